"""The program of calculator_openai.yaml. It knows OpenAI's client and nothing else."""

import json

from openai import OpenAI

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply two numbers, such as 12*34.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def multiply(expression):
    """Return a product as a text."""
    try:
        first, second = expression.split("*")
        return str(int(first) * int(second))
    except ValueError:
        return "!"


def main(base_url, api_key, model, messages):
    """Let the model answer, and calculate for it as long as it asks for that."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    chat = list(messages)
    while True:
        answer = client.chat.completions.create(model=model, messages=chat, tools=[CALCULATOR])
        message = answer.choices[0].message
        if not message.tool_calls:
            return
        chat.append(message)
        for call in message.tool_calls:
            expression = json.loads(call.function.arguments).get("expression", "")
            result = {"role": "tool", "tool_call_id": call.id, "content": multiply(expression)}
            chat.append(result)

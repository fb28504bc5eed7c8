"""Programs of OpenAI's Agents SDK for `openai_program`; its own interpreter runs them."""

from agents import (
    Agent,
    AgentsException,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)  # it would be sent to OpenAI


@function_tool
def calculator(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: such as 12*34.
    """
    first, second = expression.split("*")
    return str(int(first) * int(second))


async def responses(base_url, api_key, model, messages, ground_truth):
    """Let an agent answer by the Responses API, the SDK's default; return 1 for a right answer."""
    return await answer(base_url, api_key, model, messages, ground_truth)


async def chat_completions(base_url, api_key, model, messages, ground_truth):
    """Let an agent answer by chat completions; return 1 for a right answer."""
    set_default_openai_api("chat_completions")
    return await answer(base_url, api_key, model, messages, ground_truth)


async def answer(base_url, api_key, model, messages, ground_truth):
    """Run the agent on a problem."""
    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="Calculator", model=model, tools=[calculator])
    try:
        result = await Runner.run(agent, messages[-1]["content"], max_turns=4)
    except AgentsException:  # it has named an unknown tool, or has taken too many turns
        return 0.0
    return float(result.final_output.strip() == ground_truth)

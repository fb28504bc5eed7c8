"""A program of smolagents for `openai_program`; its own interpreter runs it."""

from smolagents import (
    EMPTY_PROMPT_TEMPLATES,
    AgentError,
    LogLevel,
    OpenAIServerModel,
    ToolCallingAgent,
    tool,
)

PROMPTS = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Multiply."}  # the model is a small one


@tool
def calculator(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: such as 12*34.
    """
    first, second = expression.split("*")
    return str(int(first) * int(second))


def main(base_url, api_key, model, messages, ground_truth):
    """Let an agent answer a problem; return 1 for a right answer."""
    agent = ToolCallingAgent(
        tools=[calculator],
        model=OpenAIServerModel(model, api_base=base_url, api_key=api_key),
        prompt_templates=PROMPTS,
        max_steps=2,
        verbosity_level=LogLevel.OFF,
    )
    try:
        answer = agent.run(messages[-1]["content"])
    except AgentError:  # the episode has reached a limit
        return 0.0
    return float(str(answer).strip() == ground_truth)

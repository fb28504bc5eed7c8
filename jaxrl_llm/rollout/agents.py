"""Agents: coroutines that lead an episode. They ask for what they need by parameter name.

An agent may ask for `chat` (`rollout.chat.Chat`), `tools` (`Tools`), `environment`
(`EpisodeEnvironment`), `row` (`EpisodeRow`), `rng` (`random.Random`, seeded by the episode) and
`gateway` (`EpisodeGateway`, which serves the policy to programs). Its other parameters are keywords
of the config. It returns when the episode is over; a limit that is reached ends it by an exception
that it lets pass.
"""

from jaxrl_llm.data.call_text import joined_contents
from jaxrl_llm.rollout.chat import Chat
from jaxrl_llm.rollout.openai_program import openai_program
from jaxrl_llm.rollout.sessions import EpisodeEnvironment, Tools
from jaxrl_llm.rollout.verifiers_agent import verifiers_environment
from jaxrl_llm.rollout.verl_agent import verl_agent_loop

__all__ = [
    "one_answer",
    "openai_program",
    "verifiers_environment",
    "verl_agent_loop",
    "with_compaction",
    "with_environment",
    "with_tools",
]


SUMMARIZE = (
    "Your context is nearly full. Summarize what you have found out and what is left to do: you go "
    "on with the task and this summary alone. Call no tool now."
)
"""What `with_compaction` asks for."""


async def one_answer(chat: Chat) -> None:
    """Draw one turn.

    Args:
        chat: of the episode.
    """
    await chat.generate()


async def with_tools(chat: Chat, tools: Tools) -> None:
    """Draw turns until one calls no tool.

    Args:
        chat: of the episode.
        tools: of the config.
    """
    while calls := (await chat.generate()).calls:
        chat.append(await tools.run(calls))


async def with_compaction(
    chat: Chat, tools: Tools, *, share: float = 0.5, request: str = SUMMARIZE
) -> None:
    """Draw turns until one calls no tool; the policy summarizes a history that grows too long.

    Then a new chain begins with the row's prompt and the summary behind its last message. The turn
    that summarizes is drawn by the policy like the others, and trained on.

    Args:
        chat: of the episode.
        tools: of the config.
        share: of `rollout.max_new_tokens` that a chain may have before it is summarized, above 0
            and below 1. What is left has to hold the newest results, the request and the summary.
        request: what the user says to have the summary.

    Raises:
        ValueError: the share is something else.
    """
    if not 0 < share < 1:
        raise ValueError(f"share: got {share}, expected more than 0 and less than 1")
    while calls := (await chat.generate()).calls:
        chat.append(await tools.run(calls))
        if chat.left > (1 - share) * chat.limits.new_tokens:
            continue
        chat.append(request)
        summary = (await chat.generate()).text.strip()
        *before, last = chat.prompt.messages
        chat = chat.new([*before, {**last, "content": joined_contents(last["content"], summary)}])


async def with_environment(
    chat: Chat, environment: EpisodeEnvironment, tools: Tools, *, role: str = "user"
) -> None:
    """Draw turns, and tell each to the environment, until it ends. Calls of tools don't reach it.

    Args:
        chat: of the episode.
        environment: of the config.
        tools: of the config, if there are any.
        role: of the messages in which the environment speaks.
    """
    if text := await environment.begin():
        chat.append({"role": role, "content": text})
    while True:
        answer = await chat.generate()
        if answer.calls and tools.schemas:
            chat.append(await tools.run(answer.calls))
        else:
            chat.append({"role": role, "content": await environment.step(answer.text)})

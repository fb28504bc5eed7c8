"""Agents: coroutines that lead an episode. They ask for what they need by parameter name.

An agent may ask for `chat` (`rollout.agents.chat.Chat`), `tools` (`Tools`), `environment`
(`EpisodeEnvironment`), `row` (`EpisodeRow`), `rng` (`random.Random`, seeded by the episode) and
`gateway` (`GatewaySession`, which serves the policy to programs). Its other parameters are keywords
of the config. It returns when the episode is over; a limit that is reached ends it by an exception
that it lets pass.
"""

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from jaxrl_llm.data.call_formats import joined_contents
from jaxrl_llm.rollout.agents.chat import BrokenEpisode, Chat, EpisodeEnvironment, Tools
from jaxrl_llm.rollout.agents.verifiers_agent import verifiers_environment
from jaxrl_llm.rollout.agents.verl_agent import verl_agent_loop
from jaxrl_llm.rollout.gateway.programs import ProgramEnd, ProgramSpec, given_to_program
from jaxrl_llm.rollout.gateway.server import GatewaySession
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.rollouts import tool_seed

__all__ = [
    "one_answer",
    "openai_program",
    "verifiers_environment",
    "verl_agent_loop",
    "with_compaction",
    "with_environment",
    "with_tools",
]


LOOK_S = 1.0  # between two looks whether a program does anything


async def openai_program(
    chat: Chat,
    row: EpisodeRow,
    gateway: GatewaySession,
    *,
    run: str | None = None,
    command: Sequence[str] | None = None,
    python: str | None = None,
    host: str = "127.0.0.1",
    idle_s: float = 300.0,
    **keywords: Any,
) -> None:
    """Let a program lead the episode by requests to an OpenAI-compatible server.

    Either `run` or `command`. Each episode has a process and an address of its own. The number that
    a function returns is the episode's `environment_score`.

    Args:
        chat: of the episode.
        row: of the data.
        gateway: answers the requests.
        run: `my_agent.py:main` or `pkg.mod:main`, a function, async or not. It may ask by name for
            base_url, api_key, model, row, messages, ground_truth, extra_info, data_source, rng and
            seed.
        command: the words of a command, which gets these values as JSON on its standard input.
        python: the interpreter that runs `run`, where its libraries have an environment of their
            own; null is this one.
        host: address at which programs reach the server.
        idle_s: seconds that a program may take without a request; then it is killed.
        **keywords: of the function.

    Raises:
        RunError: the program can't be loaded.
        BrokenEpisode: it raised, ended with an exit code other than 0, or did nothing for long.
    """
    server = gateway.server
    told = json.dumps(keywords, sort_keys=True)
    spec = ProgramSpec(run, tuple(command or ()), python, told, server.limits)
    pool = await asyncio.to_thread(server.programs, spec)
    with server.serving(gateway, host) as (address, secret):
        messages = chat.contents.with_pictures(chat.prompt.messages, image_url_part)
        shown = replace(row, messages=messages)
        number, ended = pool.start(given_to_program(address, secret, shown, tool_seed(chat.seed)))
        try:
            end = await _wait_for_end(asyncio.wrap_future(ended), gateway, idle_s)
        finally:
            pool.kill(number)
            await gateway.end()
    if gateway.prompt_error is not None and not chat.turn:
        raise BrokenEpisode(gateway.prompt_error)
    if end is None or end.error is not None:
        if gateway.limit:
            return
        reason = f"did nothing for {idle_s:g} s" if end is None else str(end.error)
        output = "" if end is None else end.output
        server.warn_once(reason.partition(":")[0], "%s: %s\n%s", spec.name, reason, output)
        raise BrokenEpisode(f"{spec.name}: {reason}")
    chat.score = end.value


def image_url_part(image: Image.Image) -> dict[str, Any]:
    """Return the part of a message by which a client of OpenAI's API shows an image."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def _wait_for_end(
    ended: "asyncio.Future[ProgramEnd]", session: GatewaySession, idle_s: float
) -> ProgramEnd | None:
    """Return how a program has ended; None where it has done nothing for long.

    Raises:
        EngineFailure: the engine failed.
    """
    while session.idle_s < idle_s:
        look = min(LOOK_S, idle_s)
        await asyncio.wait(
            [ended, session.failure], timeout=look, return_when=asyncio.FIRST_COMPLETED
        )
        if session.failure.done():
            session.failure.result()
        if ended.done():
            return ended.result()
    return None


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

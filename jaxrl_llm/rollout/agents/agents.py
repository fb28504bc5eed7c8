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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.data.call_formats import joined_contents
from jaxrl_llm.data.verifiers_rows import SOURCE, load_verifiers
from jaxrl_llm.rollout.agents.chat import (
    Answer,
    BrokenEpisode,
    Chat,
    EpisodeEnd,
    EpisodeEnvironment,
    Tools,
)
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


# Environments of Prime Intellect's `verifiers` over a chat, by its Python API of 0.1.
#
# Versions whose environments need the address of a server are not led by this.


async def verifiers_environment(
    chat: Chat, tools: Tools, row: EpisodeRow, *, id: str, args: Mapping[str, Any] | None = None
) -> None:
    """Let an environment of `verifiers` 0.1 lead an episode; its rubric gives the score.

    It runs in this process, in the event loop of all episodes. The rows are those that
    `data.prepare: {fn: verifiers, id: …}` writes. Where the environment has tools,
    `rollout.tools: [{fn: verifiers_tools, id: …}]` tells the model of them. It may only add
    messages; the run's sampling and limits hold. At a limit the rubric scores what there is.

    Args:
        chat: of the episode.
        tools: of the config; the environment runs its own ones.
        row: of the data.
        id: of the environment, whose package is installed.
        args: keywords of its `load_environment`.

    Raises:
        RunError: there is no such environment; the row or the tools are not its own.
        BrokenEpisode: it failed, or changed what had been said.
    """
    try:
        env = load_verifiers(id, json.dumps(args or {}, sort_keys=True))
    except ConfigError as error:
        raise RunError(f"rollout.agent: {error}") from error
    if SOURCE not in row.extra_info:
        raise RunError(f"data: expected rows of data.prepare: {{fn: verifiers, id: {id}}}")
    told = sorted(schema["function"]["name"] for schema in tools.schemas)
    own = sorted(tool.name for tool in env.tool_defs or [])
    if told != own:
        raise RunError(
            f"rollout.tools: got {told}, expected {own}, by [{{fn: verifiers_tools, id: {id}}}]"
        )
    given = {**json.loads(row.extra_info[SOURCE]), "prompt": row.messages}
    state = await env.rollout(given, chat_client(chat), model="policy", sampling_args={})
    try:
        if state["error"] is not None:
            raise BrokenEpisode(f"verifiers: {id}: {state['error']!r}")
        await env.rubric.score_rollout(state)
    finally:
        await env.rubric.cleanup(state)
    chat.score = state["reward"]


def chat_client(chat: Chat) -> Any:
    """Return what verifiers takes for a client of an engine, with a chat in its place."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]

    turns = ChatTurns(chat)
    others = dict.fromkeys(Client.__abstractmethods__)  # of which `get_response` makes no use
    kind = type(Client)("ChatClient", (Client,), {**others, "get_response": turns.get_response})
    return kind(None)


class ChatTurns:
    """Draws the turns of an episode for verifiers.

    Args:
        chat: of the episode.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat, self._seen = chat, [as_told(message) for message in chat.messages]

    async def get_response(self, prompt: list[Any], model: str, **_: Any) -> Any:
        """Tell what is new in a prompt, and draw a turn.

        Raises:
            BrokenEpisode: what is not new differs from what has been said.
            OverlongPromptError: a limit is reached; verifiers ends the episode.
        """
        from verifiers.errors import OverlongPromptError  # pyright: ignore[reportMissingImports]

        messages = [as_told(message) for message in prompt]
        for place, seen in enumerate(self._seen):
            if messages[place : place + 1] != [seen]:
                raise BrokenEpisode(
                    f"verifiers: got {messages[place : place + 1]} as message {place}, expected "
                    f"{seen}, as it was: an environment may only add messages"
                )
        self._chat.append(messages[len(self._seen) :])
        try:
            answer = await self._chat.generate()
        except EpisodeEnd as end:
            raise OverlongPromptError(end.reason) from end
        response = as_response(answer, self._chat, model)
        self._seen = [*messages, as_told(response.message)]
        return response


def as_told(message: Any) -> dict[str, Any]:
    """Return a message of verifiers as one of a chat.

    Raises:
        BrokenEpisode: it has more than text.
    """
    plain = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    parts = plain.get("content") or ""
    if not isinstance(parts, str):
        if any(part.get("type") != "text" for part in parts):
            raise BrokenEpisode(f"verifiers: expected text as messages, got {parts}")
        parts = "".join(part["text"] for part in parts)
    kept = {name: plain[name] for name in ("role", "tool_calls", "tool_call_id") if name in plain}
    return {**kept, "content": parts}


def as_response(answer: Answer, chat: Chat, model: str) -> Any:
    """Return a turn as verifiers has it; a wrong call has arguments that are no JSON."""
    from verifiers import types  # pyright: ignore[reportMissingImports]

    drawn = len(chat.episode(0.0).pieces[-1].tokens)
    total = len(chat.tokens)
    return types.Response(
        id=f"turn-{chat.turn}",
        created=0,
        model=model,
        usage=types.Usage(
            prompt_tokens=total - drawn,
            reasoning_tokens=0,
            completion_tokens=drawn,
            total_tokens=total,
        ),
        message=types.ResponseMessage(
            content=answer.text,
            reasoning_content=answer.reasoning or None,
            tool_calls=[
                types.ToolCall(
                    id=call.id,
                    name=call.name,
                    arguments=json.dumps(call.arguments) if call.error is None else call.error,
                )
                for call in answer.calls
            ]
            or None,
            finish_reason="tool_calls" if answer.calls else answer.finish,
            is_truncated=answer.finish == "length",
        ),
    )

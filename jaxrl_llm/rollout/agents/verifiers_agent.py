"""Environments of Prime Intellect's `verifiers` over a chat, by its Python API of 0.1.

Versions whose environments need the address of a server are not led by this.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.data.verifiers_rows import SOURCE, load_verifiers
from jaxrl_llm.rollout.agents.chat import Answer, BrokenEpisode, Chat, EpisodeEnd, Tools
from jaxrl_llm.rollout.observation import EpisodeRow


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

"""What clients ask of the gateway, and what they are told."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.rollout.chat import Answer
from jaxrl_llm.serving.fields import Fields
from jaxrl_llm.serving.requests import parse_message, parse_stops
from jaxrl_llm.serving.responses import event

OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls")
"""Fields that the run decides."""


@dataclass(frozen=True)
class ClientRequest:
    """One request of a program.

    Attributes:
        messages: the chat, as chat templates want it.
        tools: schemas that the model is told of.
        max_tokens: of the answer; None: as the run has it.
        stop: texts that end it.
        stream: whether it is sent as events.
        include_usage: whether a stream ends with a count of tokens.
        overridden: names of fields that ask for something else than the run does.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    overridden: tuple[str, ...] = ()


def read_chat_request(tree: Mapping[str, Any], sampling: Mapping[str, Any]) -> ClientRequest:
    """Read a request of `/chat/completions`.

    Args:
        tree: the JSON of its body.
        sampling: the run's values of what clients may ask for, too.

    Raises:
        APIError: a field is wrong, unknown, or would change what the policy is.
    """
    fields = Fields(tree)
    fields.take("model", str)  # programs often name the one that they were written with
    messages = [parse_message(m, i) for i, m in enumerate(fields.take("messages", list, []))]
    if not messages:
        raise fields.refuse("messages", [], "a list with a message or more")
    if messages[-1]["role"] == "assistant":
        raise fields.refuse("messages", "an assistant's message at the end", "another one")
    tools, choice = fields.take("tools", list, []), fields.any_of("tool_choice")
    given = {name: fields.any_of(name) for name in OVERRIDDEN}
    overridden = [n for n, v in given.items() if v is not None and v != sampling.get(n)]
    overridden += ["tool_choice"] if choice not in (None, "auto", "none") else []
    sizes = [
        fields.between(name, int, None, 1, float("inf"))
        for name in ("max_tokens", "max_completion_tokens")
    ]
    stream, options = fields.take("stream", bool, False), fields.take("stream_options", dict, {})
    request = ClientRequest(
        messages=tuple(map(as_template_message, with_call_names(messages))),
        tools=() if choice == "none" else tuple(tools),
        max_tokens=min((size for size in sizes if size is not None), default=None),
        stop=parse_stops(fields),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        overridden=tuple(overridden),
    )
    if fields.between("n", int, 1, 1, float("inf")) != 1:
        raise fields.refuse("n", tree["n"], "1: send the request again for another answer")
    if fields.take("logprobs", bool, False):
        raise fields.refuse("logprobs", True, "none: the run keeps them itself")
    fields.end()
    return request


def with_call_names(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages in which those of tools say which tool it is; clients send its id only."""
    names = dict[str, str]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id", "")] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""))
        yield {**message, "name": name} if name else dict(message)


def as_template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what chat templates do not know."""
    kept = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
    plain = {name: message[name] for name in kept if message.get(name) is not None}
    return {**plain, "role": "system"} if plain["role"] == "developer" else plain


def assistant_message(answer: Answer, ids: Sequence[str]) -> dict[str, Any]:
    """Return a turn as clients are told of it. The text of a wrong call is part of the content.

    Args:
        answer: the turn; its calls are right.
        ids: of the calls.
    """
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call, id in zip(answer.calls, ids, strict=True)
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


class Reply:
    """An answer on its way to the client.

    Args:
        id: of the answer.
        message: the assistant's.
        finish: of the turn.
        prompt_tokens: before the answer.
        completion_tokens: of the answer.
    """

    def __init__(
        self, id: str, message: dict[str, Any], finish: str, *, prompt_tokens: int, tokens: int
    ) -> None:
        """Keep what the answer says."""
        self.message = message
        self._finish = "tool_calls" if message.get("tool_calls") else finish
        self._around = {"id": f"chatcmpl-{id}", "created": int(time.time()), "model": "policy"}
        self._usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request without a stream."""
        choice = {"index": 0, "message": self.message, "finish_reason": self._finish}
        kind = {"object": "chat.completion"}
        return {**self._around, **kind, "choices": [choice], "usage": self._usage}

    def events(self, *, include_usage: bool) -> str:
        """Return the answer as the events of a stream, all at once."""
        delta = dict(self.message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        kind = {"object": "chat.completion.chunk"}
        steps = [(delta, None), ({}, self._finish)]
        chunks = [
            {"choices": [{"index": 0, "delta": step, "finish_reason": finish}]}
            for step, finish in steps
        ]
        chunks += [{"choices": [], "usage": self._usage}] if include_usage else []
        text = "".join(event({**self._around, **kind, **chunk}) for chunk in chunks)
        return text + "data: [DONE]\n\n"

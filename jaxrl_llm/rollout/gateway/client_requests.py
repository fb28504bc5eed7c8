"""What programs ask for by `/chat/completions`, and what they are told."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.rollout.types import SamplingParams
from jaxrl_llm.serving.fields import Fields
from jaxrl_llm.serving.messages import answer_delta, finish_reason, parse_messages, parse_tools
from jaxrl_llm.serving.requests import parse_stops
from jaxrl_llm.serving.responses import event
from jaxrl_llm.serving.responses_api import ResponseEnvelope

MODEL = "policy"
KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""What chat templates know of a message."""


@dataclass(frozen=True)
class ClientRequest:
    """One request of a program.

    Attributes:
        messages: the chat, as chat templates want it.
        tools: that the model is told of.
        max_tokens: of the answer; None: as the run has it.
        stop: texts that end it.
        stream: whether it is sent as events.
        include_usage: whether these end with a count of tokens.
        overridden: names of fields that ask for something else than the run does.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    overridden: tuple[str, ...] = ()


def read_chat_request(tree: Mapping[str, Any], sampling: SamplingParams) -> ClientRequest:
    """Read the body of a request.

    How answers are drawn is the run's choice: a temperature is read and ignored. What would make
    another distribution of the answers, as a penalty does, is refused.

    Args:
        tree: the body.
        sampling: of the run.

    Raises:
        APIError: a field is wrong, unknown or refused.
    """
    fields = Fields(tree)
    fields.take("model", str)  # programs name the one that they were written with
    messages = parse_messages(fields.take("messages", list, []))
    if not messages or messages[-1]["role"] == "assistant":
        last = [message["role"] for message in messages[-1:]]
        raise fields.refuse("messages", last, "a last message that is not the assistant's")
    tools, choice = parse_tools(fields.take("tools", list, [])), fields.any_of("tool_choice")
    request = ClientRequest(
        messages=tuple(as_template_message(message) for message in messages),
        tools=() if choice == "none" else tuple(tools),
        max_tokens=read_max_tokens(fields),
        stop=parse_stops(fields),
        stream=fields.take("stream", bool, False),
        include_usage=bool(fields.take("stream_options", dict, {}).get("include_usage")),
        overridden=(
            *read_overridden(fields, sampling),
            *(["tool_choice"] if choice not in (None, "auto", "none") else []),
        ),
    )
    if fields.take("n", int, 1) != 1:
        raise fields.refuse("n", tree["n"], "1: the same request again gets another answer")
    if fields.take("logprobs", bool, False):
        raise fields.refuse("logprobs", True, "none: the run keeps them itself")
    fields.end()
    return request


def read_max_tokens(fields: Fields) -> int | None:
    """Return how long an answer may be at most, by both names that there are for it."""
    names = "max_tokens", "max_completion_tokens"
    sizes = [fields.between(name, int, None, 1, float("inf")) for name in names]
    return min((size for size in sizes if size is not None), default=None)


def read_overridden(fields: Fields, sampling: SamplingParams) -> list[str]:
    """Return the names of fields that ask for what the run decides otherwise."""
    own = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "parallel_tool_calls": True,
        "seed": None,
    }
    given = {name: fields.any_of(name) for name in own}
    return [name for name, value in given.items() if value is not None and value != own[name]]


def as_template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what chat templates do not know.

    >>> as_template_message({"role": "user", "content": "Be brief.", "refusal": None})
    {'role': 'user', 'content': 'Be brief.'}
    """
    return {name: message[name] for name in KNOWN if message.get(name) is not None}


class Reply:
    """An answer on its way to the client.

    Args:
        id: of the answer.
        message: the assistant's.
        finish: of the turn.
        prompt_tokens: before the answer.
        tokens: of the answer.
    """

    def __init__(
        self, id: str, message: dict[str, Any], finish: str, *, prompt_tokens: int, tokens: int
    ) -> None:
        """Keep what the answer says."""
        self._id, self._message = id, message
        self._finish = finish_reason(finish, has_calls="tool_calls" in message)
        self._prompt_tokens, self._tokens = prompt_tokens, tokens

    def chat(self, request: ClientRequest) -> dict[str, Any] | str:
        """Return the answer to a request of `/chat/completions`: whole, or all its events."""
        around = {"id": f"chatcmpl-{self._id}", "created": int(time.time()), "model": MODEL}
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
        }
        if not request.stream:
            choices = [self._choice("message", self._message, self._finish)]
            return {**around, "object": "chat.completion", "choices": choices, "usage": usage}
        chunks: list[dict[str, Any]] = [
            {"choices": [self._choice("delta", answer_delta(self._message), None)]},
            {"choices": [self._choice("delta", {}, self._finish)]},
        ]
        chunks += [{"choices": [], "usage": usage}] if request.include_usage else []
        kind = {"object": "chat.completion.chunk"}
        events = [event({**around, **kind, **chunk}) for chunk in chunks]
        return "".join([*events, "data: [DONE]\n\n"])

    def response(self, tree: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the answer to a request of `/responses`, likewise.

        Args:
            tree: the request's body.
        """
        envelope = ResponseEnvelope(tree, MODEL, self._prompt_tokens)
        if not tree.get("stream"):
            choice = self._choice("message", self._message, self._finish)
            return envelope.answer([choice], self._tokens)
        choice = self._choice("delta", answer_delta(self._message), self._finish)
        return envelope.chunk(choice, first=True) + envelope.end(self._tokens)

    def _choice(self, part: str, message: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, part: message, "finish_reason": finish}

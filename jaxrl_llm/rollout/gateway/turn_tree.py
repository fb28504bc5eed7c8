"""The turns that a program has had drawn, and which of them a request goes on from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.models.vision.inputs import Visual
from jaxrl_llm.rollout.chat import Answer
from jaxrl_llm.rollout.contents import Stretch
from jaxrl_llm.rollout.types import Completion


@dataclass(frozen=True, eq=False)
class DrawnTurn:
    """A turn of the policy, and what it was drawn after.

    Attributes:
        parent: the turn that it goes on from; None where the stream begins with it.
        prompt: all tokens before it.
        number: among turns with the same prompt.
        asked: number of its request in the episode.
        completion: as it was sampled.
        answer: the turn, taken apart.
        messages: what is new since the parent, with this turn as the last.
        digest: of all messages up to this turn, and of the tools.
        visuals: images among the tokens before it.
    """

    parent: "DrawnTurn | None"
    prompt: tuple[int, ...]
    number: int
    asked: int
    completion: Completion
    answer: Answer
    messages: tuple[dict[str, Any], ...]
    digest: bytes
    visuals: tuple[Visual, ...] = ()

    @property
    def stream(self) -> tuple[int, ...]:
        """All tokens up to its end."""
        return (*self.prompt, *self.completion.tokens.tolist())

    @property
    def path(self) -> list["DrawnTurn"]:
        """The turns from the first of its stream to this one."""
        turns: list[DrawnTurn] = [self]
        while (before := turns[-1].parent) is not None:
            turns.append(before)
        return turns[::-1]

    @property
    def told(self) -> Stretch:
        """What is told between the parent and this turn; nothing in the first of a stream."""
        if self.parent is None:
            return Stretch()
        tokens = self.prompt[len(self.parent.stream) :]
        return Stretch(tokens, self.visuals[len(self.parent.visuals) :])

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """By what turns are put in order, whichever was drawn first."""
        return prompt_identity(self.prompt, self.visuals), self.number


def prompt_identity(prompt: tuple[int, ...], visuals: Sequence[Visual]) -> tuple[int, ...]:
    """Return what tells prompts apart: their tokens, and behind these the keys of their images.

    >>> import numpy as np
    >>> patches, keys = np.zeros((4, 12), np.uint8), (b"of one picture", b"of the other")
    >>> one, other = (Visual(patches, (1, 2, 2), 2, key) for key in keys)
    >>> prompt_identity((5,), [one]) == prompt_identity((5,), [other])
    False
    """
    return (*prompt, *(int.from_bytes(visual.key[:7]) for visual in visuals))


@dataclass(eq=False)
class TurnTree:
    """The turns of one episode. Requests that share a beginning share the turns in it."""

    turns: list[DrawnTurn] = field(default_factory=list)

    def find(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[DrawnTurn | None, int]:
        """Return the turn that a request goes on from, and how many of its messages end there.

        Args:
            messages: of the request.
            tools: of the request.
        """
        match: tuple[DrawnTurn | None, int] = None, 0
        by_digest = {turn.digest: turn for turn in sorted(self.turns, key=_order, reverse=True)}
        for count, digest in enumerate(history_digests(messages, tools), 1):
            if messages[count - 1]["role"] == "assistant" and digest in by_digest:
                match = by_digest[digest], count
        return match

    def streams(self) -> list[list[DrawnTurn]]:
        """Return each turn once, in streams; the one that was asked for a turn last comes last.

        Of streams that part, the one with most drawn tokens has the turns that they share.
        """
        left = set(self.turns)
        streams: list[list[DrawnTurn]] = []
        while left:
            paths = [[turn for turn in end.path if turn in left] for end in left]
            streams.append(min(paths, key=_weight))
            left -= set(streams[-1])
        return sorted(streams, key=lambda stream: stream[-1].asked)


def _order(turn: DrawnTurn) -> Any:
    return turn.order


def _weight(path: Sequence[DrawnTurn]) -> Any:
    return -sum(len(turn.completion.tokens) for turn in path), path[-1].order


def history_digests(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[bytes]:
    """Return a digest of each beginning of a chat.

    Chats are the same that differ in spaces at the ends of what the assistant said, in how a call's
    arguments are written, in reasoning, which most clients drop, or in the ids of calls. What
    others said is the client's own, which it has no reason to write otherwise: each space counts.

    Args:
        messages: as `jaxrl_llm.serving.requests.parse_message` returns them.
        tools: that the model is told of.

    >>> one = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes? "}
    >>> two = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
    >>> history_digests(one, []) == history_digests(two, [])
    True
    >>> other = {"role": "user", "content": " Hi"}
    >>> history_digests([other], [])[0] in history_digests(one, [])
    False
    """
    state, digests = _digest(b"", list(tools)), []
    for message in messages:
        calls = [
            [call["function"]["name"], _as_values(call["function"]["arguments"])]
            for call in message.get("tool_calls") or ()
        ]
        role, content = message["role"], message.get("content") or ""
        is_own = role == "assistant" and isinstance(content, str)
        text = content.strip() if is_own else content
        state = _digest(state, [role, text, calls])
        digests.append(state)
    return digests


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True).encode()).digest()


def _as_values(arguments: Any) -> Any:
    """Return a call's arguments as JSON has them, where 1.0 is 1."""

    def number(text: str) -> float:
        return int(float(text)) if float(text).is_integer() else float(text)

    return json.loads(json.dumps(arguments), parse_float=number)

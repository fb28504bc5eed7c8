"""A request on its way through a sidecar, and the pieces of its answer that have come."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Condition
from typing import Any

import numpy as np

from jaxrl_llm.rollout.engine import Stop, wait_for_first
from jaxrl_llm.rollout.types import Completion, Request
from jaxrl_llm.rollout.vllm.requests import SidecarImages

GOLDEN = 0x9E3779B1  # a stream that goes on elsewhere draws other numbers than before


@dataclasses.dataclass(eq=False)
class PendingRequest:
    """One request without its whole answer.

    Attributes:
        request: as it was asked.
        listener: called with each piece of the answer; None if all at once will do.
        images: says what the sidecar is shown; None: the prompt is text.
        future: the answer.
        pieces: of it that have come; the first is what the request goes on with, if it does.
        number: of the message that asked a sidecar for it; None while none has it.
    """

    request: Request
    listener: Callable[[Completion], None] | None
    images: SidecarImages | None = None
    future: Future[Completion] = dataclasses.field(default_factory=Future)
    pieces: list[Completion] = dataclasses.field(default_factory=list)
    number: int | None = None

    def __post_init__(self) -> None:
        """Begin with what was drawn before."""
        if self.request.drawn is not None:
            self.pieces.append(self.request.drawn)

    @property
    def max_tokens(self) -> int:
        """How many tokens prompt and answer can have."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer, as far as it has come."""
        answer = (int(token) for piece in self.pieces for token in piece.tokens)
        return (*self.request.prompt, *answer)

    def message(self) -> dict[str, Any]:
        """Return the fields of a message that asks a sidecar to answer, or to go on answering."""
        sampling, tokens = self.request.sampling, self.tokens
        generated = len(tokens) - len(self.request.prompt)
        settings = {
            "max_tokens": sampling.max_new_tokens - generated,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # only the request says what ends it
            "logprobs": sampling.top_logprobs,
            "seed": (self.request.seed + GOLDEN * generated) % 2**32,
        }
        asked = {"prompt": tokens, "sampling": settings, "stream": self.listener is not None}
        if self.images is not None:
            shown, drawn = self.images.fields(self.request), tokens[len(self.request.prompt) :]
            asked |= shown | {"prompt": (*shown["prompt"], *drawn), "expanded": tokens}
        return asked

    def data(self) -> memoryview | None:
        """Return what is sent beside the message: the pixels of images, if there are any."""
        return None if self.images is None else self.images.pixels(self.request)

    def add_piece(self, message: Mapping[str, Any]) -> Completion:
        """Keep a piece of the answer, and return it."""
        top, count = None, self.request.sampling.top_logprobs
        if count:
            pairs = np.array([step[:count] for step in message["top"]], np.float64)
            pairs = pairs.reshape(-1, count, 2)
            top = pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32)
        piece = Completion(
            np.array(message["tokens"], np.int32),
            np.array(message["logprobs"], np.float32),
            np.array([int(version) for version in message["versions"]], np.int32),
            message["finish"],
            message["stopped_by"],
            top,
        )
        self.pieces.append(piece)
        return piece

    def resolve(self, error: Exception | None = None) -> None:
        """Give the caller the answer, or the error, unless it gave up."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(self.drawn())
        else:
            self.future.set_exception(error)

    def drawn(self) -> Completion:
        """Return what has come of the answer."""
        if not self.pieces:
            tokens = np.zeros(0, np.int32)
            return Completion(tokens, np.zeros(0, np.float32), tokens, "")
        last, tops = self.pieces[-1], [piece.top for piece in self.pieces if piece.top is not None]
        return last._replace(
            tokens=np.concatenate([piece.tokens for piece in self.pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in self.pieces]),
            versions=np.concatenate([piece.versions for piece in self.pieces]),
            top=tuple(np.concatenate(parts) for parts in zip(*tops, strict=True)) if tops else None,
        )


def first_answers(
    pending: Sequence[PendingRequest], needed: int, stop: Stop | None, pieces: Condition
) -> list[Completion]:
    """Wait for the first answers, or until it is to stop; give the others up as they stand.

    Args:
        pending: all requests.
        needed: how many have to be answered.
        stop: ends the wait before.
        pieces: is held while pieces come.
    """
    futures = [one.future for one in pending]
    try:
        wait_for_first(futures[:needed], stop)
        with pieces:
            drawn = [one.drawn() for one in pending]
        answers = zip(futures, drawn, strict=True)
        return [future.result() if future.done() else left for future, left in answers]
    finally:
        for future in futures:
            future.cancel()

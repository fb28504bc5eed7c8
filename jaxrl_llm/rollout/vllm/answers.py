"""What a sidecar is asked for, and what has come of it."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxrl_llm.rollout.types import Completion, Request

GOLDEN = 0x9E3779B1  # a stream that goes on elsewhere draws other numbers than before


@dataclasses.dataclass(eq=False)
class Asked:
    """One request on its way.

    Attributes:
        request: the same.
        listener: told of each piece of the answer; None if the whole will do.
        future: the answer.
        pieces: of it that have come.
        number: under which a sidecar was told of it.
    """

    request: Request
    listener: Callable[[Completion], None] | None
    future: Future[Completion] = dataclasses.field(default_factory=Future)
    pieces: list[Completion] = dataclasses.field(default_factory=list)
    number: int | None = None

    @property
    def most(self) -> int:
        """How many tokens prompt and answer can have."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and answer, as far as it has come."""
        told = (int(token) for piece in self.pieces for token in piece.tokens)
        return (*self.request.prompt, *told)

    def message(self) -> dict[str, Any]:
        """Return what a sidecar is told, to answer or to go on with the answer of another."""
        how, known = self.request.sampling, self.known
        told = len(known) - len(self.request.prompt)
        sampling = {
            "max_tokens": how.max_new_tokens - told,
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "min_p": how.min_p,
            "repetition_penalty": how.repetition_penalty,
            "logit_bias": how.logit_bias,
            "stop_token_ids": list(how.stop_ids),
            "ignore_eos": True,  # only the request says what ends it
            "logprobs": how.top_logprobs,
            "seed": (self.request.seed + GOLDEN * told) % 2**32,
        }
        return {"prompt": known, "sampling": sampling, "stream": self.listener is not None}

    def take(self, message: Mapping[str, Any]) -> Completion:
        """Keep a piece of the answer, and return it."""
        top, wanted = None, self.request.sampling.top_logprobs
        if wanted:
            pairs = np.array([step[:wanted] for step in message["top"]], np.float64)
            pairs = pairs.reshape(-1, wanted, 2)
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

    def whole(self) -> Completion:
        """Put the pieces together."""
        last, tops = self.pieces[-1], [piece.top for piece in self.pieces if piece.top is not None]
        return last._replace(
            tokens=np.concatenate([piece.tokens for piece in self.pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in self.pieces]),
            versions=np.concatenate([piece.versions for piece in self.pieces]),
            top=tuple(np.concatenate(parts) for parts in zip(*tops, strict=True)) if tops else None,
        )

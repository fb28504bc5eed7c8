"""What programs of decoding are given, as arrays on the host."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxrl_llm.rollout.native.decode import DecodeState, Extras
from jaxrl_llm.rollout.native.programs import BIASES, STOP_IDS
from jaxrl_llm.rollout.native.sampler import BatchSamplingParams
from jaxrl_llm.rollout.native.scheduler import SequenceState


def fill_row(row: np.ndarray, pages: Sequence[int]) -> None:
    row[: len(pages)] = pages


def decode_state(placed: Sequence[SequenceState | None], *, has_rotary: bool) -> DecodeState:
    """Return where each row stands; empty ones have nothing left.

    Args:
        placed: whom each row belongs to.
        has_rotary: whether the model is told what to rotate by.
    """

    def column(dtype: Any, value: Callable[[SequenceState], Any], empty: Any = 0) -> Any:
        return np.array([empty if s is None else value(s) for s in placed], dtype)

    def number(value: Callable[[SequenceState], int]) -> Any:
        return column(np.int32, value)

    def setting(name: str, dtype: Any, empty: Any) -> Any:
        return column(dtype, lambda s: getattr(s.request.sampling, name), empty)

    none = [-1] * STOP_IDS
    return DecodeState(
        tokens=number(lambda s: s.tokens[-1]),
        positions=number(lambda s: s.cached),
        generated=number(lambda s: s.generated),
        left=number(lambda s: s.left),
        stop_ids=column(np.int32, lambda s: [*s.request.sampling.stop_ids, *none][:STOP_IDS], none),
        sampling=BatchSamplingParams(
            seeds=column(np.uint32, lambda s: s.request.seed),
            temperature=setting("temperature", np.float32, 1.0),
            top_p=setting("top_p", np.float32, 1.0),
            top_k=number(lambda s: s.request.sampling.top_k),
            min_p=setting("min_p", np.float32, 0.0),
        ),
        rotary_delta=number(rotary_delta) if has_rotary else None,
    )


def rotary_delta(sequence: SequenceState) -> int:
    """Return what is added to positions of what follows a prompt, to rotate by."""
    return 0 if sequence.visuals is None else sequence.visuals.delta


def rotary_of_rows(
    placed: Sequence[SequenceState | None], ends: Sequence[int], length: int
) -> Int[np.ndarray, "B T 3"]:
    """Return by what each row's next tokens are rotated: those from `cached` on.

    Args:
        placed: whom each row belongs to.
        ends: where its tokens end.
        length: of all rows.
    """
    rotary = np.zeros((len(placed), length, 3), np.int32)
    for row, (s, end) in enumerate(zip(placed, ends, strict=True)):
        if s is None:
            continue
        piece = rotary[row, : end - s.cached]
        piece[:] = np.arange(s.cached, end)[:, None] + rotary_delta(s)
        if s.visuals is not None and s.visuals.rotary is not None:
            given = s.visuals.rotary[s.cached : end]
            piece[: len(given)] = given
    return rotary


def extras(placed: Sequence[SequenceState | None], width: int, nothing: int) -> Extras:
    """Return what else the rows ask for; `nothing` is a number past the vocabulary."""
    biases = len(placed), BIASES
    tokens, penalty = np.full((len(placed), width), nothing, np.int32), np.ones(len(placed))
    bias_ids, bias = np.full(biases, nothing, np.int32), np.zeros(biases, np.float32)
    for i, s in enumerate(placed):
        if s is not None:
            sampling = s.request.sampling
            tokens[i, : len(s.tokens)] = s.tokens
            penalty[i] = sampling.repetition_penalty
            for j, (token, shift) in enumerate(sampling.logit_bias):
                bias_ids[i, j], bias[i, j] = token, shift
    columns: Any = (tokens, penalty.astype(np.float32), bias_ids, bias)
    return Extras(*columns)

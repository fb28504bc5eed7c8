"""What programs of decoding are given, as arrays on the host."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rollout.native.decode import DecodeState, Extras
from jaxrl_llm.rollout.native.programs import BIASES, STOP_IDS
from jaxrl_llm.rollout.native.sampler import BatchSamplingParams
from jaxrl_llm.rollout.native.scheduler import SequenceState


def fill_row(row: np.ndarray, pages: Sequence[int]) -> None:
    row[: len(pages)] = pages


def decode_state(placed: Sequence[SequenceState | None]) -> DecodeState:
    """Return where each row stands; empty ones have nothing left."""

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
    )


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

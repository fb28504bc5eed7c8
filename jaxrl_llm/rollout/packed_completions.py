"""Completions as JSON can hold them, bit for bit."""

import base64
from typing import Any

import numpy as np

from jaxrl_llm.rollout.types import Completion


def packed_completion(completion: Completion) -> dict[str, Any]:
    """Return a completion without its likeliest tokens as JSON can hold it."""

    def packed(array: np.ndarray, dtype: str) -> str:
        return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()

    return {
        "tokens": packed(completion.tokens, "<i4"),
        "logprobs": packed(completion.logprobs, "<f4"),
        "versions": packed(completion.versions, "<i4"),
        "finish": completion.finish,
        "stopped_by": completion.stopped_by,
    }


def unpacked_completion(packed: dict[str, Any]) -> Completion:
    """Return what `packed_completion` has packed."""

    def array(name: str, dtype: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(packed[name]), dtype)

    return Completion(
        array("tokens", "<i4"),
        array("logprobs", "<f4"),
        array("versions", "<i4"),
        packed["finish"],
        packed["stopped_by"],
    )

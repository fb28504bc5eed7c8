"""Completions as JSON can hold them, bit for bit."""

import base64
from typing import Any

import numpy as np

from jaxrl_llm.rollout.types import Completion


def packed_completion(completion: Completion) -> dict[str, Any]:
    """Return a completion without its likeliest tokens as JSON can hold it."""

    def packed(array: np.ndarray, dtype: str) -> str:
        return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()

    routes = {}
    if completion.routes is not None:
        dtype = completion.routes.dtype.newbyteorder("<").str
        data = packed(completion.routes, dtype)
        routes["routes"] = {"shape": completion.routes.shape, "dtype": dtype, "data": data}
    return routes | {
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

    routes = packed.get("routes")
    if routes is not None:
        flat = np.frombuffer(base64.b64decode(routes["data"]), routes["dtype"])
        routes = flat.reshape(routes["shape"])
    return Completion(
        array("tokens", "<i4"),
        array("logprobs", "<f4"),
        array("versions", "<i4"),
        packed["finish"],
        packed["stopped_by"],
        routes=routes,
    )

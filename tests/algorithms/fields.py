"""Fields of a batch of six answers of five tokens, and functions called with those that they name.

Functions run jitted, so that each is compiled once for all tests.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.functions import asks_for

B, T = 6, 5
GROUP_IDS = [40, 40, -7, 40, -7, 3]  # groups of three, two and one, interleaved
TURN_IDS = np.array(  # -1: told; only the first answer of its group has a turn 2
    [
        [-1, 0, 1, 2, -1],
        [-1, 0, 1, -1, -1],
        [0, 0, -1, 1, 2],  # a gap: tool output
        [-1, 0, -1, -1, 1],
        [-1, 0, 1, 1, 2],
        [-1, -1, 0, -1, -1],
    ]
)


@functools.cache
def make_fields(seed: int = 0) -> dict:
    """Return all fields; copy what you change."""
    rng, mask = np.random.default_rng(seed), TURN_IDS >= 0
    old = -rng.exponential(1.0, (B, T))

    def near(scale: float) -> np.ndarray:
        return np.minimum(old + scale * rng.normal(size=(B, T)), -0.01)

    names = ("rewards", "values", "old_values", "returns", "advantages", "kl", "x")
    floats = {name: rng.normal(size=(B, T)) for name in names} | {
        "logprobs": near(0.3),
        "old_logprobs": old,
        "rollout_logprobs": near(0.2),
        "ref_logprobs": near(0.3),
        "reward_logprobs": near(0.5),
        "teacher_logprobs": near(0.5),
        "sum_pi_squared": np.maximum(np.exp(old) ** 2, rng.uniform(size=(B, T))),
        "scores": rng.normal(size=B),
        "raw_scores": rng.uniform(size=B),
        "greedy_scores": rng.normal(size=B),
        "score_components": rng.normal(size=(B, 3)),
    }
    return {name: jnp.asarray(values, jnp.float32) for name, values in floats.items()} | {
        "mask": jnp.asarray(mask),
        "turn_ids": jnp.asarray(TURN_IDS),
        "group_ids": jnp.array(GROUP_IDS),
        "response_lengths": jnp.asarray(mask.sum(1)),
        "ages": jnp.asarray(rng.integers(0, 4, (B, T))),
        "high_covariance": jnp.asarray(mask & (rng.uniform(size=(B, T)) < 0.3)),
    }


jitted = functools.cache(jax.jit)


def run(function: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Return what a function makes of the fields that it asks for, as numpy arrays."""
    made = jitted(function)(*(jnp.asarray(fields[name]) for name in asks_for(function)))
    return jax.tree.map(np.asarray, made)


def as64(fields: Mapping[str, Any], *names: str) -> list[np.ndarray]:
    """Return fields for a loop: floats in float64."""
    arrays = (np.asarray(fields[name]) for name in names)
    return [x.astype(np.float64) if x.dtype.kind == "f" else x for x in arrays]


def members(ids: Any) -> list[np.ndarray]:
    """Return the rows of each group."""
    ids = np.asarray(ids)
    return [np.flatnonzero(ids == group) for group in np.unique(ids)]

"""Fields of a batch of six answers of five tokens, and functions called with those that they name.

Functions run jitted, so that each is compiled once for all tests.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.functions import asks_for, public_functions

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


KEYWORDS = {
    "kl_penalized_rewards": {"coef": 0.5},
    "reward_to_go": {"gamma": 0.9},
    "dppo_tv": {"clip_low": 0.05, "clip_high": 0.05},
    "dppo_kl": {"clip_low": 0.01, "clip_high": 0.01},
    "dro": {"beta": 0.5},
    "implicit_reward_loss": {"beta": 0.5},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.2},
    "truncated_token": {"cap": 1.1},
    "truncated_sequence": {"cap": 1.1},
    "truncated_token_normalized": {"cap": 1.1},
    "truncated_sequence_normalized": {"cap": 1.1},
    "icepop": {"low": 0.9, "high": 1.2},
    "reject_sequence": {"low": 0.8, "high": 1.2},
    "reject_sequence_geometric": {"low": 0.95, "high": 1.05},
    "reject_sequence_k3": {"cap": 0.02},
    "second_moment_mask": {"threshold": 0.02},
    "sequence_mean_token_sum_norm": {"horizon": 7.0},
    "select_kl_cov": {"ratio": 0.3},
    "select_clip_cov": {"ratio": 1.0, "low": 0.0, "high": 9.0, "key": jax.random.key(3)},
    "overlong_penalty": {"max_tokens": 4, "buffer": 2},
    "at_least": {"threshold": 0.5},
}


def named(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module with hyper-parameters, but for those of other kinds."""
    skipped = {"fixed", "adaptive", "normalized", "mismatch_metrics", "to_tokens"}
    names = sorted({*public_functions(module)} - skipped)
    return {
        name: functools.partial(getattr(module, name), **KEYWORDS.get(name, {})) for name in names
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

"""A batch of fields, and calling a function on the fields that its signature names."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

B, T = 6, 5
GROUP_IDS = [40, 40, -7, 40, -7, 3]  # groups of three, two and one, interleaved
MASK = [
    [0, 1, 1, 1, 0],
    [0, 1, 1, 0, 0],
    [1, 1, 0, 1, 1],  # a gap: tool output
    [0, 1, 0, 0, 1],
    [0, 1, 1, 1, 1],
    [0, 0, 1, 0, 0],
]


def make_fields(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    mask = np.array(MASK, bool)
    old = -rng.exponential(1.0, (B, T))
    token = {
        "rewards": rng.normal(size=(B, T)),
        "logprobs": np.minimum(old + 0.3 * rng.normal(size=(B, T)), -0.01),
        "old_logprobs": old,
        "rollout_logprobs": np.minimum(old + 0.2 * rng.normal(size=(B, T)), -0.01),
        "ref_logprobs": np.minimum(old + 0.3 * rng.normal(size=(B, T)), -0.01),
        "values": rng.normal(size=(B, T)),
        "old_values": rng.normal(size=(B, T)),
        "returns": rng.normal(size=(B, T)),
        "advantages": rng.normal(size=(B, T)),
        "entropy": rng.exponential(size=(B, T)),
        "sum_pi_squared": np.maximum(np.exp(old) ** 2, rng.uniform(size=(B, T))),
    }
    answer = {
        "scores": rng.normal(size=B),
        "raw_scores": rng.uniform(size=B),
        "greedy_scores": rng.normal(size=B),
        "score_components": rng.normal(size=(B, 3)),
    }
    fields = {k: jnp.asarray(v, jnp.float32) for k, v in (token | answer).items()}
    marked = mask & (rng.uniform(size=(B, T)) < 0.3)
    reward = np.minimum(old + 0.5 * rng.normal(size=(B, T)), -0.01)
    return fields | {
        "group_ids": jnp.array(GROUP_IDS),
        "mask": jnp.asarray(mask),
        "response_lengths": jnp.asarray(mask.sum(1)),
        "high_covariance": jnp.asarray(marked),
        "reward_logprobs": jnp.asarray(reward, jnp.float32),
    }


@pytest.fixture
def fields() -> dict:
    return make_fields()


@pytest.fixture
def other_fields() -> dict:
    return make_fields(1)


@pytest.fixture
def arguments():
    """Return the fields that a function's positional parameters name."""

    def pick(function, fields: dict) -> list:
        parameters = inspect.signature(function).parameters.values()
        return [fields[p.name] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    return pick

"""What must hold of every function, whatever it computes."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from jaxrl_llm.algorithms import advantages, correction, kl, losses, reduce, shaping, values
from jaxrl_llm.config.functions import asks_for, public_functions
from tests.algorithms.fields import B, T, jitted, make_fields, run

KEYWORDS = {
    "kl_penalized_rewards": {"coef": 0.5},
    "reward_to_go": {"gamma": 0.9},
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


def named(module):
    skipped = {"fixed", "adaptive", "normalized", "mismatch_metrics", "to_tokens"}
    names = sorted({*public_functions(module)} - skipped)
    return {name: partial(getattr(module, name), **KEYWORDS.get(name, {})) for name in names}


def to_tokens(scores, mask):
    return advantages.to_tokens(scores, mask)


ADVANTAGES = named(advantages) | {"to_tokens": to_tokens}
CORRECTIONS, LOSSES = named(correction), named(losses) | named(values)
SELECTIONS = {"select_clip_cov", "select_kl_cov"}
ALL = ADVANTAGES | CORRECTIONS | LOSSES | named(kl) | named(reduce) | named(shaping)
IN_PLACE = {"optimal_token_baseline", "optimal_token_baseline_corrected"}
"""Compare tokens of the same place."""


@pytest.mark.parametrize("name", ALL)
def test_neither_order_nor_types_nor_transformations_change_a_function(name):
    function, fields, other = ALL[name], make_fields(), make_fields(1)
    want = run(function, fields)
    if name != "second_moment_mask" or want.any():
        assert any(np.any(x) for x in jax.tree.leaves(want)), "the comparison needs numbers"

    order = np.array([4, 0, 5, 2, 1, 3])
    moved = {key: x[order] for key, x in fields.items()}
    moved["group_ids"] = 1000 - 7 * moved["group_ids"]
    expected = jax.tree.map(lambda x: x[order], want)
    chex.assert_trees_all_close(run(function, moved), expected, rtol=1e-4, atol=1e-5)

    stacked = [jnp.stack([fields[key], other[key]]) for key in asks_for(function)]
    mapped = jitted(jax.vmap(function))(*stacked)
    both = jax.tree.map(lambda *x: np.stack(x), want, run(function, other))
    chex.assert_trees_all_close(mapped, both, rtol=1e-5, atol=1e-5)

    low = {k: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for k, x in fields.items()}
    high = {k: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for k, x in low.items()}
    got = run(function, low)
    assert {x.dtype.name for x in jax.tree.leaves(got)} <= {"float32", "bool"}
    chex.assert_trees_all_close(got, run(function, high), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES | CORRECTIONS | named(reduce))
def test_told_tokens_and_unusable_answers_change_nothing(name):
    """Three tokens, of which nothing is known, somewhere in each answer; two answers of six.

    A group of its own and an empty mask are as good as cutting an answer out of the batch.
    """
    function, fields, rng = ALL[name], make_fields(), np.random.default_rng(0)
    places = np.sort([rng.permutation(T + 3)[:T] for _ in range(B)], axis=1)
    places = places[:1].repeat(B, 0) if name in IN_PLACE else places
    longer = {}
    for key, x in jax.tree.map(np.asarray, fields).items():
        longer[key] = x
        if x.shape == (B, T):
            told = {"b": False, "i": -1, "f": np.nan}[x.dtype.kind]
            longer[key] = np.full((B, T + 3), told, x.dtype)
            np.put_along_axis(longer[key], places, x, axis=1)
    told, plain = (jax.tree.leaves(run(function, each)) for each in (longer, fields))
    for got, want in zip(told, plain, strict=True):
        inside = np.take_along_axis(got, places, axis=1) if want.ndim == 2 else got
        np.testing.assert_allclose(inside, want, rtol=1e-4, atol=1e-5)
        assert want.ndim == 1 or not got[~longer["mask"]].any()

    for rows in ([1, 4], [3, 5]):
        others = np.setdiff1d(np.arange(B), rows)
        kept = {key: np.array(x) for key, x in fields.items()}
        for key, x in kept.items():
            if x.dtype.kind == "f":
                x[rows] = np.nan if x.shape == (B, T) and key != "x" else 1e3
        kept["mask"][rows], kept["response_lengths"][rows] = False, 0
        kept["group_ids"][rows] = B + np.array(rows)
        cut = {key: np.asarray(x)[others] for key, x in fields.items()}
        for got, want in zip(
            *map(jax.tree.leaves, (run(function, kept), run(function, cut))), strict=True
        ):
            assert want.ndim == 1 or not got[rows].any()
            np.testing.assert_allclose(got[others], want, rtol=1e-5, atol=1e-6)


EXTREME = [0.0, -1e-3, -1e4, -np.inf, 1e4]
POLICIES = {"logprobs", "old_logprobs", "reward_logprobs"}
NOT_CLIPPED = {"negative_log_likelihood", "second_moment_mask", "select_clip_cov", "select_kl_cov"}


@pytest.mark.parametrize(
    "name", [key for key, f in ALL.items() if POLICIES & {*asks_for(f)} and key not in NOT_CLIPPED]
)
def test_extreme_log_probs_give_finite_numbers(name):
    """Values and gradients, with impossible and certain tokens under either of two policies."""
    function, fields = ALL[name], make_fields()
    new, old = (
        jnp.asarray(np.resize(x.ravel(), (B, T)), jnp.float32)
        for x in np.meshgrid(EXTREME, EXTREME)
    )
    asked = asks_for(function)

    def total(x, given):
        made = function(*({**given, "logprobs": x}[key] for key in asked))
        return sum(jnp.sum(y) for y in jax.tree.leaves(made)), made

    both = jax.jit(jax.grad(total, has_aux=True))
    for rollout, sign in ((old, 1.0), (old, -1.0), (new, 0.0), (new, 1.0)):
        part = fields | {
            **dict.fromkeys(("logprobs", "reward_logprobs"), new),
            **dict.fromkeys(("old_logprobs", "ref_logprobs"), old),
            "rollout_logprobs": rollout,
            "advantages": jnp.full((B, T), sign),
            "raw_scores": jnp.full(B, 0.5 + 0.5 * sign),
        }
        for x in jax.tree.leaves(both(part["logprobs"], {key: part[key] for key in asked})):
            assert np.isfinite(x).all()


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in SELECTIONS])
def test_a_loss_does_not_hide_nan_and_reads_nothing_off_the_mask(name):
    """Neither for its value nor for its gradient, which are added up with the weights."""
    function, fields = ALL[name], make_fields()
    asked = asks_for(function)
    learned = "values" if "values" in asked else "logprobs"

    @jax.jit
    def contribution(given, weights, mask):
        def total(x):
            loss = function(*({**given, learned: x}[key] for key in asked)).loss
            return jnp.where(mask, weights * loss, 0.0).sum()

        return jax.value_and_grad(total)(given[learned])

    def pad(key, x):
        if x.ndim == 1 or key == "score_components":
            return jnp.pad(x, (0, 1), constant_values=-77) if x.ndim == 1 else x
        garbage = {"mask": False, "old_logprobs": -jnp.inf, "logprobs": 1e4}.get(key, -77)
        return jnp.pad(x, [(0, 1), (1, 2)], constant_values=jnp.asarray(garbage, x.dtype))

    padded = {key: pad(key, x) for key, x in fields.items()}
    results = [
        contribution(
            {key: each[key] for key in asked}, reduce.token_mean(each["mask"]), each["mask"]
        )
        for each in (fields, padded)
    ]
    (want, gradient), (got, wider) = jax.device_get(results)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(wider[:-1, 1:-2], gradient, rtol=1e-5, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3
    assert_array_equal(np.where(padded["mask"], 0.0, wider), 0.0)

    if learned == "logprobs":
        broken = fields | {"logprobs": fields["logprobs"].at[0, 1].set(jnp.nan)}
        broken["high_covariance"] = jnp.zeros_like(fields["mask"])
        assert np.isnan(run(function, broken).loss[0, 1])

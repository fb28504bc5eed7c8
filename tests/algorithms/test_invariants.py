"""What must hold of every function, whatever it computes."""

from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import advantages, correction, kl, losses, reduce, shaping, values
from jaxrl_llm.config.functions import asks_for
from tests.algorithms.fields import B, T, jitted, make_fields, named, run


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
        assert_allclose(inside, want, rtol=1e-4, atol=1e-5)
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
            assert_allclose(got[others], want, rtol=1e-5, atol=1e-6)


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


def test_a_loss_does_not_hide_nan():
    fields = {**make_fields()}
    fields["logprobs"] = fields["logprobs"].at[0, 1].set(jnp.nan)
    fields["high_covariance"] = jnp.zeros_like(fields["mask"])
    wrong = []
    for name, function in LOSSES.items():
        reads = name not in SELECTIONS and "logprobs" in asks_for(function)
        if reads and not np.isnan(run(function, fields).loss[0, 1]):
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in SELECTIONS])
def test_no_split_changes_a_loss_or_its_gradient(name):
    """Each part is filled up with rows and columns of garbage off the mask: none is read."""
    function, fields = ALL[name], jax.device_get(make_fields())
    asked = asks_for(function)
    learned = "values" if "values" in asked else "logprobs"

    @jax.jit
    def gradient_and_loss(part):
        def weighed(x):
            loss = function(*({**part, learned: x}[key] for key in asked)).loss
            loss = jnp.where(part["mask"], loss, 0.0)
            return jnp.sum(part["x"] * loss), loss

        return jax.grad(weighed, has_aux=True)(part[learned])

    def filled(key, x, rows):
        garbage = {"mask": False, "old_logprobs": -np.inf, "logprobs": 1e4}.get(key, -77)
        sides = [(0, B + 1 - len(rows)), *[(1, 2)] * (x.ndim - 1)]
        return np.pad(x[rows], sides, constant_values=np.asarray(garbage, x.dtype))

    fields = {key: fields[key] for key in {*asked, "mask", "x"}}
    whole = jax.device_get(gradient_and_loss(fields))
    assert np.abs(whole[0]).max() > 1e-2, "the comparison needs gradients that are not tiny"
    for seed in range(3):
        rng = np.random.default_rng(seed)
        order, cuts = rng.permutation(B), np.flatnonzero(rng.uniform(size=B - 1) < 0.5) + 1
        for start, stop in pairwise([0, *cuts, B]):
            rows = order[start:stop]
            part = {key: filled(key, x, rows) for key, x in fields.items()}
            for of_part, of_all in zip(gradient_and_loss(part), whole, strict=True):
                assert_allclose(of_part[: len(rows), 1:-2], of_all[rows], rtol=2e-5, atol=1e-5)
                assert_array_equal(np.where(part["mask"], 0.0, of_part), 0.0)

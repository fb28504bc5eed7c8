"""Off-policy corrections and mismatch metrics against loops written from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import correction

FUNCTIONS = {
    correction.truncated_token: {"cap": 1.1},
    correction.truncated_sequence: {"cap": 1.1},
    correction.truncated_token_normalized: {"cap": 1.1},
    correction.truncated_sequence_normalized: {"cap": 1.1},
    correction.icepop: {"low": 0.9, "high": 1.2},
    correction.reject_sequence: {"low": 0.8, "high": 1.2},
    correction.reject_sequence_geometric: {"low": 0.95, "high": 1.05},
    correction.reject_sequence_k3: {"cap": 0.02},
}
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def per_answer(function):
    return lambda rho: [function(rho)] * len(rho)


# The weights of one answer from its ratios, before any normalisation.
LOOPS = {
    "truncated_token": lambda rho: [min(r, 1.1) for r in rho],
    "truncated_sequence": per_answer(lambda rho: min(np.prod(rho), 1.1)),
    "icepop": lambda rho: [r if 0.9 <= r <= 1.2 else 0.0 for r in rho],
    "reject_sequence": per_answer(lambda rho: float(0.8 <= np.prod(rho) <= 1.2)),
    "reject_sequence_geometric": per_answer(
        lambda rho: float(0.95 <= np.prod(rho) ** (1 / len(rho)) <= 1.05)
    ),
    "reject_sequence_k3": per_answer(
        lambda rho: float(sum(r - 1 - np.log(r) for r in rho) / len(rho) <= 0.02)
    ),
}


@pytest.fixture
def triple(fields):
    return fields["old_logprobs"], fields["rollout_logprobs"], fields["mask"]


def answers(triple):
    old, rollout, mask = (np.asarray(x) for x in triple)
    log_ratio = old.astype(np.float64) - rollout.astype(np.float64)
    return [np.exp(log_ratio[b, mask[b]]) for b in range(len(mask))]


@functions
def test_matches_the_loop(function, triple):
    name = function.__name__.removesuffix("_normalized")
    rows = [np.array(LOOPS[name](rho)) for rho in answers(triple)]
    flat = np.concatenate(rows)
    scale = 1.0
    if function is correction.truncated_token_normalized:
        scale = flat.mean()
    elif function is correction.truncated_sequence_normalized:
        scale = np.mean([row[0] for row in rows])
    got = np.asarray(function(*triple, **FUNCTIONS[function]))
    assert_allclose(got[np.asarray(triple[2])], flat / scale, rtol=1e-5)
    assert_array_equal(got[~np.asarray(triple[2])], 0.0)
    assert len({*np.round(flat, 6)}) > 1  # some are kept or truncated, some are not


HAND = [
    # The ratios of one answer are 2 and 1/2.
    (correction.truncated_token, {"cap": 1.5}, [1.5, 0.5]),
    (correction.truncated_sequence, {"cap": 1.5}, [1.0, 1.0]),
    (correction.truncated_sequence, {"cap": 0.5}, [0.5, 0.5]),
    (correction.truncated_token_normalized, {"cap": 1.0}, [4 / 3, 2 / 3]),
    (correction.truncated_sequence_normalized, {"cap": 0.5}, [1.0, 1.0]),
    (correction.icepop, {"low": 0.6, "high": 2.1}, [2.0, 0.0]),
    (correction.reject_sequence, {"low": 0.9, "high": 1.1}, [1.0, 1.0]),
    (correction.reject_sequence, {"low": 1.1, "high": 1.2}, [0.0, 0.0]),
    (correction.reject_sequence_geometric, {}, [1.0, 1.0]),
    (correction.reject_sequence_k3, {"cap": 0.2501}, [1.0, 1.0]),  # (0.3069 + 0.1931) / 2
    (correction.reject_sequence_k3, {"cap": 0.2499}, [0.0, 0.0]),
]


@pytest.mark.parametrize(("function", "keywords", "want"), HAND)
def test_by_hand(function, keywords, want):
    old, rollout = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 1.0]]))
    got = function(old, rollout, jnp.array([[True, True]]), **keywords)
    assert_allclose(got, [want], rtol=1e-5)


@functions
def test_the_same_policy_gets_weight_one(function, triple):
    old, _, mask = triple
    assert_allclose(function(old, old, mask, **FUNCTIONS[function]), mask.astype(float), rtol=1e-6)


@functions
def test_garbage_off_the_mask_and_extremes(function, triple):
    old, rollout, mask = triple
    keywords = FUNCTIONS[function]
    want = function(old, rollout, mask, **keywords)
    noisy = jnp.where(mask, old, jnp.nan), jnp.where(mask, rollout, -jnp.inf)
    assert_allclose(function(*noisy, mask, **keywords), want, rtol=1e-6)
    for low in (-1e4, -jnp.inf):
        for pair in ((old, rollout.at[0, 1].set(low)), (old.at[0, 1].set(low), rollout)):
            weights = function(*pair, mask, **keywords)
            assert np.isfinite(weights).all() and (weights >= 0).all()
    nothing = function(old, rollout, jnp.zeros_like(mask), **keywords)
    assert_array_equal(nothing, np.zeros(mask.shape))


@functions
def test_jit_vmap_and_bfloat16(function, triple):
    def call(*args):
        return function(*args, **FUNCTIONS[function])

    want = call(*triple)
    assert_allclose(jax.jit(call)(*triple), want, rtol=1e-5)
    stacked = [jnp.stack([x, x[::-1]]) for x in triple]
    assert_allclose(jax.jit(jax.vmap(call))(*stacked)[1], want[::-1], rtol=1e-5)
    low = [x.astype(jnp.bfloat16) for x in triple[:2]]
    high = [x.astype(jnp.float32) for x in low]
    assert call(*low, triple[2]).dtype == jnp.float32
    assert_array_equal(call(*low, triple[2]), call(*high, triple[2]))


def test_mismatch_metrics_match_the_loop(triple):
    rows = answers(triple)
    rho = np.concatenate(rows)
    on = np.asarray(triple[2])
    old, rollout = (np.exp(np.asarray(x, np.float64)[on]) for x in triple[:2])
    want = {
        "rollout_corr/kl": -np.log(rho).mean(),
        "rollout_corr/k3_kl": (rho - 1 - np.log(rho)).mean(),
        "rollout_corr/ppl_ratio": np.mean([np.exp(-np.log(row).mean()) for row in rows]),
        "rollout_corr/chi2_token": (rho**2).mean() - 1,
        "rollout_corr/chi2_seq": np.mean([np.prod(row) ** 2 for row in rows]) - 1,
        "training/rollout_probs_diff_mean": abs(old - rollout).mean(),
        "training/rollout_probs_diff_max": abs(old - rollout).max(),
        "training/rollout_probs_diff_std": abs(old - rollout).std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(old, rollout)[0, 1],
    }
    got = correction.mismatch_metrics(*triple)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_allclose(got[name], value, rtol=1e-4, err_msg=name)


def test_mismatch_metrics_of_the_same_policy_and_of_nothing(triple):
    old, rollout, mask = triple
    same = correction.mismatch_metrics(old, old, mask)
    ones = {"rollout_corr/ppl_ratio", "training/rollout_actor_probs_pearson_corr"}
    for name, value in same.items():
        assert_allclose(value, 1.0 if name in ones else 0.0, atol=1e-5, err_msg=name)
    for empty in (jnp.zeros_like(mask), jnp.zeros_like(mask).at[0, 1].set(True)):
        for value in correction.mismatch_metrics(old, rollout, empty).values():
            assert np.isfinite(value)


@functions
def test_bad_bounds_are_named(function, triple):
    banded = "low" in FUNCTIONS[function]
    bad = {"low": 2.0, "high": 1.0} if banded else {"cap": 0.0}
    with pytest.raises(ValueError, match="low 2.0 and high 1.0" if banded else "cap: got 0"):
        function(*triple, **bad)

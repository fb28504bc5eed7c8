"""Weights of tokens of other policies, against loops written from their definitions."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms import correction
from tests.algorithms.fields import make_fields, named, run


def per_answer(function):
    return lambda rho: [function(rho)] * len(rho)


def mean_k3(rho):
    return sum(r - 1 - np.log(r) for r in rho) / len(rho)


# The weights of one answer from its ratios, before any normalisation.
LOOPS = {
    "truncated_token": lambda rho: [min(r, 1.1) for r in rho],
    "truncated_sequence": per_answer(lambda rho: min(np.prod(rho), 1.1)),
    "icepop": lambda rho: [r * (0.9 <= r <= 1.2) for r in rho],
    "reject_sequence": per_answer(lambda rho: float(0.8 <= np.prod(rho) <= 1.2)),
    "reject_sequence_geometric": per_answer(
        lambda rho: float(0.95 <= np.prod(rho) ** (1 / len(rho)) <= 1.05)
    ),
    "reject_sequence_k3": per_answer(lambda rho: float(mean_k3(rho) <= 0.02)),
}
LOOPS |= {f"{name}_normalized": LOOPS[name] for name in ("truncated_token", "truncated_sequence")}


def ratios(fields):
    """The ratios of each answer."""
    names = ("old_logprobs", "rollout_logprobs", "mask")
    old, rollout, mask = (np.asarray(fields[name]) for name in names)
    log_ratio = old.astype(np.float64) - rollout.astype(np.float64)
    return [np.exp(row[on]) for row, on in zip(log_ratio, mask, strict=True)]


@pytest.mark.parametrize("name", LOOPS)
def test_weights_are_their_loop_and_one_for_the_same_policy(name):
    function, fields = named(correction)[name], make_fields()
    rows = [np.array(LOOPS[name](rho)) for rho in ratios(fields)]
    flat, scale = np.concatenate(rows), 1.0
    if name == "truncated_token_normalized":
        scale = flat.mean()
    elif name == "truncated_sequence_normalized":
        scale = np.mean([row[0] for row in rows])
    mask = np.asarray(fields["mask"])
    assert_allclose(run(function, fields)[mask], flat / scale, rtol=1e-5)
    assert len({*np.round(flat, 6)}) > 1  # some are kept or truncated, some are not
    same = fields | {"rollout_logprobs": fields["old_logprobs"]}
    assert_allclose(run(function, same), mask.astype(float), rtol=1e-6)
    assert not run(function, fields | {"mask": np.zeros_like(mask)}).any()
    for key in function.keywords:
        wrong = {key: {"cap": 0.0, "low": 2.0, "high": -1.0}[key]}
        with pytest.raises(ValueError, match=key):
            run(partial(function, **wrong), fields)


def test_mismatch_metrics_are_the_loops():
    fields = make_fields()
    rows, on = ratios(fields), np.asarray(fields["mask"])
    rho = np.concatenate(rows)
    old, rollout = (
        np.exp(np.asarray(fields[name], np.float64)[on])
        for name in ("old_logprobs", "rollout_logprobs")
    )
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
    got = run(correction.mismatch_metrics, fields)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_allclose(got[name], value, rtol=1e-4, err_msg=name)
    one = np.zeros_like(on)
    one[0, 1] = True
    same = {"rollout_logprobs": fields["old_logprobs"]}
    for change in ({"mask": np.zeros_like(on)}, {"mask": one}, same):
        metrics = run(correction.mismatch_metrics, fields | change)
        assert np.isfinite([*metrics.values()]).all()


def test_the_largest_second_moments_are_dropped():
    """Until the mean of the others is the threshold, which is here a share of the mean of all."""
    fields = make_fields()
    names = ("old_logprobs", "rollout_logprobs", "mask")
    old, rollout, mask = (np.asarray(fields[name], float) for name in names)
    moments = np.where(mask, (old - rollout) ** 2, np.inf)
    mean = moments[mask > 0].mean()
    for share in (0.0, 0.01, 0.3, 0.9, 2.0):
        left = sorted(moments[mask > 0])
        while left and np.mean(left) > share * mean:
            left.pop()
        weights = run(partial(correction.second_moment_mask, threshold=share * mean), fields)
        np.testing.assert_array_equal(weights, moments <= max(left, default=-1.0))
        assert not 0 < share < 1 or 0 < weights.sum() < mask.sum()
    impossible = {"old_logprobs": fields["old_logprobs"].at[mask > 0].set(-np.inf)}
    assert not run(correction.second_moment_mask, fields | impossible).any()
    rounded = {name: fields[name].astype(jnp.bfloat16) for name in names[:2]}
    exact = {name: value.astype(jnp.float32) for name, value in rounded.items()}
    np.testing.assert_array_equal(
        *(run(correction.second_moment_mask, fields | given) for given in (rounded, exact))
    )
    with pytest.raises(ValueError, match="threshold"):
        run(partial(correction.second_moment_mask, threshold=-1.0), fields)


def test_tokens_are_kept_by_their_age():
    fields = make_fields()
    ages, mask = np.asarray(fields["ages"]), np.asarray(fields["mask"])
    for most in (0, 1, 3):
        weights = run(partial(correction.reject_old, most=most), fields)
        np.testing.assert_array_equal(weights, mask & (ages <= most))
    with pytest.raises(ValueError, match="most"):
        run(partial(correction.reject_old, most=-1), fields)

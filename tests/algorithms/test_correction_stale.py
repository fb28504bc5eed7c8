"""Corrections by age and by the second moment, against loops written from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import correction


def dropped_one_by_one(old, rollout, mask, threshold):
    """Take the token with the largest (log ρ)² away until the mean of the others is small."""
    moments = {place: (old[place] - rollout[place]) ** 2 for place in map(tuple, np.argwhere(mask))}
    while moments and np.mean(list(moments.values())) > threshold:
        del moments[max(moments, key=lambda place: (moments[place], place))]
    kept = np.zeros(mask.shape)
    for place in moments:
        kept[place] = 1
    return kept


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 2.0])
def test_the_largest_second_moments_are_dropped(fields, share):
    """The threshold is a share of the mean of all."""
    old, rollout, mask = (fields[name] for name in ("old_logprobs", "rollout_logprobs", "mask"))
    threshold = share * float(((old - rollout)[mask] ** 2).mean())
    weights = jax.jit(correction.second_moment_mask, static_argnames="threshold")(
        old, rollout, mask, threshold=threshold
    )
    arrays = (np.asarray(old, np.float64), np.asarray(rollout, np.float64), np.asarray(mask))
    np.testing.assert_array_equal(weights, dropped_one_by_one(*arrays, threshold))
    if 0 < share < 1:
        assert 0 < float(weights.sum()) < int(mask.sum())


def test_what_is_off_the_mask_is_not_read(fields):
    old, rollout, mask = (fields[name] for name in ("old_logprobs", "rollout_logprobs", "mask"))
    expected = correction.second_moment_mask(old, rollout, mask, threshold=0.01)
    spoilt = jnp.where(mask, old, jnp.nan)
    actual = correction.second_moment_mask(spoilt, rollout, mask, threshold=0.01)
    np.testing.assert_array_equal(actual, expected)


def test_nothing_is_dropped_where_the_policies_are_one(fields):
    old, mask = fields["old_logprobs"], fields["mask"]
    np.testing.assert_array_equal(
        correction.second_moment_mask(old, old, mask, threshold=0.0), mask
    )


@pytest.mark.parametrize("most", [0, 1, 3])
def test_tokens_are_kept_by_their_age(most):
    rng = np.random.default_rng(0)
    ages, mask = rng.integers(0, 4, (5, 7)), rng.random((5, 7)) < 0.7
    weights = correction.reject_old(jnp.asarray(ages), jnp.asarray(mask), most=most)
    for place in np.ndindex(ages.shape):
        assert weights[place] == float(mask[place] and ages[place] <= most)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [("reject_old", {"most": -1}), ("second_moment_mask", {"threshold": -1.0})],
)
def test_what_is_out_of_range_is_refused(name, keywords):
    one = jnp.zeros((1, 1))
    given = {"reject_old": (one.astype(int), one > 0), "second_moment_mask": (one, one, one > 0)}
    with pytest.raises(ValueError, match=f"{next(iter(keywords))}: got -1"):
        getattr(correction, name)(*given[name], **keywords)

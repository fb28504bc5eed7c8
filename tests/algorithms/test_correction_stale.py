"""What weighs tokens of older policies, against loops written from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import correction, losses


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


def decoupled(logprobs, rollout, prox, advantage):
    """Decoupled PPO of one token: the loss, and its derivative by the log-prob."""
    weight = min(np.exp(prox - rollout), 2.0)
    ratio = np.exp(logprobs - prox)
    held = min(max(ratio, 0.8), 1.2)
    loss = max(-advantage * ratio, -advantage * held)
    slope = -advantage * ratio if loss == -advantage * ratio else 0.0
    if advantage < 0 and loss > -3 * advantage:
        loss, slope = -3 * advantage, 0.0
    return weight * loss, weight * slope


def test_a3po_is_decoupled_ppo_around_an_interpolated_policy(fields):
    rng = np.random.default_rng(0)
    shape = fields["logprobs"].shape
    ages = jnp.asarray(rng.integers(0, 5, shape))
    rollout = fields["logprobs"] + jnp.asarray(rng.normal(0, 1.0, shape), jnp.float32)
    given = rollout, ages, fields["advantages"]

    def total(logprobs):
        loss = losses.a3po(logprobs, *given).loss
        return loss.sum(), loss

    slopes, loss = jax.jit(jax.grad(total, has_aux=True))(fields["logprobs"])
    slopes_seen = set()
    for place in np.ndindex(shape):
        new, old, advantage = (
            float(values[place]) for values in (fields["logprobs"], rollout, given[2])
        )
        age = int(ages[place])
        prox = old + (new - old) * (age / (age + 1))
        expected, slope = decoupled(new, old, prox, advantage)
        assert float(loss[place]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert float(slopes[place]) == pytest.approx(slope, rel=1e-5, abs=1e-6)
        slopes_seen.add(slope == 0)
    assert slopes_seen == {True, False}


def test_a3po_of_fresh_tokens_is_ppo_around_the_engine_s_log_probs(fields):
    given = fields["logprobs"], fields["rollout_logprobs"]
    ages = jnp.zeros(given[0].shape, jnp.int32)
    expected = losses.ppo_clip(*given, fields["advantages"]).loss
    actual = losses.a3po(*given, ages, fields["advantages"]).loss
    np.testing.assert_array_equal(actual, expected)


def test_a3po_refuses_a_cap_of_nothing(fields):
    with pytest.raises(ValueError, match=r"cap: got 0.0, expected a weight above 0"):
        losses.a3po(
            *[fields["logprobs"]] * 2, jnp.zeros((6, 5), int), fields["advantages"], cap=0.0
        )

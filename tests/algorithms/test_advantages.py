"""Advantage estimators against loops written from the papers, and what must hold of them."""

from functools import partial

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import advantages as adv
from jaxrl_llm.config.functions import call, public_functions

OUTCOME = [adv.grpo, adv.dr_grpo, adv.rloo, adv.opo, adv.grpo_pass_at_k, adv.gpg, adv.gdpo]
TOKEN = [
    adv.remax,
    adv.reinforce_plus_plus,
    adv.reinforce_plus_plus_baseline,
    adv.optimal_token_baseline,
    adv.optimal_token_baseline_corrected,
    adv.optimal_token_baseline_multi_turn,
    adv.prime,
]
BOTH = [adv.gae, adv.gae_whitened]
ALL = OUTCOME + TOKEN + BOTH
ON = jnp.ones((6, 1), bool)  # a mask of six answers
names = pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)


def as64(fields, *keys):
    return [np.asarray(fields[n], bool if n == "mask" else np.float64) for n in keys]


def members(ids):
    ids = np.asarray(ids)
    return [np.flatnonzero(ids == g) for g in sorted(set(ids.tolist()))]


def loop_whiten(x, mask):
    on = [x[i] for i in np.ndindex(x.shape) if mask[i]]
    mean = sum(on) / len(on)
    var = sum((v - mean) ** 2 for v in on) / (len(on) - 1)
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        if mask[i]:
            out[i] = (x[i] - mean) / np.sqrt(var + 1e-8)
    return out


def loop_grpo(scores, ids, scale=True):
    out = np.zeros_like(scores)
    for rows in members(ids):
        if len(rows) == 1:
            out[rows] = scores[rows]
            continue
        mean = sum(scores[i] for i in rows) / len(rows)
        std = (sum((scores[i] - mean) ** 2 for i in rows) / (len(rows) - 1)) ** 0.5
        for i in rows:
            out[i] = (scores[i] - mean) / (std + 1e-6 if scale else 1.0)
    return out


def loop_returns(rewards, mask, gamma=1.0):
    out = np.zeros_like(rewards)
    for b in range(len(rewards)):
        ahead = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                ahead = rewards[b, t] + gamma * ahead
                out[b, t] = ahead
    return out


def loop_gae(rewards, values, mask, gamma, lam):
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        next_value, ahead = 0.0, 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                delta = rewards[b, t] + gamma * next_value - values[b, t]
                ahead = delta + gamma * lam * ahead
                next_value = values[b, t]
                advantages[b, t], returns[b, t] = ahead, ahead + values[b, t]
    return advantages, returns


def loop_optimal_baseline(rewards, mask, ids, old, squares, weight=None):
    returns = loop_returns(rewards, mask)
    gathered, out = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        total = 0.0
        for t in range(rewards.shape[1]):
            if mask[b, t]:
                rho = 1.0 if weight is None else weight[b, t]
                total += rho**2 * (1 - 2 * np.exp(old[b, t]) + squares[b, t])
                gathered[b, t] = total
    for rows in members(ids):
        for t in range(rewards.shape[1]):
            live = [b for b in rows if mask[b, t]]
            baseline = 0.0
            if len(live) > 1:
                baseline = sum(returns[b, t] * gathered[b, t] for b in live)
                baseline /= sum(gathered[b, t] for b in live)
            for b in live:
                out[b, t] = returns[b, t] - baseline
    return out


def test_grpo_and_dr_grpo_match_the_loop(fields):
    (scores,) = as64(fields, "scores")
    ids = fields["group_ids"]
    assert_allclose(adv.grpo(fields["scores"], ids), loop_grpo(scores, ids), rtol=1e-5)
    want = loop_grpo(scores, ids, scale=False)
    assert_allclose(adv.dr_grpo(fields["scores"], ids), want, rtol=1e-5)
    assert_allclose(adv.grpo(fields["scores"], ids, scale_by_std=False), want, rtol=1e-5)


def test_rloo_leaves_one_out(fields):
    (scores,) = as64(fields, "scores")
    want = np.zeros_like(scores)
    for rows in members(fields["group_ids"]):
        for i in rows:
            others = [scores[j] for j in rows if j != i]
            want[i] = scores[i] - sum(others) / len(others) if others else 0.0
    assert_allclose(adv.rloo(fields["scores"], fields["group_ids"]), want, rtol=1e-5, atol=1e-6)


def test_opo_matches_the_loop(fields):
    scores, lengths = as64(fields, "scores", "response_lengths")
    want = scores.copy()
    for rows in members(fields["group_ids"]):
        if len(rows) > 1:
            baseline = sum(lengths[j] * scores[j] for j in rows) / sum(lengths[j] for j in rows)
            want[rows] = scores[rows] - baseline
    got = adv.opo(fields["scores"], fields["response_lengths"], fields["group_ids"])
    assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_opo_with_equal_lengths_is_dr_grpo(fields):
    got = adv.opo(fields["scores"], jnp.full(6, 7), fields["group_ids"])
    assert_allclose(got, adv.dr_grpo(fields["scores"], fields["group_ids"]), atol=1e-6)


def test_pass_at_k_rewards_the_lead_of_the_best(fields):
    (scores,) = as64(fields, "scores")
    want = np.zeros_like(scores)
    for rows in members(fields["group_ids"]):
        if len(rows) > 1:
            order = sorted(rows, key=lambda i: scores[i])
            lead = scores[order[-1]] - scores[order[-2]]
            want[order[-1]] = lead / (np.std(scores[rows], ddof=1) + 1e-6)
    got = adv.grpo_pass_at_k(fields["scores"], fields["group_ids"])
    assert_allclose(got, want, rtol=1e-5)
    tie = adv.grpo_pass_at_k(jnp.array([2.0, 2.0, 1.0, 0.0, 0.0, 2.0]), jnp.zeros(6, int))
    assert_array_equal(tie, np.zeros(6))


def test_gpg_counts_the_answers_of_groups_that_learn():
    scores, ids = jnp.array([1.0, 1.0, 1.0, 0.0, 0.5, 1.0]), jnp.array([0, 0, 0, 2, 2, 2])
    want = np.array([0, 0, 0, -0.5, 0, 0.5]) * (6 / 3) / 2.0
    assert_allclose(adv.gpg(scores, ids, ON, f_norm=2.0), want, rtol=1e-6)
    assert_array_equal(adv.gpg(jnp.ones(6), ids, ON), np.zeros(6))


def test_gdpo_matches_the_loop(fields):
    (components,) = as64(fields, "score_components")
    weights = (1.0, 0.5, 2.0)
    total = sum(w * loop_grpo(components[:, c], fields["group_ids"]) for c, w in enumerate(weights))
    args = [fields[name] for name in ("score_components", "group_ids", "mask")]
    got = adv.gdpo(*args, weights=weights)
    assert_allclose(got, loop_whiten(total, np.ones(6, bool)), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="got 2 weights, expected one for each of 3"):
        adv.gdpo(*args, weights=(1.0, 2.0))


def test_gdpo_tells_apart_sums_that_grpo_confuses():
    components = jnp.array([[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    ids = jnp.array([0, 0, 0, 0, 1, 1])
    confused = adv.grpo(components.sum(1), ids)
    assert confused[0] == confused[1]
    got = adv.gdpo(components, ids, ON)
    assert got[0] - got[1] > 0.1


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.9, 0.0)])
def test_gae_matches_the_loop(fields, gamma, lam):
    rewards, values, mask = as64(fields, "rewards", "values", "mask")
    args = fields["rewards"], fields["values"], fields["mask"]
    want_a, want_r = loop_gae(rewards, values, mask, gamma, lam)
    got_a, got_r = adv.gae(*args, gamma=gamma, lam=lam)
    assert_allclose(got_a, want_a, rtol=1e-5, atol=1e-6)
    assert_allclose(got_r, want_r, rtol=1e-5, atol=1e-6)
    white, same = adv.gae_whitened(*args, gamma=gamma, lam=lam)
    assert_allclose(white, loop_whiten(want_a, mask), rtol=1e-4, atol=1e-5)
    assert_array_equal(same, got_r)


def test_gae_by_hand():
    rewards = jnp.array([[0.0, 9.0, 1.0]])  # the reward off the mask is passed over
    values = jnp.array([[0.5, 9.0, 0.25]])
    mask = jnp.array([[True, False, True]])
    advantages, returns = adv.gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert_allclose(advantages, [[0.5 * 0.25 - 0.5 + 0.25 * 0.75, 0.0, 0.75]])
    assert_allclose(returns, [[0.5 - 0.1875, 0.0, 1.0]])


def test_gae_limits(fields):
    rewards, values, mask = fields["rewards"], fields["values"], fields["mask"]
    monte_carlo, returns = adv.gae(rewards, values, mask, gamma=0.9, lam=1.0)
    to_go = adv.reward_to_go(rewards, mask, gamma=0.9)
    assert_allclose(returns, to_go, atol=1e-5)
    assert_allclose(monte_carlo, jnp.where(mask, to_go - values, 0.0), atol=1e-5)
    one_step, _ = adv.gae(rewards, values, mask, gamma=0.9, lam=0.0)
    want = np.zeros((6, 5))
    for b, on in enumerate(np.asarray(mask)):
        places = np.flatnonzero(on)
        after = [*values[b, places[1:]], 0.0]
        want[b, places] = rewards[b, places] + 0.9 * np.array(after) - values[b, places]
    assert_allclose(one_step, want, atol=1e-6)


def test_gae_bridges_tool_tokens(fields):
    """The advantages are those of the same answers with the tool tokens cut out."""
    rewards, values, mask = as64(fields, "rewards", "values", "mask")
    got, _ = adv.gae(fields["rewards"], fields["values"], fields["mask"], gamma=0.9, lam=0.7)
    for b in range(len(mask)):
        on = mask[b]
        whole = np.ones((1, on.sum()), bool)
        want, _ = loop_gae(rewards[b, on][None], values[b, on][None], whole, 0.9, 0.7)
        assert_allclose(np.asarray(got)[b, on], want[0], rtol=1e-5, atol=1e-6)


def test_remax_and_reinforce_plus_plus_match_the_loop(fields):
    rewards, mask, greedy, scores = as64(fields, "rewards", "mask", "greedy_scores", "scores")
    want = np.where(mask, loop_returns(rewards, mask) - greedy[:, None], 0.0)
    got = adv.remax(fields["rewards"], fields["mask"], fields["greedy_scores"])
    assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    got = adv.reinforce_plus_plus(fields["rewards"], fields["mask"], gamma=0.9)
    want = loop_whiten(loop_returns(rewards, mask, 0.9), mask)
    assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    centred = loop_grpo(scores, fields["group_ids"], scale=False)
    want = loop_whiten(np.repeat(centred[:, None], 5, axis=1), mask)
    got = adv.reinforce_plus_plus_baseline(fields["scores"], fields["group_ids"], fields["mask"])
    assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_optimal_token_baseline_matches_the_loop(fields, arguments):
    raw = as64(fields, "rewards", "mask", "group_ids", "old_logprobs", "sum_pi_squared")
    got = adv.optimal_token_baseline(*arguments(adv.optimal_token_baseline, fields))
    assert_allclose(got, loop_optimal_baseline(*raw), rtol=1e-4, atol=1e-5)
    (rollout,) = as64(fields, "rollout_logprobs")
    weight = np.minimum(np.exp(raw[3] - rollout), 1.1)
    corrected = adv.optimal_token_baseline_corrected
    got = corrected(*arguments(corrected, fields), cap=1.1)
    assert_allclose(got, loop_optimal_baseline(*raw, weight=weight), rtol=1e-4, atol=1e-5)


def test_optimal_token_baseline_multi_turn_aligns_generated_tokens(fields, arguments):
    rewards, mask, ids, old, squares = as64(
        fields, "rewards", "mask", "group_ids", "old_logprobs", "sum_pi_squared"
    )
    dense = [np.zeros_like(x) for x in (rewards, old, squares)]
    dense_mask = np.zeros_like(mask)
    for b in range(len(mask)):
        n = mask[b].sum()
        dense_mask[b, :n] = True
        for target, source in zip(dense, (rewards, old, squares), strict=True):
            target[b, :n] = source[b, mask[b]]
    compact = loop_optimal_baseline(dense[0], dense_mask, ids, dense[1], dense[2])
    want = np.zeros_like(rewards)
    want[mask] = compact[dense_mask]
    function = adv.optimal_token_baseline_multi_turn
    assert_allclose(function(*arguments(function, fields)), want, rtol=1e-4, atol=1e-5)


HALF = {"old_logprobs": np.log([[0.5, 0.5], [0.25, 0.5]]), "sum_pi_squared": np.full((2, 2), 0.5)}
HAND = [
    # Scores 2, 0, 1 of one prompt (mean 1, deviation 1) and 5 of another.
    (adv.grpo, {}, [1, -1, 0, 5]),
    (adv.grpo, {"scale_by_std": False}, [1, -1, 0, 5]),
    (adv.dr_grpo, {}, [1, -1, 0, 5]),
    (adv.rloo, {}, [1.5, -1.5, 0, 0]),
    (adv.opo, {}, [2 - 1.4, -1.4, 1 - 1.4, 5]),  # lengths 3, 1, 1: (6 + 0 + 1) / 5
    (adv.grpo_pass_at_k, {}, [1, 0, 0, 0]),
    (adv.gpg, {"f_norm": 2.0}, [0.5, -0.5, 0, 2.5]),
]


@pytest.mark.parametrize(("function", "keywords", "want"), HAND)
def test_outcome_estimators_by_hand(function, keywords, want, arguments):
    fields = {
        "scores": jnp.array([2.0, 0.0, 1.0, 5.0]),
        "group_ids": jnp.array([8, 8, 8, -1]),
        "response_lengths": jnp.array([3, 1, 1, 9]),
        "mask": jnp.ones((4, 1), bool),
    }
    assert_allclose(function(*arguments(function, fields), **keywords), want, atol=1e-5)


def test_whitened_estimators_by_hand(arguments):
    """Tokens 1, 1, −1 (or 2, 2, 0): mean 1/3, variance 4/3, so 2/3 and −4/3 over 2/√3."""
    fields = {
        "scores": jnp.array([2.0, 0.0]),
        "group_ids": jnp.array([0, 0]),
        "rewards": jnp.array([[1.0, 2.0], [0.0, 7.0]]),
        "mask": jnp.array([[True, True], [True, False]]),
        "score_components": jnp.array([[2.0, 1.0], [0.0, 1.0]]),
    }
    want = [[3**-0.5, 3**-0.5], [-2 * 3**-0.5, 0]]
    baseline, plain = adv.reinforce_plus_plus_baseline, adv.reinforce_plus_plus
    assert_allclose(baseline(*arguments(baseline, fields)), want, rtol=1e-5)
    assert_allclose(plain(*arguments(plain, fields), gamma=0.5), want, rtol=1e-5)
    assert_allclose(adv.gdpo(*arguments(adv.gdpo, fields)), [0.5**0.5, -(0.5**0.5)], rtol=1e-5)
    values = jnp.array([[0.5, 0.25], [0.0, 7.0]])
    white, returns = adv.gae_whitened(*arguments(adv.gae_whitened, fields | {"values": values}))
    raw = np.array([2.5, 1.75, 0.0])  # mean 17/12
    assert_allclose(white[fields["mask"]], (raw - 17 / 12) / raw.std(ddof=1), rtol=1e-5)
    assert_allclose(returns, [[3.0, 2.0], [0.0, 0.0]])
    got = adv.remax(fields["rewards"], fields["mask"], jnp.array([0.5, 0.25]))
    assert_allclose(got, [[2.5, 1.5], [-0.25, 0.0]])


def test_optimal_token_baseline_by_hand(arguments):
    """w = 1 − 2π + Σπ² is 1/2 and 1: the baseline of the returns 1 and 0 is 1/3."""
    fields = {k: jnp.asarray(v, jnp.float32) for k, v in HALF.items()} | {
        "rewards": jnp.array([[0.0, 1.0], [0.0, 9.0]]),
        "mask": jnp.array([[True, True], [True, False]]),
        "group_ids": jnp.array([0, 0]),
        "rollout_logprobs": jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]])),
    }
    plain, corrected = adv.optimal_token_baseline, adv.optimal_token_baseline_corrected
    got = plain(*arguments(plain, fields))
    assert_allclose(got, [[2 / 3, 1.0], [-1 / 3, 0.0]], rtol=1e-5)
    got = corrected(*arguments(corrected, fields))  # ρ is 1 and 1/2: w is 1/2 and 1/4
    assert_allclose(got, [[1 / 3, 1.0], [-2 / 3, 0.0]], rtol=1e-5)
    flipped = {k: v[:, ::-1] if k != "group_ids" else v for k, v in fields.items()}
    late = flipped | {"mask": jnp.array([[True, True], [False, True]])}
    late["rewards"] = jnp.array([[0.0, 1.0], [9.0, 0.0]])
    late["old_logprobs"] = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.25]]))
    aligned = adv.optimal_token_baseline_multi_turn
    assert_allclose(aligned(*arguments(aligned, late)), [[2 / 3, 1.0], [0.0, -1 / 3]], rtol=1e-5)


EXTREME = [0.0, -1e4, -np.inf, 1e4]


@pytest.mark.parametrize("function", [*TOKEN[3:]], ids=lambda f: f.__name__)
def test_extreme_log_probs_give_finite_advantages(function, fields, arguments):
    shape = fields["mask"].shape
    new, old = (np.resize(x.ravel(), shape) for x in np.meshgrid(EXTREME, EXTREME))
    for first, second in ((new, old), (old, new)):
        part = fields | {
            name: jnp.asarray(values, jnp.float32)
            for names, values in (
                (("reward_logprobs", "old_logprobs"), first),
                (("ref_logprobs", "rollout_logprobs"), second),
            )
            for name in names
        }
        assert np.isfinite(function(*arguments(function, part))).all()


def test_a_lone_answer_keeps_its_return_under_the_optimal_baseline(fields, arguments):
    got = adv.optimal_token_baseline(*arguments(adv.optimal_token_baseline, fields))
    to_go = adv.reward_to_go(fields["rewards"], fields["mask"])
    assert_allclose(got[5], to_go[5], atol=1e-6)  # a group of one
    assert_allclose(got[2, 0], to_go[2, 0], atol=1e-6)  # the other of its group starts later


def loop_prime(reward, scores, mask, ids, beta, gamma, coef):
    """PRIME, eq. 5, term by term; the baseline is the mean of the others' mean rewards."""
    out = np.zeros_like(reward)
    for rows in members(ids):
        for i in rows:
            others = [j for j in rows if j != i]
            if not others:
                continue
            on = np.flatnonzero(mask[i])
            process = sum(beta * reward[j, mask[j]].mean() for j in others) / len(others)
            outcome = scores[i] - sum(scores[j] for j in others) / len(others)
            for place, t in enumerate(on):
                to_go = sum(
                    gamma**k * (beta * reward[i, s] - process) for k, s in enumerate(on[place:])
                )
                out[i, t] = to_go + coef * outcome
    return out


@pytest.mark.parametrize(("beta", "gamma", "coef"), [(0.05, 1.0, 1.0), (2.0, 0.9, 0.5)])
def test_prime_matches_the_loop(fields, arguments, beta, gamma, coef):
    reward, ref, scores, mask = as64(fields, "reward_logprobs", "ref_logprobs", "scores", "mask")
    want = loop_prime(reward - ref, scores, mask, fields["group_ids"], beta, gamma, coef)
    keywords = {"beta": beta, "gamma": gamma, "outcome_coef": coef}
    got = adv.prime(*arguments(adv.prime, fields), **keywords)
    assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert_array_equal(got[5], np.zeros(5))  # a group of one


def test_prime_by_hand():
    """Rewards (3, x, 1) and (2), x off the mask; means 2 and 2; scores 1 and 0."""
    reward = jnp.array([[3.0, 9.0, 1.0], [2.0, 9.0, 9.0]])
    mask = jnp.array([[True, False, True], [True, False, False]])
    args = reward, jnp.zeros((2, 3)), jnp.array([1.0, 0.0]), jnp.array([0, 0]), mask
    got = adv.prime(*args, beta=1.0)
    assert_allclose(got, [[1 - 1 + 1.0, 0, -1 + 1.0], [0 - 1.0, 0, 0]])
    got = adv.prime(*args, beta=1.0, gamma=0.5, outcome_coef=4.0)
    assert_allclose(got, [[1 - 0.5 + 4.0, 0, -1 + 4.0], [-4.0, 0, 0]])


def test_prime_with_the_reference_as_reward_model_is_rloo(fields, arguments):
    fields |= {"reward_logprobs": fields["ref_logprobs"]}
    want = adv.to_tokens(adv.rloo(fields["scores"], fields["group_ids"]), fields["mask"])
    assert_allclose(adv.prime(*arguments(adv.prime, fields)), want, atol=1e-6)
    with pytest.raises(ValueError, match=r"beta: got -1.0"):
        adv.prime(*arguments(adv.prime, fields), beta=-1.0)


def test_score_placed_on_the_last_token_and_kl_charged(fields):
    rewards = adv.rewards_from_scores(fields["scores"], fields["mask"])
    for b, on in enumerate(np.asarray(fields["mask"])):
        want = np.zeros(5)
        want[np.flatnonzero(on)[-1]] = fields["scores"][b]
        assert_allclose(rewards[b], want)
    kl = jnp.full((6, 5), 2.0)
    charged = adv.kl_penalized_rewards(rewards, kl, fields["mask"], coef=jnp.float32(0.25))
    assert_allclose(charged, jnp.where(fields["mask"], rewards - 0.5, 0.0))
    none = adv.rewards_from_scores(jnp.ones(1), jnp.zeros((1, 5), bool))
    assert_array_equal(none, np.zeros((1, 5)))


def test_whiten(fields):
    x, mask = as64(fields, "values", "mask")
    got = adv.whiten(fields["values"], fields["mask"])
    assert_allclose(got, loop_whiten(x, mask), rtol=1e-5, atol=1e-6)
    assert_array_equal(adv.whiten(fields["values"], jnp.zeros((6, 5), bool)), np.zeros((6, 5)))
    one = jnp.zeros((6, 5), bool).at[2, 3].set(True)
    assert_array_equal(adv.whiten(fields["values"], one), np.zeros((6, 5)))


scores8 = st.lists(st.floats(-8, 8, width=16), min_size=8, max_size=8)
ids8 = st.lists(st.integers(-3, 3), min_size=8, max_size=8)
grpo, dr_grpo, rloo = map(jax.jit, (adv.grpo, adv.dr_grpo, adv.rloo))


@hypothesis.given(scores8, ids8, st.permutations(range(8)), st.floats(-4, 4, width=16))
def test_group_properties(scores, ids, order, shift):
    scores, ids, order = np.array(scores, np.float32), np.array(ids), np.array(order)
    plain, scaled, left_out = dr_grpo(scores, ids), grpo(scores, ids), rloo(scores, ids)
    for rows in members(ids):
        size = len(rows)
        if size == 1:
            assert_array_equal(plain[rows], scores[rows])
            assert_array_equal(scaled[rows], scores[rows])
            assert_array_equal(left_out[rows], [0.0])
            continue
        assert abs(float(plain[rows].sum())) < 1e-4
        assert abs(float(left_out[rows].sum())) < 1e-3
        assert abs(float(scaled[rows].sum())) < 1e-3
        assert_allclose(left_out[rows], size / (size - 1) * plain[rows], rtol=1e-5, atol=1e-6)
        assert_allclose(dr_grpo(scores + shift, ids)[rows], plain[rows], atol=1e-4)
        if np.ptp(scores[rows]) == 0:
            assert_array_equal(scaled[rows], np.zeros(size))
        elif np.ptp(scores[rows]) > 0.1:
            assert_allclose(np.std(scaled[rows], ddof=1), 1.0, rtol=1e-3)
    for function, base in ((grpo, scaled), (dr_grpo, plain), (rloo, left_out)):
        assert_allclose(function(scores[order], ids[order]), base[order], atol=1e-5)


PARTS_OF_ESTIMATORS = {"kl_penalized_rewards", "reward_to_go", "rewards_from_scores", "to_tokens"}
ESTIMATORS = {
    name: jax.jit(getattr(adv, name)) for name in {*public_functions(adv)} - PARTS_OF_ESTIMATORS
}
constants = st.sampled_from([0.1, 0.35, 0.9, 10.1, 100.1, 1000.3, 1e5 + 0.3, -1e4 - 0.1, 1e-20])
constants |= st.floats(-(2.0**99), 2.0**99, width=32)
lengths4 = st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any)  # tiled: 8 answers
ids4 = st.lists(st.integers(0, 2), min_size=4, max_size=4)


@hypothesis.given(constants, lengths4, ids4, st.integers(0, 9))
def test_equal_scores_give_exactly_zero(value, lengths, ids, seed):
    """In float32 (0.9 + 0.9 + 0.9) / 3 is not 0.9; a division by the deviation makes 1 of that.

    It holds of all estimators, whichever fields they ask for. By definition it does not where an
    answer is alone in its group, and a token in its place (A = R, or A = G): here everyone has a
    twin. A critic, greedy answers, a reward model and a teacher say what the answers got.
    """
    rng = np.random.default_rng(seed)
    mask = np.tile(np.arange(6) < np.array(lengths)[:, None], (2, 1))
    mask[:, 1] &= ~mask[:, 4]  # a gap: tool output
    log_probs = -rng.exponential(1.0, (8, 6))
    same = np.full(8, value)
    of_tokens = np.where(mask, same[:, None], rng.normal(size=(8, 6)))
    numbers = {
        **dict.fromkeys(("scores", "greedy_scores"), same),
        **dict.fromkeys(("values", "x"), of_tokens),
        "score_components": np.stack([same, same], 1),
        "sum_pi_squared": np.maximum(np.exp(log_probs) ** 2, rng.uniform(size=(8, 6))),
        **dict.fromkeys(("old_logprobs", "ref_logprobs", "reward_logprobs"), log_probs),
        **dict.fromkeys(("rollout_logprobs", "teacher_logprobs"), log_probs - 0.25),
    }
    fields = {name: jnp.asarray(array, jnp.float32) for name, array in numbers.items()} | {
        "mask": jnp.asarray(mask),
        "group_ids": jnp.where(mask.any(1), jnp.tile(jnp.array(ids), 2), 10 + jnp.arange(8)),
        "response_lengths": jnp.asarray(mask.sum(1)),
        "turn_ids": jnp.where(mask, jnp.arange(6) // 2, -1),
    }
    fields["rewards"] = adv.rewards_from_scores(fields["scores"], fields["mask"])
    wrong = {}
    for name, function in ESTIMATORS.items():
        got = jax.tree.leaves(call(function, fields))[0]
        largest = np.abs(np.asarray(got)[mask if got.ndim == 2 else mask.any(1)]).max()
        if largest != 0:
            wrong[name] = largest
    assert not wrong


@hypothesis.given(
    st.lists(st.integers(-9, 9), min_size=8, max_size=8),
    st.sampled_from([0.0, 3.0, 1000.0]),
    st.sampled_from([0.125, 1.0, 2.0**70, 2.0**100]),
    lengths4,
)
def test_neither_size_nor_offset_of_scores_disturbs_a_standardisation(whole, offset, unit, lengths):
    mask = np.tile(np.arange(6) < np.array(lengths)[:, None], (2, 1))
    used, ids = mask.any(1), np.where(mask.any(1), 0, 10 + np.arange(8))
    scores = (np.array(whole) + offset) * unit
    given, on = jnp.asarray(scores, jnp.float32), jnp.asarray(mask)
    rewards, groups = adv.rewards_from_scores(given, on), jnp.asarray(ids)
    standard = np.where(used, loop_grpo(scores, ids), 0)
    by_token, by_answer = (np.where(mask, x[:, None], 0) for x in (scores, standard))
    turns = jnp.where(on, 0, -1)
    rows = {
        "whiten": ((given[:, None], on[:, :1]), loop_whiten(by_token[:, :1], mask[:, :1])),
        "reinforce_plus_plus": ((rewards, on), loop_whiten(by_token, mask)),
        "gdpo": ((given[:, None], groups, on), loop_whiten(standard, used)),
        "grpo": ((given, groups), standard),
        "grpo_turns": ((rewards, turns, groups, on), by_answer),
    }
    for name, (fields, want) in rows.items():
        got = np.asarray(ESTIMATORS[name](*fields))
        got = np.where(used, got, 0) if got.ndim == 1 else got
        assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)


SHIFTED = [adv.grpo, adv.dr_grpo, adv.rloo, adv.opo, adv.grpo_pass_at_k, adv.gpg, adv.prime]


@pytest.mark.parametrize("function", SHIFTED, ids=lambda f: f.__name__)
def test_a_shift_of_all_scores_changes_no_answer_that_has_company(function, fields, arguments):
    moved = fields | {"scores": fields["scores"] + 3.0}
    want, got = (function(*arguments(function, f)) for f in (fields, moved))
    assert_allclose(got[:5], want[:5], atol=1e-5)  # the last is alone


def test_opo_sums_to_zero_when_weighted_by_length(fields):
    got = adv.opo(fields["scores"], fields["response_lengths"], fields["group_ids"])
    for rows in members(fields["group_ids"])[::2]:  # the groups of two and three
        lengths = np.asarray(fields["response_lengths"])[rows]
        assert_allclose((np.asarray(got)[rows] * lengths).sum(), 0.0, atol=1e-5)


@names
def test_the_order_of_answers_and_the_names_of_groups_change_nothing(function, fields, arguments):
    order = np.array([4, 0, 5, 2, 1, 3])
    moved = {k: v[order] for k, v in fields.items()}
    moved["group_ids"] = 1000 - 7 * moved["group_ids"]
    want = jax.tree.map(lambda x: x[order], function(*arguments(function, fields)))
    got = function(*arguments(function, moved))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


PARTS = {
    adv.whiten: ("values", "mask"),
    adv.to_tokens: ("scores", "mask"),
    adv.rewards_from_scores: ("scores", "mask"),
    partial(adv.kl_penalized_rewards, coef=0.5): ("rewards", "values", "mask"),
    partial(adv.reward_to_go, gamma=0.9): ("rewards", "mask"),
}


@pytest.mark.parametrize("function", PARTS)
def test_parts_under_jit_vmap_and_bfloat16(function, fields, other_fields):
    first, second = ([f[name] for name in PARTS[function]] for f in (fields, other_fields))
    eager = jnp.stack([function(*first), function(*second)])
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    assert_allclose(jax.jit(jax.vmap(function))(*stacked), eager, rtol=1e-5, atol=1e-6)
    low = [x if x.dtype == bool else x.astype(jnp.bfloat16) for x in first]
    high = [x if x.dtype == bool else x.astype(jnp.float32) for x in low]
    assert function(*low).dtype == jnp.float32
    assert_array_equal(function(*low), function(*high))


@names
def test_jit_and_vmap_agree_with_eager(function, fields, other_fields, arguments):
    first, second = arguments(function, fields), arguments(function, other_fields)
    eager = [function(*first), function(*second)]
    jitted = jax.jit(function)(*first)
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = jax.jit(jax.vmap(function))(*stacked)
    chex.assert_trees_all_close(jitted, eager[0], rtol=1e-5, atol=1e-5)
    both = jax.tree.map(lambda *x: jnp.stack(x), *eager)
    chex.assert_trees_all_close(mapped, both, rtol=1e-5, atol=1e-5)


@names
def test_bfloat16_is_computed_in_float32(function, fields, arguments):
    low = {k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v for k, v in fields.items()}
    high = {k: v.astype(jnp.float32) if v.dtype == jnp.bfloat16 else v for k, v in low.items()}
    got, want = function(*arguments(function, low)), function(*arguments(function, high))
    chex.assert_trees_all_equal(got, want)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))


@pytest.mark.parametrize("function", TOKEN + BOTH, ids=lambda f: f.__name__)
def test_padding_adds_nothing_and_is_not_read(function, fields, arguments):
    def pad(name, x):
        if x.ndim != 2 or x.shape[1] != 5:
            return x
        fill = False if name == "mask" else jnp.nan
        return jnp.pad(x, [(0, 0), (2, 1)], constant_values=fill)

    keys = [k for k in fields if k != "high_covariance"]
    padded = {k: pad(k, fields[k]) for k in keys}
    want = function(*arguments(function, fields))
    got = jax.jit(function)(*arguments(function, padded))
    inner = jax.tree.map(lambda x: x[:, 2:-1], got)
    chex.assert_trees_all_close(inner, want, rtol=1e-5, atol=1e-6)
    for x in jax.tree.leaves(got):
        off = ~np.asarray(padded["mask"])
        assert_array_equal(np.asarray(x)[off], np.zeros(off.sum()))

"""Advantage estimators against loops written from the papers, and what must hold of them."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import advantages as adv
from jaxrl_llm.config.functions import public_functions
from jaxrl_llm.training.bind import AdvantageSum
from tests.algorithms.fields import as64, make_fields, members, run


@pytest.fixture
def fields():
    return {**make_fields()}


def loop_whiten(x, mask):
    on = [x[i] for i in np.ndindex(x.shape) if mask[i]]
    mean = sum(on) / len(on)
    var = sum((v - mean) ** 2 for v in on) / (len(on) - 1)
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        if mask[i]:
            out[i] = (x[i] - mean) / np.sqrt(var + 1e-8)
    return out


def loop_grpo(scores, ids, scale_by_std=True):
    out = np.zeros_like(scores)
    for rows in members(ids):
        if len(rows) == 1:
            out[rows] = scores[rows]
            continue
        mean = sum(scores[i] for i in rows) / len(rows)
        std = (sum((scores[i] - mean) ** 2 for i in rows) / (len(rows) - 1)) ** 0.5
        for i in rows:
            out[i] = (scores[i] - mean) / (std + 1e-6 if scale_by_std else 1.0)
    return out


def loop_rloo(scores, ids):
    out = np.zeros_like(scores)
    for rows in members(ids):
        for i in rows:
            others = [scores[j] for j in rows if j != i]
            out[i] = scores[i] - sum(others) / len(others) if others else 0.0
    return out


def loop_opo(scores, lengths, ids):
    out = scores.copy()
    for rows in members(ids):
        if len(rows) > 1:
            baseline = sum(lengths[j] * scores[j] for j in rows) / sum(lengths[j] for j in rows)
            out[rows] = scores[rows] - baseline
    return out


def loop_pass_at_k(scores, ids):
    out = np.zeros_like(scores)
    for rows in members(ids):
        if len(rows) > 1:
            order = sorted(rows, key=lambda i: scores[i])
            lead = scores[order[-1]] - scores[order[-2]]
            out[order[-1]] = lead / (np.std(scores[rows], ddof=1) + 1e-6)
    return out


def loop_gdpo(components, ids, weights):
    total = sum(w * loop_grpo(components[:, c], ids) for c, w in enumerate(weights))
    return loop_whiten(total, np.ones(len(total), bool))


def loop_returns(rewards, mask, gamma=1.0):
    out = np.zeros_like(rewards)
    for b in range(len(rewards)):
        ahead = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                ahead = rewards[b, t] + gamma * ahead
                out[b, t] = ahead
    return out


def loop_gae(rewards, values, mask, gamma, lam, turns=None):
    """With turns: discounted only from the last token of one to the first of the next."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for b in range(len(rewards)):
        next_value, ahead, next_turn = 0.0, 0.0, None
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                is_same = turns is not None and turns[b, t] == next_turn
                discount, trace = (1, 1) if is_same else (gamma, lam)
                delta = rewards[b, t] + discount * next_value - values[b, t]
                ahead = delta + discount * trace * ahead
                next_value = values[b, t]
                next_turn = None if turns is None else turns[b, t]
                advantages[b, t], returns[b, t] = ahead, ahead + values[b, t]
    return advantages, returns


def loop_grpo_turns(rewards, turns, ids, mask, gamma=1.0, scale_by_std=True):
    returns, out = {}, np.zeros(rewards.shape)
    for b in range(len(rewards)):
        ahead = 0.0
        for k in sorted(set(turns[b, mask[b]].tolist()), reverse=True):
            ahead = sum(rewards[b, mask[b] & (turns[b] == k)]) + gamma * ahead
            returns[b, k] = ahead
    for (b, k), value in returns.items():
        peers = [v for (j, turn), v in returns.items() if turn == k and ids[j] == ids[b]]
        if len(peers) > 1:
            mean = sum(peers) / len(peers)
            std = (sum((v - mean) ** 2 for v in peers) / (len(peers) - 1)) ** 0.5
            out[b, mask[b] & (turns[b] == k)] = (value - mean) / (
                std + 1e-6 if scale_by_std else 1.0
            )
    return out


def loop_optimal_baseline(rewards, mask, ids, old, squares, rollout=None, cap=None):
    returns = loop_returns(rewards, mask)
    gathered, out = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        total = 0.0
        for t in range(rewards.shape[1]):
            if mask[b, t]:
                rho = 1.0 if cap is None else min(np.exp(old[b, t] - rollout[b, t]), cap)
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


def loop_aligned_baseline(rewards, mask, ids, old, squares):
    """The n-th drawn token of an answer is compared with the n-th of others."""
    dense = [np.zeros_like(x) for x in (rewards, old, squares)]
    dense_mask, out = np.zeros_like(mask), np.zeros_like(rewards)
    for b, on in enumerate(mask):
        dense_mask[b, : on.sum()] = True
        for target, source in zip(dense, (rewards, old, squares), strict=True):
            target[b, : on.sum()] = source[b, on]
    out[mask] = loop_optimal_baseline(dense[0], dense_mask, ids, *dense[1:])[dense_mask]
    return out


def loop_prime(reward, ref, scores, ids, mask, beta=0.05, gamma=1.0, outcome_coef=1.0):
    """PRIME, eq. 5, term by term; the baseline is the mean of the others' mean rewards."""
    ratio, out = reward - ref, np.zeros_like(reward)
    for rows in members(ids):
        for i in rows:
            others = [j for j in rows if j != i]
            if not others:
                continue
            process = sum(beta * ratio[j, mask[j]].mean() for j in others) / len(others)
            outcome = scores[i] - sum(scores[j] for j in others) / len(others)
            on = np.flatnonzero(mask[i])
            for place, t in enumerate(on):
                to_go = sum(
                    gamma**k * (beta * ratio[i, s] - process) for k, s in enumerate(on[place:])
                )
                out[i, t] = to_go + outcome_coef * outcome
    return out


def loop_reverse_kl(student, teacher, mask, coef, discount):
    out = np.zeros_like(student)
    for i, row in enumerate(mask):
        on = np.flatnonzero(row)
        for place, t in enumerate(on):
            for later in range(place, len(on)):
                s = on[later]
                out[i, t] -= coef * discount ** (later - place) * (student[i, s] - teacher[i, s])
    return out


def loop_remax(rewards, mask, greedy):
    return loop_returns(rewards, mask) - np.where(mask, greedy[:, None], 0.0)


def loop_reinforce(rewards, mask, gamma):
    return loop_whiten(loop_returns(rewards, mask, gamma), mask)


def loop_reinforce_group(scores, ids, mask):
    centred = loop_grpo(scores, ids, scale_by_std=False)
    return loop_whiten(np.where(mask, centred[:, None], 0.0), mask)


OTB = ("rewards", "mask", "group_ids", "old_logprobs", "sum_pi_squared")
PRIME = ("reward_logprobs", "ref_logprobs", "scores", "group_ids", "mask")
GAE, TURNS = ("rewards", "values", "mask"), ("rewards", "turn_ids", "group_ids", "mask")
KL = ("rollout_logprobs", "teacher_logprobs", "mask")
LOOPS = [  # an estimator, the keywords of it and of its loop, what its loop reads, and the loop
    (adv.grpo, {}, ("scores", "group_ids"), loop_grpo),
    (adv.dr_grpo, {}, ("scores", "group_ids"), partial(loop_grpo, scale_by_std=False)),
    (adv.rloo, {}, ("scores", "group_ids"), loop_rloo),
    (adv.opo, {}, ("scores", "response_lengths", "group_ids"), loop_opo),
    (adv.grpo_pass_at_k, {}, ("scores", "group_ids"), loop_pass_at_k),
    (adv.gdpo, {"weights": (1.0, 0.5, 2.0)}, ("score_components", "group_ids"), loop_gdpo),
    (adv.remax, {}, ("rewards", "mask", "greedy_scores"), loop_remax),
    (adv.reinforce_plus_plus, {"gamma": 0.9}, ("rewards", "mask"), loop_reinforce),
    (adv.reinforce_plus_plus_baseline, {}, ("scores", "group_ids", "mask"), loop_reinforce_group),
    (adv.whiten, {}, ("x", "mask"), loop_whiten),
    (adv.optimal_token_baseline, {}, OTB, loop_optimal_baseline),
    (
        adv.optimal_token_baseline_corrected,
        {"cap": 1.1},
        (*OTB, "rollout_logprobs"),
        loop_optimal_baseline,
    ),
    (adv.optimal_token_baseline_multi_turn, {}, OTB, loop_aligned_baseline),
    (adv.prime, {}, PRIME, loop_prime),
    (adv.prime, {"beta": 2.0, "gamma": 0.9, "outcome_coef": 0.5}, PRIME, loop_prime),
    (adv.grpo_turns, {"scale_by_std": False}, TURNS, loop_grpo_turns),
    *((adv.gae, {"gamma": 0.9, "lam": lam}, GAE, loop_gae) for lam in (0.0, 0.8)),
    (adv.gae, {"gamma": 1.0, "lam": 1.0}, GAE, loop_gae),
    *((adv.reverse_kl, {"coef": 0.3, "discount": d}, KL, loop_reverse_kl) for d in (0.0, 0.7, 1.0)),
]
PARTS = {"kl_penalized_rewards", "reward_to_go", "rewards_from_scores", "to_tokens"}


def test_estimators_are_their_loops():
    wrong = []
    for function, keywords, names, loop in LOOPS:
        bound = partial(function, **keywords)
        for seed in (0, 1):
            got = run(bound, make_fields(seed))
            want = loop(*as64(make_fields(seed), *names), **keywords)
            for one, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                if not np.allclose(one, expected, rtol=1e-4, atol=1e-5):
                    wrong.append((function.__name__, keywords, seed))
    assert not wrong
    covered = {function.__name__ for function, *_ in LOOPS}
    assert {*public_functions(adv)} - covered - PARTS == {"gpg", "gae_whitened", "gae_turns"}


def test_whitened_gae_keeps_the_returns(fields):
    rewards, values, mask = as64(fields, *GAE)
    want, returns = loop_gae(rewards, values, mask, 0.9, 0.8)
    white, same = run(partial(adv.gae_whitened, gamma=0.9, lam=0.8), fields)
    assert_allclose(white, loop_whiten(want, mask), rtol=1e-4, atol=1e-5)
    assert_allclose(same, returns, rtol=1e-5, atol=1e-6)


def test_gpg_counts_the_answers_of_groups_that_learn(fields):
    fields |= {
        "scores": jnp.array([1.0, 1.0, 1.0, 0.0, 0.5, 1.0]),
        "group_ids": jnp.array([0, 0, 0, 2, 2, 2]),
    }
    want = np.array([0, 0, 0, -0.5, 0, 0.5]) * (6 / 3) / 2.0
    assert_allclose(run(partial(adv.gpg, f_norm=2.0), fields), want, rtol=1e-6)
    assert not run(adv.gpg, fields | {"scores": jnp.ones(6)}).any()


def test_the_score_is_on_the_last_token_and_kl_is_charged_on_all(fields):
    mask, rewards = np.asarray(fields["mask"]), run(adv.rewards_from_scores, fields)
    for b, on in enumerate(mask):
        want = np.zeros(5)
        want[np.flatnonzero(on)[-1]] = fields["scores"][b]
        assert_allclose(rewards[b], want)
    charged = run(partial(adv.kl_penalized_rewards, coef=0.25), fields)
    rewards, kl = as64(fields, "rewards", "kl")
    assert_allclose(charged, np.where(mask, rewards - 0.25 * kl, 0.0), rtol=1e-5)
    nothing = fields | {"mask": jnp.zeros((6, 5), bool)}
    assert not run(adv.rewards_from_scores, nothing).any() and not run(adv.whiten, nothing).any()
    one = fields | {"mask": nothing["mask"].at[2, 3].set(True)}
    assert not run(adv.whiten, one).any()


def test_bad_hyper_parameters_are_named(fields):
    for function, keywords in ((adv.prime, {"beta": -1.0}), (adv.gdpo, {"weights": (1.0, 2.0)})):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            run(partial(function, **keywords), fields)


quarters = st.lists(st.integers(-8, 8), min_size=32, max_size=32)
layouts = st.lists(st.text("tsn", min_size=8, max_size=8), min_size=4, max_size=4)


def numbered(steps):
    """Number the turns of told tokens (t), and of drawn ones of the same turn (s) or the next."""
    turn, ids = -1, []
    for step in steps:
        turn = turn if step == "t" else max(turn, 0) if step == "s" else turn + 1
        ids.append(-1 if step == "t" else turn)
    return ids


gae = {f: jax.jit(f, static_argnames=("gamma", "lam")) for f in (adv.gae, adv.gae_turns)}
grpo_turns = jax.jit(adv.grpo_turns, static_argnames=("gamma", "scale_by_std"))


@hypothesis.given(layouts, quarters, quarters, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_estimators_of_turns_are_their_loops_wherever_turns_end(steps, rewards, values, ids):
    turns, ids = np.array([numbered(s) for s in steps]), np.array(ids)
    mask = turns >= 0
    rewards, values = (np.reshape(x, (4, 8)).astype(np.float32) / 4 for x in (rewards, values))
    got = grpo_turns(rewards, turns, ids, mask, gamma=0.5)
    want = loop_grpo_turns(rewards, turns, ids, mask, gamma=0.5)
    assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    got = gae[adv.gae_turns](rewards, values, mask, turns, gamma=0.5, lam=0.75)
    assert_allclose(got, loop_gae(rewards, values, mask, 0.5, 0.75, turns), rtol=1e-5, atol=1e-5)
    every = np.where(mask, np.cumsum(mask, axis=1) - 1, -1)  # each token a turn
    got = gae[adv.gae_turns](rewards, values, mask, every, gamma=0.5, lam=0.75)
    plain = gae[adv.gae](rewards, values, mask, gamma=0.5, lam=0.75)
    assert_allclose(got, plain, atol=1e-5)


ESTIMATORS = [getattr(adv, name) for name in {*public_functions(adv)} - PARTS]
constants = st.sampled_from([0.1, 0.35, 0.9, 10.1, 100.1, 1000.3, 1e5 + 0.3, -1e4 - 0.1, 1e-20])
constants |= st.floats(-(2.0**99), 2.0**99, width=32)


@hypothesis.given(constants)
def test_equal_scores_give_exactly_zero(value):
    """In float32 (0.9 + 0.9 + 0.9) / 3 is not 0.9; a division by the deviation makes 1 of that.

    It holds of all estimators, whichever fields they ask for. By definition it does not where an
    answer is alone in its group, and a token in its place (A = R, or A = G): here everyone has a
    twin. A critic, greedy answers, a reward model and a teacher say what the answers got.
    """
    fields = {name: np.concatenate([x, x]) for name, x in make_fields().items()}
    mask, same = fields["mask"], np.full(12, value, np.float32)
    fields["rewards"] = np.zeros_like(fields["rewards"])
    for row, on in zip(fields["rewards"], mask, strict=True):
        row[np.flatnonzero(on)[-1]] = value
    fields |= dict.fromkeys(("scores", "greedy_scores"), same)
    fields |= dict.fromkeys(("values", "x"), np.where(mask, same[:, None], fields["x"]))
    fields |= dict.fromkeys(("ref_logprobs", "reward_logprobs"), fields["old_logprobs"])
    fields |= {"teacher_logprobs": fields["rollout_logprobs"]}
    fields |= {"score_components": np.stack([same, same], 1)}
    wrong = {}
    for function in ESTIMATORS:
        got = jax.tree.leaves(run(function, fields))[0]
        largest = np.abs(got[mask] if got.ndim == 2 else got).max()
        if largest != 0:
            wrong[function.__name__] = largest
    assert not wrong


def test_equal_returns_of_turns_give_exactly_zero_wherever_their_tokens_are():
    """In float32 (0.1 + 0.2) + 0.7 is not 0.1 + (0.2 + 0.7); the noise would be divided by eps."""
    turns = np.array([[0, 1, 2, -1, -1, -1, -1], [0, 0, -1, 1, 1, -1, 2], [-1, 0, 1, 1, 1, -1, 2]])
    ends = (np.pad(turns[:, 1:], [(0, 0), (0, 1)], constant_values=9) != turns) & (turns >= 0)
    rewards = np.where(ends, np.array([0.1, 0.2, 0.7], np.float32)[turns], np.float32(0))
    fields = {"rewards": rewards, "turn_ids": turns, "mask": turns >= 0}
    got = run(partial(adv.grpo_turns, gamma=0.9), fields | {"group_ids": np.zeros(3, int)})
    assert_array_equal(got, np.zeros((3, 7)))


def test_neither_size_nor_offset_of_scores_disturbs_a_standardisation(fields):
    """Whose squares float32 can not hold, or whose sum loses what tells them apart."""
    fields |= {"scores": jnp.array([3.0, -2.0, 4.0, 1.0, 0.0, 5.0]), "group_ids": jnp.zeros(6, int)}
    for unit, offset in ((2.0**100, 0.0), (0.125, 1000.0)):
        moved = fields | {"scores": fields["scores"] * unit + offset}
        moved["x"] = jnp.where(fields["mask"], moved["scores"][:, None], 0.0)
        scores, mask, x = as64(moved, "scores", "mask", "x")
        standard = loop_grpo(scores, moved["group_ids"])
        assert_allclose(run(adv.grpo, moved), standard, rtol=1e-4, atol=1e-5)
        assert_allclose(run(adv.whiten, moved), loop_whiten(x, mask), rtol=1e-4, atol=1e-5)


def test_a_sum_asks_for_what_its_terms_ask_for_and_weighs_them():
    """And it has the returns of the one term that has some."""
    total = AdvantageSum([(adv.grpo, 1.0), (adv.reverse_kl, 0.5)])
    scores, ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
    student, teacher = jnp.array([[-1.0, -2.0]] * 2), jnp.array([[-2.0, -2.0]] * 2)
    expected = adv.grpo(scores, ids)[:, None] + 0.5 * (teacher - student)
    got = total(scores, ids, student, teacher, jnp.ones((2, 2), bool))
    assert_allclose(got, expected, rtol=1e-6)

    def both(values, rewards, mask):
        return rewards - values, rewards

    rewards, values, mask = jnp.array([[2.0]]), jnp.array([[0.5]]), jnp.ones((1, 1), bool)
    advantages, returns = AdvantageSum([(both, 2.0)])(values, rewards, mask)
    assert advantages.tolist() == [[3.0]] and returns.tolist() == [[2.0]]
    with pytest.raises(ValueError, match="returns"):
        AdvantageSum([(both, 1.0), (both, 1.0)])(values, rewards, mask)

"""Policy and value losses and their reductions, against loops written from the papers."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import losses, reduce, values
from jaxrl_llm.config.functions import call
from tests.algorithms.fields import as64, make_fields, named, run


@pytest.fixture
def fields():
    return {**make_fields()}


def ppo(a, r, low, high):
    return max(-a * r, -a * min(max(r, low), high))


def dual(a, r):
    return min(ppo(a, r, 0.8, 1.2), -3 * a) if a < 0 else ppo(a, r, 0.8, 1.2)


def tau(a):
    return 1.0 if a > 0 else 1.05


def keep_tv(a, new, old):
    return new - old <= 0.05 if a > 0 else new - old >= -0.05


def keep_kl(a, new, old):
    kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    return kl <= 0.01 or (new < old if a > 0 else new > old)


# One token, from A, log π, log π_old and whether it is marked.
TOKEN_LOOPS = {
    "ppo_clip": lambda a, lp, old, marked: dual(a, math.exp(lp - old)),
    "reinforce": lambda a, lp, old, marked: -a * lp,
    "cispo": lambda a, lp, old, marked: -a * min(math.exp(lp - old), 1.2) * lp,
    "sapo": lambda a, lp, old, marked: (
        -a * 4 / tau(a) / (1 + math.exp(-tau(a) * (math.exp(lp - old) - 1)))
    ),
    "dppo_tv": lambda a, lp, old, marked: (
        -a * math.exp(lp - old) * lp * keep_tv(a, math.exp(lp), math.exp(old))
    ),
    "dppo_tv, capped": lambda a, lp, old, marked: -a * min(math.exp(lp - old), 1.25) * lp,
    "dppo_kl": lambda a, lp, old, marked: (
        -a * math.exp(lp - old) * lp * keep_kl(a, math.exp(lp), math.exp(old))
    ),
    "dro": lambda a, lp, old, marked: -(a * lp - 0.25 * (lp - old) ** 2),
    "clip_cov": lambda a, lp, old, marked: 0.0 if marked else ppo(a, math.exp(lp - old), 0.8, 1.2),
    "kl_cov": lambda a, lp, old, marked: -a * math.exp(lp - old) + marked * abs(lp - old),
}


def loop_gspo(advantages, log_ratios):
    s = math.exp(sum(log_ratios) / len(log_ratios))
    return [ppo(a, s, 0.95, 1.05) for a in advantages]


def loop_gmpo(advantages, log_ratios):
    mean = sum(advantages) / len(advantages)
    sign = 1 if mean > 0 else -1
    parts = [sign * min(sign * d, 0.2) for d in log_ratios]
    return [-mean * math.exp(sum(parts) / len(parts))] * len(parts)


ANSWER_LOOPS = {"gspo": loop_gspo, "gmpo": loop_gmpo}
LOSSES = {name: f for name, f in named(losses).items() if name in TOKEN_LOOPS | ANSWER_LOOPS}
LOSSES["dppo_tv, capped"] = partial(losses.dppo_tv, clip_low=9.0, clip_high=9.0, cap=1.25)


def loop(name, lp, old, adv, mask, marked):
    """One loss on the mask, in float64."""
    out = np.zeros_like(lp)
    for b, on in enumerate(mask):
        if name in ANSWER_LOOPS:
            out[b, on] = ANSWER_LOOPS[name](adv[b, on], lp[b, on] - old[b, on])
            continue
        for t in np.flatnonzero(on):
            out[b, t] = TOKEN_LOOPS[name](adv[b, t], lp[b, t], old[b, t], marked[b, t])
    return out


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_loop(name, fields):
    """Of either sign of an advantage, and of ratios on either side of 1."""
    names = ("logprobs", "old_logprobs", "advantages", "mask", "high_covariance")
    want = loop(name, *as64(fields, *names))
    got = run(LOSSES[name], fields)
    assert_allclose(np.where(fields["mask"], got.loss, 0.0), want, rtol=2e-5, atol=1e-5)
    assert len({*want.ravel()}) > 5  # the cases of the loop are not all one


def test_ppo_clip_by_hand():
    ratio = jnp.array([[1.1, 1.5, 0.5, 1.5, 0.5, 9.0]])
    sign = jnp.array([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    args = jnp.log(ratio), jnp.zeros((1, 6)), sign
    loss, diagnostics = losses.ppo_clip(*args, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert_allclose(loss, [[-1.1, -1.28, -0.5, 1.5, 0.8, 3.0]], rtol=1e-6)
    assert_array_equal(diagnostics["pg_clipfrac"], [[0, 1, 0, 0, 1, 0]])
    assert_array_equal(diagnostics["pg_clipfrac_lower"], [[0, 0, 0, 0, 0, 1]])
    assert_allclose(diagnostics["ppo_kl"], -np.log(ratio), rtol=1e-6)
    assert_allclose(losses.ppo_clip(*args, dual_clip=math.inf).loss[0, 5], 9.0, rtol=1e-6)


# One answer of two like tokens: π, π_old, A and its loss; of the edges that loops leave out.
HAND = [
    ("sapo", {}, 0.6, 0.4, 1.0, -2.489837),  # 4 σ(0.5)
    ("sapo", {}, 0.6, 0.4, -1.0, 2.393586),  # 4 / 1.05 · σ(0.525)
    ("dppo_tv", {}, 0.6, 0.4, 1.0, 0.0),  # 0.2 is beyond 0.15
    ("dppo_kl", {}, 0.6, 0.4, 1.0, 0.0),  # 0.0811 is beyond 0.05
    ("dppo_kl", {"clip_high": 0.0812}, 0.6, 0.4, 1.0, 0.766238),
    ("dppo_kl", {"clip_low": 0.0, "clip_high": 0.0}, 0.5, 0.5, 1.0, 0.693147),
    ("ppo_clip", {"clip_low": 0.0, "clip_high": 0.0}, 0.6, 0.4, 1.0, -1.0),
    ("gspo", {}, 0.6, 0.4, 1.0, -1.0004),
    ("gspo", {}, 0.6, 0.4, -1.0, 1.5),
    ("gmpo", {}, 0.6, 0.4, 1.0, -1.491825),  # exp 0.4
    ("gmpo", {}, 0.4, 0.6, -1.0, 0.670320),  # exp −0.4
    ("kl_cov", {"kl_coef": 0.0}, 0.6, 0.4, 1.0, -1.5),
    ("a3po", {"cap": 0.5}, 0.6, 0.4, 1.0, -0.6),
]


def test_losses_by_hand():
    wrong, ones = [], jnp.ones((1, 2))
    for name, keywords, pi, old, advantage, want in HAND:
        given = {
            "logprobs": jnp.log(pi * ones),
            "old_logprobs": jnp.log(old * ones),
            "advantages": advantage * ones,
            "mask": ones > 0,
            "high_covariance": ones < 0,
            "rollout_logprobs": jnp.log(old * ones),
            "ages": jnp.zeros((1, 2), int),
        }
        got, diagnostics = call(partial(getattr(losses, name), **keywords), given)
        kl = np.ravel(diagnostics.get("ppo_kl", math.log(old / pi)))[0]
        if not np.allclose([got[0, 0], kl], [want, math.log(old / pi)], rtol=2e-5, atol=1e-7):
            wrong.append((name, keywords, got, kl))
    assert not wrong


def test_value_losses_by_hand():
    args = jnp.array([[1.0, -1.0]]), jnp.array([[3.0, -1.5]])
    assert_allclose(values.squared_value_loss(*args).loss, [[2.0, 0.125]])
    new, old = jnp.array([[1.0, 0.2, -1.0]]), jnp.zeros((1, 3))
    loss, diagnostics = values.clipped_value_loss(new, old, jnp.ones((1, 3)))
    assert_allclose(loss, [[0.125, 0.32, 2.0]], rtol=1e-6)
    assert_array_equal(diagnostics["vf_clipfrac"], [[1, 0, 0]])


def test_implicit_reward_loss_is_the_cross_entropy_of_each_answer(fields):
    """Against the formula in float64, and its gradient β (σ(z) − y) on every token."""
    fields["raw_scores"] = jnp.array([1.0, 0.0, 0.25, 1.0, 0.0, 1.0])
    loss_of = partial(values.implicit_reward_loss, beta=0.5)
    mask, label = np.asarray(fields["mask"]), np.asarray(fields["raw_scores"], np.float64)
    ratio = np.asarray(fields["logprobs"], np.float64) - np.asarray(fields["ref_logprobs"])
    p = np.array([1 / (1 + np.exp(-0.5 * r[m].sum())) for r, m in zip(ratio, mask, strict=True)])
    want = -label * np.log(p) - (1 - label) * np.log(1 - p)
    loss, diagnostics = run(loss_of, fields)
    assert_allclose(loss, np.repeat(want[:, None], 5, axis=1), rtol=1e-5)
    right = (p > 0.5) == (label > 0.5)
    assert 0 < right.sum() < 6
    assert_array_equal(diagnostics["accuracy"], np.repeat(right[:, None], 5, axis=1))
    weights = reduce.sequence_mean_token_mean(fields["mask"])

    def scalar(x):
        return (weights * call(loss_of, fields | {"logprobs": x}).loss).sum()

    want_grad = np.where(mask, 0.5 * (p - label)[:, None] / 6, 0.0)
    assert_allclose(jax.jit(jax.grad(scalar))(fields["logprobs"]), want_grad, rtol=1e-4, atol=1e-7)
    for z, label, exact in ((1e4, 1.0, 0.0), (1e4, 0.0, 1e4), (40.0, 1.0, 0.0)):
        args = jnp.array([[z]]), jnp.zeros((1, 1)), jnp.array([label]), jnp.ones((1, 1), bool)
        assert_allclose(values.implicit_reward_loss(*args, beta=1.0).loss, [[exact]], atol=1e-12)


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("reinforce", "dppo_tv, capped")])
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name, fields):
    """Of each token with its own advantage; GMPO's are of whole answers."""
    mask = fields["mask"]
    fields |= {"old_logprobs": fields["logprobs"], "high_covariance": jnp.zeros_like(mask)}
    if name == "gmpo":
        fields["advantages"] = jnp.broadcast_to(fields["scores"][:, None], mask.shape)
    weights = reduce.sequence_mean_token_mean(mask)

    def scalar(logprobs):
        return (weights * call(LOSSES[name], fields | {"logprobs": logprobs}).loss).sum()

    got = jax.jit(jax.grad(scalar))(fields["logprobs"])
    assert_allclose(got, -weights * fields["advantages"], rtol=1e-5, atol=1e-7)


def test_bad_hyper_parameters_are_named(fields):
    for function, keywords in (
        (losses.ppo_clip, {"clip_low": -0.1}),
        (losses.ppo_clip, {"dual_clip": 1.0}),
        (losses.cispo, {"clip_high": -1.0}),
        (losses.sapo, {"tau_neg": 0.0}),
        (losses.dro, {"beta": -1.0}),
        (losses.gspo, {"clip_low": -1.0}),
        (losses.gmpo, {"clip_low": -1.0}),
        (losses.kl_cov, {"kl_coef": -1.0}),
        (losses.a3po, {"cap": 0.0}),
        (losses.select_kl_cov, {"ratio": 2.0}),
        (values.clipped_value_loss, {"clip": -1.0}),
        (values.implicit_reward_loss, {"beta": 0.0}),
    ):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            call(partial(function, **keywords), fields)


def loop_covariance(fields):
    logprobs, advantages = (np.asarray(fields[k], np.float64) for k in ("logprobs", "advantages"))
    mask = np.asarray(fields["mask"])
    out = np.full(mask.shape, -np.inf)
    for i in map(tuple, np.argwhere(mask)):
        out[i] = (logprobs[i] - logprobs[mask].mean()) * (advantages[i] - advantages[mask].mean())
    return out


def test_kl_cov_takes_the_tokens_of_the_highest_covariance(fields):
    products = loop_covariance(fields)
    for ratio, count in ((1e-6, 1), (0.26, 4), (1.0, 16)):  # 16 tokens on the mask
        chosen = run(partial(losses.select_kl_cov, ratio=ratio), fields)
        want = np.zeros_like(chosen)
        want.ravel()[np.argsort(-products, axis=None)[:count]] = True
        assert_array_equal(chosen, want)


def test_clip_cov_draws_among_the_tokens_between_the_bounds(fields):
    products = loop_covariance(fields)
    low, high = 0.1, 1.0
    eligible = (products > low) & (products < high)
    assert eligible.sum() >= 4
    args = [fields[name] for name in ("logprobs", "advantages", "mask")]
    bounds = {"low": low, "high": high}
    picks = {r: jax.jit(partial(losses.select_clip_cov, ratio=r, **bounds)) for r in (0.13, 1.0)}

    def draw(seed, ratio):
        return np.asarray(picks[ratio](*args, key=jax.random.key(seed)))

    draws = [draw(seed, 0.13) for seed in range(12)]  # 2 of 16
    assert all(d.sum() == 2 and not (d & ~eligible).any() for d in draws)
    assert len({d.tobytes() for d in draws}) > 3
    assert_array_equal(draw(5, 0.13), draws[5])
    assert_array_equal(draw(0, 1.0), eligible)


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
    """Of fresh tokens it is PPO around the engine's log-probs."""
    rng, shape = np.random.default_rng(0), fields["logprobs"].shape
    fields["ages"] = jnp.asarray(rng.integers(0, 5, shape))
    noise = jnp.asarray(rng.normal(0, 1.0, shape), jnp.float32)
    fields["rollout_logprobs"] = fields["logprobs"] + noise

    def total(logprobs):
        loss = call(losses.a3po, fields | {"logprobs": logprobs}).loss
        return loss.sum(), loss

    slopes, loss = jax.jit(jax.grad(total, has_aux=True))(fields["logprobs"])
    names, are_flat = ("logprobs", "rollout_logprobs", "advantages", "ages"), set()
    news, olds, advantages, ages = as64(fields, *names)
    for at in np.ndindex(shape):
        prox = olds[at] + (news[at] - olds[at]) * (ages[at] / (ages[at] + 1))
        expected, slope = decoupled(news[at], olds[at], prox, advantages[at])
        assert float(loss[at]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert float(slopes[at]) == pytest.approx(slope, rel=1e-5, abs=1e-6)
        are_flat.add(slope == 0)
    assert are_flat == {True, False}


WEIGHED_MASK = np.array([[1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
WEIGHED = np.array([[1.0, 2, 3, 99], [99, 99, 10, 99], [99, 99, 99, 99]])
REDUCTIONS = {
    reduce.token_mean: (1 + 2 + 3 + 10) / 4,
    reduce.token_sum: 1 + 2 + 3 + 10,
    reduce.sequence_mean_token_sum: (6 + 10) / 2,
    reduce.sequence_mean_token_mean: (2 + 10) / 2,
    partial(reduce.sequence_mean_token_sum_norm, horizon=4.0): (6 + 10) / 2 / 4,
}


def test_weighted_sums_are_those_by_hand():
    for function, want in REDUCTIONS.items():
        weights = run(function, {"mask": WEIGHED_MASK})
        assert_allclose((weights * WEIGHED).sum(), want, rtol=1e-6)
        assert not weights[~WEIGHED_MASK].any()
        more = run(function, {"mask": np.pad(WEIGHED_MASK, [(0, 3), (0, 2)])})
        assert_allclose(more, np.pad(weights, [(0, 3), (0, 2)]), rtol=1e-6)
        assert not run(function, {"mask": np.zeros((3, 4), bool)}).any()
    with pytest.raises(ValueError, match="horizon"):
        run(partial(reduce.sequence_mean_token_sum_norm, horizon=0.0), {"mask": WEIGHED_MASK})

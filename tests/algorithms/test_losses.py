"""Policy and value losses against loops written from the papers, and what must hold of them."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import losses, reduce, values

LOSSES = {
    "ppo_clip": (losses.ppo_clip, {}),
    "reinforce": (losses.reinforce, {}),
    "cispo": (losses.cispo, {}),
    "sapo": (losses.sapo, {}),
    "dppo_tv": (losses.dppo_tv, {"clip_low": 0.05, "clip_high": 0.05}),
    "dppo_kl": (losses.dppo_kl, {"clip_low": 0.01, "clip_high": 0.01}),
    "dro": (losses.dro, {"beta": 0.5}),
    "gspo": (losses.gspo, {"clip_low": 0.05, "clip_high": 0.05}),
    "gmpo": (losses.gmpo, {"clip_low": 0.2, "clip_high": 0.2}),
    "clip_cov": (losses.clip_cov, {}),
    "kl_cov": (losses.kl_cov, {}),
}
VALUES = {
    "squared_value_loss": (values.squared_value_loss, {}),
    "clipped_value_loss": (values.clipped_value_loss, {}),
}
REWARD = {"implicit_reward_loss": (values.implicit_reward_loss, {"beta": 0.5})}
ALL = LOSSES | VALUES | REWARD
REDUCTIONS = [
    reduce.token_mean,
    reduce.token_sum,
    reduce.sequence_mean_token_sum,
    reduce.sequence_mean_token_mean,
    lambda mask: reduce.sequence_mean_token_sum_norm(mask, horizon=7.0),
]
policy = pytest.mark.parametrize("name", LOSSES)
every = pytest.mark.parametrize("name", ALL)


@pytest.fixture
def loss_of(arguments):
    """Return `fields -> TokenLoss` for a loss by name."""

    def bind(name):
        function, keywords = ALL[name]
        return lambda fields: function(*arguments(function, fields), **keywords)

    return bind


def learned(name):
    return "values" if name in VALUES else "logprobs"


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


@policy
def test_matches_the_loop(name, fields, loss_of):
    keys = "logprobs", "old_logprobs", "advantages", "mask", "high_covariance"
    raw = [np.asarray(fields[k], bool if fields[k].dtype == bool else np.float64) for k in keys]
    want = loop(name, *raw)
    got = loss_of(name)(fields)
    assert_allclose(np.where(fields["mask"], got.loss, 0.0), want, rtol=2e-5, atol=1e-5)
    assert len({*want.ravel()}) > 5  # the cases of the loop are not all one


def test_ppo_clip_by_hand():
    ratio = jnp.array([[1.1, 1.5, 0.5, 1.5, 0.5, 9.0]])
    sign = jnp.array([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    loss, diagnostics = losses.ppo_clip(
        jnp.log(ratio), jnp.zeros((1, 6)), sign, clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    assert_allclose(loss, [[-1.1, -1.28, -0.5, 1.5, 0.8, 3.0]], rtol=1e-6)
    assert_array_equal(diagnostics["pg_clipfrac"], [[0, 1, 0, 0, 1, 0]])
    assert_array_equal(diagnostics["pg_clipfrac_lower"], [[0, 0, 0, 0, 0, 1]])
    assert_allclose(diagnostics["ppo_kl"], -np.log(ratio), rtol=1e-6)


# One answer of two like tokens: π, π_old, A, its loss and that of the token that is marked.
HAND = [
    ("reinforce", {}, 0.5, 0.4, 2.0, 1.386294),
    ("cispo", {}, 0.6, 0.4, 1.0, 0.612991),  # 1.2 · log(1 / 0.6)
    ("sapo", {}, 0.6, 0.4, 1.0, -2.489837),  # 4 σ(0.5)
    ("sapo", {}, 0.6, 0.4, -1.0, 2.393586),  # 4 / 1.05 · σ(0.525)
    ("dppo_tv", {}, 0.6, 0.4, 1.0, 0.0),  # 0.2 is beyond 0.15
    ("dppo_tv", {}, 0.6, 0.4, -1.0, -0.766238),  # 1.5 log 0.6
    ("dppo_tv", {"cap": 1.25}, 0.6, 0.4, -1.0, -0.638532),
    ("dppo_kl", {}, 0.6, 0.4, 1.0, 0.0),  # 0.0811 is beyond 0.05
    ("dppo_kl", {}, 0.6, 0.4, -1.0, -0.766238),
    ("dppo_kl", {"clip_high": 0.0812}, 0.6, 0.4, 1.0, 0.766238),
    ("dro", {"beta": 0.5}, 0.6, 0.4, 1.0, 0.551926),
    ("gspo", {}, 0.6, 0.4, 1.0, -1.0004),
    ("gspo", {}, 0.6, 0.4, -1.0, 1.5),
    ("gmpo", {}, 0.6, 0.4, 1.0, -1.491825),  # exp 0.4
    ("gmpo", {}, 0.4, 0.6, -1.0, 0.670320),  # exp −0.4
    ("clip_cov", {}, 0.6, 0.4, 1.0, -1.2),
    ("kl_cov", {}, 0.6, 0.4, 1.0, -1.5),
]


@pytest.mark.parametrize(("name", "keywords", "pi", "old", "advantage", "want"), HAND)
def test_by_hand(name, keywords, pi, old, advantage, want, arguments):
    ones = jnp.ones((1, 2))
    fields = {
        "logprobs": jnp.log(pi * ones),
        "old_logprobs": jnp.log(old * ones),
        "advantages": advantage * ones,
        "mask": ones > 0,
        "high_covariance": ones < 0,
    }
    function = LOSSES[name][0]
    got = function(*arguments(function, fields), **keywords).loss
    assert_allclose(got, want * ones, rtol=2e-5, atol=1e-7)


def test_marked_tokens_by_hand():
    """r = 1.5: Clip-Cov drops the token, KL-Cov charges it log 1.5."""
    args = jnp.log(jnp.array([[1.5]])), jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.array([[True]])
    assert_array_equal(losses.clip_cov(*args).loss, [[0.0]])
    assert_allclose(losses.kl_cov(*args, kl_coef=2.0).loss, [[-1.5 + 0.81093]], rtol=1e-5)


def test_squared_value_loss_by_hand():
    args = jnp.array([[1.0, -1.0]]), jnp.array([[3.0, -1.5]])
    assert_allclose(values.squared_value_loss(*args).loss, [[2.0, 0.125]])


def test_dual_clip_can_be_switched_off():
    args = jnp.log(jnp.array([[9.0, 9.0]])), jnp.zeros((1, 2)), jnp.array([[-1.0, 0.0]])
    loss, _ = losses.ppo_clip(*args, dual_clip=math.inf)
    assert_allclose(loss, [[9.0, 0.0]], rtol=1e-6)


def test_clipped_value_loss_by_hand():
    new, old = jnp.array([[1.0, 0.2, -1.0]]), jnp.zeros((1, 3))
    loss, diagnostics = values.clipped_value_loss(new, old, jnp.array([[1.0, 1.0, 1.0]]))
    assert_allclose(loss, [[0.125, 0.32, 2.0]], rtol=1e-6)
    assert_array_equal(diagnostics["vf_clipfrac"], [[1, 0, 0]])


def test_implicit_reward_loss_is_the_cross_entropy_of_each_answer(fields, arguments):
    """Against the formula in float64, and its gradient β (σ(z) − y) on every token."""
    fields["raw_scores"] = jnp.array([1.0, 0.0, 0.25, 1.0, 0.0, 1.0])
    args = arguments(values.implicit_reward_loss, fields)
    mask, label = np.asarray(fields["mask"]), np.asarray(fields["raw_scores"], np.float64)
    ratio = np.asarray(fields["logprobs"], np.float64) - np.asarray(fields["ref_logprobs"])
    p = np.array([1 / (1 + np.exp(-0.5 * r[m].sum())) for r, m in zip(ratio, mask, strict=True)])
    want = -label * np.log(p) - (1 - label) * np.log(1 - p)
    loss, diagnostics = values.implicit_reward_loss(*args, beta=0.5)
    assert_allclose(loss, np.repeat(want[:, None], 5, axis=1), rtol=1e-5)
    right = (p > 0.5) == (label > 0.5)
    assert 0 < right.sum() < 6
    assert_array_equal(diagnostics["accuracy"], np.repeat(right[:, None], 5, axis=1))
    weights = reduce.sequence_mean_token_mean(fields["mask"])
    assert_allclose((weights * loss).sum(), want.mean(), rtol=1e-5)

    def scalar(x):
        return (weights * values.implicit_reward_loss(x, *args[1:], beta=0.5).loss).sum()

    want_grad = np.where(mask, 0.5 * (p - label)[:, None] / 6, 0.0)
    assert_allclose(jax.grad(scalar)(args[0]), want_grad, rtol=1e-4, atol=1e-7)


def test_implicit_reward_loss_by_hand():
    """z = 0.5 · 2 log 3 = log 3, so σ(z) = 3/4; and −log 3 for the answer that is unlikely."""
    logprobs, ref = jnp.log(jnp.array([[0.6, 0.3], [0.1, 0.2]])), jnp.log(jnp.array([[0.2, 0.1]]))
    ref = jnp.concatenate([ref, jnp.log(jnp.array([[0.3, 0.6]]))])
    mask, scores = jnp.ones((2, 2), bool), jnp.array([1.0, 1.0])
    loss, diagnostics = values.implicit_reward_loss(logprobs, ref, scores, mask, beta=0.5)
    assert_allclose(loss, [[np.log(4 / 3)] * 2, [np.log(4)] * 2], rtol=1e-5)
    assert_array_equal(diagnostics["accuracy"], [[1, 1], [0, 0]])


@pytest.mark.parametrize(("z", "label", "want"), [(1e4, 1.0, 0.0), (1e4, 0.0, 1e4), (40.0, 1.0, 0)])
def test_implicit_reward_loss_keeps_small_and_large_losses(z, label, want):
    args = jnp.array([[z]]), jnp.zeros((1, 1)), jnp.array([label]), jnp.ones((1, 1), bool)
    loss, back = jax.vjp(
        lambda x: values.implicit_reward_loss(x, *args[1:], beta=1.0).loss, args[0]
    )
    assert_allclose(loss, [[want]], atol=1e-12)
    assert_allclose(back(jnp.ones((1, 1)))[0], [[1.0 - label]], atol=1e-12)


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "reinforce"])
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name, fields, loss_of):
    """With one advantage per answer and the paper's average, so that it holds for sequences."""
    mask = fields["mask"]
    fields |= {"old_logprobs": fields["logprobs"], "high_covariance": jnp.zeros_like(mask)}
    fields["advantages"] = jnp.broadcast_to(fields["scores"][:, None], mask.shape)
    weights = reduce.sequence_mean_token_mean(mask)

    def scalar(logprobs):
        return (weights * loss_of(name)(fields | {"logprobs": logprobs}).loss).sum()

    got = jax.jit(jax.grad(scalar))(fields["logprobs"])
    assert_allclose(got, -weights * fields["advantages"], rtol=1e-5, atol=1e-7)


def test_gspo_credits_a_token_with_its_own_advantage(fields, arguments):
    """The form for tokens: dL_t / d log π_t = −A_t s, and nothing reaches the other tokens."""
    weights = reduce.sequence_mean_token_mean(fields["mask"])

    def scalar(logprobs):
        args = arguments(losses.gspo, fields | {"logprobs": logprobs})
        return (weights * losses.gspo(*args, clip_low=1.0, clip_high=9.0).loss).sum()

    mask = np.asarray(fields["mask"])
    log_ratio = np.where(mask, fields["logprobs"] - fields["old_logprobs"], 0.0)
    s = np.exp(log_ratio.sum(1, keepdims=True) / mask.sum(1, keepdims=True))
    got = jax.grad(scalar)(fields["logprobs"])
    assert_allclose(got, -weights * fields["advantages"] * s, rtol=1e-5, atol=1e-7)


@every
def test_splits_and_padding_change_nothing(name, fields, loss_of):
    """sum(weights · loss) and its gradient: the same whole, in parts, and padded with garbage."""
    loss, key = loss_of(name), learned(name)

    @jax.jit
    def value_and_grad(part, weights):
        def scalar(x):
            return (weights * loss(part | {key: x}).loss).sum()

        return jax.value_and_grad(scalar)(part[key])

    def pad(name, x):
        if name == "raw_scores":
            return jnp.pad(x, (0, 1), constant_values=-77.0)
        if x.ndim != 2 or name == "score_components":
            return x
        garbage = {"mask": False, "old_logprobs": -jnp.inf, "logprobs": 1e4}.get(name, -77.0)
        return jnp.pad(x, [(0, 1), (1, 2)], constant_values=jnp.asarray(garbage, x.dtype))

    padded = {k: pad(k, v) for k, v in fields.items()}
    for reduction in REDUCTIONS:
        weights = reduction(fields["mask"])
        want, want_grad = value_and_grad(fields, weights)
        for size in (2, 3):
            total, grads = 0.0, []
            for start in range(0, 6, size):
                rows = slice(start, start + size)
                part = {k: v[rows] for k, v in fields.items()}
                value, grad = value_and_grad(part, weights[rows])
                total, grads = total + value, [*grads, grad]
            assert_allclose(total, want, rtol=1e-5, atol=1e-6)
            assert_allclose(np.concatenate(grads), want_grad, rtol=1e-5, atol=1e-6)
        value, grad = value_and_grad(padded, reduction(padded["mask"]))
        assert_allclose(value, want, rtol=1e-5, atol=1e-6)
        assert_allclose(grad[:-1, 1:-2], want_grad, rtol=1e-5, atol=1e-6)
        assert_array_equal(np.where(padded["mask"], 0.0, grad), np.zeros_like(grad))


EXTREMES = [0.0, -1e-3, -1e4, -np.inf, 1e4]


@pytest.mark.parametrize("name", LOSSES | REWARD)
def test_extreme_log_probs_stay_finite(name, fields, loss_of):
    new, old = (x.ravel() for x in np.meshgrid(EXTREMES, EXTREMES))
    shape = fields["mask"].shape
    for sign in (1.0, -1.0, 0.0):
        part = fields | {
            "logprobs": jnp.asarray(np.resize(new, shape), jnp.float32),
            "old_logprobs": jnp.asarray(np.resize(old, shape), jnp.float32),
            "ref_logprobs": jnp.asarray(np.resize(old, shape), jnp.float32),
            "raw_scores": jnp.full(shape[0], 0.5 + 0.5 * sign),
            "advantages": jnp.full(shape, sign),
        }

        def scalar(x, part=part):
            loss, diagnostics = loss_of(name)(part | {"logprobs": x})
            return loss.sum(), (loss, diagnostics)

        grad, outputs = jax.grad(scalar, has_aux=True)(part["logprobs"])
        for x in jax.tree.leaves((grad, outputs)):
            assert np.isfinite(x).all()


@policy
def test_nan_is_not_hidden(name, fields, loss_of):
    broken = fields | {"logprobs": fields["logprobs"].at[0, 1].set(jnp.nan)}
    broken["high_covariance"] = jnp.zeros_like(fields["mask"])
    assert np.isnan(loss_of(name)(broken).loss[0, 1])


@every
def test_jit_and_vmap_agree_with_eager(name, fields, other_fields, loss_of):
    eager = [loss_of(name)(fields), loss_of(name)(other_fields)]
    both = jax.tree.map(lambda *x: jnp.stack(x), fields, other_fields)
    mapped = jax.jit(jax.vmap(loss_of(name)))(both)
    want = jax.tree.map(lambda *x: jnp.stack(x), *eager)
    jax.tree.map(lambda g, w: assert_allclose(g, w, rtol=1e-5, atol=1e-5), mapped, want)
    jitted = jax.jit(loss_of(name))(fields)
    jax.tree.map(lambda g, w: assert_allclose(g, w, rtol=1e-5, atol=1e-5), jitted, eager[0])


@every
def test_bfloat16_is_computed_in_float32(name, fields, loss_of):
    low = {k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v for k, v in fields.items()}
    high = {k: v.astype(jnp.float32) if v.dtype == jnp.bfloat16 else v for k, v in low.items()}
    got, want = loss_of(name)(low), loss_of(name)(high)
    chex.assert_trees_all_equal(got, want)
    assert all(x.dtype == jnp.float32 and x.shape == (6, 5) for x in jax.tree.leaves(got))


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("ppo_clip", {"clip_low": -0.1}, "clip_low -0.1"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip: got 1.0"),
        ("cispo", {"clip_high": -1.0}, "clip_high -1.0"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg 0.0"),
        ("dro", {"beta": -1.0}, "beta: got -1.0"),
        ("gspo", {"clip_low": -1.0}, "clip_low -1.0"),
        ("gmpo", {"clip_low": -1.0}, "clip_low -1.0"),
        ("kl_cov", {"kl_coef": -1.0}, "kl_coef: got -1.0"),
        ("clipped_value_loss", {"clip": -1.0}, "clip: got -1.0"),
        ("implicit_reward_loss", {"beta": 0.0}, "beta: got 0.0"),
    ],
)
def test_bad_hyper_parameters_are_named(name, keywords, message, fields, arguments):
    function = ALL[name][0]
    with pytest.raises(ValueError, match=message):
        function(*arguments(function, fields), **keywords)


def loop_covariance(fields):
    logprobs, advantages = (np.asarray(fields[k], np.float64) for k in ("logprobs", "advantages"))
    mask = np.asarray(fields["mask"])
    out = np.full(mask.shape, -np.inf)
    for i in map(tuple, np.argwhere(mask)):
        out[i] = (logprobs[i] - logprobs[mask].mean()) * (advantages[i] - advantages[mask].mean())
    return out


def test_kl_cov_takes_the_tokens_of_the_highest_covariance(fields, arguments):
    products = loop_covariance(fields)
    args = arguments(losses.select_kl_cov, fields)
    for ratio, count in ((1e-6, 1), (0.26, 4), (1.0, 16)):  # 16 tokens on the mask
        chosen = np.asarray(losses.select_kl_cov(*args, ratio=ratio))
        want = np.zeros_like(chosen)
        want.ravel()[np.argsort(-products, axis=None)[:count]] = True
        assert_array_equal(chosen, want)
    with pytest.raises(ValueError, match="ratio: got 2"):
        losses.select_kl_cov(*args, ratio=2.0)


def test_clip_cov_draws_among_the_tokens_between_the_bounds(fields, arguments):
    products = loop_covariance(fields)
    low, high = 0.1, 1.0
    eligible = (products > low) & (products < high)
    assert eligible.sum() >= 4
    args = arguments(losses.select_clip_cov, fields)

    def draw(seed, ratio):
        key = jax.random.key(seed)
        return np.asarray(losses.select_clip_cov(*args, key=key, ratio=ratio, low=low, high=high))

    draws = [draw(seed, 0.13) for seed in range(12)]  # 2 of 16
    assert all(d.sum() == 2 and not (d & ~eligible).any() for d in draws)
    assert len({d.tobytes() for d in draws}) > 3
    assert_array_equal(draw(5, 0.13), draws[5])
    assert_array_equal(draw(0, 1.0), eligible)


@pytest.mark.parametrize("select", [losses.select_clip_cov, losses.select_kl_cov])
def test_selection_under_jit_vmap_bfloat16_and_extremes(select, fields, other_fields, arguments):
    keywords = {"ratio": 0.3}
    if select is losses.select_clip_cov:
        keywords |= {"key": jax.random.key(3), "low": 0.0, "high": 9.0}

    def call(*args):
        return select(*args, **keywords)

    first, second = arguments(select, fields), arguments(select, other_fields)
    eager = jnp.stack([call(*first), call(*second)])
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    assert_array_equal(jax.jit(jax.vmap(call))(*stacked), eager)
    mask = np.asarray(fields["mask"])
    assert 0 < eager[0].sum() <= 4 and not (np.asarray(eager[0]) & ~mask).any()
    low = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in first]
    high = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in low]
    assert_array_equal(call(*low), call(*high))
    garbage = [jnp.where(mask, x, jnp.nan) if x.dtype == jnp.float32 else x for x in first]
    assert_array_equal(call(*garbage), eager[0])  # what lies off the mask is not read
    wild = first[0].at[0, 1].set(-jnp.inf)
    assert not (np.asarray(call(wild, *first[1:])) & ~mask).any()

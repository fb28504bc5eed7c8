"""KL estimators and coefficient controllers."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import kl

PLAIN = {
    kl.k1: lambda d: d,
    kl.absolute: abs,
    kl.k2: lambda d: d * d / 2,
    kl.k3: lambda d: np.exp(-d) + d - 1,
}
WITH_K2 = {
    kl.k1_with_k2_gradient: kl.k1,
    kl.absolute_with_k2_gradient: kl.absolute,
    kl.k3_with_k2_gradient: kl.k3,
}
jitted = {f: jax.jit(f) for f in (*PLAIN, *WITH_K2)}
by_name = {"ids": lambda f: f.__name__}


@pytest.mark.parametrize("function", PLAIN, **by_name)
def test_matches_the_formula(function, fields):
    d = np.asarray(fields["logprobs"], np.float64) - np.asarray(fields["ref_logprobs"], np.float64)
    got = function(fields["logprobs"], fields["ref_logprobs"])
    assert_allclose(got, PLAIN[function](d), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "want"),
    [(kl.k1, 0.693147), (kl.absolute, 0.693147), (kl.k2, 0.240227), (kl.k3, 0.193147)],
)
def test_by_hand(function, want):
    """π = 1/2 and π_ref = 1/4, so d = log 2."""
    got = function(jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]])))
    assert_allclose(got, [[want]], rtol=1e-5)


@pytest.mark.parametrize("function", WITH_K2, **by_name)
def test_value_of_one_and_gradient_of_k2(function, fields):
    logprobs, ref = fields["logprobs"], fields["ref_logprobs"]
    value, back = jax.vjp(lambda x: function(x, ref), logprobs)
    assert_allclose(value, WITH_K2[function](logprobs, ref), rtol=1e-6)
    assert_allclose(back(jnp.ones_like(value))[0], logprobs - ref, rtol=1e-5)


def test_estimates_over_all_tokens_give_the_divergence():
    """E_π[k1] = E_π[k3] = KL, and ∇KL = E_π[∇k2], by summing over the vocabulary."""
    logits = jnp.array([0.3, -0.2, 1.1, 0.0])
    ref = jax.nn.log_softmax(jnp.array([0.0, 0.4, 0.7, -0.3]))

    def divergence(logits):
        logpi = jax.nn.log_softmax(logits)
        return (jnp.exp(logpi) * (logpi - ref)).sum()

    pi = jax.nn.softmax(logits)

    def expected(estimate, logits):
        return (pi * estimate(jax.nn.log_softmax(logits)[None], ref[None])[0]).sum()

    for estimate in (kl.k1, kl.k3):
        assert_allclose(expected(estimate, logits), divergence(logits), rtol=1e-5)
    want = jax.grad(divergence)(logits)
    for estimate in (kl.k2, *WITH_K2):
        got = jax.grad(lambda x, e=estimate: expected(e, x))(logits)
        assert_allclose(got, want, rtol=1e-4, atol=1e-6)


lists = st.lists(st.floats(-1e4, 0, width=32), min_size=10, max_size=10)


@hypothesis.given(lists, lists)
def test_k3_lies_between_0_and_10(new, ref):
    new, ref = jnp.array([new], jnp.float32), jnp.array([ref], jnp.float32)
    got = jitted[kl.k3](new, ref)
    assert (got >= 0).all() and (got <= 10).all()
    assert_array_equal(jitted[kl.k3](new, new), np.zeros((1, 10)))


@pytest.mark.parametrize("function", [*PLAIN, *WITH_K2], **by_name)
def test_extremes_bfloat16_jit_and_vmap(function, fields):
    new, ref = (x.ravel() for x in np.meshgrid([0.0, -1e4, -np.inf, 1e4], [0.0, -1e4, -np.inf]))
    new, ref = jnp.asarray(new, jnp.float32)[None], jnp.asarray(ref, jnp.float32)[None]
    value, back = jax.vjp(lambda x: function(x, ref), new)
    assert np.isfinite(value).all() and np.isfinite(back(jnp.ones_like(value))[0]).all()
    assert np.isnan(function(new.at[0, 0].set(jnp.nan), ref)[0, 0])
    low = fields["logprobs"].astype(jnp.bfloat16), fields["ref_logprobs"].astype(jnp.bfloat16)
    want = function(*(x.astype(jnp.float32) for x in low))
    assert function(*low).dtype == jnp.float32
    assert_array_equal(function(*low), want)
    pair = fields["logprobs"], fields["ref_logprobs"]
    assert_allclose(jitted[function](*pair), function(*pair), rtol=1e-5, atol=1e-6)
    stacked = [jnp.stack([x, x[::-1]]) for x in pair]
    assert_allclose(jax.vmap(function)(*stacked)[1], function(*pair)[::-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("observed", "want"),
    [
        (0.1, 0.5),  # on target
        (9.0, 0.5 * (1 + 0.2 * 256 / 10_000)),  # far above: the error counts as 20 %
        (0.0, 0.5 * (1 - 0.2 * 256 / 10_000)),
        (0.11, 0.5 * (1 + 0.1 * 256 / 10_000)),
    ],
)
def test_adaptive_coefficient(observed, want):
    assert_allclose(kl.adaptive(0.5, observed, 256), want, rtol=1e-6)
    traced = jax.jit(kl.adaptive)(jnp.float32(0.5), jnp.float32(observed), 256)
    assert_allclose(traced, want, rtol=1e-6)


@pytest.mark.parametrize("answers", [1, 9_999, 10_000, 50_000, 60_000, 10**6])
def test_an_adaptive_coefficient_stays_positive_and_moves_by_a_fifth_at_most(answers):
    share = min(answers / 10_000, 1)
    for observed, move in ((0.0, -0.2), (0.09, -0.1), (0.1, 0.0), (0.11, 0.1), (1e9, 0.2)):
        got = kl.adaptive(0.5, observed, answers)
        assert_allclose(got, 0.5 * (1 + move * share), rtol=1e-5)


def test_adaptive_coefficient_holds_a_target():
    """Where the KL divergence answers to the coefficient, it settles at the target."""
    coef = 0.01
    for _ in range(400):
        coef = float(kl.adaptive(coef, 0.02 / coef, 1000, target=0.05, horizon=2000))
    assert abs(0.02 / coef - 0.05) < 1e-3


def test_fixed_coefficient_and_bad_targets():
    assert kl.fixed(0.3, 12.0, 8) == 0.3
    with pytest.raises(ValueError, match="target 0"):
        kl.adaptive(1.0, 1.0, 1, target=0.0)

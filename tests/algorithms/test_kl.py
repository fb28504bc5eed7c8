"""KL estimators and coefficient controllers."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms import kl
from tests.algorithms.fields import as64, jitted, make_fields, run

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


def test_estimators_are_their_formulas():
    """Of the last three the value is another's, and the gradient is k2's."""
    fields = make_fields()
    new, ref = as64(fields, "logprobs", "ref_logprobs")
    for function, formula in PLAIN.items():
        assert_allclose(run(function, fields), formula(new - ref), rtol=1e-4, atol=1e-6)
    for function, value in WITH_K2.items():
        assert_allclose(run(function, fields), PLAIN[value](new - ref), rtol=1e-4, atol=1e-6)
        slope = jax.jit(jax.grad(lambda x, f=function: f(x, fields["ref_logprobs"]).sum()))
        assert_allclose(slope(fields["logprobs"]), new - ref, rtol=1e-4, atol=1e-6)


def test_k3_lies_between_0_and_10_and_does_not_hide_nan():
    some = np.float32([-1e4, -30, -1, -1e-3, -1e-8, 0, np.nan])
    got = np.asarray(jitted(kl.k3)(*np.meshgrid(some, some)))
    assert (got[:-1, :-1] >= 0).all() and got[:-1, :-1].max() == 10
    assert not got.diagonal()[:-1].any()
    assert np.isnan(got[-1]).all() and np.isnan(got[:, -1]).all()


def test_an_adaptive_coefficient_moves_by_a_fifth_at_most_and_stays_positive():
    wrong = []
    for answers in (1, 256, 9_999, 10_000, 50_000, 60_000, 10**6):
        share = min(answers / 10_000, 1)
        for observed, move in ((0.0, -0.2), (0.09, -0.1), (0.1, 0.0), (0.11, 0.1), (1e9, 0.2)):
            if not np.isclose(kl.adaptive(0.5, observed, answers), 0.5 * (1 + move * share), 1e-5):
                wrong.append((answers, observed))
    assert not wrong


def test_a_fixed_coefficient_stays_and_bad_keywords_are_named():
    assert kl.fixed(0.3, 12.0, 8) == 0.3
    for wrong in ({"target": 0.0}, {"horizon": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            kl.adaptive(1.0, 1.0, 1, **wrong)

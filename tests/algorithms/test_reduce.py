"""Weights of tokens: by hand, and that empty rows and empty masks count for nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import reduce

MASK = np.array([[1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
LOSS = np.array([[1.0, 2, 3, 99], [99, 99, 10, 99], [99, 99, 99, 99]])
CASES = [
    (reduce.token_mean, {}, (1 + 2 + 3 + 10) / 4),
    (reduce.token_sum, {}, 1 + 2 + 3 + 10),
    (reduce.sequence_mean_token_sum, {}, (6 + 10) / 2),
    (reduce.sequence_mean_token_mean, {}, (2 + 10) / 2),
    (reduce.sequence_mean_token_sum_norm, {"horizon": 4.0}, (6 + 10) / 2 / 4),
]
cases = pytest.mark.parametrize(("function", "keywords", "want"), CASES)


@cases
def test_by_hand(function, keywords, want):
    weights = function(jnp.asarray(MASK), **keywords)
    assert weights.dtype == jnp.float32
    assert_allclose((weights * LOSS).sum(), want, rtol=1e-6)
    assert_array_equal(np.where(MASK, 0, weights), np.zeros(MASK.shape))


@cases
def test_rows_without_tokens_count_for_nothing(function, keywords, want):
    more = jnp.pad(jnp.asarray(MASK), [(0, 3), (0, 2)])
    weights = function(more, **keywords)
    assert_allclose(weights[:3, :4], function(jnp.asarray(MASK), **keywords), rtol=1e-6)
    assert float(abs(weights[3:]).sum()) == 0


@cases
def test_an_empty_mask_gives_zeros(function, keywords, want):
    empty = jnp.zeros((3, 4), bool)
    assert_array_equal(function(empty, **keywords), np.zeros((3, 4)))
    jitted = jax.jit(lambda m: function(m, **keywords))
    assert_array_equal(jitted(empty), np.zeros((3, 4)))
    assert_allclose((jitted(jnp.asarray(MASK)) * LOSS).sum(), want, rtol=1e-6)


@cases
def test_jit_and_vmap_agree_with_eager(function, keywords, want):
    masks = jnp.stack([jnp.asarray(MASK), jnp.asarray(MASK)[::-1], jnp.zeros((3, 4), bool)])
    eager = jnp.stack([function(mask, **keywords) for mask in masks])
    mapped = jax.jit(jax.vmap(lambda mask: function(mask, **keywords)))(masks)
    assert_allclose(mapped, eager, rtol=1e-6)


def test_horizon_must_be_positive():
    with pytest.raises(ValueError, match="horizon: got 0"):
        reduce.sequence_mean_token_sum_norm(jnp.asarray(MASK), horizon=0.0)

"""Grouped products and their kernels, interpreted, against a loop over the groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.moe.grouped import grouped_matmul
from jaxrl_llm.models.moe.grouped_triton import multiply_groups, sum_outer_products
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.sharding.layout import TOKENS, Layout, make_mesh
from tests.specs import MOE
from tests.specs import draw as draw_params


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(got, expected, dtype):
    rounding = {jnp.float32: 1e-6, jnp.bfloat16: 2**-8}[dtype]
    expected = np.asarray(expected)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=rounding, atol=rounding * abs(expected).max()
    )


@functools.partial(jax.jit, static_argnames=("transposed", "between"))
def multiply(x, matrices, sizes, *, transposed=False, between=False):
    return multiply_groups(
        x, matrices, sizes, transposed=transposed, between=between, interpret=True
    )


@pytest.mark.parametrize(
    ("rows", "every", "width", "dtype"),
    [
        (9, ([3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0], [5, 0, 2, 0]), (24, 40), jnp.float32),
        (300, ([200, 1, 90, 9],), (200, 136), jnp.bfloat16),
    ],
)
def test_products_equal_a_loop_over_groups(rows, every, width, dtype):
    """Forward and backward; rows after the last group get zeros."""
    inner, columns = width
    x, y = draw(rows, inner, dtype=dtype), draw(rows, columns, seed=1, dtype=dtype)
    matrices = draw(4, inner, columns, seed=2, dtype=dtype)
    wide, high, matrix = (np.asarray(a, np.float64) for a in (x, y, matrices))
    outer = jax.jit(functools.partial(sum_outer_products, interpret=True))
    plain = jax.jit(lambda x, y, m, sizes: jax.vjp(lambda x, m: grouped_matmul(x, m, sizes), x, m))
    for given in every:
        sizes, ends = jnp.array(given), np.cumsum(given)
        rest = jnp.asarray(np.arange(rows) < ends[-1], dtype)[:, None]
        groups = [slice(end - size, end) for end, size in zip(ends, given, strict=True)]
        products, back = np.zeros((rows, columns)), np.zeros((rows, inner))
        for group, w in zip(groups, matrix, strict=True):
            products[group], back[group] = wide[group] @ w, high[group] @ w.T
        sums = np.stack([wide[g].T @ high[g] for g in groups])
        close(multiply(x, matrices, sizes), products, dtype)
        close(multiply(y, matrices, sizes, transposed=True), back, dtype)
        close(outer(x, y, sizes), sums, jnp.float32)
        got, pull = plain(x * rest, y, matrices, sizes)
        to_x, to_matrices = pull(y * rest)
        close(got, products, dtype)
        close(to_x, back, dtype)
        close(to_matrices, sums, dtype)
    between = jnp.swapaxes(matrices, 0, 1)
    for given, transposed in ((x, False), (y, True)):
        np.testing.assert_array_equal(
            multiply(given, between, sizes, transposed=transposed, between=True),
            multiply(given, matrices, sizes, transposed=transposed),
        )


def test_gradient_of_matrices_is_summed_in_float32():
    """2,049 ones are 2,048 in bfloat16, and so would be every partial sum after it."""
    rows = 2049
    x, matrices = jnp.ones((rows, 8), jnp.bfloat16), jnp.ones((2, 8, 8))

    def loss(matrices):
        return grouped_matmul(x, matrices, jnp.array([0, rows])).astype(jnp.float32).sum()

    gradient = np.asarray(jax.jit(jax.grad(loss))(matrices))
    assert gradient.dtype == np.float32
    assert np.unique(gradient[0]).tolist() == [0.0]
    assert np.unique(gradient[1]).tolist() == [rows]


@functools.cache
def given_to_experts():
    weights = {name: x[0] for name, x in draw_params(MOE)["layers"].items() if "expert" in name}
    weights["router"] = draw(16, 8, seed=7)
    return weights, draw(8, 16, 16, seed=8, dtype=jnp.bfloat16)


def of_experts(weights, x, layout=None):
    out, stats, _ = mixture(weights, MOE.moe, x, jnp.ones(x.shape[:2], bool), layout=layout)
    return (out.astype(jnp.float32) * draw(*x.shape, seed=9)).sum(), stats


def test_gradients_of_experts_are_those_of_one_device_in_bfloat16():
    """Rows are the same numbers on any mesh; only the order of float32 sums differs."""
    mesh, (weights, x) = make_mesh({"expert": 2, "fsdp": 4}), given_to_experts()
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P(TOKENS)))
    on_mesh = functools.partial(of_experts, layout=Layout(mesh))
    (_, stats), together = jax.jit(jax.value_and_grad(on_mesh, has_aux=True))(weights, split)
    (_, expected_stats), alone = jax.jit(jax.value_and_grad(of_experts, has_aux=True))(weights, x)
    for pair in zip(jax.tree.leaves(stats), jax.tree.leaves(expected_stats), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-5)
    for name in ("expert_gate", "expert_up", "expert_down"):
        expected = np.asarray(alone[name])
        assert abs(np.asarray(together[name]) - expected).max() <= 1e-5 * abs(expected).max(), name

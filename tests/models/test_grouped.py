"""Kernels for grouped products, interpreted, against a loop over the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.moe.grouped import grouped_matmul
from jaxrl_llm.models.moe.grouped_triton import cut_tiles, multiply_groups, sum_outer_products
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.sharding.layout import TOKENS, Layout, make_mesh

SIZES = ([3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0], [200, 1, 90, 9], [1] * 7)


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(got, expected, dtype):
    rounding = {jnp.float32: 1e-6, jnp.bfloat16: 2**-8}[dtype]
    expected = np.asarray(expected)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=rounding, atol=rounding * abs(expected).max()
    )


@pytest.mark.parametrize(
    ("sizes", "width", "dtype"),
    [
        ([3, 0, 5, 1], (24, 40), jnp.float32),
        ([0, 0, 0, 9], (16, 16), jnp.bfloat16),
        ([9, 0, 0, 0], (24, 40), jnp.bfloat16),
        ([200, 1, 90, 9], (200, 136), jnp.float32),
        ([200, 1, 90, 9], (200, 136), jnp.bfloat16),
        ([1] * 7, (16, 16), jnp.float32),
    ],
    ids=str,
)
def test_kernels_equal_loop_over_groups(sizes, width, dtype):
    (inner, columns), rows = width, sum(sizes)
    x, y = draw(rows, inner, dtype=dtype), draw(rows, columns, seed=1, dtype=dtype)
    matrices = draw(len(sizes), inner, columns, seed=2, dtype=dtype)
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    wide, high, matrix = (np.asarray(a, np.float64) for a in (x, y, matrices))
    sizes = jnp.array(sizes)

    products = np.concatenate([wide[g] @ w for g, w in zip(groups, matrix, strict=True)])
    close(multiply_groups(x, matrices, sizes, interpret=True), products, dtype)
    products = np.concatenate([high[g] @ w.T for g, w in zip(groups, matrix, strict=True)])
    close(multiply_groups(y, matrices, sizes, transposed=True, interpret=True), products, dtype)
    sums = sum_outer_products(x, y, sizes, interpret=True)
    close(sums, np.stack([wide[g].T @ high[g] for g in groups]), jnp.float32)

    between = jnp.swapaxes(matrices, 0, 1)
    for rows, transposed in ((x, False), (y, True)):
        options = {"transposed": transposed, "interpret": True}
        np.testing.assert_array_equal(
            multiply_groups(rows, between, sizes, between=True, **options),
            multiply_groups(rows, matrices, sizes, **options),
        )


def test_rows_after_the_last_group_get_zeros():
    x, y, matrices = draw(20, 16), draw(20, 24, seed=1), draw(3, 16, 24, seed=2)
    sizes = jnp.array([5, 0, 2])
    products = multiply_groups(x, matrices, sizes, interpret=True)
    close(products[:5], np.asarray(x[:5]) @ np.asarray(matrices[0]), jnp.float32)
    close(products[5:7], np.asarray(x[5:7]) @ np.asarray(matrices[2]), jnp.float32)
    assert not products[7:].any()
    sums = sum_outer_products(x, y, sizes, interpret=True)
    close(sums[2], np.asarray(x[5:7]).T @ np.asarray(y[5:7]), jnp.float32)

    def loss(x):
        return (grouped_matmul(x, matrices, sizes) ** 2).sum()

    zeros_after = x.at[7:].set(0.0)
    assert not jax.grad(loss)(zeros_after)[7:].any()
    assert not grouped_matmul(zeros_after, matrices, sizes)[7:].any()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tile", [1, 4, 64])
def test_tiles_hold_every_row_once(sizes, tile):
    group = np.repeat(np.arange(len(sizes)), sizes)
    seen = np.zeros(sum(sizes), int)
    for own, start, stop in zip(*cut_tiles(jnp.array(sizes), sum(sizes), tile), strict=True):
        held = slice(int(start), max(int(start), min(int(start) + tile, int(stop))))
        seen[held] += 1
        assert set(group[held]) <= {int(own)}
    assert set(seen) == {1}


def test_gradient_of_matrices_is_summed_in_float32():
    """2,049 ones are 2,048 in bfloat16, and so would be every partial sum after it."""
    rows = 2049
    x, matrices = jnp.ones((rows, 8), jnp.bfloat16), jnp.ones((2, 8, 8))

    def loss(matrices):
        return grouped_matmul(x, matrices, jnp.array([0, rows])).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss))(matrices)
    assert gradient.dtype == jnp.float32
    assert np.unique(gradient[0]).tolist() == [0.0]
    assert np.unique(gradient[1]).tolist() == [rows]


@pytest.mark.parametrize(
    "sizes", [{"expert": 4, "data": 2}, {"fsdp": 4, "tensor": 2}, {"expert": 2, "fsdp": 4}], ids=str
)
def test_gradients_of_experts_are_those_of_one_device_in_bfloat16(sizes):
    """Rows are the same numbers on any mesh; only the order of float32 sums differs."""
    spec = MoeSpec(experts=8, experts_per_token=2, ff_width=16)
    shapes = {"router": (16, 8), "expert_gate": (8, 16, 16), "expert_up": (8, 16, 16)}
    weights = {
        name: draw(*shape, seed=i)
        for i, (name, shape) in enumerate((shapes | {"expert_down": (8, 16, 16)}).items())
    }
    x, towards = draw(8, 64, 16, seed=8, dtype=jnp.bfloat16), draw(8, 64, 16, seed=9)

    def loss(weights, x, layout=None):
        out, *_ = mixture(weights, spec, x, jnp.ones((8, 64), bool), layout=layout)
        return (out.astype(jnp.float32) * towards).sum()

    mesh = make_mesh(sizes)
    alone = jax.jit(jax.grad(loss))(weights, x)
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P(TOKENS)))
    together = jax.jit(jax.grad(lambda *a: loss(*a, layout=Layout(mesh))))(weights, split)
    for name in ("expert_gate", "expert_up", "expert_down"):
        most = 1e-3 if name != "expert_down" and "tensor" in sizes else 1e-5
        expected = np.asarray(alone[name])
        assert abs(together[name] - expected).max() <= most * abs(expected).max(), name

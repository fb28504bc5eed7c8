"""Kernels for grouped products on a CUDA device, as in `test_gpu.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.kernels import this_device
from jaxrl_llm.models.moe.grouped import choose_grouped_kernels, grouped_matmul
from jaxrl_llm.models.moe.grouped_triton import multiply_groups, sum_outer_products
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.specs import DENSE

pytestmark = pytest.mark.gpu

SHAPES = {  # rows, and of a group its inner width and columns
    "training": ([4096, 0, 300, 5000, 1, 2047], 700, 4096, 1536),
    "decoding": ([20, 0, 5, 100, 1, 2], 64, 4096, 384),
    "odd": ([33, 0, 511, 7], 0, 200, 136),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_products_in_float32(name, dtype):
    given, after, inner, columns = SHAPES[name]
    rows = sum(given) + after
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inner), dtype).at[sum(given) :].set(0)
    y = jax.random.normal(keys[1], (rows, columns), dtype).at[sum(given) :].set(0)
    matrices = jax.random.normal(keys[2], (len(given), inner, columns), dtype)
    sizes = jnp.array(given)

    def wide(x, matrices):
        with jax.default_matmul_precision("float32"):
            return grouped_matmul(*(a.astype(jnp.float32) for a in (x, matrices)), sizes)

    expected, back = jax.vjp(wide, x.astype(jnp.float32), matrices.astype(jnp.float32))
    to_x, to_matrices = back(y.astype(jnp.float32))
    got = multiply_groups(x, matrices, sizes)
    close(got, expected, dtype)
    close(multiply_groups(y, matrices, sizes, transposed=True), to_x, dtype)
    close(sum_outer_products(x, y, sizes), to_matrices, jnp.float32)


def test_the_kernels_agree_when_a_run_tries_them():
    moe = MoeSpec(experts=128, experts_per_token=8, ff_width=768)
    spec = dataclasses.replace(DENSE, hidden_size=2048, layers=1, moe=moe)
    layout = Layout(make_mesh({}, jax.devices("gpu")[:1]))
    choice = choose_grouped_kernels("triton", spec, layout, "bfloat16", device=this_device())
    assert choice.name == "triton", choice.reason


def close(got, expected, dtype):
    """Compare within the rounding of a result, of which no sum has a share."""
    rounding = 1e-5 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    expected = np.asarray(expected)
    most = rounding * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=rounding, atol=most)

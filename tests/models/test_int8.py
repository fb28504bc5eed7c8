"""Vectors in int8 against a loop of the formula."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import quantize
from jaxrl_llm.models.cache import init_cache
from jaxrl_llm.models.mla import LatentSpec
from tests.specs import tiny_spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantize(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(7, 3, 20)) * 10.0 ** rng.integers(-6, 6, (7, 3, 1))).astype(np.float32)
    x[2, 1, :16] = 0.0
    numbers, scales = map(np.asarray, jax.jit(quantize, static_argnums=(1, 2))(x, (16, 4), dtype))
    assert (numbers.dtype, scales.dtype.name, scales.shape) == (np.int8, dtype, (7, 3, 2))
    assert {int(n) for n in numbers.ravel()} <= set(range(-127, 128))
    for i, j, (g, part) in itertools.product(
        range(7), range(3), enumerate([slice(0, 16), slice(16, 20)])
    ):
        scale = float(scales[i, j, g])
        assert scale == pytest.approx(np.abs(x[i, j, part]).max() / 127, rel=2**-8)
        restored = scale * numbers[i, j, part].astype(float)
        np.testing.assert_allclose(restored, x[i, j, part], atol=scale * 0.5001, rtol=0)
    assert not numbers[2, 1, :16].any()


def test_what_is_not_finite_is_not_hidden():
    _, scales = quantize(jnp.array([[1.0, jnp.nan], [1.0, jnp.inf]]), (2,), jnp.float32)
    assert not jnp.isfinite(scales).any()


LATENT = LatentSpec(query_rank=None, kv_rank=32, nope_width=8, rope_width=16, value_width=8)


@pytest.mark.parametrize(
    ("spec", "numbers", "scales"),
    [
        (tiny_spec(heads=4, kv_heads=2, head_dim=16, layers=3), 2 * 2 * 16, 2 * 2),
        (
            tiny_spec(
                heads=4, kv_heads=4, head_dim=24, qk_norm=False, latent=LATENT, layers=3
            ).for_decoding,
            48,
            2,
        ),
    ],
    ids=["heads", "a latent"],
)
def test_a_cache_in_int8_holds_a_byte_a_number_and_the_scales(spec, numbers, scales):
    cache = init_cache(spec, 5, 7, dtype="bfloat16", kv_cache_dtype="int8")
    assert cache.compute_dtype == "bfloat16"
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 3 * 5 * 7 * (numbers + 2 * scales)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: expected auto or int8, got 'fp8'"):
        init_cache(tiny_spec(), 1, 1, kv_cache_dtype="fp8")

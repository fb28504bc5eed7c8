"""Float8 matrices against numpy loops of their formula."""

import dataclasses
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.models.linear import project
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.quantization import (
    QuantizedMatrix,
    declare_quantized,
    quantize_matrix,
    quantize_params,
    quantized_dtypes,
)
from tests.specs import DENSE, LATENT, SIGMOID
from tests.specs import draw as draw_params

E4M3 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(0)


def round_loop(numbers):
    """Return e4m3 numbers and the scale of a vector."""
    scale = np.float32(max(abs(n) for n in numbers)) * np.float32(1 / 448)
    scale = scale if scale > 0 else np.float32(1)
    return np.array([np.float32(n) / scale for n in numbers]).astype(E4M3), scale


def draw(*shape):
    """Numbers of many magnitudes."""
    return (RNG.normal(size=shape) * np.exp(2 * RNG.normal(size=shape))).astype(np.float32)


def test_a_matrix_is_rounded_by_channel():
    shape, inputs = (2, 4, 5), 2
    matrix = draw(*shape)
    matrix[..., 1] = 0
    got = quantize_matrix(jnp.asarray(matrix), inputs)
    assert got.inputs == inputs
    assert got.values.shape == (*shape[inputs:], *shape[:inputs])
    for channel in itertools.product(*map(range, shape[inputs:])):
        values, scale = round_loop(matrix[(..., *channel)].ravel())
        assert got.scale[channel] == scale
        np.testing.assert_array_equal(np.asarray(got.values[channel]).ravel(), values)
    got = quantize_matrix(jnp.ones((4, 2)).at[1, 0].set(jnp.nan))
    assert np.isnan(np.asarray(got.values, np.float32)).tolist() == [[0, 1, 0, 0], [0] * 4]


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.float32, 20), (jnp.bfloat16, 7)])
def test_a_product_is_the_loops(dtype, bits):
    shape, inputs = ((6, 2, 5), 1) if bits == 20 else ((3, 2, 10), 2)
    matrix, x = draw(*shape), draw(2, 3, *shape[:inputs])
    x[0, 1] = 0
    x = jnp.asarray(x, dtype)
    got = project(x, quantize_matrix(jnp.asarray(matrix), inputs), inputs=inputs)
    assert got.dtype == dtype
    assert got.shape == (2, 3, *shape[inputs:])
    columns = matrix.reshape(-1, int(np.prod(shape[inputs:]))).T
    for token in itertools.product(range(2), range(3)):
        numbers, step = round_loop(np.asarray(x[token], np.float32).ravel())
        expected, room = [], []
        for column in columns:
            values, scale = round_loop(column)
            pairs = [float(a) * float(b) for a, b in zip(numbers, values, strict=True)]
            expected.append(sum(pairs) * float(step) * float(scale))
            room.append(sum(map(abs, pairs)) * float(step) * float(scale) * 2.0**-20)
        difference = np.abs(np.asarray(got[token], np.float64).ravel() - expected)
        assert np.all(difference <= np.abs(expected) * 2.0**-bits + room)


SHARED = dataclasses.replace(SIGMOID, moe=dataclasses.replace(SIGMOID.moe, shared_ff_width=6))
CASES = {
    "dense": (DENSE, "query key value output gate up down"),
    "sigmoid": (SHARED, "query key value output gate up down shared_gate shared_up shared_down"),
    "latent": (LATENT, "query kv_a output gate up down"),
}


@pytest.mark.parametrize("name", CASES)
def test_only_matrices_of_layers_are_in_float8(name):
    """And they have the declared forms, rounded one layer after the other."""
    spec, expected = CASES[name]
    declared, plain, names = declare_quantized(spec), declare(spec), set()
    dtypes, params = compute_dtypes(spec, "bfloat16"), draw_params(spec)
    held, kinds = quantize_params(params, declared, dtypes), quantized_dtypes(declared, dtypes)
    for stack in spec.stacks:
        for key, decl in declared[stack].items():
            got, was = held[stack][key], plain[stack][key]
            if not isinstance(decl, QuantizedMatrix):
                assert decl.axes == was.axes
                assert got is params[stack][key]
                continue
            names.add(key)
            assert sorted(decl.values.axes) == sorted(was.axes)
            for part in ("values", "scale"):
                array = getattr(got, part)
                assert array.shape == getattr(decl, part).shape
                assert array.dtype == getattr(kinds[stack][key], part)
            if key not in ("output", "down"):
                continue  # each shape takes a program
            last = np.asarray(params[stack][key][-1]).astype(ml_dtypes.bfloat16)
            alone = quantize_matrix(jnp.asarray(last), decl.inputs)
            np.testing.assert_array_equal(got[-1].values, alone.values)
            np.testing.assert_array_equal(got[-1].scale, alone.scale)
    assert names == set(expected.split())
    others = [name for name in plain if name not in spec.stacks]
    assert [declared[name].axes for name in others] == [plain[name].axes for name in others]

"""The gated delta rule in programs for GPUs: no GPU is needed, but jax's CUDA plugin."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.delta import gated_delta_rule
from jaxrl_llm.planning.steps import gpu_devices
from tests.planning.stablehlo import OPTIONS

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.guards("models/delta.py"),
]

KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128  # of Qwen3.5-4B
FLOAT = 4  # bytes


@pytest.fixture
def shape():
    sharding = jax.sharding.SingleDeviceSharding(gpu_devices("H200", 1)[0])

    def one(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    return one


def tokens(shape, rows, length):
    keys = shape(rows, length, KEY_HEADS, WIDTH, dtype=jnp.bfloat16)
    values = shape(rows, length, VALUE_HEADS, WIDTH, dtype=jnp.bfloat16)
    rates = shape(rows, length, VALUE_HEADS)
    return keys, keys, values, rates, rates, shape(rows, length, dtype=jnp.int32)


def test_gradients_need_little_memory_and_no_product_rounds(shape):
    def total(q, k, v, log_decay, beta, segment_ids):
        return (gated_delta_rule(q, k, v, log_decay, beta, segment_ids)[0] ** 2).sum()

    length = 4096
    lowered = jax.jit(jax.grad(total, argnums=range(5))).lower(*tokens(shape, 1, length))
    compiled = lowered.compile(compiler_options=OPTIONS)
    numbers = compiled.memory_analysis().temp_size_in_bytes / FLOAT
    assert numbers / length / VALUE_HEADS < 6 * WIDTH  # a memory has 128 · 128
    precisions = re.findall(r'"operand_precision":\[([^]]*)\]', compiled.as_text())
    assert set(precisions) == {'"HIGHEST","HIGHEST"'}  # else TF32


def test_decoding_changes_memories_in_place(shape):
    slots = 64
    memories = shape(slots, VALUE_HEADS, WIDTH, WIDTH)
    step = jax.jit(gated_delta_rule, donate_argnums=6).lower(*tokens(shape, slots, 1), memories)
    sizes = step.compile(compiler_options=OPTIONS).memory_analysis()
    held = slots * VALUE_HEADS * WIDTH**2 * FLOAT
    assert sizes.alias_size_in_bytes == held
    assert sizes.temp_size_in_bytes < held / 50

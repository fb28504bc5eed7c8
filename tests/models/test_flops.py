"""FLOPs of a model against what XLA counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.delta import DeltaSpec, gated_delta_rule
from jaxrl_llm.models.flops import (
    active_parameters,
    causal_pairs,
    forward_flops,
    tower_flops,
    update_flops,
)
from jaxrl_llm.models.inputs import FrameBounds, Visual, patch_rows
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.vision.parameters import declare_vision
from jaxrl_llm.models.vision.tower import encode
from tests.decoders import forward, logits
from tests.specs import DENSE, tiny_vision

SPEC = dataclasses.replace(  # wide enough that products outweigh the rest
    DENSE,
    **dict(vocab_size=512, hidden_size=512, heads=8, kv_heads=4, head_dim=64, ff_width=1536),
    **dict(layers=1, tied_embeddings=True),  # XLA counts a loop's body once
)


def test_a_forward_pass_has_the_flops_that_xla_counts():
    def run(params, rows):
        return logits(params, SPEC, forward(params, SPEC, rows, rows, rows))

    length = 64
    params = jax.tree.map(lambda decl: jax.ShapeDtypeStruct(decl.shape, jnp.float32), declare(SPEC))
    rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
    counted = jax.jit(run).lower(params, rows).compile().cost_analysis()["flops"]
    needed = forward_flops(SPEC, length, length**2)  # XLA's attention computes all pairs
    np.testing.assert_allclose(counted, needed, rtol=0.05)  # and norms, softmax


def test_a_delta_layer_has_the_flops_that_xla_counts_and_no_pairs():
    delta = DeltaSpec(key_heads=4, value_heads=8, key_width=64, value_width=32)
    spec = dataclasses.replace(SPEC, layers=3, delta=delta, delta_layers=(True, True, False))
    layers, head, _ = active_parameters(spec)
    of_layer = (forward_flops(spec, 1, 0) - 2 * (layers + head)) / 2

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((1, 1, *sizes), dtype)

    tokens = shape(4, 64), shape(4, 64), shape(8, 32), shape(8), shape(8), shape(dtype=jnp.int32)
    counted = jax.jit(gated_delta_rule).lower(*tokens).cost_analysis()["flops"]
    decay = 8 * 64 * 32
    np.testing.assert_allclose(counted - decay, of_layer, rtol=0.02)
    pairs = forward_flops(spec, 1, 5) - forward_flops(spec, 1, 0)
    assert pairs == forward_flops(SPEC, 1, 5) - forward_flops(SPEC, 1, 0)


def test_the_active_parameters_of_gpt_oss_are_those_of_its_model_card():
    """https://arxiv.org/abs/2508.10925, table 1; it counts the head, and not the embedding."""
    units = {"biases": True, "swiglu": ClippedSwiglu(alpha=1.702, limit=7.0), "hf_joined": True}
    spec = dataclasses.replace(
        SPEC,
        **dict(vocab_size=201088, hidden_size=2880, layers=24, heads=64, kv_heads=8),
        **dict(tied_embeddings=False, qkv_bias=True, output_bias=True, attention_sinks=True),
        moe=MoeSpec(experts=32, experts_per_token=4, ff_width=2880, **units),
    )
    assert sum(active_parameters(spec)) == pytest.approx(3.61e9, rel=1e-3)


def test_an_update_has_thrice_the_flops_of_a_causal_forward_pass():
    lengths = [3, 7, 1]
    pairs = sum(seen for length in lengths for seen in range(1, length + 1))
    assert causal_pairs(0, *lengths) == pairs
    assert update_flops(SPEC, lengths) == 3 * forward_flops(SPEC, 11, pairs)
    parts = [  # a prompt in the cache is not computed again
        forward_flops(SPEC, end - start, causal_pairs(start, end), scored=0)
        for start, end in ((0, 3), (3, 5))
    ]
    assert sum(parts) == forward_flops(SPEC, 5, causal_pairs(0, 5), scored=0)


@pytest.mark.parametrize(
    "own", [{"kind": "qwen3", "position_side": 4}, {"kind": "qwen2_5", "window": 2}]
)
def test_a_tower_has_the_flops_that_xla_counts(own):
    plain = {"hidden_size": 128, "heads": 4, "ff_width": 512, "patch": 8, "out_size": 128}
    tower = tiny_vision(**plain | {"position_side": 0} | own)
    grid = (2, 8, 12)
    patches = np.zeros((192, tower.patch_width), np.uint8)
    rows = patch_rows(tower, [[Visual(patches, grid, tower.merge, b"")]], 192)
    params = {
        name: jax.ShapeDtypeStruct(decl.shape, jnp.float32)
        for name, decl in declare_vision(tower).items()
    }

    def run(params):
        return encode(params, tower, rows, bounds=FrameBounds(longest=96, most=2))

    counted = jax.jit(run).lower(params).compile().cost_analysis()["flops"]
    # XLA's attention computes all pairs of a row, or of windows and their neighbours
    length = 16 * 3 if tower.window else 192
    segments = (rows.frames if rows.windows is None else rows.windows)[0]
    pairs = int((segments[:, None] == segments).sum())
    needed = tower_flops(tower, [grid]) + 4 * 128 * (192 * length - pairs)
    np.testing.assert_allclose(counted, needed, rtol=0.06)

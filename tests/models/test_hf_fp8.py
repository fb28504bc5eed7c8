"""Checkpoints in block-wise float8: against loops, and as transformers reads them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from jaxrl_llm.models.hf.config import config_to_save
from jaxrl_llm.models.hf.fp8 import (
    blocked_host_arrays,
    check_block_shapes,
    quantization_config,
    quantize_blocks,
)
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import compute_dtypes, declare
from tests.specs import DENSE, LATENT, draw, tiny_spec

WIDE = dataclasses.replace(
    DENSE, vocab_size=96, hidden_size=256, heads=4, head_dim=64, ff_width=384, layers=1
)
MIXTURE = MoeSpec(experts=4, experts_per_token=2, ff_width=128)
WIDE = dataclasses.replace(WIDE, moe=MIXTURE)
RNG = np.random.default_rng(0)


def round_block(block):
    """Return e4m3 numbers and the scale of a block."""
    scale = np.float32(max(abs(n) for n in block.ravel())) * np.float32(1 / 448)
    scale = scale if scale > 0 else np.float32(1)
    return (block / scale).astype(ml_dtypes.float8_e4m3fn), scale


@pytest.mark.parametrize("shape", [(130, 300), (3, 140, 40)])
def test_blocks_are_those_of_a_loop(shape):
    matrix = (RNG.normal(size=shape) * np.exp(2 * RNG.normal(size=shape))).astype(np.float32)
    matrix[..., 128:, :] = 0
    values, scale = map(np.asarray, quantize_blocks(jnp.asarray(matrix)))
    rows, columns = shape[-2:]
    assert scale.shape == (*shape[:-2], -(-rows // 128), -(-columns // 128))
    for *batch, i, j in np.ndindex(scale.shape):
        place = (*batch, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        expected, step = round_block(matrix[place])
        np.testing.assert_array_equal(values[place], expected)
        assert scale[(*batch, i, j)] == step


def checkpoint(spec, params):
    """Return the arrays of a float8 checkpoint, by name."""
    dtypes = jax.tree.leaves(compute_dtypes(spec, "bfloat16"))
    leaves = zip(jax.tree.leaves(declare(spec)), jax.tree.leaves(params), dtypes, strict=True)
    return {name: np.ascontiguousarray(x) for name, x in blocked_host_arrays(leaves)}


def test_transformers_reads_the_checkpoint(tmp_path):
    """It turns whole blocks back by its own code, and computes with what comes out."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    spec, params = WIDE, draw(WIDE, scale=0.02)
    arrays = checkpoint(spec, params)
    config = config_to_save(spec, None, np.dtype(ml_dtypes.bfloat16))
    config["quantization_config"] = quantization_config(spec)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    model = model.float()
    back = {name: x.numpy() for name, x in model.state_dict().items()}
    names = [name for name in arrays if f"{name}_scale_inv" in arrays]
    assert len(names) == 4 + 3 * 4
    for name in names:
        values, scale = arrays[name].astype(np.float32), arrays[f"{name}_scale_inv"]
        spread = np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)
        expected = values * spread[: values.shape[0], : values.shape[1]]
        if name not in back:
            continue  # experts, which transformers stacks
        np.testing.assert_allclose(back[name], expected, rtol=2**-8)
    tokens = torch.tensor([[5, 9, 2, 33, 71, 8]])
    save_params(tmp_path / "plain", params, spec, source=None, dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.no_grad():
        logprobs = [m(tokens).logits.float().log_softmax(-1) for m in (model, plain)]
    difference = (logprobs[0] - logprobs[1]).abs()
    assert 0 < difference.mean() < 0.02
    assert not torch.isnan(difference).any()


BLOCK_SHAPES = [  # changes of a spec, GPUs, and what does not fill blocks on each of them
    ({}, 1, None),
    ({"kv_heads": 4}, 2, None),
    ({}, 2, "the keys"),
    ({"head_dim": 32}, 1, "the keys"),
    ({"ff_width": 320}, 1, "the feed-forward"),
    ({"moe": MIXTURE, "kv_heads": 4}, 2, "an expert"),
    ({"latent": LATENT.latent, "qk_norm": False, "kv_heads": 64, "head_dim": 6}, 2, None),
    ({"latent": LATENT.latent, "qk_norm": False, "kv_heads": 64, "head_dim": 6}, 4, "the values"),
]


def test_blocks_lie_within_what_vllm_joins_and_cuts():
    sizes = {"hidden_size": 192, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff_width": 256}
    for changes, gpus, told in BLOCK_SHAPES:
        given = sizes | changes
        given["heads"] = max(given["heads"], given["kv_heads"])
        spec = tiny_spec(**given)
        if told is None:
            check_block_shapes(spec, gpus)
            continue
        with pytest.raises(ValueError, match=told):
            check_block_shapes(spec, gpus)

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
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import compute_dtypes, declare, init_params
from jaxrl_llm.models.spec import ModelSpec
from tests.specs import tiny_spec

DENSE = ModelSpec(
    vocab_size=96,
    hidden_size=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ff_width=384,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=512,
)
MIXTURE = MoeSpec(experts=4, experts_per_token=2, ff_width=128)
RNG = np.random.default_rng(0)


def round_block(block):
    """Return e4m3 numbers and the scale of a block."""
    scale = np.float32(max(abs(n) for n in block.ravel())) * np.float32(1 / 448)
    scale = scale if scale > 0 else np.float32(1)
    return (block / scale).astype(ml_dtypes.float8_e4m3fn), scale


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 300), (1, 129), (3, 140, 40)])
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


@pytest.mark.parametrize("host", [False, True], ids=["devices", "host"])
def test_what_is_no_matrix_of_a_layer_is_as_ever(host):
    spec = tiny_spec(layers=3, moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6))
    params = init_params(spec, key=jax.random.key(0))
    if host:
        params = jax.tree.map(np.asarray, params)
    arrays = checkpoint(spec, params)
    wide = {name for name, x in arrays.items() if x.dtype == ml_dtypes.float8_e4m3fn}
    scales = {name.removesuffix("_scale_inv") for name in arrays if name.endswith("_scale_inv")}
    assert wide == scales
    others = sorted(set(arrays) - wide - {f"{name}_scale_inv" for name in scales})
    kinds = {"mlp.gate": np.float32, "norm": np.float32, "embed_tokens": ml_dtypes.bfloat16}
    for name in others:
        assert [np.dtype(kind) for part, kind in kinds.items() if part in name] == [
            arrays[name].dtype
        ]
    assert sum("experts" in name for name in wide) == 3 * 3 * 4
    for layer in range(3):
        stack = np.asarray(params["layers"]["expert_up"][layer, 2])
        expected, step = round_block(stack.T.astype(ml_dtypes.bfloat16).astype(np.float32))
        name = f"model.layers.{layer}.mlp.experts.2.up_proj.weight"
        np.testing.assert_array_equal(arrays[name], expected)
        assert arrays[f"{name}_scale_inv"].tolist() == [[step]]
    kept = quantization_config(spec)["modules_to_not_convert"]
    assert kept[2:] == [f"model.layers.{layer}.mlp.gate" for layer in range(3)]


@pytest.mark.parametrize("moe", [None, MIXTURE], ids=["dense", "mixture"])
def test_transformers_reads_the_checkpoint(tmp_path, moe):
    """It turns whole blocks back by its own code, and computes with what comes out."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    spec = dataclasses.replace(DENSE, moe=moe)
    params = init_params(spec, key=jax.random.key(0))
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
    assert len(names) == 2 * (7 if moe is None else 4 + 3 * 4)
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


@pytest.mark.parametrize(
    ("changes", "gpus", "told"),
    [
        ({}, 1, None),
        ({"kv_heads": 4}, 2, None),
        ({}, 2, "the keys on each of 2 GPUs, got 64"),
        ({"head_dim": 32}, 1, "the keys on each of 1 GPUs, got 64"),
        ({"ff_width": 320}, 1, "the feed-forward on each of 1 GPUs, got 320"),
        ({"moe": MIXTURE, "kv_heads": 4}, 2, "an expert on each of 2 GPUs, got 64"),
    ],
)
def test_blocks_lie_within_what_vllm_joins_and_cuts(changes, gpus, told):
    spec = {"hidden_size": 192, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff_width": 256}
    spec = tiny_spec(**spec | changes)
    if told is None:
        check_block_shapes(spec, gpus)
    else:
        with pytest.raises(ValueError, match=told):
            check_block_shapes(spec, gpus)


def test_a_latents_values_are_cut():
    latent = LatentSpec(query_rank=None, kv_rank=8, nope_width=4, rope_width=2, value_width=4)
    spec = tiny_spec(heads=64, kv_heads=64, head_dim=6, qk_norm=False, latent=latent, ff_width=256)
    check_block_shapes(spec, 2)
    with pytest.raises(ValueError, match="the values on each of 4 GPUs, got 64"):
        check_block_shapes(spec, 4)

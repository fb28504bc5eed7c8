"""Checkpoints in float8 and MXFP4, read and written, against loops; more in tests/parity."""

import dataclasses
import json
import tracemalloc

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from jaxrl_llm.models.decoder import with_value_head
from jaxrl_llm.models.hf.config import config_to_save, read_spec
from jaxrl_llm.models.hf.files import find_arrays
from jaxrl_llm.models.hf.fp8 import (
    blocked_host_arrays,
    check_block_shapes,
    quantization_config,
    quantize_blocks,
)
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.quantized import read_quantization, restore_arrays
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.rollout.vllm.setup import language_model
from jaxrl_llm.sharding.layout import make_mesh, shardings
from tests.models.test_quantization import round_loop
from tests.quantize import FP8, quantize_fp8
from tests.specs import DENSE, LATENT, draw, tiny_spec

BLOCK = (8, 16)
UP = "model.layers.0.mlp.up_proj.weight"
EDGES = dataclasses.replace(DENSE, layers=1, ff_width=150)
"""With a matrix of more than one block of 128 that is no multiple of it."""


def test_float8_is_restored_exactly_wherever_blocks_are_cut(tmp_path):
    """And saved as plain numbers, as vLLM and critics get them, too."""
    for name in ("plain", "fp8"):
        save_params(tmp_path / name, draw(DENSE), DENSE, source=None, dtype=np.float32)
    arrays, _ = quantize_fp8(tmp_path / "fp8", BLOCK)
    save_file(arrays, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    expected = load_params(tmp_path / "plain", DENSE)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    for layout in (None, shardings(declare(DENSE), mesh)):
        loaded = load_params(tmp_path / "fp8", DENSE, shardings=layout)
        chex.assert_trees_all_equal(loaded, expected, strict=True)
    assert "quantization_config" not in language_model(DENSE, str(tmp_path / "fp8"), "bfloat16")[1]
    critic, spec = with_value_head(expected, DENSE)
    save_params(tmp_path / "x", critic, spec, source=tmp_path / "fp8", dtype="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "x/config.json").read_text())
    assert read_spec(tmp_path / "x") == spec


@pytest.fixture
def fp8(tmp_path):
    save_params(tmp_path / "x", draw(EDGES), EDGES, source=None, dtype=np.float32)
    return tmp_path / "x"


def test_blocks_at_the_edges_are_smaller_and_scales_may_be_narrower(fp8):
    def narrow(arrays):
        arrays[f"{UP}_scale_inv"] = arrays[f"{UP}_scale_inv"].astype(ml_dtypes.bfloat16)

    _, stored = quantize_fp8(fp8, (128, 128), narrow)
    assert stored[f"{UP}_scale_inv"].shape == (2, 1)
    scales = np.repeat(stored[f"{UP}_scale_inv"].astype(np.float32), 128, axis=0)[:150]
    expected = stored[UP].astype(np.float32) * scales
    np.testing.assert_array_equal(load_params(fp8, EDGES)["layers"]["up"][0], expected.T)


def test_scales_that_do_not_fit_are_listed(fp8):
    down, gate, key = (
        UP.replace("mlp.up", name) for name in ("mlp.down", "mlp.gate", "self_attn.k")
    )

    def spoil(arrays):
        del arrays[f"{UP}_scale_inv"]
        arrays[f"{down}_scale_inv"] = np.ones((2, 2), np.float32)
        arrays[f"{gate}_scale_inv"] = np.ones((2, 1), np.uint8)
        arrays[key] = np.ones((8, 16), np.float32)

    quantize_fp8(fp8, (128, 128), spoil)
    with pytest.raises(ValueError) as error:
        load_params(fp8, EDGES)
    for told in (
        f"misshapen: {down}_scale_inv",
        f"missing: {UP}_scale_inv",
        f"surplus: {key}_scale_inv",
        f"unsupported type: {gate}_scale_inv",
        f"unsupported type: {UP}",
    ):
        assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 6


def test_quantization_that_is_not_told_or_another_is_refused(fp8):
    quantize_fp8(fp8, (128, 128))
    config = json.loads((fp8 / "config.json").read_text())
    own = config.pop("quantization_config")
    (fp8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"surplus: {UP}_scale_inv"):
        load_params(fp8, EDGES)
    for change, named in (
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        (own | {"weight_block_size": None}, "weight_block_size"),
        (own | {"weight_block_size": [1, 32], "fmt": "e5m2"}, "e5m2"),
    ):
        (fp8 / "config.json").write_text(json.dumps(config | {"quantization_config": change}))
        with pytest.raises(ValueError, match=named):
            read_spec(fp8)
        with pytest.raises(ValueError, match=named):
            load_params(fp8, EDGES)


def restored(directory, arrays, quantization):
    """Return the arrays of a checkpoint, restored, with their readers."""
    save_file(arrays, directory / "model.safetensors")
    config = {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    found, problems = restore_arrays(find_arrays(directory), read_quantization(directory))
    assert problems == []
    return found


def test_no_more_is_restored_than_is_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 127, (1024, 512)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = rng.normal(size=(8, 4)).astype(np.float32)
    stored = {"x": values, "x_scale_inv": scales}
    array = restored(tmp_path, stored, FP8 | {"weight_block_size": [128, 128]})["x"]
    entries = np.arange(100, 228), np.arange(0, 512, 2)
    tracemalloc.start()
    some = array.read(entries)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * some.nbytes < array.read((np.arange(1024), np.arange(512))).nbytes / 4
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)
    np.testing.assert_array_equal(some, (values.astype(np.float32) * spread)[np.ix_(*entries)])


def mxfp4(experts=2, outputs=8, groups=8):
    """All bytes twice, with scales that make no number a subnormal."""
    rng = np.random.default_rng(0)
    count = experts * outputs * groups
    numbers = np.concatenate([rng.permutation(256) for _ in range(count * 16 // 256)])
    blocks = numbers.astype(np.uint8).reshape(experts, outputs, groups, 16)
    scales = rng.integers(2, 252, (experts, outputs, groups)).astype(np.uint8)
    return {"w_blocks": blocks, "w_scales": scales}


def test_parts_of_mxfp4_are_those_of_the_whole(tmp_path):
    """tests/parity has every number; a scale of 255 stands for none."""
    stored = mxfp4()
    array = restored(tmp_path, stored, {"quant_method": "mxfp4"})["w"]
    assert array.shape == (2, 256, 8)
    whole = array.read((np.arange(2), np.arange(256), np.arange(8)))
    entries = np.array([1]), np.arange(40, 120), np.arange(1, 8, 2)
    np.testing.assert_array_equal(array.read(entries), whole[np.ix_(*entries)])
    stored["w_scales"][0, 0, 0] = 255
    broken = restored(tmp_path, stored, {"quant_method": "mxfp4"})["w"]
    assert np.isnan(broken.read((np.arange(1), np.arange(32), np.arange(1)))).all()


# ------------------------------------------------------- written in blocks of float8, for vLLM

MIXTURE = MoeSpec(experts=4, experts_per_token=2, ff_width=128)
WIDE = dataclasses.replace(
    DENSE,
    **dict(vocab_size=96, hidden_size=256, heads=4, head_dim=64, ff_width=384, layers=1),
    moe=MIXTURE,
)


@pytest.mark.parametrize("shape", [(130, 300), (3, 140, 40)])
def test_blocks_are_those_of_a_loop(shape):
    rng = np.random.default_rng(0)
    matrix = (rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))).astype(np.float32)
    matrix[..., 128:, :] = 0
    values, scale = map(np.asarray, quantize_blocks(jnp.asarray(matrix)))
    rows, columns = shape[-2:]
    assert scale.shape == (*shape[:-2], -(-rows // 128), -(-columns // 128))
    for *batch, i, j in np.ndindex(scale.shape):
        place = (*batch, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        expected, step = round_loop(matrix[place].ravel())
        np.testing.assert_array_equal(values[place].ravel(), expected)
        assert scale[(*batch, i, j)] == step


def test_transformers_reads_the_checkpoint(tmp_path):
    """It turns whole blocks back by its own code, and computes with what comes out."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    spec, params = WIDE, draw(WIDE, scale=0.02)
    dtypes = jax.tree.leaves(compute_dtypes(spec, "bfloat16"))
    leaves = zip(jax.tree.leaves(declare(spec)), jax.tree.leaves(params), dtypes, strict=True)
    arrays = {name: np.ascontiguousarray(x) for name, x in blocked_host_arrays(leaves)}
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
    for name in back.keys() & {*names}:  # not experts, which transformers stacks
        values, scale = arrays[name].astype(np.float32), arrays[f"{name}_scale_inv"]
        spread = np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)
        expected = values * spread[: values.shape[0], : values.shape[1]]
        np.testing.assert_allclose(back[name], expected, rtol=2**-8)
    tokens = torch.tensor([[5, 9, 2, 33, 71, 8]])
    save_params(tmp_path / "plain", params, spec, source=None, dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.no_grad():
        logprobs = [m(tokens).logits.float().log_softmax(-1) for m in (model, plain)]
    difference = (logprobs[0] - logprobs[1]).abs()
    assert 0 < difference.mean() < 0.02
    assert not torch.isnan(difference).any()


def test_blocks_lie_within_what_vllm_joins_and_cuts():
    sizes = {"hidden_size": 192, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff_width": 256}
    check_block_shapes(tiny_spec(**sizes), 1)
    check_block_shapes(tiny_spec(**sizes | {"kv_heads": 4}), 2)
    latent = {"heads": 64, "kv_heads": 64, "head_dim": 6, "qk_norm": False}
    for changes, gpus, told in (  # what does not fill blocks on each GPU
        ({}, 2, "the keys"),
        ({"moe": MIXTURE, "kv_heads": 4}, 2, "an expert"),
        (latent | {"latent": LATENT.latent}, 4, "the values"),
    ):
        with pytest.raises(ValueError, match=told):
            check_block_shapes(tiny_spec(**sizes | changes), gpus)

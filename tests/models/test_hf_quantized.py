"""Checkpoints in float8 and MXFP4 against loops; tests/parity has transformers."""

import dataclasses
import json
import tracemalloc

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl_llm.models.decoder import with_value_head
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.files import find_arrays
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.quantized import read_quantization, restore_arrays
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.vllm.setup import language_model
from jaxrl_llm.sharding.layout import make_mesh, shardings
from tests.quantize import FP8, quantize_fp8
from tests.specs import DENSE, draw

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


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_blocks_at_the_edges_are_smaller_and_scales_may_be_narrower(fp8, kind):
    def narrow(arrays):
        arrays[f"{UP}_scale_inv"] = arrays[f"{UP}_scale_inv"].astype(kind)

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
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        (own | {"weight_block_size": None}, "weight_block_size"),
        (own | {"weight_block_size": [0, 128]}, "weight_block_size"),
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


def test_mxfp4_that_does_not_fit_is_listed(tmp_path):
    stored = mxfp4() | {"v_blocks": np.ones((2, 3), np.uint8), "u_blocks": mxfp4()["w_blocks"]}
    stored["w_scales"] = stored["w_scales"][:, :, 1:].copy()
    save_file(stored, tmp_path / "model.safetensors")
    _, problems = restore_arrays(find_arrays(tmp_path), {"quant_method": "mxfp4"})
    told = sorted(problem.split(" is ")[0].split(",")[0] for problem in problems)
    assert told == ["misshapen: v_blocks", "misshapen: w_scales", "missing: u_scales"]

"""Checkpoints in float8 and MXFP4 against loops; tests/parity has transformers."""

import dataclasses
import json
import tracemalloc

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.decoder import with_value_head
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.files import find_arrays
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.quantized import read_quantization, restore_arrays
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.vllm.setup import language_model
from jaxrl_llm.sharding.layout import shardings
from tests.quantize import FP8, quantize_fp8
from tests.specs import tiny_spec

BLOCK = (8, 16)
UP = "model.layers.0.mlp.up_proj.weight"
SIZES = {"vocab_size": 24, "hidden_size": 20, "layers": 2, "heads": 4, "kv_heads": 2}
LATENT = LatentSpec(query_rank=12, kv_rank=10, nope_width=6, rope_width=4, value_width=5)
SPECS = {
    "dense": tiny_spec(**SIZES, head_dim=6, ff_width=36, tied_embeddings=False),
    "mixture": tiny_spec(
        **SIZES, head_dim=6, moe=MoeSpec(experts=4, experts_per_token=2, ff_width=12)
    ),
    "latent": tiny_spec(
        **SIZES | {"layers": 3, "kv_heads": 4},
        head_dim=10,
        qk_norm=False,
        tied_embeddings=False,
        latent=LATENT,
        moe=MoeSpec(
            experts=4,
            experts_per_token=2,
            ff_width=12,
            dense_layers=1,
            shared_ff_width=12,
            router=SigmoidRouter(groups=2, top_groups=1, normalize=True, scale=1.0),
        ),
    ),
}


@pytest.fixture(scope="module", params=SPECS)
def case(request, draw, tmp_path_factory):
    """A spec, a directory in float8, and one with what its numbers stand for."""
    spec = SPECS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("plain", "fp8"):
        save_params(folder / name, draw(spec), spec, source=None, dtype=np.float32)
    arrays, _ = quantize_fp8(folder / "fp8", BLOCK)
    save_file(arrays, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return spec, folder


def test_float8_is_restored_exactly(case):
    """Whole, and cut so that parts of a mesh begin inside blocks."""
    spec, folder = case
    assert read_spec(folder / "fp8") == read_spec(folder / "plain") == spec
    expected = load_params(folder / "plain", spec)
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=types)
    for layout in (None, shardings(declare(spec), mesh)):
        loaded = load_params(folder / "fp8", spec, shardings=layout)
        chex.assert_trees_all_equal(loaded, expected, strict=True)


def test_what_is_saved_is_no_longer_quantized(case, tmp_path):
    spec, folder = case
    params = load_params(folder / "fp8", spec)
    save_params(tmp_path / "x", params, spec, source=folder / "fp8", dtype=np.float32)
    saved, source = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "x", folder / "fp8")
    )
    assert source.pop("quantization_config")
    assert saved == source
    chex.assert_trees_all_equal(load_params(tmp_path / "x", spec), params)
    assert not any("scale" in name for name in load_file(tmp_path / "x" / "model.safetensors"))
    assert "quantization_config" not in language_model(spec, str(folder / "fp8"), "bfloat16")[1]
    if spec.latent is None:  # of which transformers has no token classifier
        critic, critic_spec = with_value_head(params, spec)
        save_params(tmp_path / "y", critic, critic_spec, source=folder / "fp8", dtype="bfloat16")
        assert "quantization_config" not in json.loads((tmp_path / "y/config.json").read_text())
        assert read_spec(tmp_path / "y") == critic_spec


@pytest.fixture
def fp8(draw, tmp_path):
    """Blocks of 128 × 128 in matrices that are no multiples of them."""
    spec = dataclasses.replace(SPECS["dense"], layers=1, ff_width=150)
    save_params(tmp_path / "x", draw(spec), spec, source=None, dtype=np.float32)
    return tmp_path / "x", spec


def test_blocks_at_the_edges_are_smaller(fp8):
    directory, spec = fp8
    expected, stored = quantize_fp8(directory, (128, 128))
    assert stored[f"{UP}_scale_inv"].shape == (2, 1)
    loaded = load_params(directory, spec)
    np.testing.assert_array_equal(loaded["layers"]["up"][0], expected[UP].T)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_scales_may_be_narrower(fp8, kind):
    directory, spec = fp8

    def narrow(arrays):
        arrays[f"{UP}_scale_inv"] = arrays[f"{UP}_scale_inv"].astype(kind)

    _, stored = quantize_fp8(directory, (128, 128), narrow)
    scales = np.repeat(stored[f"{UP}_scale_inv"].astype(np.float32), 128, axis=0)[:150]
    expected = stored[UP].astype(np.float32) * scales
    np.testing.assert_array_equal(load_params(directory, spec)["layers"]["up"][0], expected.T)


def test_scales_that_do_not_fit_are_listed(fp8):
    directory, spec = fp8
    down, gate, key = (
        UP.replace("mlp.up", name) for name in ("mlp.down", "mlp.gate", "self_attn.k")
    )

    def spoil(arrays):
        del arrays[f"{UP}_scale_inv"]
        arrays[f"{down}_scale_inv"] = np.ones((2, 2), np.float32)
        arrays[f"{gate}_scale_inv"] = np.ones((2, 1), np.uint8)
        arrays[key] = np.ones((12, 20), np.float32)

    quantize_fp8(directory, (128, 128), spoil)
    with pytest.raises(ValueError, match="does not fit the spec") as error:
        load_params(directory, spec)
    assert sorted(str(error.value).splitlines()[1:]) == [
        f"  misshapen: {down}_scale_inv is (2, 2), expected (1, 2)",
        f"  missing: {UP}_scale_inv, the scales of a quantized array",
        f"  surplus: {key}_scale_inv",
        f"  unsupported type: {gate}_scale_inv is U8, expected one of ['F32', 'BF16', 'F16']",
        f"  unsupported type: {UP} is F8_E4M3, expected one of ['F32', 'BF16', 'F16']",
    ]


def test_float8_that_the_config_does_not_say_is_refused(fp8):
    directory, spec = fp8
    quantize_fp8(directory, (128, 128))
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"surplus: {UP}_scale_inv") as error:
        load_params(directory, spec)
    assert f"unsupported type: {UP} is F8_E4M3" in str(error.value)


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        (FP8 | {"weight_block_size": None}, "'fp8' with weight_block_size=None and fmt='e4m3'"),
        (FP8 | {"weight_block_size": [0, 128]}, r"with weight_block_size=\[0, 128\]"),
        (FP8 | {"weight_block_size": [1, 32], "fmt": "e5m2"}, r"=\[1, 32\] and fmt='e5m2'"),
    ],
)
def test_other_kinds_of_quantization_are_refused(fp8, quantization, told):
    directory, spec = fp8
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization})
    )
    with pytest.raises(ValueError, match=f"config.json: the weights are quantized by .*{told}"):
        read_spec(directory)
    with pytest.raises(ValueError, match=f"config.json: the weights are quantized by .*{told}"):
        load_params(directory, spec)


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


def test_mxfp4_by_loops(tmp_path):
    """A sign, two bits of exponent with bias 1 and one of mantissa; in turns the low bits first."""
    stored = mxfp4()
    array = restored(tmp_path, stored, {"quant_method": "mxfp4"})["w"]
    assert array.shape == (2, 256, 8)
    whole = array.read((np.arange(2), np.arange(256), np.arange(8)))
    for e, o, g, i in np.ndindex(2, 8, 8, 32):
        byte = int(stored["w_blocks"][e, o, g, i // 2])
        bits = byte >> 4 if i % 2 else byte & 15
        sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        expected = (-1) ** sign * size * 2.0 ** (int(stored["w_scales"][e, o, g]) - 127)
        assert whole[e, 32 * g + i, o] == expected
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
    assert sorted(problems) == [
        "misshapen: v_blocks is U8 (2, 3), expected U8 [experts, outputs, groups, 16]",
        "misshapen: w_scales is (2, 8, 7), expected (2, 8, 8)",
        "missing: u_scales, the scales of a quantized array",
    ]

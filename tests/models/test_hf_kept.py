"""What exports take over from a source: arrays that are not the language model's, and float32."""

import dataclasses
import json
import logging

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.decoder import with_value_head
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.config import FAMILIES, make_config, read_spec
from jaxrl_llm.models.hf.files import find_arrays
from jaxrl_llm.models.hf.load import load_params, log_untouched
from jaxrl_llm.models.hf.save import find_kept, save_arrays, save_params
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.vllm.engine import WeightBuffer
from tests.specs import tiny_spec

PREFIX = "model.language_model."
SPEC = tiny_spec(layers=2, hf_prefix=PREFIX, vocab_size=10, hidden_size=5)
RNG = np.random.default_rng(0)
BESIDE = {
    "model.visual.patch_embed.proj.weight": RNG.normal(size=(3, 5, 2)).astype(ml_dtypes.bfloat16),
    "model.visual.blocks.0.norm1.weight": RNG.normal(size=7).astype(np.float32),
    "model.visual.scale": np.array(0.3, np.float16),
    "model.visual.empty": np.zeros((0, 3), np.float32),
    "model.visual.position_ids": np.arange(6).reshape(2, 3),
    "model.visual.mask": np.array([True, False, True]),
    "mtp.norm.weight": RNG.normal(size=4).astype(ml_dtypes.bfloat16),
}


@pytest.fixture
def family(monkeypatch):
    """Let the first family be the language model of one that sees images."""
    sees = dataclasses.replace(
        FAMILIES[0],
        untouched=("model.visual.", "mtp."),
        common=FAMILIES[0].common | {"hf_prefix": PREFIX},
    )
    monkeypatch.setattr("jaxrl_llm.models.hf.config.FAMILIES", (sees, *FAMILIES[1:]))
    log_untouched.cache_clear()


def add_arrays(directory, arrays, change=lambda stored: None):
    path = directory / "model.safetensors"
    stored = load_file(path) | arrays
    change(stored)
    save_file(stored, path, metadata={"format": "pt"})


@pytest.fixture
def params(draw):
    return draw(SPEC)


@pytest.fixture
def source(family, params, tmp_path):
    save_params(tmp_path / "source", params, SPEC, source=None, dtype=np.float32)
    add_arrays(tmp_path / "source", BESIDE)
    return tmp_path / "source"


def read_all(directory):
    """Return every array's dtype, shape and bytes."""
    arrays = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, x in load_file(path).items():
            arrays[name] = (x.dtype, x.shape, x.tobytes())
    return arrays


def test_arrays_beside_the_language_model_are_not_loaded(source, params, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            chex.assert_trees_all_equal(load_params(source, read_spec(source)), params)
    [line] = [r.getMessage() for r in caplog.records if "no part of the language" in r.getMessage()]
    assert "7 arrays are no part of the language model" in line
    assert line.endswith("(model.visual.*, mtp.*)")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 200])
def test_exports_have_them_byte_for_byte(source, tmp_path, dtype, max_shard_bytes):
    (source / "preprocessor_config.json").write_text("{}")
    spec = read_spec(source)
    params = load_params(source, spec)
    saved = tmp_path / "saved"
    kind = np.dtype(dtype)
    save_params(saved, params, spec, source=source, dtype=kind, max_shard_bytes=max_shard_bytes)
    assert (saved / "preprocessor_config.json").exists()
    before, after = read_all(source), read_all(saved)
    assert before.keys() == after.keys()
    for name, was in before.items():
        if name in BESIDE or dtype == "float32":
            assert after[name] == was, name
        else:
            assert after[name][0] == kind
    index = saved / "model.safetensors.index.json"
    assert index.exists() == (max_shard_bytes == 200)
    if index.exists():
        listed = json.loads(index.read_text())
        assert listed["weight_map"].keys() == after.keys()
        assert listed["metadata"]["total_size"] == sum(len(x[2]) for x in after.values())
    stored = find_arrays(saved)
    assert all(array.is_whole() and array.checksum for array in stored.values())
    assert all(
        array.offset % min(8, x[0].itemsize) == 0
        for array, x in ((stored[name], x) for name, x in after.items())
    )
    # an export of an export has them, too
    save_params(tmp_path / "again", params, spec, source=saved, dtype=kind)
    assert {name: read_all(tmp_path / "again")[name] for name in BESIDE} == {
        name: before[name] for name in BESIDE
    }


def test_a_critic_has_them(source, tmp_path):
    spec = read_spec(source)
    critic, critic_spec = with_value_head(load_params(source, spec), spec)
    save_params(tmp_path / "x", critic, critic_spec, source=source, dtype=np.float32)
    before, after = read_all(source), read_all(tmp_path / "x")
    assert {name: after[name] for name in BESIDE} == {name: before[name] for name in BESIDE}
    chex.assert_trees_all_equal(load_params(tmp_path / "x", critic_spec), critic)


def test_damage_to_them_is_found(source, params, tmp_path):
    save_params(tmp_path / "x", params, SPEC, source=source, dtype=np.float32)
    path = tmp_path / "x" / "model.safetensors"
    place = find_arrays(tmp_path / "x")["model.visual.patch_embed.proj.weight"]
    data = bytearray(path.read_bytes())
    data[place.offset + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged: model\.visual\.patch_embed\.proj\.weight"):
        load_params(tmp_path / "x", SPEC)


def test_other_arrays_are_surplus_as_ever(source, draw, tmp_path):
    add_arrays(source, {"model.audio.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"surplus: model\.audio\.weight$"):
        load_params(source, SPEC)


def test_a_family_without_such_arrays_does_not_pass_them_over(draw, tmp_path):
    plain = dataclasses.replace(SPEC, hf_prefix="model.")
    save_params(tmp_path / "x", draw(plain), plain, source=None, dtype=np.float32)
    add_arrays(tmp_path / "x", BESIDE)
    with pytest.raises(ValueError, match=r"surplus: model\.visual\.scale"):
        load_params(tmp_path / "x", plain)


def test_quantized_ones_are_saved_as_what_they_stand_for(source, params, tmp_path):
    numbers = RNG.integers(0, 127, (10, 20)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = RNG.normal(size=(2, 2)).astype(np.float32)
    add_arrays(source, {"mtp.fc.weight": numbers, "mtp.fc.weight_scale_inv": scales})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    (source / "config.json").write_text(json.dumps(config))
    save_params(tmp_path / "x", params, SPEC, source=source, dtype=np.float32)
    stored = load_file(tmp_path / "x" / "model.safetensors")
    spread = np.repeat(np.repeat(scales, 8, 0), 16, 1)[:10, :20]
    np.testing.assert_array_equal(stored["mtp.fc.weight"], numbers.astype(np.float32) * spread)
    assert "mtp.fc.weight_scale_inv" not in stored
    assert "quantization_config" not in json.loads((tmp_path / "x/config.json").read_text())


def test_the_push_to_vllm_has_none_of_them(source):
    spec = read_spec(source)
    buffer = WeightBuffer(spec, "float32")
    assert not {entry.name for entry in buffer.entries} & BESIDE.keys()
    buffer.close()


def test_float32_of_a_narrower_source_stays(draw, tmp_path):
    """The norm of query is float32 there, the other arrays bfloat16."""
    spec = dataclasses.replace(SPEC, hf_prefix="model.")
    params = draw(spec)
    save_params(tmp_path / "source", params, spec, source=None, dtype="bfloat16")
    norm = "model.layers.1.self_attn.q_norm.weight"

    def widen(stored, names):
        stored |= {name: stored[name].astype(np.float32) for name in names}

    add_arrays(tmp_path / "source", {}, lambda stored: widen(stored, [norm]))
    save_params(tmp_path / "one", params, spec, source=tmp_path / "source", dtype="bfloat16")
    both = [norm, norm.replace("1", "0")]
    add_arrays(tmp_path / "source", {}, lambda stored: widen(stored, both))
    save_params(tmp_path / "all", params, spec, source=tmp_path / "source", dtype="bfloat16")
    for directory, wide in (("one", []), ("all", both)):
        stored = load_file(tmp_path / directory / "model.safetensors")
        assert [name for name, x in stored.items() if x.dtype == np.float32] == sorted(wide)
    add_arrays(tmp_path / "source", {}, lambda stored: widen(stored, [*stored]))
    save_params(tmp_path / "narrow", params, spec, source=tmp_path / "source", dtype="bfloat16")
    stored = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_what_a_deltanet_computes_in_float32_is_saved_so(draw, tmp_path):
    delta = DeltaSpec(key_heads=2, value_heads=2, key_width=3, value_width=5)
    spec = tiny_spec(layers=2, delta=delta, delta_layers=(True, False))
    declared, params = declare(spec), draw(spec)
    alone = {"config": None, "source": None, "dtype": "bfloat16"}
    save_arrays(tmp_path / "x", params, declared, **alone)
    stored = load_file(tmp_path / "x" / "model.safetensors")
    at = "model.layers.0.linear_attn."
    wide = sorted(name for name, x in stored.items() if x.dtype == np.float32)
    assert wide == [f"{at}A_log", f"{at}dt_bias"]
    np.testing.assert_array_equal(
        stored[f"{at}A_log"], params["delta_layers"]["delta_decay_log"][0].ravel()
    )
    # a source that has one of them narrower, and a norm in float32
    stored[f"{at}dt_bias"] = stored[f"{at}dt_bias"].astype(ml_dtypes.bfloat16)
    stored[f"{at}norm.weight"] = stored[f"{at}norm.weight"].astype(np.float32)
    save_file(stored, tmp_path / "x" / "model.safetensors")
    config = make_config(tiny_spec(layers=2))
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    kept = find_kept(tmp_path / "x", declared)
    assert kept.float32 == {f"{at}A_log", f"{at}norm.weight"}
    save_arrays(tmp_path / "y", params, declared, **alone, kept=kept)
    again = load_file(tmp_path / "y" / "model.safetensors")
    assert {name: x.dtype for name, x in again.items()} == {n: x.dtype for n, x in stored.items()}

"""What exports take over from a source: arrays that are not the language model's, and float32."""

import dataclasses
import json
import logging

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.hf.config import FAMILIES, read_spec
from jaxrl_llm.models.hf.files import find_arrays
from jaxrl_llm.models.hf.load import load_params, log_untouched
from jaxrl_llm.models.hf.save import save_params
from tests.specs import DENSE, draw

PREFIX = "model.language_model."
SPEC = dataclasses.replace(DENSE, hf_prefix=PREFIX)
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


def add_arrays(directory, arrays):
    path = directory / "model.safetensors"
    save_file(load_file(path) | arrays, path, metadata={"format": "pt"})


@pytest.fixture
def params():
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
    assert sum("model.visual." in record.getMessage() for record in caplog.records) == 1
    add_arrays(source, {"model.audio.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"model\.audio\.weight"):
        load_params(source, SPEC)


def test_a_family_without_such_arrays_does_not_pass_them_over(tmp_path):
    plain = dataclasses.replace(SPEC, hf_prefix="model.")
    save_params(tmp_path / "x", draw(plain), plain, source=None, dtype=np.float32)
    add_arrays(tmp_path / "x", BESIDE)
    with pytest.raises(ValueError, match=r"model\.visual\.scale"):
        load_params(tmp_path / "x", plain)


@pytest.mark.parametrize(("dtype", "max_shard_bytes"), [("float32", 10**9), ("bfloat16", 200)])
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
    for name, array in find_arrays(saved).items():
        assert array.is_whole() and array.checksum, name
        assert array.offset % min(8, after[name][0].itemsize) == 0, name
    # an export of an export has them, too
    save_params(tmp_path / "again", params, spec, source=saved, dtype=kind)
    assert {name: read_all(tmp_path / "again")[name] for name in BESIDE} == {
        name: before[name] for name in BESIDE
    }


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

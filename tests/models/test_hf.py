"""Hugging Face directories without transformers; tests/parity holds the comparison with it."""

import dataclasses
import json
import os
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.arrays import HfPart
from jaxrl_llm.models.hf.config import make_config, read_spec
from jaxrl_llm.models.hf.fp8 import blocked_host_arrays, quantize_blocks
from jaxrl_llm.models.hf.load import load_arrays, load_params
from jaxrl_llm.models.hf.save import host_arrays, save_arrays, save_params
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.sharding.layout import make_mesh, shardings
from tests.specs import DELTA, MOE, draw

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source(spec, params, tmp_path):
    directory = tmp_path / "source"
    save_params(directory, params, spec, source=None, dtype=np.float32)
    return directory


def edit_arrays(directory, change):
    path = directory / "model.safetensors"
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)


def assert_same(got, expected):
    chex.assert_trees_all_equal(got, expected, strict=True)  # dtypes, too


@pytest.mark.parametrize("tied", [True, False])
def test_save_then_load_is_exact(spec, params, tied, tmp_path):
    """In files that keep to their size, of any size."""
    spec = dataclasses.replace(spec, tied_embeddings=tied)
    params = {k: v for k, v in params.items() if k != "head" or not tied}
    arrays = 2 + (not tied) + 11 * spec.layers
    for most, files in ((10**9, {1}), (4000, range(2, arrays)), (1, {arrays})):
        folder = tmp_path / str(most) / "model"
        save_params(folder, params, spec, source=None, dtype=np.float32, max_shard_bytes=most)
        assert read_spec(folder) == spec
        assert_same(load_params(folder, spec), params)
        assert len([*folder.glob("*.safetensors")]) in files
        assert [p.name for p in folder.parent.iterdir()] == ["model"]
    folder, total = tmp_path / "4000" / "model", 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        assert {index["weight_map"][name] for name in stored} == {path.name}
        size = sum(array.nbytes for array in stored.values())
        assert size <= 4000
        total += size
    assert (
        index["metadata"]["total_size"] == total == sum(x.nbytes for x in jax.tree.leaves(params))
    )


@pytest.mark.parametrize(
    ("sizes", "dtype"), [({"fsdp": 2, "tensor": 4}, jnp.float32), ({"data": 8}, jnp.bfloat16)]
)
def test_load_into_shardings(spec, params, source, sizes, dtype):
    """And donate what was loaded: arrays never alias each other."""
    layout = shardings(declare(spec), make_mesh(sizes))
    expected = jax.tree.map(lambda x: x.astype(dtype), params)
    for where in (None, layout):
        loaded = load_params(source, spec, shardings=where, dtype=dtype)
        assert_same(loaded, expected)
        assert where is None or jax.tree.map(lambda x: x.sharding, loaded) == layout
        negate = jax.jit(lambda p: jax.tree.map(lambda x: -x, p), donate_argnums=0)
        negated = negate(loaded)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(loaded))
        for leaf, value in zip(jax.tree.leaves(negated), jax.tree.leaves(expected), strict=True):
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, -np.asarray(value)[shard.index])


def arrays_in(directory):
    arrays = {}
    for path in directory.glob("*.safetensors"):
        arrays |= {k: v.tobytes() for k, v in load_file(path).items()}
    return arrays


def test_load_into_split_layers(spec, params, source, tmp_path):
    """A device that holds one layer reads one layer; the stack is never on the host."""
    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    split = jax.NamedSharding(mesh, jax.P("data"))
    host = jax.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")
    layout = jax.tree.map(lambda decl: split if decl.stacked else host, declare(spec))
    loaded = load_params(source, spec, shardings=layout)
    assert_same(loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == layout
    save_params(tmp_path / "again", loaded, spec, source=source, dtype=np.float32)
    assert arrays_in(tmp_path / "again") == arrays_in(source)


def test_a_save_has_its_name_once_it_is_whole(source, spec, params, tmp_path, monkeypatch):
    """What a save that was killed has left is replaced."""
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "model-00007-of-00009.safetensors").write_bytes(b"half")
    written, fsync = [], os.fsync

    def look(descriptor):
        written.append((tmp_path / "x").exists())
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", look)
    plain = {"source": source, "dtype": np.float32, "max_shard_bytes": 9000}
    save_params(tmp_path / "x", params, spec, **plain)
    assert written == [False] * len(written)
    assert len(written) >= 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "x"]
    assert_same(load_params(tmp_path / "x", spec), params)


def test_save_refuses(spec, params, source, tmp_path, monkeypatch):
    headless = {k: v for k, v in params.items() if k != "head"} | {"extra": jnp.ones(2)}
    for kind, named, given in (
        (FileExistsError, "source", {"directory": source}),
        (ValueError, "int8", {"dtype": np.int8}),
        (ValueError, "embed", {"params": params | {"embed": params["embed"][1:]}}),
        (ValueError, "(?s)extra.*head", {"params": headless}),
        (ValueError, "source", {"spec": dataclasses.replace(spec, rope_theta=1e6)}),
    ):
        plain = {"directory": tmp_path / "x", "params": params, "spec": spec, "dtype": np.float32}
        with pytest.raises(kind, match=named):
            save_params(**plain | given, source=source)
    monkeypatch.setattr("os.fsync", lambda descriptor: 1 / 0)  # as of a full disk
    with pytest.raises(ZeroDivisionError):
        save_params(tmp_path / "x", params, spec, source=source, dtype=np.float32)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_load_lists_what_does_not_fit(spec, source):
    def spoil(arrays):
        del arrays["model.norm.weight"]
        arrays["model.norm.bias"] = np.ones(16, np.float32)
        arrays[QUERY] = np.ones((3, 16), np.float32)
        arrays["lm_head.weight"] = np.ones((32, 16), np.int8)

    edit_arrays(source, spoil)
    with pytest.raises(ValueError) as error:
        load_params(source, spec)
    lines = [line.split(" is ")[0].strip() for line in str(error.value).splitlines()[1:]]
    assert lines == [
        "missing: model.norm.weight",
        "surplus: model.norm.bias",
        "unsupported type: lm_head.weight",
        f"misshapen: {QUERY}",
    ]


def test_what_may_be_there_besides(spec, params, source):
    """Rotary frequencies, which are no weights, and the head of a tied model."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_arrays(source, lambda arrays: arrays.update({name: np.ones(3, np.float32)}))
    assert_same(load_params(source, spec), params)
    tied = dataclasses.replace(spec, tied_embeddings=True)
    assert_same(load_params(source, tied), {k: v for k, v in params.items() if k != "head"})


def test_load_refuses_damaged_files(spec, params, source, tmp_path):
    path = source / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole + b"0", b"", b"x" * 500):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_params(source, spec)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_params(source, spec)

    sharded = tmp_path / "x"
    save_params(sharded, params, spec, source=source, dtype=np.float32, max_shard_bytes=9000)
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    saved = second.read_bytes()
    for damaged in (saved[:-4], first.read_bytes()):  # the second: arrays that are there twice
        second.write_bytes(damaged)
        with pytest.raises(ValueError, match=second.name):
            load_params(sharded, spec)
    second.unlink()
    with pytest.raises(ValueError, match=second.name):
        load_params(sharded, spec)


def test_no_bit_of_a_saved_file_changes_what_is_loaded(spec, params, source):
    """80 flips, half of them in the header: each is an error, or changes nothing."""
    path = source / "model.safetensors"
    whole, dice = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for number in range(80):
        byte = dice.randrange(header) if number % 2 else dice.randrange(header, len(whole))
        flipped = bytes([whole[byte] ^ 1 << dice.randrange(8)])
        path.write_bytes(whole[:byte] + flipped + whole[byte + 1 :])
        try:
            assert_same(load_params(source, spec), params)
        except ValueError as error:
            refused += 1
            assert number % 2 or "damaged" in str(error)
        else:
            assert number % 2, "a byte of an array has changed"
    assert refused > 50


# ------------------------------------------------------------- parts of arrays, and experts

HYBRID = dataclasses.replace(DELTA, qkv_bias=True)
JOINED_QUERY = "model.layers.2.self_attn.q_proj.weight"


def test_a_model_with_joined_arrays_is_saved_and_loaded(tmp_path):
    """Also into a mesh that splits heads, whose parts lie apart in the files."""
    spec, params = HYBRID, draw(HYBRID)
    save_arrays(tmp_path / "x", params, declare(spec), config=None, source=None, dtype=np.float32)
    stored = load_file(tmp_path / "x" / "model.safetensors")
    heads = stored[JOINED_QUERY].reshape(spec.heads, 2, spec.head_dim, -1)
    for n in range(spec.heads):
        for i, name in enumerate(("query", "attention_gate")):
            ours = params["layers"][name][0, :, n]
            np.testing.assert_array_equal(heads[n, i], ours.T)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    for layout in (None, shardings(declare(spec), mesh)):
        loaded = load_params(tmp_path / "x", spec, shardings=layout)
        chex.assert_trees_all_equal(loaded, params)


def test_joined_arrays_in_blocks_of_float8():
    """Blocks are those of the whole; what a DeltaNet has stays as it is."""
    spec = dataclasses.replace(HYBRID, head_dim=66)
    params = draw(spec)
    leaves = [
        (decl, np.asarray(leaf), np.dtype(np.float32))
        for decl, leaf in zip(jax.tree.leaves(declare(spec)), jax.tree.leaves(params), strict=True)
    ]
    plain, arrays = dict(host_arrays(leaves)), dict(blocked_host_arrays(leaves))
    scaled = {name.removesuffix("_scale_inv") for name in arrays if name.endswith("_scale_inv")}
    assert JOINED_QUERY in scaled
    assert not any("linear_attn" in name for name in scaled)
    for name, x in plain.items():
        if name in scaled:
            values, scale = map(np.asarray, quantize_blocks(jnp.asarray(x)))
            np.testing.assert_array_equal(arrays[name], values)
            np.testing.assert_allclose(arrays[f"{name}_scale_inv"], scale, rtol=1e-6)
        else:
            np.testing.assert_array_equal(arrays[name], x)


def fused(layers):
    """Declare experts as Qwen 3.5 has them in its files."""
    gate, up, down = (layers[f"expert_{name}"] for name in ("gate", "up", "down"))
    width, at = gate.shape[3], "model.layers.{layers}.mlp.experts."
    both = {"hf_name": at + "gate_up_proj", "hf_axes": (("experts",), *gate.hf_axes)}
    parts = [HfPart(("expert_ff",), start, 2 * width) for start in (0, width)]
    return layers | {
        "expert_gate": dataclasses.replace(gate, **both, hf_part=parts[0]),
        "expert_up": dataclasses.replace(up, **both, hf_part=parts[1]),
        "expert_down": dataclasses.replace(
            down, hf_name=at + "down_proj", hf_axes=(("experts",), *down.hf_axes)
        ),
    }


def test_experts_are_loaded_in_both_forms(tmp_path):
    spec, params, apart = MOE, draw(MOE), declare(MOE)
    together = apart | {"layers": fused(apart["layers"])}
    save_params(tmp_path / "apart", params, spec, source=None, dtype=np.float32)
    save_arrays(tmp_path / "together", params, together, config=None, source=None, dtype=np.float32)
    stored = load_file(tmp_path / "together" / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 32, 16)
    for directory in ("apart", "together"):
        for declared in (apart, together):
            loaded = load_arrays(tmp_path / directory, declared)
            chex.assert_trees_all_equal(loaded, params)
    (tmp_path / "together" / "config.json").write_text(json.dumps(make_config(spec)))
    save_params(tmp_path / "x", params, spec, source=tmp_path / "together", dtype=np.float32)
    again = load_file(tmp_path / "x" / "model.safetensors")
    chex.assert_trees_all_equal(again, stored)  # in the form of its source
    del stored["model.layers.0.mlp.experts.gate_up_proj"]
    stored["model.layers.1.mlp.experts.0.up_proj.weight"] = np.ones((16, 16), np.float32)
    save_file(stored, tmp_path / "together" / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.0\.") as error:
        load_arrays(tmp_path / "together", apart)
    assert "surplus: model.layers.1.mlp.experts.gate_up_proj" in str(error.value)

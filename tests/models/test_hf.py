"""Hugging Face directories without transformers; tests/parity holds the comparison with it."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.models.decoder import with_value_head
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import from_hf, load_params
from jaxrl_llm.models.hf.save import COMPANION_FILES, save_params, to_hf
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.sharding.layout import shardings

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source(spec, params, tmp_path):
    directory = tmp_path / "source"
    save_params(directory, params, spec, source=None, dtype=np.float32)
    return directory


def edit_arrays(directory, change):
    path = directory / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    change(arrays)
    safetensors.numpy.save_file(arrays, path)


def assert_same(got, expected):
    chex.assert_trees_all_equal(got, expected, strict=True)  # dtypes, too


def hf_arrays(declaration, array):
    return {name: to_hf(declaration, array[index]) for name, index in declaration.hf_indices()}


def test_conversion_by_loops(spec, params):
    """q_proj.weight[n*H + h, d] is query[layer, d, n, h]; o_proj.weight[d, n*H + h] is output."""
    declared, width = declare(spec)["layers"], spec.head_dim
    query, output = (np.asarray(params["layers"][name]) for name in ("query", "output"))
    theirs = hf_arrays(declared["query"], query) | hf_arrays(declared["output"], output)
    o_proj = theirs["model.layers.2.self_attn.o_proj.weight"]
    for d, n, h in np.ndindex(spec.hidden_size, spec.heads, width):
        assert theirs[QUERY][n * width + h, d] == query[1, d, n, h]
        assert o_proj[d, n * width + h] == output[2, n, h, d]
    np.testing.assert_array_equal(from_hf(declared["query"], theirs[QUERY]), query[1])


def test_conversion_is_traceable(spec, params):
    decl = declare(spec)["layers"]["down"]
    traced = jax.jit(lambda x: hf_arrays(decl, x))(params["layers"]["down"])
    plain = hf_arrays(decl, np.asarray(params["layers"]["down"]))
    assert traced.keys() == plain.keys()
    chex.assert_trees_all_equal(traced, plain)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 4000, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_save_then_load_is_exact(spec, params, tied, max_shard_bytes, tmp_path):
    spec = dataclasses.replace(spec, tied_embeddings=tied)
    params = {k: v for k, v in params.items() if k != "head" or not tied}
    save_params(
        tmp_path / "a" / "model",
        params,
        spec,
        source=None,
        dtype=np.float32,
        max_shard_bytes=max_shard_bytes,
    )
    assert read_spec(tmp_path / "a" / "model") == spec
    assert_same(load_params(tmp_path / "a" / "model", spec), params)
    files = sorted(p.name for p in (tmp_path / "a" / "model").glob("*.safetensors"))
    arrays = 2 + (not tied) + 11 * spec.layers
    assert len(files) == 1 if max_shard_bytes == 10**9 else 1 < len(files) <= arrays
    assert (len(files) == arrays) == (max_shard_bytes == 1)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["model"]


def test_shards_keep_to_their_size(spec, params, tmp_path):
    save_params(tmp_path / "x", params, spec, source=None, dtype=np.float32, max_shard_bytes=4000)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    total = 0
    for path in (tmp_path / "x").glob("*.safetensors"):
        arrays = safetensors.numpy.load_file(path)
        assert {index["weight_map"][name] for name in arrays} == {path.name}
        size = sum(array.nbytes for array in arrays.values())
        assert size <= 4000
        total += size
    assert (
        index["metadata"]["total_size"] == total == 4 * sum(x.size for x in jax.tree.leaves(params))
    )


def test_bfloat16_round_trip(spec, params, tmp_path):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    save_params(tmp_path / "x", params, spec, source=None, dtype=jnp.bfloat16)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert_same(load_params(tmp_path / "x", spec, dtype=jnp.bfloat16), narrow)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    assert_same(load_params(tmp_path / "x", spec), widened)


def mesh_of(**sizes):
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}, {"data": 8}, {"tensor": 2}]
)
def test_load_into_shardings(spec, params, source, sizes, dtype):
    layout = shardings(declare(spec), mesh_of(**sizes))
    loaded = load_params(source, spec, shardings=layout, dtype=dtype)
    assert_same(loaded, jax.tree.map(lambda x: x.astype(dtype), params))
    assert jax.tree.map(lambda x: x.sharding, loaded) == layout


def test_load_into_split_layers(spec, params, source, tmp_path):
    """A device that holds one layer reads one layer; the stack is never on the host."""
    split = jax.sharding.NamedSharding(mesh_of(data=3), jax.sharding.PartitionSpec("data"))
    host = jax.sharding.NamedSharding(
        mesh_of(data=3), jax.sharding.PartitionSpec(), memory_kind="pinned_host"
    )
    layout = jax.tree.map(lambda decl: split if decl.stacked else host, declare(spec))
    loaded = load_params(source, spec, shardings=layout)
    assert_same(loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == layout
    save_params(tmp_path / "again", loaded, spec, source=source, dtype=np.float32)
    assert arrays_in(tmp_path / "again") == arrays_in(source)


def arrays_in(directory):
    arrays = {}
    for path in directory.glob("*.safetensors"):
        arrays |= {k: v.tobytes() for k, v in safetensors.numpy.load_file(path).items()}
    return arrays


def test_source_files_are_taken_over(spec, params, source, tmp_path):
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": 7}
    config["torch_dtype"] = config.pop("dtype")  # as transformers 4 writes it
    (source / "config.json").write_text(json.dumps(config))
    for name in COMPANION_FILES:
        (source / name).write_text(f"content of {name}")
    (source / "optimizer.pt").write_text("not for export")
    save_params(tmp_path / "x", params, spec, source=source, dtype=jnp.bfloat16)
    expected = {*COMPANION_FILES, "config.json", "model.safetensors"}
    assert {p.name for p in (tmp_path / "x").iterdir()} == expected
    for name in COMPANION_FILES:
        assert (tmp_path / "x" / name).read_text() == f"content of {name}"
    saved = json.loads((tmp_path / "x" / "config.json").read_text())
    assert saved == config | {"torch_dtype": "bfloat16"}


def test_failed_save_leaves_nothing(spec, params, source, tmp_path, monkeypatch):
    written = []

    def full_disk(descriptor):
        written.append(descriptor)
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_params(tmp_path / "x", params, spec, source=source, dtype=np.float32)
    assert written
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_save_after_a_killed_save(spec, params, source, tmp_path):
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "model-00001-of-00009.safetensors").write_text("half")
    save_params(tmp_path / "x", params, spec, source=source, dtype=np.float32)
    assert_same(load_params(tmp_path / "x", spec), params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "x"]


KILLED = """
import os, signal, sys
import jax, numpy as np
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import init_params
spec = read_spec(sys.argv[1])
left = int(sys.argv[3])
def fsync(descriptor):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
save_params(sys.argv[2], init_params(spec, key=jax.random.key(0)), spec, source=sys.argv[1],
            dtype=np.float32, max_shard_bytes=9000)
"""


def test_killed_save_leaves_nothing_by_that_name(source, spec, params, tmp_path):
    command = [sys.executable, "-c", KILLED, source, tmp_path / "x", "2"]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()
    assert len([*(tmp_path / ".x.partial").glob("*.safetensors")]) == 2
    save_params(tmp_path / "x", params, spec, source=source, dtype=np.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "x"]


def test_saving_holds_one_layer_of_one_array(spec, params, tmp_path, monkeypatch):
    """What is fetched from the devices is never a whole stack, and is let go of before the next."""
    fetched = []
    fetch = np.asarray

    def watched(array, *rest, **more):
        if isinstance(array, jax.Array):
            fetched.append(array.shape)
        return fetch(array, *rest, **more)

    monkeypatch.setattr(np, "asarray", watched)
    save_params(tmp_path / "x", params, spec, source=None, dtype=np.float32)
    sizes = [int(np.prod(shape)) for shape in fetched]
    assert len(sizes) == 3 + spec.layers * len(params["layers"])
    assert sum(sizes) == sum(x.size for x in jax.tree.leaves(params))


def test_save_refuses(spec, params, source, tmp_path):
    def save(directory=tmp_path / "x", params=params, spec=spec, source=source, dtype=np.float32):
        save_params(directory, params, spec, source=source, dtype=dtype)

    with pytest.raises(FileExistsError, match="source exists and is not empty"):
        save(directory=source)
    with pytest.raises(ValueError, match=r"dtype int8; expected one of .'float32', 'bfloat16'"):
        save(dtype=np.int8)
    with pytest.raises(ValueError, match=r"embed: got \(36, 16\), expected \(37, 16\)"):
        save(params=params | {"embed": params["embed"][1:]})
    with pytest.raises(
        ValueError, match=r"(?s)extra: got \(2,\), expected nothing.*head: got nothing"
    ):
        save(params={k: v for k, v in params.items() if k != "head"} | {"extra": jnp.ones(2)})
    with pytest.raises(ValueError, match="the model's spec is not that of its source"):
        save(spec=dataclasses.replace(spec, rope_theta=1e6))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_load_lists_what_does_not_fit(spec, source):
    def spoil(arrays):
        del arrays["model.norm.weight"]
        arrays["model.norm.bias"] = np.ones(16, np.float32)
        arrays[QUERY] = arrays[QUERY].T.copy()
        arrays["lm_head.weight"] = np.ones((37, 16), np.int8)

    edit_arrays(source, spoil)
    with pytest.raises(ValueError, match="does not fit the spec") as error:
        load_params(source, spec)
    assert str(error.value).splitlines()[1:] == [
        "  missing: model.norm.weight",
        "  surplus: model.norm.bias",
        "  unsupported type: lm_head.weight is I8, expected one of ['F32', 'BF16', 'F16']",
        f"  misshapen: {QUERY} is (16, 24), expected (24, 16)",
    ]


def test_saved_rotary_frequencies_are_no_weights(spec, params, source):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_arrays(source, lambda arrays: arrays.update({name: np.ones(3, np.float32)}))
    assert_same(load_params(source, spec), params)


def test_tied_model_may_carry_its_head(spec, params, source):
    tied = dataclasses.replace(spec, tied_embeddings=True)
    assert_same(load_params(source, tied), {k: v for k, v in params.items() if k != "head"})


@pytest.mark.parametrize("with_source", [True, False])
def test_critic_round_trip(spec, params, source, with_source, tmp_path):
    critic, critic_spec = with_value_head(params, spec)
    critic["score"] = critic["score"].at[:, 0].set(jnp.arange(16.0))
    critic["score_bias"] = critic["score_bias"] - 0.1
    origin = source if with_source else None
    save_params(tmp_path / "x", critic, critic_spec, source=origin, dtype=np.float32)
    assert read_spec(tmp_path / "x") == critic_spec
    assert_same(load_params(tmp_path / "x", critic_spec), critic)
    arrays = safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")
    assert "lm_head.weight" not in arrays
    np.testing.assert_array_equal(arrays["score.weight"], np.arange(16.0)[None])
    assert arrays["score.bias"].tolist() == [np.float32(-0.1)]


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_no_critic(spec, source, tied):
    wrong = dataclasses.replace(spec, value_head=True, tied_embeddings=tied)
    with pytest.raises(ValueError, match="does not fit the spec") as error:
        load_params(source, wrong)
    assert str(error.value).splitlines()[1:] == [
        "  missing: score.bias",
        "  missing: score.weight",
        "  surplus: lm_head.weight",
    ]


def test_load_refuses_damaged_files(spec, params, source, tmp_path):
    path = source / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole + b"0", whole[:5], b"", b"x" * 500, whole[8:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or truncated"):
            load_params(source, spec)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors nor model.safe"):
        load_params(source, spec)

    sharded = tmp_path / "x"
    save_params(sharded, params, spec, source=source, dtype=np.float32, max_shard_bytes=9000)
    parts = [sharded / f"model-0000{n}-of-00004.safetensors" for n in (1, 2)]
    names = [set(safetensors.numpy.load_file(part)) for part in parts]
    saved = parts[1].read_bytes()
    parts[1].write_bytes(saved[:-4])
    with pytest.raises(ValueError, match=r"model-00002-of-00004\.safetensors is damaged or trunc"):
        load_params(sharded, spec)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ValueError, match=r"00002.* holds arrays that another file holds too") as e:
        load_params(sharded, spec)
    assert all(name in str(e.value) for name in names[0])
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"do not exist: \['model-00002-of-00004.safetensors'\]"):
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
            assert number % 2 or re.search(r"damaged: .* is not what was written", str(error))
        else:
            assert number % 2, "a byte of an array has changed"
    assert refused > 50


def test_loaded_arrays_can_be_donated(spec, source):
    """Loading makes arrays that a train step may consume, and that never alias each other."""
    layout = shardings(declare(spec), mesh_of(data=2, fsdp=2))
    for where in (None, layout):
        loaded = load_params(source, spec, shardings=where)
        double = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
        doubled = double(loaded)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(loaded))
        again = load_params(source, spec)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), doubled, again)
        for leaf, expected in zip(jax.tree.leaves(doubled), jax.tree.leaves(again), strict=True):
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, 2 * np.asarray(expected)[shard.index])

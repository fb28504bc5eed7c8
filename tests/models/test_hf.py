"""Hugging Face directories without transformers; tests/parity holds the comparison with it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.models.heads import with_value_head
from jaxrl_llm.models.hf import (
    COMPANION_FILES,
    from_hf,
    hf_arrays,
    load_params,
    save_params,
)
from jaxrl_llm.models.hf_config import read_spec
from jaxrl_llm.models.spec import declare
from jaxrl_llm.sharding.rules import shardings

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


def assert_same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, wanted)


def test_conversion_by_loops(spec, params):
    """q_proj.weight[n*H + h, d] is query[layer, d, n, h]; o_proj.weight[d, n*H + h] is output."""
    declared, width = declare(spec)["layers"], spec.head_width
    query, output = (np.asarray(params["layers"][name]) for name in ("query", "output"))
    theirs = dict(hf_arrays(declared["query"], query)) | dict(hf_arrays(declared["output"], output))
    o_proj = theirs["model.layers.2.self_attn.o_proj.weight"]
    for d, n, h in np.ndindex(spec.width, spec.heads, width):
        assert theirs[QUERY][n * width + h, d] == query[1, d, n, h]
        assert o_proj[d, n * width + h] == output[2, n, h, d]
    np.testing.assert_array_equal(from_hf(declared["query"], theirs[QUERY]), query[1])


def test_conversion_is_traceable(spec, params):
    decl = declare(spec)["layers"]["down"]
    traced = jax.jit(lambda x: dict(hf_arrays(decl, x)))(params["layers"]["down"])
    plain = dict(hf_arrays(decl, np.asarray(params["layers"]["down"])))
    assert traced.keys() == plain.keys()
    jax.tree.map(np.testing.assert_array_equal, traced, plain)


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


def test_load_into_shardings(spec, params, source):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = shardings(declare(spec), mesh)
    loaded = load_params(source, spec, shardings=layout)
    assert_same(loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == layout


def test_source_files_are_taken_over(spec, params, source, tmp_path):
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": 7}
    config["torch_dtype"] = config.pop("dtype")  # as transformers 4 writes it
    (source / "config.json").write_text(json.dumps(config))
    for name in COMPANION_FILES:
        (source / name).write_text(f"content of {name}")
    (source / "optimizer.pt").write_text("not for export")
    save_params(tmp_path / "x", params, spec, source=source, dtype=jnp.bfloat16)
    wanted = {*COMPANION_FILES, "config.json", "model.safetensors"}
    assert {p.name for p in (tmp_path / "x").iterdir()} == wanted
    for name in COMPANION_FILES:
        assert (tmp_path / "x" / name).read_text() == f"content of {name}"
    saved = json.loads((tmp_path / "x" / "config.json").read_text())
    assert saved == config | {"torch_dtype": "bfloat16"}


def test_failed_save_leaves_nothing(spec, params, source, tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_params(tmp_path / "x", params, spec, source=source, dtype=np.float32)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_save_after_a_killed_save(spec, params, source, tmp_path):
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "model-00001-of-00009.safetensors").write_text("half")
    save_params(tmp_path / "x", params, spec, source=source, dtype=np.float32)
    assert_same(load_params(tmp_path / "x", spec), params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "x"]


def test_save_refuses(spec, params, source, tmp_path):
    def save(directory=tmp_path / "x", params=params, spec=spec, source=source, dtype=np.float32):
        save_params(directory, params, spec, source=source, dtype=dtype)

    with pytest.raises(FileExistsError, match="source exists and is not empty"):
        save(directory=source)
    with pytest.raises(ValueError, match=r"dtype int8; wanted one of .'float32', 'bfloat16'"):
        save(dtype=np.int8)
    with pytest.raises(ValueError, match=r"embed: got \(36, 16\), wanted \(37, 16\)"):
        save(params=params | {"embed": params["embed"][1:]})
    with pytest.raises(
        ValueError, match=r"(?s)extra: got \(2,\), wanted nothing.*head: got nothing"
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
        "  unsupported type: lm_head.weight is I8, wanted one of ['F32', 'BF16', 'F16']",
        f"  misshapen: {QUERY} is (16, 24), wanted (24, 16)",
    ]


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
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or truncated"):
        load_params(source, spec)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors nor model.safe"):
        load_params(source, spec)

    sharded = tmp_path / "x"
    save_params(sharded, params, spec, source=source, dtype=np.float32, max_shard_bytes=9000)
    (sharded / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(ValueError, match=r"do not exist: \['model-00002-of-00004.safetensors'\]"):
        load_params(sharded, spec)


def test_loaded_arrays_can_be_donated(spec, source):
    """Loading makes arrays that a train step may consume, and that never alias the file."""
    loaded = load_params(source, spec)
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(loaded)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(loaded))
    again = load_params(source, spec)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), doubled, again)

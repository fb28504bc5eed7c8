"""Arrays of ours that are parts of one in a checkpoint, and experts in both forms."""

import dataclasses
import itertools
import json
import math
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.arrays import NORMAL, ArrayDecl, HfPart
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.config import make_config
from jaxrl_llm.models.hf.fp8 import blocked_host_arrays, is_blocked, quantize_blocks
from jaxrl_llm.models.hf.load import from_hf, hf_entries, load_arrays, load_params, part_from_hf
from jaxrl_llm.models.hf.save import (
    host_arrays,
    join_parts,
    joined,
    save_arrays,
    save_params,
    to_hf,
)
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.vllm.engine import WeightBuffer
from jaxrl_llm.sharding.layout import shardings
from tests.specs import tiny_spec

DELTA = DeltaSpec(key_heads=2, value_heads=4, key_width=3, value_width=5)
HYBRID = {
    "layers": 4,
    "delta": DELTA,
    "delta_layers": (True, True, False, True),
    "gated_attention": True,
    "qkv_bias": True,
}


def part(name, shape, axes, hf_axes, hf_part=None):
    groups = tuple(tuple(group.split("*")) for group in hf_axes.split())
    return ArrayDecl(
        shape=shape,
        axes=tuple(axes.split()),
        initializer=NORMAL,
        hf_name=name,
        hf_axes=groups,
        hf_part=hf_part,
    )


@st.composite
def layouts(draw):
    """Draw how arrays make up one: of any order of axes, side by side or taking turns."""
    letters = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
    sizes = {letter: draw(st.integers(1, 4)) for letter in letters}
    cuts = draw(st.sets(st.integers(1, 3), max_size=2))
    bounds = sorted({0, len(letters), *(cut for cut in cuts if cut < len(letters))})
    groups = [letters[i:j] for i, j in itertools.pairwise(bounds)]
    group = draw(st.sampled_from(groups))
    first = draw(st.integers(0, len(group) - 1))
    axes = group[first : draw(st.integers(first + 1, len(group)))]
    count, take_turns = draw(st.integers(1, 3)), draw(st.booleans())
    widths = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    widths = [widths[0]] * count if take_turns else widths
    inner = math.prod(sizes[axis] for axis in axes[1:])
    total, start, parts = sum(widths) * inner, 0, []
    for number, width in enumerate(widths):
        order = draw(st.permutations(letters))
        shape = [(sizes | {axes[0]: width})[axis] for axis in order]
        where = (number, total, count) if take_turns else (start, total, 1)
        parts.append((shape, order, axes, where))
        start += width * inner
    return groups, draw(st.permutations(parts)), draw(st.lists(st.floats(0, 0.99), min_size=8))


@settings(deadline=None, max_examples=100)
@given(layouts())
def test_joining_undoes_splitting(layout):
    groups, described, shares = layout
    hf_axes = " ".join(map("*".join, groups))
    parts = [
        part("x", tuple(shape), " ".join(order), hf_axes, HfPart(tuple(axes), *where))
        for shape, order, axes, where in described
    ]
    shape = parts[0].hf_shape
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    ours = [from_hf(decl, whole) for decl in parts]
    assert [x.shape for x in ours] == [decl.shape for decl in parts]
    assert all(np.shares_memory(x, whole) for x in ours)  # nothing is copied that is not asked for
    assert sum(x.size for x in ours) == whole.size
    np.testing.assert_array_equal(join_parts(parts, map(to_hf, parts, ours)), whole)
    for decl, own in zip(parts, ours, strict=True):
        starts = [int(share * size) for share, size in zip(shares, decl.shape, strict=False)]
        lengths = [n - i for i, n in zip(starts, decl.shape, strict=True)]
        ends = [
            i + 1 + int(u * (n - 1)) for i, n, u in zip(starts, lengths, shares[4:], strict=False)
        ]
        chosen = tuple(map(slice, starts, ends))
        entries = hf_entries(decl, chosen)
        assert all((np.diff(x) > 0).all() for x in entries)
        some = part_from_hf(decl, chosen, whole[np.ix_(*entries)])
        np.testing.assert_array_equal(some, own[chosen])


def test_parts_by_loops():
    """Of each head q | gate, gate and up in turns, and beta and decay by key head."""
    heads, width, embed = 3, 2, 4
    query, gate = (
        part("q", (embed, heads, width), "d n h", "n*h d", HfPart(("h",), start, 2 * width))
        for start in (0, width)
    )
    rng = np.random.default_rng(0)
    q, g = rng.normal(size=(2, embed, heads, width))
    whole = join_parts([gate, query], [to_hf(gate, g), to_hf(query, q)])
    for n, h, d in np.ndindex(heads, width, embed):
        assert whole[n * 2 * width + h, d] == q[d, n, h]
        assert whole[n * 2 * width + width + h, d] == g[d, n, h]
    gate, up = (
        part("e", (2, embed, 5), "e d f", "e d f", HfPart(("f",), start, 10, 2)) for start in (0, 1)
    )
    a, b = rng.normal(size=(2, 2, embed, 5))
    whole = join_parts([gate, up], [to_hf(gate, a), to_hf(up, b)])
    np.testing.assert_array_equal(whole[..., ::2], a)
    np.testing.assert_array_equal(whole[..., 1::2], b)
    traced = jax.jit(lambda a, b: join_parts([gate, up], [to_hf(gate, a), to_hf(up, b)]))(a, b)
    np.testing.assert_array_equal(traced, whole.astype(np.float32))


def test_parts_that_are_missing_or_overlap_are_refused():
    first, second, other = (
        part("q", (4, 3), "d f", "f d", HfPart(("f",), start, total))
        for start, total in ((0, 6), (3, 6), (0, 7))
    )
    x = np.ones((3, 4))
    with pytest.raises(ValueError, match="q: its parts make up 3 of 6 entries, and 0 of them more"):
        join_parts([first], [x])
    with pytest.raises(ValueError, match="make up 3 of 6 entries, and 3 of them more than once"):
        join_parts([first, first], [x, x])
    with pytest.raises(ValueError, match="q: its parts are of different arrays"):
        join_parts([first, other], [x, x])
    with pytest.raises(ValueError, match="make up 3 of 6"):
        joined([(first, x, None)])
    with pytest.raises(ValueError, match=r"q: its parts have the dtypes \['bfloat16', 'float32'\]"):
        joined([(first, x, "float32"), (second, x, "bfloat16")])


def test_a_model_with_joined_arrays_is_saved_and_loaded(draw, tmp_path):
    """Also into a mesh that splits heads, whose parts lie apart in the files."""
    spec = tiny_spec(**HYBRID, heads=4, kv_heads=2, hidden_size=8)
    params = draw(spec)
    save_arrays(tmp_path / "x", params, declare(spec), config=None, source=None, dtype=np.float32)
    stored = load_file(tmp_path / "x" / "model.safetensors")
    width = spec.head_dim
    heads = stored["model.layers.2.self_attn.q_proj.weight"].reshape(spec.heads, 2, width, -1)
    for n in range(spec.heads):
        for i, name in enumerate(("query", "attention_gate")):
            ours = params["layers"][name][0, :, n]
            np.testing.assert_array_equal(heads[n, i], ours.T)
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=types)
    for layout in (None, shardings(declare(spec), mesh)):
        loaded = load_params(tmp_path / "x", spec, shardings=layout)
        chex.assert_trees_all_equal(loaded, params)


def test_joined_arrays_in_blocks_of_float8(draw):
    """Blocks are those of the whole; what a DeltaNet has stays as it is."""
    spec = tiny_spec(**HYBRID, heads=2, kv_heads=1, head_dim=130, hidden_size=12)
    params = draw(spec)
    leaves = [
        (decl, leaf, np.dtype(np.float32))
        for decl, leaf in zip(jax.tree.leaves(declare(spec)), jax.tree.leaves(params), strict=True)
    ]
    plain = dict(host_arrays(leaves))
    on_host = [(decl, np.asarray(leaf), kind) for decl, leaf, kind in leaves]
    arrays = dict(blocked_host_arrays(leaves))
    chex.assert_trees_all_equal(arrays, dict(blocked_host_arrays(on_host)))
    scaled = {name.removesuffix("_scale_inv") for name in arrays if name.endswith("_scale_inv")}
    assert "model.layers.2.self_attn.q_proj.weight" in scaled
    assert not any("linear_attn" in name for name in scaled)
    for name, x in plain.items():
        if name in scaled:
            values, scale = map(np.asarray, quantize_blocks(jnp.asarray(x)))
            np.testing.assert_array_equal(arrays[name], values)
            np.testing.assert_allclose(arrays[f"{name}_scale_inv"], scale, rtol=1e-6)
        else:
            np.testing.assert_array_equal(arrays[name], x)


@pytest.mark.parametrize("quantized", [False, True])
def test_the_push_to_vllm_lays_joined_arrays_out(draw, quantized):
    spec = tiny_spec(**HYBRID)
    params = draw(spec)
    buffer = WeightBuffer(spec, "bfloat16", quantized=quantized)
    try:
        for _ in buffer.write(params, 1):
            pass
        entries = {entry.name: entry for entry in buffer.entries}
        assert len(entries) == len(buffer.entries)
        q = entries["model.layers.2.self_attn.q_proj.weight"]
        assert q.shape == (2 * spec.heads * spec.head_dim, spec.hidden_size)
        assert q.dtype == ("float8_e4m3fn" if quantized else "bfloat16")
        assert entries["model.layers.0.linear_attn.in_proj_qkv.weight"].dtype == "bfloat16"
        assert entries["model.layers.0.linear_attn.A_log"].dtype == "float32"
    finally:
        buffer.close()


def test_only_one_part_is_held_besides_the_whole(draw):
    """The parts of a layer are fetched one after the other, and let go of."""
    spec = tiny_spec(layers=2, moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6))
    declared, params = fused(declare(spec)["layers"]), draw(spec)["layers"]
    fetched, held = [], []

    class Watched(np.ndarray):
        def __getitem__(self, layer):
            held.append(sum(ref() is not None for ref in fetched))
            one = np.array(np.ndarray.__getitem__(self.view(np.ndarray), layer))
            fetched.append(weakref.ref(one))
            return one

    leaves = [
        (declared[name], np.asarray(params[name]).view(Watched), None)
        for name in ("expert_gate", "expert_up")
    ]
    for layer, (name, whole) in enumerate(host_arrays(leaves)):
        assert name == f"model.layers.{layer}.mlp.experts.gate_up_proj"
        gate, up = (np.asarray(params[name][layer]) for name in ("expert_gate", "expert_up"))
        np.testing.assert_array_equal(whole, np.concatenate([gate, up], 2).swapaxes(1, 2))
    assert held == [0] * 4


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


def test_experts_are_loaded_in_both_forms(draw, tmp_path):
    spec = tiny_spec(layers=2, moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6))
    params, apart = draw(spec), declare(spec)
    together = apart | {"layers": fused(apart["layers"])}
    save_params(tmp_path / "apart", params, spec, source=None, dtype=np.float32)
    save_arrays(tmp_path / "together", params, together, config=None, source=None, dtype=np.float32)
    stored = load_file(tmp_path / "together" / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 12, spec.hidden_size)
    assert stored["model.layers.1.mlp.experts.down_proj"].shape == (4, spec.hidden_size, 6)
    for directory in ("apart", "together"):
        for declared in (apart, together):
            loaded = load_arrays(tmp_path / directory, declared)
            chex.assert_trees_all_equal(loaded, params)
    (tmp_path / "together" / "config.json").write_text(json.dumps(make_config(spec)))
    save_params(tmp_path / "x", params, spec, source=tmp_path / "together", dtype=np.float32)
    again = load_file(tmp_path / "x" / "model.safetensors")
    chex.assert_trees_all_equal(again, stored)  # in the form of its source
    del stored["model.layers.0.mlp.experts.gate_up_proj"]
    stored["model.layers.1.mlp.experts.0.up_proj.weight"] = np.ones((6, 4), np.float32)
    save_file(stored, tmp_path / "together" / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.mlp\.experts\.0\.") as error:
        load_arrays(tmp_path / "together", apart)
    assert "surplus: model.layers.1.mlp.experts.gate_up_proj" in str(error.value)


def test_which_matrices_are_in_blocks():
    spec = tiny_spec(**HYBRID, moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6))
    declared = declare(spec)
    blocked = {
        name for stack in spec.stacks for name, d in declared[stack].items() if is_blocked(d)
    }
    assert blocked == {
        *("query", "key", "value", "output", "attention_gate"),
        *("expert_gate", "expert_up", "expert_down"),
    }

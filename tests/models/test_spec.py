import dataclasses
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.arrays import NORMAL, ArrayDecl
from jaxrl_llm.models.parameters import declare, init_params, parameter_count
from jaxrl_llm.sharding.layout import shardings


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_spec_is_a_static_argument(spec):
    traces = []

    def scale(spec, x):
        traces.append(spec)
        return spec.hidden_size * x

    jitted = jax.jit(scale, static_argnums=0)
    assert jitted(spec, 1.0) == jitted(dataclasses.replace(spec), 1.0) == 16
    assert jitted(dataclasses.replace(spec, hidden_size=8), 1.0) == 8
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "kv_heads must divide heads, got heads=3, kv_heads=2"),
        ({"head_dim": 5}, "head_dim must be even .* got 5"),
        ({"head_dim": 8, "rotary_fraction": 0.4}, "got 8, of which 3 are rotated"),
        ({"head_dim": 8, "rotary_fraction": 1.5}, "got 8, of which 12 are rotated"),
        ({"activation": "relu"}, "activation 'relu'; expected one of"),
        ({"window": 2, "windowed_layers": (True,)}, "1 entries for 3 layers"),
        ({"windowed_layers": (True, False, True)}, "needs a window and both kinds"),
        ({"window": 2, "windowed_layers": (True,) * 3}, "needs a window and both kinds"),
        ({"local_rope_theta": 1e4}, "local_rope_theta needs windowed_layers"),
        ({"rotary_layers": (True, False)}, "one entry for each of the 3 layers"),
        ({"rotary_layers": (True,) * 3}, "leave it out where all are rotated"),
        ({"pre_norms": False}, "needs pre_norms or post_norms"),
        ({"qk_norm": False, "whole_qk_norm": True}, "whole_qk_norm says over what"),
        ({"score_softcap": 0.0}, r"must be positive, got \{'score_softcap': 0.0"),
        ({"layers": 0, "norm_eps": -1.0}, r"must be positive, got \{'layers': 0, 'norm_eps': -1"),
    ],
)
def test_spec_refuses(spec, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(spec, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (2, 8)}, "one per dimension"),
        ({"axes": ("layers", "embed", "embed")}, "must be different"),
        ({"hf_axes": (("heads",),)}, "must stand once"),
        ({"hf_name": "q.weight"}, "must stand once"),
    ],
)
def test_declaration_refuses(changes, message):
    good = dict(
        shape=(2, 8, 4),
        axes=("layers", "embed", "heads"),
        initializer=NORMAL,
        hf_name="{layers}.q.weight",
        hf_axes=(("heads",), ("embed",)),
    )
    ArrayDecl(**good)
    with pytest.raises(ValueError, match=message):
        ArrayDecl(**good | changes)


def test_initialize_follows_the_declarations(spec):
    declared = paths(declare(spec))
    abstract = partial(init_params, spec, key=jax.random.key(0), dtype=jnp.bfloat16)
    drawn = paths(jax.eval_shape(abstract))
    assert {k: v.shape for k, v in drawn.items()} == {k: v.shape for k, v in declared.items()}
    assert {v.dtype for v in drawn.values()} == {jnp.dtype(jnp.bfloat16)}
    assert sum(v.size for v in drawn.values()) == parameter_count(spec)


def test_parameter_count_by_hand(spec):
    v, d, h, f = 37, 16, 6, 20
    layer = d * 4 * h * 2 + d * 2 * h * 2 + 3 * d * f + 2 * d + 2 * h
    assert parameter_count(spec) == 2 * v * d + 3 * layer + d
    tied = dataclasses.replace(spec, tied_embeddings=True, qk_norm=False)
    assert parameter_count(tied) == v * d + 3 * (layer - 2 * h) + d
    assert "head" not in declare(tied)
    for other in (spec, dataclasses.replace(spec, tied_embeddings=True)):
        critic = dataclasses.replace(other, value_head=True)
        assert parameter_count(critic) == v * d + 3 * layer + d + d + 1
        assert "head" not in declare(critic)


def test_optional_arrays_by_hand(spec):
    rich = dataclasses.replace(
        spec, qkv_bias=True, output_bias=True, mlp_bias=True, post_norms=True
    )
    d, h, f = 16, 6, 20
    biases = (4 + 2 + 2) * h + d + 2 * f + d
    assert parameter_count(rich) == parameter_count(spec) + 3 * (biases + 2 * d)
    layers = declare(rich)["layers"]
    names = {
        ours: decl.hf_name.removeprefix("model.layers.{layers}.") for ours, decl in layers.items()
    }
    assert names["mlp_norm"] == "pre_feedforward_layernorm.weight"
    assert names["attention_post_norm"] == "post_attention_layernorm.weight"
    assert names["query_bias"] == "self_attn.q_proj.bias"
    assert layers["query_bias"].hf_shape == (24,)
    assert len(set(names.values())) == len(names)


def test_initial_norms_with_unit_offset(spec):
    drawn = init_params(dataclasses.replace(spec, unit_offset_norms=True), key=jax.random.key(0))
    for name, array in paths(drawn).items():
        if "norm" in name:
            np.testing.assert_array_equal(array, 0.0)


def test_a_stack_numbers_its_layers_from_its_first():
    decl = ArrayDecl(
        shape=(2, 4),
        axes=("layers", "norm"),
        initializer=NORMAL,
        hf_name="{layers}.norm",
        hf_axes=(("norm",),),
        layer_numbers=(3, 4),
    )
    assert list(decl.hf_indices()) == [("3.norm", (0,)), ("4.norm", (1,))]


def test_initial_value_head(spec):
    critic = init_params(dataclasses.replace(spec, value_head=True), key=jax.random.key(0))
    assert critic["score"].shape == (16, 1)
    np.testing.assert_allclose(float(critic["score"].std()), 0.02, rtol=0.5)
    assert critic["score_bias"].tolist() == [0.0]


def test_initial_values(spec):
    for name, array in paths(init_params(spec, key=jax.random.key(0))).items():
        if "norm" in name:
            np.testing.assert_array_equal(array, 1.0)
        else:
            spread = 4 * 0.02 / math.sqrt(array.size)
            assert abs(float(array.mean())) < spread, name
            np.testing.assert_allclose(float(array.std()), 0.02, rtol=0.2, err_msg=name)


def test_initial_values_depend_on_key_and_path_only(spec):
    drawn = init_params(spec, key=jax.random.key(0))["layers"]
    other_key = init_params(spec, key=jax.random.key(1))["layers"]
    other_spec = dataclasses.replace(spec, qk_norm=False, tied_embeddings=True)
    other_arrays = init_params(other_spec, key=jax.random.key(0))["layers"]
    np.testing.assert_array_equal(drawn["gate"], other_arrays["gate"])
    assert not np.array_equal(drawn["gate"], other_key["gate"])
    assert not np.array_equal(drawn["gate"], drawn["up"])


def test_initial_values_do_not_depend_on_the_mesh(spec):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = shardings(declare(spec), mesh)

    def some(tree):  # to compile all takes half a second for each
        return {"embed": tree["embed"], "query": tree["layers"]["query"]}

    def draw(key):
        return some(init_params(spec, key=key))

    sharded = jax.jit(draw, out_shardings=some(layout))(jax.random.key(0))
    assert sharded["query"].sharding.spec == jax.P(None, "fsdp", "tensor", None)
    chex.assert_trees_all_equal(sharded, jax.jit(draw)(jax.random.key(0)))

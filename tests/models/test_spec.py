import dataclasses
import math

import chex
import jax
import numpy as np
import pytest

from jaxrl_llm.models.parameters import declare, init_params
from jaxrl_llm.sharding.layout import (
    DEFAULT_RULES,
    Fallback,
    fallbacks,
    make_mesh,
    partition_spec,
    shardings,
)


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


REFUSED = [
    ({"heads": 3}, "kv_heads"),
    ({"head_dim": 8, "rotary_fraction": 0.4}, "8"),
    ({"activation": "relu"}, "activation"),
    ({"window": 2, "windowed_layers": (True,)}, "2 layers"),
    ({"windowed_layers": (True, False)}, "window"),
    ({"local_rope_theta": 1e4}, "local_rope_theta"),
    ({"score_softcap": 0.0}, "score_softcap"),
    ({"layers": 0, "norm_eps": -1.0}, "layers.*norm_eps"),
]


def test_specs_that_do_not_fit_are_refused(spec):
    for changes, named in REFUSED:
        with pytest.raises(ValueError, match=named):
            dataclasses.replace(spec, **changes)


def test_initial_values(spec):
    """They depend on the key and on an array's path only."""
    drawn = paths(init_params(spec, key=jax.random.key(0)))
    declared = paths(declare(spec))
    assert {k: v.shape for k, v in drawn.items()} == {k: v.shape for k, v in declared.items()}
    for name, array in drawn.items():
        if "norm" in name:
            np.testing.assert_array_equal(array, 1.0)
        else:
            spread = 4 * 0.02 / math.sqrt(array.size)
            assert abs(float(array.mean())) < spread, name
            np.testing.assert_allclose(float(array.std()), 0.02, rtol=0.2, err_msg=name)
    other_key = paths(init_params(spec, key=jax.random.key(1)))
    other_spec = dataclasses.replace(
        spec, qk_norm=False, value_head=True, unit_offset_norms=True, qkv_bias=True
    )
    others = paths(init_params(other_spec, key=jax.random.key(0)))
    np.testing.assert_array_equal(drawn["layers/gate"], others["layers/gate"])
    assert not np.array_equal(drawn["layers/gate"], other_key["layers/gate"])
    assert not np.array_equal(drawn["layers/gate"], drawn["layers/up"])
    assert not any(np.any(others[name]) for name in others if "norm" in name or "bias" in name)
    assert others["score"].shape == (16, 1)
    np.testing.assert_allclose(float(others["score"].std()), 0.02, rtol=0.5)


def test_initial_values_do_not_depend_on_the_mesh(spec):
    layout = shardings(declare(spec), make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4]))

    def some(tree):  # to compile all takes half a second for each
        return {"embed": tree["embed"], "query": tree["layers"]["query"]}

    def draw(key):
        return some(init_params(spec, key=key))

    sharded = jax.jit(draw, out_shardings=some(layout))(jax.random.key(0))
    assert sharded["query"].sharding.spec == jax.P(None, "fsdp", "tensor", None)
    chex.assert_trees_all_equal(sharded, jax.jit(draw)(jax.random.key(0)))


# ------------------------------------------------------------------------------------------ rules


def abstract_mesh(**axes):
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))


def test_partitions_by_hand():
    mesh = abstract_mesh(data=2, fsdp=2, tensor=2)
    heads = ("layers", "embed", "kv_heads", "head_dim")
    for axes, shape, expected in (
        (("vocab", "embed"), (40, 16), ("tensor", "fsdp")),
        (heads, (3, 16, 2, 6), (None, "fsdp", "tensor", None)),
        (("layers", "norm"), (3, 16), (None, None)),
        (("embed", "label"), (16, 1), ("fsdp", None)),
    ):
        assert partition_spec(axes, DEFAULT_RULES, mesh, shape) == (jax.P(*expected), ())


def test_indivisible_dimension_stays_whole_and_is_reported():
    """And an axis of one device is left out of a product."""
    mesh = abstract_mesh(data=2, fsdp=2, tensor=4)
    spec, missed = partition_spec(("embed", "kv_heads"), DEFAULT_RULES, mesh, (16, 2))
    assert spec == jax.P("fsdp", None)
    assert missed == (Fallback("kv_heads", 2, ("tensor",), 4),)
    both = {"vocab": ("data", "fsdp")}
    spec, missed = partition_spec(("vocab",), both, mesh, (2,))
    assert spec == jax.P("data")
    assert missed == (Fallback("vocab", 2, ("data", "fsdp"), 4),)
    mesh = abstract_mesh(data=1, fsdp=4)
    assert partition_spec(("vocab",), both, mesh, (8,)) == (jax.P("fsdp"), ())


def test_fallbacks_name_the_arrays(spec):
    spec = dataclasses.replace(spec, vocab_size=37)
    by_array = fallbacks(declare(spec), abstract_mesh(fsdp=2, tensor=4))
    assert by_array.keys() == {"embed", "head", "layers/key", "layers/value"}
    assert by_array["layers/key"] == (Fallback("kv_heads", 2, ("tensor",), 4),)
    assert by_array["embed"] == (Fallback("vocab", 37, ("tensor",), 4),)

"""The rules table: hand-checked partitions, and fallbacks that are reported."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.models.parameters import declare
from jaxrl_llm.sharding.layout import DEFAULT_RULES, Fallback, fallbacks, partition_spec, shardings


def abstract_mesh(**axes):
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("vocab", "embed"), (40, 16), ("tensor", "fsdp")),
        (
            ("layers", "embed", "kv_heads", "head_dim"),
            (3, 16, 2, 6),
            (None, "fsdp", "tensor", None),
        ),
        (("layers", "norm"), (3, 16), (None, None)),
        (("embed", "label"), (16, 1), ("fsdp", None)),
    ],
)
def test_partitions_by_hand(axes, shape, expected):
    mesh = abstract_mesh(data=2, fsdp=2, tensor=2)
    assert partition_spec(axes, DEFAULT_RULES, mesh, shape) == (jax.P(*expected), ())


def test_a_mesh_axis_of_one_device_is_left_out_of_a_product():
    mesh = abstract_mesh(data=1, fsdp=4)
    spec, missed = partition_spec(("vocab",), {"vocab": ("data", "fsdp")}, mesh, (8,))
    assert spec == jax.P("fsdp")
    assert not missed


def test_indivisible_dimension_stays_whole_and_is_reported():
    mesh = abstract_mesh(data=2, fsdp=2, tensor=4)
    spec, missed = partition_spec(("embed", "kv_heads"), DEFAULT_RULES, mesh, (16, 2))
    assert spec == jax.P("fsdp", None)
    assert missed == (Fallback("kv_heads", 2, ("tensor",), 4),)
    spec, missed = partition_spec(("vocab",), {"vocab": ("data", "fsdp")}, mesh, (2,))
    assert spec == jax.P("data")
    assert missed == (Fallback("vocab", 2, ("data", "fsdp"), 4),)


def test_fallbacks_name_the_arrays(spec):
    by_array = fallbacks(declare(spec), abstract_mesh(fsdp=2, tensor=4))
    assert by_array.keys() == {"embed", "head", "layers/key", "layers/value"}
    assert by_array["layers/key"] == (Fallback("kv_heads", 2, ("tensor",), 4),)
    assert by_array["embed"] == (Fallback("vocab", 37, ("tensor",), 4),)


def test_shardings_place_arrays(spec, params):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = shardings(declare(spec), mesh)
    placed = jax.device_put(params, layout)
    gate = placed["layers"]["gate"]
    assert gate.addressable_shards[0].data.shape == (3, 8, 10)
    np.testing.assert_array_equal(gate, params["layers"]["gate"])
    critic = declare(dataclasses.replace(spec, value_head=True))
    assert shardings(critic, mesh)["score"].spec == jax.P("fsdp", None)
    assert shardings(critic, mesh)["score_bias"].is_fully_replicated
    whole = shardings(declare(spec), mesh, dict.fromkeys(DEFAULT_RULES))
    assert whole["layers"]["gate"].is_fully_replicated


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, r"no rule for the logical axis 'ff'; rules exist for \['embed'\]"),
        ({"ff": "tenser"}, r"rule for 'ff' names the mesh axes \['tenser'\]; the mesh axes are"),
        ({"ff": ("data", "fsdp")}, "'fsdp' is claimed by both 'ff' and 'embed'"),
    ],
)
def test_refuses(rules, message):
    mesh = abstract_mesh(data=2, fsdp=2)
    declarations = {"down": SimpleNamespace(axes=("ff", "embed"), shape=(4, 4))}
    with pytest.raises(ValueError, match=message):
        fallbacks(declarations, mesh, {"embed": "fsdp"} | rules)

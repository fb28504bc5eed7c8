import math

import jax
import numpy as np
import pytest

from jaxrl_llm.sharding.layout import AXES, BATCH, batch_shards, make_mesh, over_batch, replicated


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": -1}, {"data": 8}),
        ({"fsdp": -1, "tensor": 4}, {"fsdp": 2, "tensor": 4}),
        ({"data": 8, "tensor": -1}, {"data": 8}),
        ({"stage": 2, "expert": 2, "context": -1}, {"stage": 2, "expert": 2, "context": 2}),
    ],
)
def test_sizes_fill_the_devices(sizes, expected):
    mesh = make_mesh(sizes)
    assert mesh.shape == dict.fromkeys(AXES, 1) | expected
    assert list(mesh.devices.ravel()) == jax.devices()
    assert batch_shards(mesh) == math.prod(expected.get(axis, 1) for axis in BATCH)


def test_axes_are_left_to_the_compiler():
    """jax's own default differs between versions."""
    assert all(kind == jax.sharding.AxisType.Auto for kind in make_mesh({"data": -1}).axis_types)


def test_sizes_that_do_not_fit_are_refused():
    for sizes, asked in (
        ({"data": 3}, "data=3"),
        ({"data": 3, "fsdp": -1}, "data=3, fsdp=-1"),
        ({"data": 16}, "data=16"),
        ({"data": -1, "fsdp": -1}, "data=-1, fsdp=-1"),
        ({"data": 0, "fsdp": -1}, "data=0, fsdp=-1"),
        ({"data": -8, "fsdp": -1}, "data=-8, fsdp=-1"),
        ({"pipeline": 2, "data": 4}, "pipeline"),
    ):
        with pytest.raises(ValueError, match=asked):
            make_mesh(sizes)


def test_layouts():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    x = np.arange(16.0).reshape(8, 2)
    split = jax.device_put(x, over_batch(mesh))
    assert {shard.data.shape for shard in split.addressable_shards} == {(2, 2)}
    for shard in split.addressable_shards:
        _, _, data, fsdp, _, _ = np.argwhere(mesh.devices == shard.device)[0]
        np.testing.assert_array_equal(shard.data, x[2 * (2 * data + fsdp) :][:2])
    whole = jax.device_put(x, replicated(mesh))
    assert {shard.data.shape for shard in whole.addressable_shards} == {(8, 2)}

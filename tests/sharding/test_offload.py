import contextlib
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.sharding.layout import make_mesh, replicated
from jaxrl_llm.sharding.reshard import to_device, to_host


@pytest.fixture
def tree():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    rng = np.random.default_rng(0)
    matrix, halves = rng.normal(size=(4, 8, 6)).astype(np.float32), rng.normal(size=(8, 4))
    return {
        "matrix": jax.device_put(matrix, NamedSharding(mesh, P(None, "fsdp", "tensor"))),
        "halves": jax.device_put(jnp.asarray(halves, jnp.bfloat16), NamedSharding(mesh, P("data"))),
        "count": jax.device_put(jnp.int32(7), replicated(mesh)),
    }


def test_there_and_back(tree):
    values = jax.device_get(tree)
    layouts = jax.tree.map(lambda x: x.sharding, tree)
    held = to_host(tree)
    assert all(x.is_deleted() for x in tree.values())
    for name, array in held.items():
        assert array.sharding == layouts[name].with_memory_kind("pinned_host")
        assert all(s.data.sharding.memory_kind == "pinned_host" for s in array.addressable_shards)
    back = to_device(held)
    assert all(x.is_deleted() for x in held.values())
    for name, array in back.items():
        assert array.sharding.memory_kind == "device"
        assert array.sharding.is_equivalent_to(layouts[name], array.ndim)
        assert array.dtype == values[name].dtype
        np.testing.assert_array_equal(np.asarray(array), values[name])


def test_what_is_there_already_stays(tree):
    assert to_device(tree)["matrix"] is tree["matrix"]
    held = to_host(tree)
    assert to_host(held)["matrix"] is held["matrix"]
    assert not held["matrix"].is_deleted()


def test_a_way_back_compiles_nothing_new(tree):
    """A step compiled for an array takes the array that was away."""
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t))
    step(tree)
    tree = to_device(to_host(tree))
    with contextlib.closing(CompileCounter()) as counter:
        step(tree)
        step(to_device(to_host(tree)))
        assert counter.count == 0


def test_devices_without_host_memory_are_named(tree, monkeypatch):
    device = SimpleNamespace(
        device_kind="abacus",
        platform="wood",
        addressable_memories=lambda: [SimpleNamespace(kind="beads")],
    )
    module = sys.modules["jaxrl_llm.sharding.reshard"]  # the package has a function of its name
    monkeypatch.setattr(module, "_a_device", lambda layout: device)
    with pytest.raises(NotImplementedError, match=r"abacus.*beads"):
        to_host(tree)

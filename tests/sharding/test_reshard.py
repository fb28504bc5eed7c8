import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.metrics import CompileCounter
from jaxrl_llm.sharding.mesh import make_mesh, replicated
from jaxrl_llm.sharding.reshard import cast, checksum, reshard


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 4, "tensor": 2})


@pytest.fixture
def tree(mesh):
    rng = np.random.default_rng(0)
    return {
        "matrix": jax.device_put(
            rng.normal(size=(8, 6)).astype(np.float32), NamedSharding(mesh, P("fsdp", "tensor"))
        ),
        "steps": jax.device_put(np.arange(4, dtype=np.int32), replicated(mesh)),
    }


def target(mesh):
    return {"matrix": NamedSharding(mesh, P("tensor", None)), "steps": replicated(mesh)}


def assert_arrived(found, tree, layout):
    for name, array in tree.items():
        assert found[name].sharding.is_equivalent_to(layout[name], array.ndim)
        np.testing.assert_array_equal(found[name], array)


def test_moves_within_a_mesh(tree, mesh):
    assert_arrived(reshard(tree, target(mesh)), tree, target(mesh))


def test_one_layout_for_all(tree, mesh):
    layout = replicated(mesh)
    assert_arrived(reshard(tree, layout), tree, dict.fromkeys(tree, layout))


@pytest.mark.parametrize("devices", [slice(0, 1), slice(0, 4), slice(4, 8)])
def test_moves_to_other_devices(tree, devices):
    other = make_mesh({"fsdp": -1}, jax.devices()[devices])
    layout = {"matrix": NamedSharding(other, P("fsdp")), "steps": replicated(other)}
    assert_arrived(reshard(tree, layout), tree, layout)


def test_moves_from_one_device_to_many(tree, mesh):
    alone = jax.device_put(jax.device_get(tree), jax.devices()[3])
    assert_arrived(reshard(alone, target(mesh)), tree, target(mesh))


def test_moves_to_a_mesh_with_the_devices_in_another_order(tree):
    other = make_mesh({"tensor": -1}, jax.devices()[::-1])
    layout = {"matrix": NamedSharding(other, P("tensor")), "steps": replicated(other)}
    assert_arrived(reshard(tree, layout), tree, layout)


def buffers(tree):
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


@pytest.mark.parametrize("move", ["nowhere", "within the mesh", "from one device to all"])
def test_the_source_may_be_donated(tree, mesh, move):
    layout = {k: v.sharding for k, v in tree.items()} if move == "nowhere" else replicated(mesh)
    wanted = jax.device_get(tree)
    if move == "from one device to all":
        tree = jax.device_put(wanted, jax.devices()[0])
    found = reshard(tree, layout)
    assert not buffers(found) & buffers(tree)
    donate = jax.jit(lambda t: jax.tree.map(lambda x: -x - 1, t), donate_argnums=0)
    jax.block_until_ready(donate(tree))
    assert tree["matrix"].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_casts_floats_only(tree, mesh):
    found = reshard(tree, target(mesh), dtype=jnp.bfloat16)
    assert found["steps"].dtype == jnp.int32
    wanted = np.asarray(tree["matrix"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["matrix"], wanted)


def test_the_same_move_compiles_once(tree, mesh):
    reshard(tree, target(mesh), dtype=jnp.bfloat16)
    counter = CompileCounter()
    try:
        reshard(jax.tree.map(jnp.negative, tree), target(mesh), dtype=jnp.bfloat16)
        before = counter.count
        reshard(tree, target(mesh), dtype=jnp.bfloat16)
        assert counter.count == before
        reshard(tree, target(mesh), dtype=jnp.float16)
        assert counter.count == before + 1, "the counter counts"
    finally:
        counter.close()


def test_cast():
    assert cast(jnp.ones(2, jnp.bfloat16), None).dtype == jnp.bfloat16
    assert cast(jnp.ones(2, jnp.bfloat16), "float32").dtype == jnp.float32
    assert cast(jnp.ones(2, bool), "float32").dtype == bool


# -------------------------------------------------------------------------------------- checksum


def slow_checksum(leaves):
    """Python's integers instead of machine words."""
    total = 0
    for leaf in leaves:
        words = np.ascontiguousarray(leaf).view(f"uint{8 * leaf.itemsize}").ravel().tolist()
        added = 0
        for place, word in enumerate(words):
            first = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
            second = (first ^ (first >> 13)) * 0xC2B2AE35 % 2**32
            added += (second ^ (second >> 16)) * (2 * place + 1)
        total = (total * 1000003 + added) % 2**32
    return total


def test_checksum_by_loops():
    rng = np.random.default_rng(0)
    leaves = [
        rng.normal(size=(3, 5)).astype(np.float32),
        np.asarray(jnp.asarray(rng.normal(size=7), jnp.bfloat16)),
        rng.integers(-9, 9, 4).astype(np.int32),
        np.float32(-0.0).reshape(()),
    ]
    assert int(checksum(leaves)) == slow_checksum(leaves)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_changed_bit_changes_it(dtype):
    array = jnp.asarray(np.random.default_rng(0).normal(size=40), dtype)
    width = 8 * array.dtype.itemsize
    words = np.asarray(array).view(f"uint{width}")
    flips = [(i, bit) for i in (0, 17, 39) for bit in range(width)]
    rows = np.tile(words, (1 + len(flips), 1))
    for row, (i, bit) in zip(rows[1:], flips, strict=True):
        row[i] ^= words.dtype.type(1) << words.dtype.type(bit)
    sums = jax.jit(jax.vmap(checksum))(jnp.asarray(rows.view(array.dtype)))
    assert np.all(np.asarray(sums[1:]) != sums[0])


def test_swapped_entries_change_it():
    """Floats that differ in high bits only, at distances that are powers of two."""
    total = jax.jit(lambda x, i: checksum([x, x.at[0].set(x[i]).at[i].set(x[0])][1]))
    x = jnp.ones(2048).at[0].set(2.0)
    distances = [1, 2, 256, 512, 1024]
    found = {int(total(x, jnp.int32(i))) for i in [0, *distances]}
    assert len(found) == 1 + len(distances)


def test_swapped_and_missing_arrays_change_it():
    a, b = jnp.arange(3.0), jnp.arange(3.0) + 1
    sums = [int(checksum(t)) for t in ([a, b], [b, a], [a], [b], [a, a])]
    assert len(set(sums)) == len(sums)


def test_the_layout_does_not_change_it(tree, mesh):
    whole = jax.device_get(tree)
    moved = reshard(tree, target(mesh))
    assert int(checksum(tree)) == int(jax.jit(checksum)(moved)) == int(checksum(whole))

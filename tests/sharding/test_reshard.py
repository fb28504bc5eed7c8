"""Meshes, what moves among them and to the host's memory, and checksums that do not see it."""

import collections
import contextlib
import functools
import itertools
import math
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.sharding.checksum import checksum, digests
from jaxrl_llm.sharding.layout import AXES, BATCH, batch_shards, make_mesh, replicated
from jaxrl_llm.sharding.reshard import moved_bytes, reshard, to_device, to_host

pytestmark = pytest.mark.guards("sharding/")


# ---------------------------------------------------------------------------------------- meshes


def test_sizes_fill_the_devices():
    for sizes, expected in (
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"fsdp": -1, "tensor": 4}, {"fsdp": 2, "tensor": 4}),
        ({"data": 8, "tensor": -1}, {"data": 8}),
        ({"stage": 2, "expert": 2, "context": -1}, {"stage": 2, "expert": 2, "context": 2}),
    ):
        made = make_mesh(sizes)
        assert made.shape == dict.fromkeys(AXES, 1) | expected
        assert list(made.devices.ravel()) == jax.devices()
        assert batch_shards(made) == math.prod(expected.get(axis, 1) for axis in BATCH)
        # jax's own default differs between versions
        assert all(kind == jax.sharding.AxisType.Auto for kind in made.axis_types)


def test_sizes_that_do_not_fit_are_refused():
    for sizes, asked in (
        ({"data": 3}, "data=3"),
        ({"data": 3, "fsdp": -1}, "data=3, fsdp=-1"),
        ({"data": -1, "fsdp": -1}, "data=-1, fsdp=-1"),
        ({"data": 0, "fsdp": -1}, "data=0, fsdp=-1"),
        ({"pipeline": 2, "data": 4}, "pipeline"),
    ):
        with pytest.raises(ValueError, match=asked):
            make_mesh(sizes)


# ------------------------------------------------------------------------------------- donation


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 4, "tensor": 2})


@pytest.fixture
def tree(mesh):
    rng = np.random.default_rng(0)
    matrix, halves = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(8, 4))
    return {
        "matrix": jax.device_put(matrix, NamedSharding(mesh, P("fsdp", "tensor"))),
        "halves": jax.device_put(jnp.asarray(halves, jnp.bfloat16), NamedSharding(mesh, P("fsdp"))),
        "steps": jax.device_put(np.arange(4, dtype=np.int32), replicated(mesh)),
    }


def buffers(tree):
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


@pytest.mark.parametrize("move", ["nowhere", "within the mesh", "from one device to all"])
def test_the_source_may_be_donated(tree, mesh, move):
    layout = {k: v.sharding for k, v in tree.items()} if move == "nowhere" else replicated(mesh)
    expected = jax.device_get(tree)
    if move == "from one device to all":
        tree = jax.device_put(expected, jax.devices()[0])
    moved = reshard(tree, layout)
    assert not buffers(moved) & buffers(tree)
    donate = jax.jit(lambda t: jax.tree.map(lambda x: -x - 1, t), donate_argnums=0)
    jax.block_until_ready(donate(tree))
    assert tree["matrix"].is_deleted()
    chex.assert_trees_all_equal(moved, expected)


# ---------------------------------------------------------------------------------- any two layouts

SHAPES = {"table": (64, 16), "stack": (6, 16, 32), "norm": (6, 16), "steps": ()}
BUCKET = 8192
"""Smaller than four copies of `table` and of `stack`, so that both are moved in slices."""


def on(mesh, table, stack, norm=None):
    specs = {"table": table, "stack": stack, "norm": norm or P(), "steps": P()}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


@functools.cache
def layouts():
    devices = jax.devices()
    shuffled = make_mesh({"fsdp": 4, "tensor": 2}, [devices[i] for i in (3, 1, 7, 0, 6, 2, 5, 4)])
    cube, pair = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}), P("tensor", "fsdp")
    both = P(None, "fsdp", "tensor")
    return {
        "replicated": on(cube, P(), P()),
        "fsdp": on(make_mesh({"fsdp": 8}), P(None, "fsdp"), P(None, "fsdp"), P(None, "fsdp")),
        "tensor": on(make_mesh({"data": 2, "tensor": 4}), P("tensor"), P(None, None, "tensor")),
        "both": on(make_mesh({"fsdp": 4, "tensor": 2}), pair, both),
        "shuffled": on(shuffled, pair, both),
        "by layer": on(cube, P(("fsdp", "tensor")), P("data", None, "tensor"), P("data")),
        "first four": on(make_mesh({"fsdp": 2, "tensor": 2}, devices[:4]), pair, both),
        "last four": on(
            make_mesh({"tensor": 4}, devices[4:]), P("tensor"), P(None, None, "tensor")
        ),
        "six": on(make_mesh({"data": 3, "fsdp": 2}, devices[:6]), P("fsdp"), P(None, "fsdp")),
        "one": dict.fromkeys(SHAPES, SingleDeviceSharding(devices[5])),
    }


LAYOUTS = tuple(layouts())


@functools.cache
def values():
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**drawn, "steps": np.int32(12345)}


def laid_out(name, keys=tuple(SHAPES)):
    return {key: jax.device_put(values()[key], layouts()[name][key]) for key in keys}


COMBINATIONS = list(itertools.product((None, jnp.bfloat16), (False, True)))


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize(
    "in_every_way", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "in every way"]
)
def test_layouts_reach_each_other(source, in_every_way):
    """By default a third of all pairs, each with one of four combinations of dtype and donation."""
    keys = tuple(SHAPES) if in_every_way else ("stack", "norm", "steps")
    start = LAYOUTS.index(source)
    targets = LAYOUTS if in_every_way else LAYOUTS[start % 3 :: 3]
    for i, target in enumerate(targets):
        for way in range(4 if in_every_way else 1):
            dtype, donate = COMBINATIONS[(i + start + way) % 4]
            tree, layout = laid_out(source, keys), {key: layouts()[target][key] for key in keys}
            moved = reshard(tree, layout, dtype=dtype, donate=donate, bucket_bytes=BUCKET)
            assert all(x.is_deleted() == donate for x in tree.values())
            assert_holds(moved, layout, dtype)


def assert_holds(moved, layout, dtype=None):
    for key in layout:
        value = values()[key]
        expected = value if dtype is None or key == "steps" else value.astype(dtype)
        assert moved[key].sharding.is_equivalent_to(layout[key], value.ndim)
        assert moved[key].sharding.memory_kind == layout[key].memory_kind
        assert moved[key].dtype == expected.dtype
        for shard in moved[key].addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])


def test_from_and_to_host_memory():
    source, target = "first four", "fsdp"

    def in_host_memory(name):
        return {k: layout.with_memory_kind("pinned_host") for k, layout in layouts()[name].items()}

    there = reshard(laid_out(source), in_host_memory(target), bucket_bytes=BUCKET)
    assert_holds(there, in_host_memory(target))
    back = reshard(there, layouts()[source], dtype=jnp.float16, bucket_bytes=BUCKET)
    assert not there["table"].is_deleted()
    assert_holds(back, layouts()[source], jnp.float16)


# ------------------------------------------------------------------------------------ host memory


def test_there_and_back(tree):
    values = jax.device_get(tree)
    assert to_device(tree)["matrix"] is tree["matrix"]
    layouts = jax.tree.map(lambda x: x.sharding, tree)
    held = to_host(tree)
    assert all(x.is_deleted() for x in tree.values())
    for name, array in held.items():
        assert array.sharding == layouts[name].with_memory_kind("pinned_host")
        assert all(s.data.sharding.memory_kind == "pinned_host" for s in array.addressable_shards)
    assert to_host(held)["matrix"] is held["matrix"]
    back = to_device(held)
    assert all(x.is_deleted() for x in held.values())
    for name, array in back.items():
        assert array.sharding.memory_kind == "device"
        assert array.sharding.is_equivalent_to(layouts[name], array.ndim)
        assert array.dtype == values[name].dtype
        np.testing.assert_array_equal(np.asarray(array), values[name])


def test_a_way_back_compiles_nothing_new(tree):
    """A step compiled for an array takes the array that was away."""
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t))
    step(tree)
    tree = to_device(to_host(tree))
    with contextlib.closing(CompileCounter()) as counter:
        step(tree)
        step(to_device(to_host(tree)))
        assert counter.count == 0


# ----------------------------------------------------------------------------------- peak and cost


class Memory:
    """The peak of each device: its live arrays, and what a program adds as it was compiled.

    It stands in for `jax.jit`, so that every program is measured where it runs. The reordering of
    devices is a program of `device_put`, and is not seen.
    """

    def __init__(self):
        self.peak, self._compiled, self._jit = collections.Counter(), {}, jax.jit

    def jit(self, function, **options):
        static = options.get("static_argnums", ())
        static = {static} if isinstance(static, int) else set(static)

        def run(*args):
            dynamic = [x for i, x in enumerate(args) if i not in static]
            types = [
                (x.shape, x.dtype, getattr(x, "sharding", 0)) for x in jax.tree.leaves(dynamic)
            ]
            fixed = [args[i] for i in static]
            key = (function, str(fixed), *types, *jax.tree.leaves(options["out_shardings"]))
            if key not in self._compiled:
                self._compiled[key] = self._jit(function, **options).lower(*args).compile()
            program = self._compiled[key]
            sizes = program.memory_analysis()
            added = sizes.temp_size_in_bytes + sizes.output_size_in_bytes
            for device in jax.tree.leaves(options["out_shardings"])[0].device_set:
                self.note(device, live()[device] + added - sizes.alias_size_in_bytes)
            return program(*dynamic)

        return run

    def note(self, device, held):
        self.peak[device] = max(self.peak[device], held)


def live():
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    return sums((device, size) for (device, _), size in buffers.items())


def sums(pairs):
    total = collections.Counter()
    for device, size in pairs:
        total[device] += size
    return total


def parts(array):
    return sums((shard.device, shard.data.nbytes) for shard in array.addressable_shards)


HARDEST = (  # by the memory that they took, of all pairs
    *(("first four", "replicated"), ("first four", "six"), ("six", "first four")),
    *(("both", "one"), ("one", "both"), ("by layer", "tensor"), ("fsdp", "first four")),
)


@pytest.mark.parametrize(("dtype", "donate"), [(None, True), (jnp.float16, False)])
def test_peak_memory_is_bounded(monkeypatch, dtype, donate):
    """In float16, because the CPU backend copies a bfloat16 array whenever it writes to a part."""
    monkeypatch.setattr(jax, "jit", (memory := Memory()).jit)
    for source, target in HARDEST:
        tree = jax.block_until_ready(laid_out(source))
        before, old = live(), sum(map(parts, tree.values()), collections.Counter())
        memory.peak.clear()
        moved = reshard(tree, layouts()[target], dtype=dtype, donate=donate, bucket_bytes=BUCKET)
        arrived = [parts(x) for x in moved.values()]
        new, largest = sum(arrived, collections.Counter()), functools.reduce(operator.or_, arrived)
        assert memory.peak
        for device, peak in memory.peak.items():
            bound = before[device] + new[device]
            if donate:
                others = before[device] - old[device]
                bound = others + max(old[device], new[device]) + largest[device]
            assert peak <= bound + BUCKET, (source, target, device)
        del tree, moved, arrived


def test_donated_arrays_make_room_for_the_next(monkeypatch):
    layout, value = layouts()["tensor"]["stack"], np.ones(SHAPES["stack"], np.float32)
    tree = [jax.device_put(value, layouts()["fsdp"]["stack"]) for _ in range(8)]
    before, old = live(), sum(map(parts, tree), collections.Counter())
    monkeypatch.setattr(jax, "jit", (memory := Memory()).jit)
    moved = reshard(tree, layout, donate=True, bucket_bytes=BUCKET)
    for device, peak in memory.peak.items():
        larger = max(old[device], 8 * parts(moved[0])[device])
        bound = before[device] - old[device] + larger + parts(moved[0])[device] + BUCKET
        assert peak <= bound < before[device] + 8 * parts(moved[0])[device]


def test_sixty_layers_compile_few_programs():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    here, there = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P("tensor"))
    shapes = {"q": (16, 16), "k": (16, 8), "norm": (16,)}

    def layers(seed):
        return [
            {
                name: jax.device_put(np.full(shape, seed + i, np.float32), here)
                for name, shape in shapes.items()
            }
            for i in range(60)
        ]

    with contextlib.closing(CompileCounter()) as counter:
        moved = reshard(layers(0), there, dtype=jnp.bfloat16, bucket_bytes=2**15)
        assert 1 <= counter.take() <= 2 * len(shapes)
        moved = reshard(layers(5), there, dtype=jnp.bfloat16, bucket_bytes=2**15)
        assert counter.take() == 0
    for i, layer in enumerate(moved):
        for name, shape in shapes.items():
            np.testing.assert_array_equal(layer[name], np.full(shape, 5 + i, jnp.bfloat16))


def test_moved_bytes():
    whole = 64 * 16 * 4
    for source, target, table in (
        *(("replicated", "fsdp", 0), ("fsdp", "replicated", 8 * 7 / 8), ("fsdp", "fsdp", 0)),
        *(("replicated", "one", 0), ("one", "replicated", 7), ("first four", "last four", 1)),
        # 64 x 16 over tensor=2, fsdp=4: a part is 32 x 4; over fsdp=2, tensor=2: 32 x 8, of which
        # devices 0 and 1 hold the half of theirs, 2 and 3 nothing.
        ("both", "first four", 1 - 2 / 8),
    ):
        tree, layout = laid_out(source), layouts()[target]
        assert moved_bytes(tree["table"], layout["table"]) == table * whole
        assert moved_bytes(tree["table"], layout["table"], dtype=jnp.bfloat16) == table * whole / 2
        one_by_one = [moved_bytes(tree[key], layout[key]) for key in SHAPES]
        assert moved_bytes(tree, layout) == sum(one_by_one)


# -------------------------------------------------------------------------------------- checksum


def expected_digest(leaf):
    """In numpy's wide integers."""
    leaf = np.ascontiguousarray(leaf)
    words = leaf.view(f"uint{8 * leaf.itemsize}").ravel().astype(np.uint64)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ words >> np.uint64(shift)) * np.uint64(factor) % 2**32
    words ^= words >> np.uint64(16)
    places = 2 * np.arange(words.size, dtype=np.uint64) + 1
    return int((words * places % 2**32).sum() % 2**32)


def test_checksum_by_formula():
    rng, total = np.random.default_rng(0), 0
    leaves = [
        rng.normal(size=(3, 5)).astype(np.float32),
        rng.normal(size=7).astype(jnp.bfloat16),
        rng.integers(-9, 9, 4).astype(np.int32),
        np.float32(-0.0).reshape(()),
    ]
    for leaf in leaves:
        total = (total * 1000003 + expected_digest(leaf)) % 2**32
    assert int(checksum(leaves)) == total


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_changed_bit_changes_it(dtype):
    words = np.random.default_rng(0).normal(size=40).astype(dtype)
    words = words.view(f"uint{8 * words.itemsize}")
    flips = [(i, bit) for i in (0, 17, 39) for bit in range(8 * words.itemsize)]
    rows = np.tile(words, (1 + len(flips), 1))
    for row, (i, bit) in zip(rows[1:], flips, strict=True):
        row[i] ^= words.dtype.type(1) << words.dtype.type(bit)
    sums = jax.jit(jax.vmap(checksum))(jnp.asarray(rows.view(dtype)))
    assert np.all(np.asarray(sums[1:]) != sums[0])


def test_what_changes_it_and_what_does_not(tree, mesh):
    """Swapped entries and arrays do, a layout and a tuple in place of a stack do not."""
    distances = [0, 1, 2, 256, 512, 1024]  # of floats that differ in high bits only
    total = jax.jit(jax.vmap(checksum))
    swapped = np.stack([np.where(np.arange(2048) == i, 2.0, 1.0) for i in distances])
    assert len({int(one) for one in total(np.float32(swapped))}) == len(distances)
    a, b = np.arange(3.0, dtype=np.float32), np.arange(3.0, dtype=np.float32) + 1
    sums = [int(checksum(t)) for t in ([a, b], [b, a], [a], [b], [a, a])]
    assert len(set(sums)) == len(sums)
    expected = int(checksum({"x": np.stack([a, b]), "y": b}))
    assert int(checksum({"none": (), "x": (a, b), "y": b})) == expected
    whole = dict.fromkeys(tree, replicated(mesh))
    moved = reshard(tree, whole | {"matrix": NamedSharding(mesh, P("tensor"))})
    assert int(checksum(tree)) == int(jax.jit(checksum)(moved))
    assert int(checksum(jax.device_get(tree))) == int(checksum(tree))


def test_a_digest_is_the_checksum_of_one_array_wherever_it_is(mesh):
    """On one CPU a large array's rows are added up in parts."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 2**32, (5, 256, 1024), np.uint32).view(np.float32)
    arrays = {
        "host": large,
        "one": jax.device_put(large, jax.devices()[0]),
        "split": jax.device_put(large, NamedSharding(mesh, P(None, "fsdp", "tensor"))),
        "offloaded": to_host(jax.device_put(large, jax.devices()[0])),
    }
    expected = expected_digest(large)
    assert {name: int(sums) for name, sums in digests(arrays).items()} == dict.fromkeys(
        arrays, expected
    )
    others = {"flags": jnp.array([True, False]), "key": jax.random.key(3), "none": jnp.ones((0, 4))}
    assert jax.tree.map(jnp.shape, digests(others)) == dict.fromkeys(others, ())

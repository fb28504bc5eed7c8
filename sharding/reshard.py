"""Moving an array tree from one layout to another, or to the host's memory and back."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array


def cast_like(tree: Any, dtype: Any) -> Any:
    """Return the shapes and dtypes that `tree` has after a cast.

    >>> cast_like({"w": jnp.ones(2), "n": jnp.ones(3)}, {"w": jnp.bfloat16, "n": None})["w"].dtype
    dtype(bfloat16)
    """
    return jax.eval_shape(lambda tree: cast_tree(tree, dtype), tree)


def cast_tree(tree: Any, dtype: Any) -> Any:
    """Cast floating-point arrays to one dtype, or to a tree of dtypes; None leaves them.

    >>> cast_tree({"w": jnp.ones(2), "n": jnp.ones(3)}, jnp.bfloat16)["n"].dtype
    dtype(bfloat16)
    """
    leaves, structure = jax.tree.flatten(tree)
    expected = structure.flatten_up_to(dtype) if isinstance(dtype, dict) else [dtype] * len(leaves)
    return jax.tree.unflatten(structure, map(cast, leaves, expected))


def cast(array: Array, dtype: DTypeLike | None) -> Array:
    """Cast a floating-point array; leave others, and None leaves all.

    >>> cast(jnp.ones(2), jnp.bfloat16).dtype
    dtype(bfloat16)
    """
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(dtype)


@functools.lru_cache(maxsize=4096)
def transfer_layouts(
    source: Sharding, target: Sharding, shape: tuple[int, ...]
) -> tuple[NamedSharding, NamedSharding]:
    """Return the layouts between which an array is carried from device to device.

    One program runs on one list of devices. So a program on the source's devices brings the array
    into the first layout, and what arrives in the second one a program on the target's devices
    brings into the target, if that is another. On two sets of devices every part in the second
    layout is a part in the first, so that only whole parts are copied.
    """
    source, target = in_device_memory(source), in_device_memory(target)
    here, there = device_order(source, shape), device_order(target, shape)
    if here == there:
        return as_named(target, there), as_named(target, there)
    if set(here) == set(there):
        return as_named(source, here), as_named(target, there)
    source, target, ways = as_named(source, here), as_named(target, there), []
    if len(here) % len(there) == 0:
        ways.append((_copies(target, here), target))
    if len(there) % len(here) == 0:
        ways.append((source, _copies(source, there)))
    ways.append((_replicated(here), _replicated(there)))
    return next(way for way in ways if len(_senders(*way, shape)) == len(there))


def _copies(layout: NamedSharding, devices: Sequence[Any]) -> NamedSharding:
    """Lay an array out over k times the devices: every part k times, on neighbours."""
    grid = np.array(devices).reshape(*layout.mesh.axis_sizes, -1)
    mesh = Mesh(grid, (*layout.mesh.axis_names, "copy"))
    return NamedSharding(mesh, layout.spec)


def as_named(layout: Sharding, devices: Sequence[Any]) -> NamedSharding:
    """Return a layout on a mesh: this one, or else a whole copy on every device."""
    if isinstance(layout, NamedSharding):
        return layout
    return _replicated(devices)


def _replicated(devices: Sequence[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), "device"), PartitionSpec())


def carry(array: Array, layout: NamedSharding) -> Array:
    """Copy the parts of an array, unchanged, to the devices of another layout."""
    if array.sharding.device_set == layout.device_set:
        return jax.device_put(array, layout)
    senders = _senders(array.sharding, layout, array.shape)
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    local = [device for device in senders if device in layout.addressable_devices]
    sent = jax.device_put([parts[senders[device]] for device in local], local)
    return jax.make_array_from_single_device_arrays(array.shape, layout, sent, dtype=array.dtype)


@functools.lru_cache(maxsize=4096)
def _senders(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> dict[Any, Any]:
    """Return which device of its own process sends each device its part, where one has it."""
    held = index_ranges(source, shape)
    chosen = {}
    for i, (device, box) in enumerate(index_ranges(target, shape).items()):
        near = [d for d in held if held[d] == box and d.process_index == device.process_index]
        if near:
            chosen[device] = device if device in near else near[i % len(near)]
    return chosen


def device_order(layout: Sharding, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return a layout's devices in the order of its programs."""
    return tuple(layout.devices_indices_map(shape))


def index_ranges(
    layout: Sharding, shape: tuple[int, ...]
) -> dict[Any, tuple[tuple[int, int], ...]]:
    """Return the first and the last index, plus one, that each device holds of every axis."""

    def box(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))

    return {device: box(index) for device, index in layout.devices_indices_map(shape).items()}


def in_host_memory(layout: Sharding) -> bool:
    """Return whether a layout is in the host's memory."""
    return layout.memory_kind not in (None, _device_memory(layout))


def in_device_memory(layout: Sharding) -> Sharding:
    """Return the same layout in the devices' memory."""
    return layout.with_memory_kind(_device_memory(layout))


def _device_memory(layout: Sharding) -> str:
    return next(iter(layout.addressable_devices)).default_memory().kind


BUCKET_BYTES = 2**30
"""Memory of a device that a move may take beside the arrays themselves."""


class Move(NamedTuple):
    """One array's change of dtype and layout; equal moves share their compiled programs."""

    shape: tuple[int, ...]
    old: np.dtype[Any]
    new: np.dtype[Any]
    source: Sharding
    target: Sharding

    @property
    def room(self) -> int:
        """Bytes that a device may need on the way: the whole array as cut, gathered, sent, got."""
        return 4 * math.prod(self.shape) * max(self.old.itemsize, self.new.itemsize)


def reshard(
    tree: Any,
    target: Any,
    *,
    dtype: Any = None,
    donate: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """Copy `tree` into the target layout, a bucket of bounded bytes at a time.

    Small arrays are moved together, one compiled program per bucket; an array larger than a bucket
    is moved in slices, written into its target in place. The same move again compiles nothing.
    With S a device's part of `tree` and R its part of the result, it holds at no time more than

    - S + R + `bucket_bytes`, or,
    - with `donate`, max(S, R) + its part of the largest new array + `bucket_bytes`.

    A bucket counts arrays as if the device held four whole copies, because the compiler may gather
    what it lays out anew. Beyond that bound: of an array too large for a bucket at least one index
    of one axis is moved at a time; an array in host memory passes through its device's memory as a
    whole; and the CPU backend copies a bfloat16 array whenever a slice is written to it.

    Where arrays span several processes, each of them calls this in the same order, and holds
    devices of both layouts: no array travels to a process that has none of it.

    Args:
        tree: arrays.
        target: a sharding for each of them, or one for all: on the same devices in any order, on
            some of them, on more, or on others; in any memory.
        dtype: cast to this on the way: a dtype for all floating-point arrays, or a tree of them.
        donate: delete each array of `tree` once it has been moved.
        bucket_bytes: memory that each device may need beside the arrays themselves.

    Returns:
        New arrays. They share no buffer with `tree`, so that the source may be donated later.

    Raises:
        ValueError: `bucket_bytes` is not positive.
        NotImplementedError: the layouts lie on different processes.

    >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> reshard({"w": jnp.ones(2), "n": jnp.arange(2)}, one, dtype=jnp.bfloat16)["w"].dtype
    dtype(bfloat16)
    """
    if bucket_bytes < 1:
        raise ValueError(f"expected bucket_bytes of at least 1, got {bucket_bytes}")
    arrays, structure = jax.tree.flatten(tree)
    moves = _moves(tree, target, dtype)
    for layouts in {(move.source, move.target) for move in moves}:
        _check_processes(*layouts)
    moved: list[Any] = [None] * len(arrays)
    for bucket in _buckets(moves, bucket_bytes):
        results = _move(
            [arrays[i] for i in bucket], [moves[i] for i in bucket], donate, bucket_bytes
        )
        for i, array in zip(bucket, results, strict=True):
            moved[i] = array
            if donate:
                arrays[i].delete()
    return jax.tree.unflatten(structure, moved)


def moved_bytes(tree: Any, target: Any, *, dtype: Any = None) -> int:
    """Count the bytes of the target that its devices do not hold yet, each copy counted.

    Whatever way `reshard` takes, so much has to arrive; it counts an array as if it were cast
    before it is sent.

    Args:
        tree: arrays, or their shapes with shardings.
        target: as for `reshard`.
        dtype: as for `reshard`.

    >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> moved_bytes(jax.device_put(jnp.ones(2), one), one)
    0
    """
    return sum(map(_missing_bytes, _moves(tree, target, dtype)))


def _moves(tree: Any, target: Any, dtype: Any) -> list[Move]:
    arrays, structure = jax.tree.flatten(tree)
    cast = jax.tree.leaves(cast_like(tree, dtype))
    one = isinstance(target, Sharding)
    targets = [target] * len(arrays) if one else structure.flatten_up_to(target)
    return [
        Move(x.shape, np.dtype(x.dtype), np.dtype(like.dtype), x.sharding, layout)
        for x, like, layout in zip(arrays, cast, targets, strict=True)
    ]


def _check_processes(source: Sharding, target: Sharding) -> None:
    here, there = (sorted({d.process_index for d in s.device_set}) for s in (source, target))
    if here != there or jax.process_index() not in here:
        raise NotImplementedError(
            f"process {jax.process_index()} moves arrays from processes {here} to {there}; "
            "expected layouts over the same processes, this one among them"
        )


@functools.lru_cache(maxsize=4096)
def _missing_bytes(move: Move) -> int:
    held = index_ranges(move.source, move.shape)
    missing = 0
    for device, needed in index_ranges(move.target, move.shape).items():
        overlap = zip(needed, held[device], strict=True) if device in held else [((0, 0), (0, 0))]
        shared = math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in overlap)
        missing += math.prod(stop - start for start, stop in needed) - shared
    return missing * move.new.itemsize


def group_by_bytes(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Group items in their order, each group ending as soon as it has `most` bytes.

    Args:
        sizes: bytes of each item.
        most: bytes; one item more at most.

    >>> list(group_by_bytes([3, 1, 4, 1], most=4))
    [[0, 1], [2], [3]]
    """
    bucket, held = [], 0
    for number, size in enumerate(sizes):
        bucket.append(number)
        held += size
        if held >= most:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def _buckets(moves: Sequence[Move], bucket_bytes: int) -> Iterator[list[int]]:
    """Group the moves; equal ones are neighbours, so that the groups' programs repeat."""
    first: dict[Move, tuple[Any, ...]] = {}
    for i, move in enumerate(moves):
        first.setdefault(move, (i, _route(move)))
    bucket: list[int] = []
    held, route = 0, None
    for i in sorted(range(len(moves)), key=lambda i: first[moves[i]][0]):
        if bucket and (held + moves[i].room > bucket_bytes or route != first[moves[i]][1]):
            yield bucket
            bucket, held = [], 0
        bucket.append(i)
        held, route = held + moves[i].room, first[moves[i]][1]
    if bucket:
        yield bucket


@functools.lru_cache(maxsize=4096)
def _route(move: Move) -> tuple[Any, ...]:
    """Return what the moves of one bucket have in common."""
    kinds = move.source.memory_kind, move.target.memory_kind
    return (
        device_order(move.source, move.shape),
        device_order(move.target, move.shape),
        *kinds,
        _stays(move),
    )


def _stays(move: Move) -> bool:
    """Tell whether every part stays on its device as it is."""
    source, target = index_ranges(move.source, move.shape), index_ranges(move.target, move.shape)
    return move.old == move.new and list(source.items()) == list(target.items())


def _move(
    arrays: Sequence[Array], moves: Sequence[Move], donate: bool, bucket_bytes: int
) -> list[Array]:
    if in_host_memory(moves[0].source):
        arrays = [jax.device_put(x, in_device_memory(x.sharding)) for x in arrays]
        donate = True
    if donate and _stays(moves[0]):
        targets = [in_device_memory(m.target) for m in moves]
        moved = jax.jit(list, donate_argnums=0, out_shardings=targets)(list(arrays))
    elif moves[0].room > bucket_bytes and moves[0].shape:
        moved = [_move_in_slices(arrays[0], moves[0], bucket_bytes)]
    else:
        moved = _move_together(arrays, moves)
    placed = [jax.device_put(x, m.target) for x, m in zip(moved, moves, strict=True)]
    return jax.block_until_ready(placed)


def _move_together(arrays: Sequence[Array], moves: Sequence[Move]) -> list[Array]:
    layouts = [transfer_layouts(m.source, m.target, m.shape) for m in moves]
    targets = [in_device_memory(m.target) for m in moves]
    dtypes = tuple(m.new for m in moves)
    first = [layout for layout, _ in layouts]
    last = [layout for _, layout in layouts]
    pieces = jax.jit(_copy, static_argnums=1, out_shardings=first)(list(arrays), dtypes)
    pieces = [carry(x, layout) for x, layout in zip(pieces, last, strict=True)]
    if all(s.is_equivalent_to(t, x.ndim) for s, t, x in zip(last, targets, arrays, strict=True)):
        return pieces
    return jax.jit(_copy, static_argnums=1, out_shardings=targets)(pieces, dtypes)


def _copy(arrays: Sequence[Array], dtypes: tuple[Any, ...]) -> list[Array]:
    return [jnp.copy(x.astype(dtype)) for x, dtype in zip(arrays, dtypes, strict=True)]


class _Slicing(NamedTuple):
    """Slices of `rows` along an axis that is seen as [parts, size / parts].

    No device holds a part of one of `parts` only, so a slice of all of them at once is cut, and
    written, without communication.
    """

    axis: int
    parts: int
    rows: int

    def view(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = self.axis
        return (*shape[:axis], self.parts, shape[axis] // self.parts, *shape[axis + 1 :])

    def part(self, move: Move) -> Move:
        """Return the move of one slice."""
        view = self.view(move.shape)
        return move._replace(
            shape=(*view[: self.axis + 1], self.rows, *view[self.axis + 2 :]),
            source=self._layout(move.source, move.shape),
            target=self._layout(move.target, move.shape),
        )

    def _layout(self, layout: Sharding, shape: tuple[int, ...]) -> Sharding:
        named = as_named(in_device_memory(layout), device_order(layout, shape))
        spec = [*named.spec, *[None] * (self.axis + 1 - len(named.spec))]
        spec.insert(self.axis + 1, None)
        return NamedSharding(named.mesh, PartitionSpec(*spec))


def _slicing(move: Move, bucket_bytes: int) -> _Slicing:
    """Choose the first axis whose slices can be small enough, else that with the smallest ones."""
    source, target = (s.shard_shape(move.shape) for s in (move.source, move.target))
    parts = [math.lcm(n // a, n // b) for n, a, b in zip(move.shape, source, target, strict=True)]
    rows = [n // p * bucket_bytes // move.room for n, p in zip(move.shape, parts, strict=True)]
    axis = next((i for i, r in enumerate(rows) if r), rows.index(max(rows)))
    return _Slicing(axis, parts[axis], max(1, rows[axis]))


def _move_in_slices(array: Array, move: Move, bucket_bytes: int) -> Array:
    slicing = _slicing(move, bucket_bytes)
    target = in_device_memory(move.target)
    part = slicing.part(move)
    zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=target)
    cut = jax.jit(_cut, static_argnums=2, out_shardings=part.source)
    write = jax.jit(_write, static_argnums=3, donate_argnums=0, out_shardings=target)
    result = zeros(move.shape, move.new)
    size = move.shape[slicing.axis] // slicing.parts
    for start in range(0, size, slicing.rows):
        # The last slice begins early enough to be as long as the others: one program for all.
        begin = np.int32(min(start, size - slicing.rows))
        moved = _move_together([cut(array, begin, slicing)], [part])
        result = jax.block_until_ready(write(result, moved.pop(), begin, slicing))
    return result


def _cut(array: Array, begin: Array, slicing: _Slicing) -> Array:
    view = array.reshape(slicing.view(array.shape))
    return jax.lax.dynamic_slice_in_dim(view, begin, slicing.rows, slicing.axis + 1)


def _write(whole: Array, piece: Array, begin: Array, slicing: _Slicing) -> Array:
    view = whole.reshape(slicing.view(whole.shape))
    view = jax.lax.dynamic_update_slice_in_dim(view, piece, begin, slicing.axis + 1)
    return view.reshape(whole.shape)


HOST = "pinned_host"
"""The memory from which a device copies without the operating system's help."""


def to_host(tree: Any) -> Any:
    """Move arrays from their devices' memory to the host's, one array at a time.

    Each part goes to the host of its device; the partition over devices stays as it is. The arrays
    given are deleted, but for those in host memory already, which are returned as they are.
    Neither a move to the host nor one back needs device memory beside the arrays themselves.

    Args:
        tree: arrays.

    Returns:
        The same arrays, bit for bit. A program that is given them copies them to the device, so
        move them back before they are used.

    Raises:
        NotImplementedError: the devices know no pinned host memory.

    >>> to_host({"w": jax.numpy.ones(2)})["w"].sharding.memory_kind
    'pinned_host'
    """
    return jax.tree.map(_move_to_host, tree)


def to_device(tree: Any) -> Any:
    """Move arrays back from the host's memory to their devices', one array at a time.

    The arrays given are deleted, but for those in device memory already, which are returned as
    they are.

    Args:
        tree: arrays.

    Returns:
        The same arrays, bit for bit.

    >>> to_device(to_host({"w": jax.numpy.arange(2)}))["w"]
    Array([0, 1], dtype=int32)
    """
    return jax.tree.map(_move_to_device, tree)


@contextlib.contextmanager
def on_device(tree: Any) -> Iterator[Any]:
    """Copy arrays in host memory to their devices for the time of a block.

    Args:
        tree: arrays; those in device memory are given as they are.

    >>> with on_device(to_host({"w": jax.numpy.arange(2)})) as held:
    ...     held["w"]
    Array([0, 1], dtype=int32)
    """
    copies = jax.tree.map(copy_on_device, tree)
    try:
        yield copies
    finally:
        for copy, array in zip(jax.tree.leaves(copies), jax.tree.leaves(tree), strict=True):
            if copy is not array:
                copy.delete()


def _move_to_host(array: jax.Array) -> jax.Array:
    device = _a_device(array.sharding)
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise NotImplementedError(
            f"can't offload: {device.device_kind} on platform {device.platform!r} knows the "
            f"memories {kinds}, expected {HOST!r}"
        )
    return _move_to(array, HOST)


def copy_on_device(array: jax.Array) -> jax.Array:
    """Return an array in its devices' memory: itself, if it is there.

    >>> copy_on_device(to_host(jax.numpy.arange(2)))
    Array([0, 1], dtype=int32)
    """
    kind = _a_device(array.sharding).default_memory().kind
    if array.sharding.memory_kind == kind:
        return array
    return reshard(array, array.sharding.with_memory_kind(kind))


def _move_to_device(array: jax.Array) -> jax.Array:
    return _move_to(array, _a_device(array.sharding).default_memory().kind)


def _move_to(array: jax.Array, kind: str) -> jax.Array:
    if array.sharding.memory_kind == kind:
        return array
    return reshard(array, array.sharding.with_memory_kind(kind), donate=True)


def _a_device(layout: Sharding) -> Any:
    return next(iter(layout.addressable_devices))

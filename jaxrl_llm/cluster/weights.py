"""Weights on their way from training processes to engines in others, by Ray's object store.

Each training process publishes what of each array lies on its devices, in the engine's dtype; of
copies one, and those that have copies take turns. An engine takes what its devices need. So the
host of a process holds its own part of the model and a bucket of arrays, never all of it, unless a
device holds all.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineError
from jaxrl_llm.sharding.reshard import group_by_bytes

BUCKET_BYTES = 2**28

Bounds = tuple[tuple[int, int], ...]
"""First index and end along each axis."""


class Piece(NamedTuple):
    """A box of an array."""

    bounds: Bounds
    values: np.ndarray


class TransferPlan(NamedTuple):
    """The arrays of a model as engines take them.

    Attributes:
        shapes: of the arrays, in the order of their tree.
        dtypes: of the same.
        buckets: numbers of the arrays that travel together.
    """

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype]
    buckets: list[list[int]]


def plan_transfer(spec: ModelSpec, dtype: str) -> TransferPlan:
    """Cut the arrays of a model into buckets.

    Args:
        spec: the model, without an adapter.
        dtype: of the engine.
    """
    shapes = [tuple(array.shape) for array in jax.tree.leaves(declare(spec))]
    kinds = [np.dtype(kind) for kind in jax.tree.leaves(compute_dtypes(spec, dtype))]
    sizes = [math.prod(s) * k.itemsize for s, k in zip(shapes, kinds, strict=True)]
    return TransferPlan(shapes, kinds, list(group_by_bytes(sizes, BUCKET_BYTES)))


def own_pieces(array: jax.Array, dtype: np.dtype, turn: int = 0) -> list[Piece]:
    """Return what of an array this process has to publish: of each box one copy in all.

    Args:
        array: on devices of all processes.
        dtype: to publish.
        turn: as in `own_shards`.

    >>> own_pieces(jax.numpy.ones(2), np.dtype("float16"))
    [Piece(bounds=((0, 2),), values=array([1., 1.], dtype=float16))]
    """
    return [
        # a copy, as an array keeps for ever what of it was on the host
        Piece(bounds_of(shard.index, array.shape), np.asarray(jnp.array(shard.data, dtype)))
        for shard in own_shards(array, turn)
    ]


def own_shards(array: jax.Array, turn: int) -> list[Any]:
    """Choose among the copies of each box of an array; return those chosen that are here.

    Args:
        array: on devices of all processes.
        turn: the number of the first box's copy, among so many as there are; each next box's is
            the next one.
    """
    indices = array.sharding.devices_indices_map(array.shape)
    boxes = list(dict.fromkeys(bounds_of(index, array.shape) for index in indices.values()))
    numbers, copies = {box: i for i, box in enumerate(boxes)}, len(indices) // len(boxes)
    return [
        shard
        for shard in array.addressable_shards
        if shard.replica_id == (turn + numbers[bounds_of(shard.index, array.shape)]) % copies
    ]


def bounds_of(index: Any, shape: Sequence[int]) -> Bounds:
    """Return a shard's index as bounds.

    >>> bounds_of((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def assemble(pieces: Sequence[Piece], bounds: Bounds, dtype: np.dtype, name: str) -> np.ndarray:
    """Put a box of an array together.

    Args:
        pieces: of the array, disjoint.
        bounds: of the box.
        dtype: of the array.
        name: of the array, for the error.

    Raises:
        EngineError: the pieces don't cover the box, or have another dtype.
    """
    for piece in pieces:
        if piece.bounds == bounds and piece.values.dtype == dtype:
            return piece.values
    box, filled = np.empty([end - first for first, end in bounds], dtype), 0
    for piece in pieces:
        common = [
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, piece.bounds, strict=True)
        ]
        if piece.values.dtype != dtype or any(first >= end for first, end in common):
            continue
        into = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, bounds, strict=True))
        of = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, piece.bounds, strict=True))
        box[into] = piece.values[of]
        filled += math.prod(end - first for first, end in common)
    if filled != box.size:
        raise EngineError(
            f"weights {name}, {list(bounds)}: expected {box.size} numbers of dtype {dtype}, "
            f"got {filled}"
        )
    return box


def publish(
    coordinator: Any, params: Any, plan: TransferPlan, *, sync: int, process: int
) -> list[Any]:
    """Put this process's parts of the weights into its node's object store, for engines to take.

    Args:
        coordinator: handle of the job's `Coordinator`.
        params: the weights, nested as `declare(spec)`.
        plan: the plan of their model.
        sync: number of this weight sync.
        process: index of this process.

    Returns:
        References that must be kept as long as an engine may need these weights.
    """
    import ray

    leaves, references = jax.tree.leaves(params), []
    for number, bucket in enumerate(plan.buckets):
        parts = {i: own_pieces(leaves[i], plan.dtypes[i], turn=i) for i in bucket}
        references.append(ray.put(parts))
        ray.get(coordinator.publish.remote(sync, number, process, references[-1:]))
    return references


def collect(
    coordinator: Any, plan: TransferPlan, shardings: Any, *, sync: int, like: Any
) -> tuple[Any, int]:
    """Take the weights of a sync, as they are published.

    Args:
        coordinator: handle of the job's `Coordinator`.
        plan: the plan of their model.
        shardings: of the arrays on this process's devices, nested as `like`; None leaves them on
            the host, whole.
        sync: number of the weight sync.
        like: a tree with an item for each array.

    Returns:
        The arrays, and how many bytes came.

    Raises:
        EngineError: a part did not come.
    """
    structure = jax.tree.structure(like)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(like)]
    homes = [None] * len(plan.shapes) if shardings is None else structure.flatten_up_to(shardings)
    arrays: list[Any] = [None] * len(plan.shapes)
    total = 0
    for number, bucket in enumerate(plan.buckets):
        references = coordinator.get_parts.remote(sync, number).future().result()
        coming = [reference.future() for reference in references]  # all at once
        published = [future.result() for future in coming]
        for i in bucket:
            pieces = [piece for parts in published for piece in parts[i]]
            total += sum(piece.values.nbytes for piece in pieces)
            arrays[i] = _place(pieces, plan.shapes[i], plan.dtypes[i], homes[i], names[i])
    return jax.tree.unflatten(structure, arrays), total


def _place(
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
    dtype: np.dtype,
    home: Sharding | None,
    name: str,
) -> Any:
    @functools.cache  # of copies on several devices
    def box(bounds: Bounds) -> np.ndarray:
        return assemble(pieces, bounds, dtype, name)

    if home is None:
        return box(tuple((0, size) for size in shape))
    return jax.make_array_from_callback(shape, home, lambda index: box(bounds_of(index, shape)))

"""Micro-batches: a batch's sequences, packed into rows of a few fixed shapes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.data.bin_packing import in_bucket, plan_microbatches, plan_whole
from jaxrl_llm.data.packing import RowShape, pack_rows
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.mesh import over_batch, replicated
from jaxrl_llm.types import Batch, Rows

Fields = dict[str, Any]


class MicroBatch(NamedTuple):
    """One micro-batch: packed rows for the model, [b T] fields for the algorithm."""

    rows: Rows
    fields: Fields


def pack_microbatches(
    batch: Batch, names: set[str], shape: RowShape, mesh: Mesh
) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """Cut a batch into micro-batches on the devices, each with the indices of its sequences.

    Raises:
        ValueError: a batch wider than a row.
    """
    if batch.tokens.shape[1] > shape.length:
        raise ValueError(
            f"a batch of {batch.tokens.shape[1]} columns, expected at most a row's {shape.length}"
        )
    sharding = over_batch(mesh)
    for planned in plan_microbatches(batch.sequence_lengths, shape):
        members, bucket = in_bucket(batch.sequence_lengths, planned, shape)
        indices, micro = _laid_out(batch, names, members, bucket)
        yield indices, distributed.put(micro, sharding)


def pack_batch(batch: Batch, shape: RowShape, mesh: Mesh) -> Rows:
    """Pack a whole batch into rows on the devices, of the smallest bucket that holds it.

    Sequence i of the rows is sequence i of the batch, so that what a model says of them is [B T].

    Args:
        batch: B sequences.
        shape: of a micro-batch with at least B rows, as long as the batch is wide.
        mesh: the devices.
    """
    sizes = batch.sequence_lengths
    members, bucket = in_bucket(sizes, plan_whole(sizes, shape), shape)
    packed = pack_rows(batch.tokens, sizes, members, bucket)
    order = np.argsort([i for row in members for i in row])
    rows = distributed.put(packed[:3], over_batch(mesh))
    places = distributed.put(tuple(place[order] for place in packed[3:]), replicated(mesh))
    return Rows(*rows, *places)


def _laid_out(
    batch: Batch, names: Iterable[str], members: list[list[int]], bucket: RowShape
) -> tuple[np.ndarray, MicroBatch]:
    indices = np.array([i for row in members for i in row], np.int32)
    rows = pack_rows(batch.tokens, batch.sequence_lengths, members, bucket)
    return indices, MicroBatch(rows, {n: _pad(batch[n][indices], bucket) for n in names})


def _pad(values: np.ndarray, shape: RowShape) -> np.ndarray:
    widths = [(0, shape.sequences - len(values))]
    if values.ndim > 1:
        values = values[:, : shape.length]
        widths.append((0, shape.length - values.shape[1]))
    return np.pad(values, widths)


class BucketWarmup:
    """Compiles a step for all buckets of micro-batches when it is first run, none of them later.

    Args:
        shape: of the micro-batches.
        mesh: the devices.
    """

    def __init__(self, shape: RowShape, mesh: Mesh) -> None:
        """Begin without any."""
        self._shape, self._mesh = shape, mesh
        self._seen: set[Any] = set()

    def __call__(
        self,
        run: Callable[[MicroBatch], Any],
        params: Params,
        batch: Batch,
        names: Iterable[str] = (),
    ) -> None:
        """Run a step on a micro-batch without sequences in each bucket.

        Nothing is run where these parameters' layout and dtypes were met before.

        Args:
            run: the step; what it returns is fetched, and forgotten.
            params: what it runs with.
            batch: with the fields that it asks for.
            names: of these fields.
        """
        kind = tuple((leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(params))
        if kind in self._seen or len(self._shape.buckets) == 1:
            return
        self._seen.add(kind)
        for bucket in self._shape.buckets:
            _, micro = _laid_out(batch, names, [], bucket)
            distributed.fetch(run(distributed.put(micro, over_batch(self._mesh))))


def merge_microbatches(
    parts: Iterable[tuple[np.ndarray, dict[str, Array]]], batch: Batch
) -> dict[str, np.ndarray]:
    """Put what micro-batches say of their tokens together, once all of them are on their way."""
    merged: dict[str, np.ndarray] = {}
    for indices, results in list(parts):
        for name, values in distributed.fetch(results).items():
            whole = merged.setdefault(name, np.zeros(batch.tokens.shape, np.float32))
            width = min(values.shape[1], whole.shape[1])
            whole[indices, :width] = values[: len(indices), :width]
    return merged

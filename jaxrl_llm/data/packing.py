"""Packing: many sequences side by side in one row, so that no FLOP is spent on padding.

`pack` lays [B T] values out in rows, `unpack` gathers them back; they invert each other.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxrl_llm.types import Rows

SEQUENCES_PER_ROW = 16
"""The most sequences in a row; it fixes the shape of a micro-batch's [b T] side."""


class RowShape(NamedTuple):
    """The static shape of a micro-batch: R rows of L tokens with at most b sequences."""

    rows: int
    length: int
    sequences: int


def row_shape(tokens: int, length: int, *, sequences: int, multiple_of: int = 1) -> RowShape:
    """Return the shape of a micro-batch of at most `tokens` tokens.

    Args:
        tokens: the limit, in tokens.
        length: tokens in a row, at least the longest sequence.
        sequences: sequences in all; a micro-batch never needs more slots.
        multiple_of: devices over which rows are split.

    Raises:
        ValueError: where not even one row for each device fits.

    >>> row_shape(4096, 1024, sequences=512)
    RowShape(rows=4, length=1024, sequences=64)
    """
    rows = tokens // length // multiple_of * multiple_of
    if rows == 0:
        raise ValueError(
            f"a micro-batch of {tokens} tokens can't hold {multiple_of} rows of {length} tokens, "
            f"one for each device: raise tokens_per_microbatch to {multiple_of * length}"
        )
    rows = min(rows, -(-sequences // multiple_of) * multiple_of)
    slots = min(rows * SEQUENCES_PER_ROW, sequences)
    return RowShape(rows, length, -(-slots // multiple_of) * multiple_of)


def plan(sizes: Int[np.ndarray, " B"], shape: RowShape) -> list[list[list[int]]]:
    """Place sequences into the rows of as few micro-batches as best-fit-decreasing finds.

    Args:
        sizes: tokens of each sequence.
        shape: of every micro-batch.

    Returns:
        For each micro-batch, for each of its rows, the indices of the sequences in it.

    Raises:
        ValueError: a sequence longer than a row, or without tokens.

    >>> plan(np.array([3, 2, 2, 4]), RowShape(rows=1, length=5, sequences=4))
    [[[3]], [[0, 1]], [[2]]]
    """
    for index, size in enumerate(sizes):
        if not 0 < size <= shape.length:
            raise ValueError(f"sequence {index} has {size} tokens, wanted 1 to {shape.length}")
    most = min(SEQUENCES_PER_ROW, shape.sequences)
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        at = bisect.bisect_left(space, (size, -1))
        if at == len(space):
            rows.append([])
            left, row = shape.length, len(rows) - 1
        else:
            left, row = space.pop(at)
        rows[row].append(index)
        if len(rows[row]) < most:
            bisect.insort(space, (left - size, row))
    return _into_microbatches(rows, shape)


def _into_microbatches(rows: list[list[int]], shape: RowShape) -> list[list[list[int]]]:
    batches: list[list[list[int]]] = []
    used = 0
    for row in rows:
        if not batches or len(batches[-1]) == shape.rows or used + len(row) > shape.sequences:
            batches.append([])
            used = 0
        batches[-1].append(row)
        used += len(row)
    return batches


def pack_rows(
    tokens: Int[np.ndarray, "B T"],
    sizes: Int[np.ndarray, " B"],
    rows: Sequence[Sequence[int]],
    shape: RowShape,
) -> Rows:
    """Lay the sequences of one micro-batch out in rows, with positions and segments.

    Sequence slots follow the order of the flattened `rows`.
    """
    row = np.zeros(shape.sequences, np.int32)
    start = np.zeros(shape.sequences, np.int32)
    size = np.zeros(shape.sequences, np.int32)
    slot = 0
    for r, members in enumerate(rows):
        at = 0
        for index in members:
            row[slot], start[slot], size[slot] = r, at, sizes[index]
            at += int(sizes[index])
            slot += 1
    members = np.array([i for m in rows for i in m], np.int32)
    steps = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), (slot, tokens.shape[1]))
    numbers = np.broadcast_to(np.arange(1, slot + 1, dtype=np.int32)[:, None], steps.shape)
    where = (row[:slot], start[:slot], size[:slot])
    return Rows(
        pack(tokens[members].astype(np.int32), *where, shape),
        pack(steps, *where, shape),
        pack(numbers, *where, shape),
        row,
        start,
        size,
    )


def pack(
    values: Shaped[np.ndarray, "b T"],
    row: Int[np.ndarray, " b"],
    start: Int[np.ndarray, " b"],
    size: Int[np.ndarray, " b"],
    shape: RowShape,
) -> Shaped[np.ndarray, "R L"]:
    """Lay the first `size` values of every sequence out in rows; the rest is 0."""
    packed = np.zeros(shape.rows * shape.length, values.dtype)
    inside = np.arange(values.shape[1]) < size[:, None]
    flat = (row * shape.length + start)[:, None] + np.arange(values.shape[1])
    packed[flat[inside]] = values[inside]
    return packed.reshape(shape.rows, shape.length)


def unpack(
    packed: Shaped[Array, "R L"],
    row: Int[Array, " b"],
    start: Int[Array, " b"],
    size: Int[Array, " b"],
) -> Shaped[Array, "b T"]:
    """Gather every sequence back from the rows, padded to T = L with 0: the inverse of `pack`.

    >>> rows = jnp.array([[5, 6, 7, 0]])
    >>> print(unpack(rows, jnp.array([0, 0]), jnp.array([0, 2]), jnp.array([2, 1])))
    [[5 6 0 0]
     [7 0 0 0]]
    """
    steps = jnp.arange(packed.shape[1])
    column = jnp.minimum(start[:, None] + steps, packed.shape[1] - 1)
    zero = jnp.zeros((), packed.dtype)
    return jnp.where(steps < size[:, None], packed[row[:, None], column], zero)

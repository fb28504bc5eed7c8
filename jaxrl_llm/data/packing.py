"""Packing: many sequences side by side in one row, so that no FLOP is spent on padding.

`pack` lays [B T] values out in rows, `unpack` gathers them back; they invert each other. Which
sequences share a row is `bin_packing.py`'s choice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jaxrl_llm.data.balance import VERL_COST, Cost
from jaxrl_llm.models.attention import keys_per_query
from jaxrl_llm.types import Rows

MAX_SEQUENCES_PER_ROW = 16
"""Of a row as long as the longest sequence. It fixes the shape of a micro-batch's [b T] side."""

MAX_HALVINGS = 3  # of a micro-batch's shape
MANY_SEQUENCES = 18
"""Of the longest, in a row: with as many, what one of them leaves free is less than 5 %."""

MIN_BUCKET_FLOPS = (
    4e9  # of a micro-batch: in 100 of them as much as a CPU does while it compiles one
)


class RowShape(NamedTuple):
    """The static shape of a micro-batch: R rows of L tokens with at most b sequences.

    The i-th of its ranks, devices that wait for each other, has the i-th block of R / ranks rows.
    `cost` is that of a sequence, by which ranks are balanced, and `unit` what lengths are multiples
    of. Where a row is longer than the longest sequence, `longest` says how long that is.
    `visual_share` is the most of a row's tokens that may stand for images and videos.
    """

    rows: int
    length: int
    sequences: int
    ranks: int = 1
    cost: Cost = VERL_COST
    unit: int = 1
    longest: int | None = None
    visual_share: float = 1.0

    @property
    def visual_length(self) -> int:
        """Return V, the most tokens of a row that stand for images and videos."""
        return max(1, self.visual_room(self.length))

    def visual_room(self, tokens: int) -> int:
        """Return how many of so many tokens may stand for images and videos.

        >>> RowShape(rows=1, length=200, sequences=2, visual_share=29 / 100).visual_room(200)
        58
        """
        return int(tokens * self.visual_share + 1e-9)  # 57.99… is 58

    @property
    def width(self) -> int:
        """Return T, the most tokens of a sequence."""
        return min(self.longest or self.length, self.length)

    @property
    def tokens(self) -> int:
        """Return the places for tokens in a micro-batch."""
        return self.rows * self.length

    @property
    def time(self) -> float:
        """Return how long a micro-batch takes where XLA attends, in that of tokens outside it."""
        keys = keys_per_query(self.length, self.longest)
        return self.cost.of_rows(self.rows, self.length, keys) / self.ranks

    @property
    def in_short_rows(self) -> "RowShape":
        """Return the shape whose rows are as long as the longest sequence, for as many tokens.

        >>> RowShape(rows=2, length=70, sequences=9, ranks=2, longest=16).in_short_rows[:3]
        (8, 16, 9)
        """
        if self.longest is None:
            return self
        rows = self.length // self.longest * self.rows
        return self._replace(rows=rows, length=self.longest, longest=None)

    @property
    def sequences_per_row(self) -> int:
        """Return the most sequences in a row."""
        return min(MAX_SEQUENCES_PER_ROW * -(-self.length // self.width), self.sequences)

    @property
    def buckets(self) -> tuple["RowShape", ...]:
        """Return the shapes that micro-batches may have: this one, and its halves several times.

        Rows are halved while every rank has several, then their length. Where few of the longest
        fill a row, there is one of 15/16, for sequences of equal size that leave the rest empty.
        Each shape is compiled, so the model must be large enough for that to pay.

        >>> large = Cost(breakeven=24576.0, flops=4e10)
        >>> shape = RowShape(rows=8, length=16, sequences=9, ranks=2, cost=large)
        >>> [bucket[:2] for bucket in shape.buckets]
        [(2, 8), (2, 16), (4, 16), (8, 16)]
        """
        shapes = [self]
        for _ in range(MAX_HALVINGS):
            rows, length = shapes[-1][:2]
            if rows > self.ranks:
                half = self._replace(rows=_half(rows, self.ranks), length=length)
            else:
                half = self._replace(rows=rows, length=_half(length, self.unit))
            if half == shapes[-1] or half.tokens * self.cost.flops < MIN_BUCKET_FLOPS:
                break
            shapes.append(half)
        if self.longest and len(shapes) > 1 and self.length < MANY_SEQUENCES * self.longest:
            shapes.insert(1, self._replace(length=-(-self.length * 15 // 16)))
        return tuple(reversed(shapes))


def _half(number: int, unit: int) -> int:
    """Return half of a number, rounded up to a multiple of a unit."""
    return -(-number // unit // 2) * unit


def row_shape(
    tokens: int,
    length: int,
    *,
    sequences: int,
    multiple_of: int = 1,
    cost: Cost = VERL_COST,
    unit: int = 1,
    long_rows: bool = False,
) -> RowShape:
    """Return the shape of a micro-batch of at most `tokens` tokens.

    Args:
        tokens: the limit, in tokens.
        length: tokens in a row, at least the longest sequence.
        sequences: sequences in all; a micro-batch never needs more slots.
        multiple_of: devices over which rows are split.
        cost: of a sequence.
        unit: what the lengths of rows are multiples of.
        long_rows: whether a device may get one row for all of its tokens, in which sequences of
            more than half of `length` leave less room (`choose_rows` tells when that is faster). It
            does not where all of them fit into a micro-batch of one shape.

    Raises:
        ValueError: where not even one row for each device fits.

    >>> row_shape(4096, 1024, sequences=512)[:4]
    (4, 1024, 64, 1)
    >>> row_shape(4096, 1024, sequences=512, long_rows=True)[:4]
    (1, 4096, 64, 1)
    """
    rows = tokens // length // multiple_of * multiple_of
    if rows == 0:
        raise ValueError(
            f"a micro-batch of {tokens} tokens can't hold {multiple_of} rows of {length} tokens, "
            f"one for each part of the batch: expected at least {multiple_of * length}"
        )
    each = -(-sequences // multiple_of)
    rows = min(rows, each * multiple_of)
    slots = min(rows * MAX_SEQUENCES_PER_ROW, sequences)
    slots = -(-slots // multiple_of) * multiple_of
    shape = RowShape(rows, length, slots, multiple_of, cost, unit)
    is_always_one = rows == each * multiple_of and len(shape.buckets) == 1  # nothing to fill better
    if not long_rows or rows == multiple_of or is_always_one:
        return shape
    row = min(tokens // multiple_of, each * length)
    return shape._replace(rows=multiple_of, length=row, longest=length)


def pack_rows(
    tokens: Int[np.ndarray, "B T"],
    sizes: Int[np.ndarray, " B"],
    rows: Sequence[Sequence[int]],
    shape: RowShape,
    mask: Bool[np.ndarray, "B T"] | None = None,
    second_start: Int[np.ndarray, " B"] | None = None,
    routes: Int[np.ndarray, "B T M top"] | None = None,
) -> Rows:
    """Lay the sequences of one micro-batch out in rows, with positions and segments.

    Sequence slots follow the order of the flattened `rows`. A token is scored at the place before
    its own, so the places of `scored` are one before those of `mask`. Where `second_start` is
    given, each sequence is two that know nothing of each other, the second from there on. `routes`
    are the experts that tokens go to.
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
    if second_start is not None:
        second = second_start[members][:, None]
        is_second = steps >= second
        steps, numbers = steps - second * is_second, 2 * numbers - ~is_second
    where = (row[:slot], start[:slot], size[:slot])
    return Rows(
        pack(tokens[members].astype(np.int32), *where, shape),
        pack(steps, *where, shape),
        pack(numbers, *where, shape),
        row,
        start,
        size,
        None if mask is None else np.roll(pack(mask[members], *where, shape), -1, axis=1),
        None if routes is None else pack(routes[members], *where, shape),
    )


def pack(
    values: Shaped[np.ndarray, "b T *K"],
    row: Int[np.ndarray, " b"],
    start: Int[np.ndarray, " b"],
    size: Int[np.ndarray, " b"],
    shape: RowShape,
) -> Shaped[np.ndarray, "R L *K"]:
    """Lay the first `size` values of every sequence out in rows; the rest is 0."""
    packed = np.zeros((shape.rows * shape.length, *values.shape[2:]), values.dtype)
    inside = np.arange(values.shape[1]) < size[:, None]
    flat = (row * shape.length + start)[:, None] + np.arange(values.shape[1])
    packed[flat[inside]] = values[inside]
    return packed.reshape(shape.rows, shape.length, *values.shape[2:])


def unpack(
    packed: Shaped[Array, "R L *K"],
    row: Int[Array, " b"],
    start: Int[Array, " b"],
    size: Int[Array, " b"],
    width: int | None = None,
) -> Shaped[Array, "b T *K"]:
    """Gather every sequence back from the rows, padded to T with 0: the inverse of `pack`.

    T is `width`, by default L.

    >>> rows = jnp.array([[5, 6, 7, 0]])
    >>> print(unpack(rows, jnp.array([0, 0]), jnp.array([0, 2]), jnp.array([2, 1])))
    [[5 6 0 0]
     [7 0 0 0]]
    """
    steps = jnp.arange(width or packed.shape[1])
    column = jnp.minimum(start[:, None] + steps, packed.shape[1] - 1)
    inside = jnp.expand_dims(steps < size[:, None], range(2, packed.ndim))
    zero = jnp.zeros((), packed.dtype)
    return jnp.where(inside, packed[row[:, None], column], zero)

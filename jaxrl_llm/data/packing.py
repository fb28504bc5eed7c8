"""Packing: many sequences side by side in one row, so that no FLOP is spent on padding.

`pack` lays [B T] values out in rows, `unpack` gathers them back; they invert each other. Which
sequences share a row is the choice of `plan_microbatches`.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm.models.attention import keys_per_query
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.delta import CHUNK
from jaxrl_llm.models.flops import active_parameters, delta_products
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.types import Rows

# What a sequence costs, and how sequences are shared out so that devices finish together.
#
# In a synchronous micro-batch every device waits for the slowest.

XLA_ATTENTION = 4.0
"""How many times as long a FLOP of XLA's attention takes as one of a large product. Updates of the
model `small` of `benchmarks.training.train_step`, in long rows and in short ones, gave 3 to 7 on a
CPU, the most for the shortest sequences (82 to 512 tokens). A DeltaNet's chunks are as small."""


@dataclass(frozen=True)
class Cost:
    """The FLOPs of sequences, in those that one token takes outside attention: n + n² / breakeven.

    Attributes:
        breakeven: tokens of the sequence that spends as much in attention as outside of it.
        flops: the unit: of a token outside attention, forward and backward; 0 where unknown.
        in_chunks: the part of `flops` that layers with a DeltaNet spend on chunks of tokens.

    >>> Cost(breakeven=100.0)(np.array([10, 100]))
    array([ 11., 200.])
    """

    breakeven: float
    flops: float = 0.0
    in_chunks: float = 0.0

    def __call__(self, sizes: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """Return the cost of sequences of these sizes, in tokens."""
        return sizes + np.square(sizes, dtype=np.float64) / self.breakeven

    def of_rows(self, rows: int, length: int, keys: float) -> float:
        """Return what packed rows cost where XLA attends, filled or not.

        Args:
            rows: how many.
            length: of a row, in tokens, which a DeltaNet lengthens to whole chunks.
            keys: whose scores are computed for each token.
        """
        attention = 2 * keys / self.breakeven
        padding = self.in_chunks * (-length % CHUNK) / length
        return rows * length * (1 + XLA_ATTENTION * (attention + padding))


VERL_COST = Cost(breakeven=24576.0)
"""What verl assumes for every model: 24576·n + n², six times the width of one of 7B."""


def model_cost(spec: ModelSpec) -> Cost:
    """Return what sequences cost in a model.

    Forward and backward, a token takes 6 FLOPs for each parameter that it is multiplied with, and
    a pair of tokens 12·N·H in a layer's attention (https://arxiv.org/abs/2204.02311, appendix B).
    We count the n²/2 pairs of causal attention and not n², so n = parameters / (layers·N·H) is
    where both are equal. Experts count as far as a token is sent to them. Layers with a window are
    left out of the layers: their attention does not grow with the square. So are those with a
    DeltaNet, whose products with the memory count as parameters do.

    >>> spec = tiny_spec(layers=3, qk_norm=False)
    >>> model_cost(spec).breakeven * 3 * 2 * 2  # 3 layers of 48 + 72, norms of 4, and the embedding
    420.0
    """
    windowed = spec.windowed_layers or (spec.window is not None,) * spec.layers
    delta = spec.delta_layers or (False,) * spec.layers
    full = sum(not (short or none) for short, none in zip(windowed, delta, strict=True))
    pairs = full * spec.heads * spec.head_dim
    parameters = sum(active_parameters(spec)) + delta_products(spec)
    breakeven = parameters / pairs if pairs else math.inf
    return Cost(breakeven, 6.0 * parameters, delta_products(spec) / parameters)


def sequence_cost(model: Model) -> Cost:
    """Return what sequences cost in any model; of one that is no `Decoder` by its parameters alone.

    Nobody knows then what attention costs, and verl's assumption takes its place.
    """
    if isinstance(model, Decoder):
        return model_cost(model.spec)
    parameters = sum(math.prod(array.shape) for array in jax.tree.leaves(model.declare()))
    return Cost(VERL_COST.breakeven, 6.0 * parameters)


def karmarkar_karp(
    costs: Float[np.ndarray, " n"], parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Divide numbers into parts of nearly equal sums, by the largest differencing method.

    Each number begins as a partial solution of its own. The two whose parts differ most are joined,
    the largest part of one with the smallest of the other, until one is left. Its largest sum is at
    most 4/3 - 1/(3·parts) times the smallest possible, as with the greedy method that gives the
    next largest number to the smallest part, and on average much closer; neither is always better.
    From Karmarkar and Karp 1982, "The differencing method of set partitioning"; bound by Michiels
    et al. 2007 (https://doi.org/10.1007/s10878-006-9010-z). By hand: NumPy and SciPy have
    no number partitioning, and these lines are less than a dependency.

    Args:
        costs: the numbers, not negative.
        parts: how many parts.
        equal_size: whether all parts hold as many numbers, by starting from solutions of `parts`
            numbers next to each other in size; the bound is then 2 - 1/parts.

    Returns:
        For each part the indices of its numbers, ascending.

    Raises:
        ValueError: no parts, or numbers that can't be divided into parts of equal size.

    >>> karmarkar_karp(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    [[1, 3, 4], [0, 2]]
    """
    if parts < 1 or (equal_size and len(costs) % parts):
        equal = " of equal size" if equal_size else ""
        raise ValueError(f"{len(costs)} numbers can't be divided into {parts} parts{equal}")
    divided: list[list[int]] = [[] for _ in range(parts)]
    if not len(costs) or parts == 1:
        return [[*range(len(costs))], *divided[1:]]
    members = np.argsort(-costs, kind="stable").reshape(-1, parts if equal_size else 1)
    sums = dict(enumerate(costs[members]))  # descending; parts that are empty are left out
    widest = [(-_spread(s, parts), number) for number, s in sums.items()]
    heapq.heapify(widest)
    joins = []
    while len(widest) > 1:
        first, second = heapq.heappop(widest)[1], heapq.heappop(widest)[1]
        one, other = sums[first], sums.pop(second)
        total = np.zeros(min(parts, len(one) + len(other)))
        total[: len(one)] += one
        total[len(total) - len(other) :] += other[::-1]
        order = np.argsort(-total, kind="stable")
        joins.append((first, second, len(one), len(other), order))
        sums[first] = total[order]
        heapq.heappush(widest, (-_spread(sums[first], parts), first))
    ((root, total),) = sums.items()
    place = {root: np.arange(len(total))}
    for first, second, ones, others, order in reversed(joins):
        joined = np.empty_like(order)
        joined[order] = place[first]
        place[first], place[second] = joined[:ones], joined[len(order) - others :][::-1]
    for number, indices in enumerate(members.tolist()):
        for index, part in zip(indices, place[number].tolist(), strict=True):
            divided[part].append(index)
    return [sorted(part) for part in divided]


def _spread(sums: Float[np.ndarray, " k"], parts: int) -> float:
    return float(sums[0] - (sums[-1] if len(sums) == parts else 0))


def sum_by_rank(
    amounts: Float[np.ndarray, " B"] | Int[np.ndarray, " B"],
    batches: Sequence[Sequence[Sequence[int]]],
    ranks: int,
) -> Float[np.ndarray, "M S"]:
    """Sum what each of S ranks has in each of M micro-batches of a plan.

    Args:
        amounts: of each sequence.
        batches: for each micro-batch, for each of its rows, the indices of the sequences in it.
        ranks: devices over which rows are split; rank i has the i-th block of a micro-batch's.

    >>> print(sum_by_rank(np.array([3, 2, 1]), [[[0], [1]], [[], [2]]], ranks=2))
    [[3. 2.]
     [0. 1.]]
    """
    sums = np.zeros((len(batches), ranks))
    for batch, total in zip(batches, sums, strict=True):
        for number, row in enumerate(batch):
            total[number * ranks // len(batch)] += amounts[list(row)].sum()
    return sums


def imbalance(
    sizes: Int[np.ndarray, " B"], batches: Sequence[Sequence[Sequence[int]]], ranks: int, cost: Cost
) -> dict[str, float]:
    """Return how evenly a plan loads the ranks.

    Args:
        sizes: tokens of each sequence.
        batches: the plan of these sequences.
        ranks: devices over which rows are split.
        cost: of a sequence.

    Returns:
        `perf/imbalance`: the time of the slowest ranks of all micro-batches over that of ranks with
        the same cost, 1 at best; and under verl's names the tokens of ranks, had the sequences been
        dealt out in their order, and `balanced_` as they are.

    >>> metrics = imbalance(np.array([3, 2, 1]), [[[0], [1, 2]]], 2, VERL_COST)
    >>> metrics["global_seqlen/minmax_diff"], metrics["global_seqlen/balanced_max"]
    (4.0, 3.0)
    """
    costs = sum_by_rank(cost(sizes), batches, ranks)
    tokens = sum_by_rank(sizes, batches, ranks).sum(0)
    in_order = [float(part.sum()) for part in np.array_split(sizes, ranks)]
    return {
        "perf/imbalance": float(costs.max(1).sum() / costs.mean(1).sum()),
        "global_seqlen/min": min(in_order),
        "global_seqlen/max": max(in_order),
        "global_seqlen/minmax_diff": max(in_order) - min(in_order),
        "global_seqlen/balanced_min": float(tokens.min()),
        "global_seqlen/balanced_max": float(tokens.max()),
        "global_seqlen/mean": float(tokens.mean()),
    }


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


def plan_microbatches(sizes: Int[np.ndarray, " B"], shape: RowShape) -> list[list[list[int]]]:
    """Place sequences into the rows of few micro-batches, so that ranks finish together.

    Places that hold no token take as long as tokens do outside attention, and ranks wait for the
    slowest in attention. The rows of best-fit-decreasing are cut into micro-batches that leave few
    of their buckets' places empty. Or else sequences are dealt out to ranks of equal cost by
    `karmarkar_karp`, in as few micro-batches as that finds room for. The faster plan is taken.

    Args:
        sizes: tokens of each sequence; one without tokens is in no row.
        shape: of every micro-batch.

    Returns:
        For each micro-batch, for each of its rows, the indices of the sequences in it; `in_bucket`
        finds its shape. With several ranks some rows may be empty, since the i-th rank has the i-th
        block of rows.

    Raises:
        ValueError: a sequence longer than a row.

    >>> plan_microbatches(np.array([3, 2, 2, 4]), RowShape(rows=1, length=5, sequences=4))
    [[[3]], [[0, 1]], [[2]]]
    >>> plan_microbatches(np.array([3, 2, 2, 4]), RowShape(rows=2, length=7, sequences=4, ranks=2))
    [[[3, 2], [0, 1]]]
    """
    for index, size in enumerate(sizes):
        if not 0 <= size <= shape.width:
            raise ValueError(f"sequence {index}: expected 0 to {shape.width} tokens, got {size}")
    if not sizes.all():
        held = np.flatnonzero(sizes).tolist()
        planned = plan_microbatches(sizes[held], shape) if held else []
        return [[[held[i] for i in row] for row in rows] for rows in planned]
    costs = shape.cost(sizes)
    # ranks of equal cost, or else of equal size, which are easier to pack
    levels = [costs, sizes.astype(np.float64)] if shape.ranks > 1 else [costs]
    batches = _into_microbatches(sizes, shape)
    filled = [_over_ranks(batch, costs, shape) for batch in batches]
    counts = _counts(sizes, len(filled), shape) + [len(filled)] * (shape.ranks > 1)
    for count, level in itertools.product(counts, levels):
        if balanced := _deal_out(sizes, level, count, shape):
            return min((filled, balanced), key=lambda plan: _time(sizes, plan, shape))
    return filled


def choose_rows(sizes: Int[np.ndarray, " B"], shape: RowShape) -> RowShape:
    """Return the shape of rows, long or short ones, in which these sequences take less time.

    Long rows leave little room empty, whatever the lengths. In short ones XLA's attention computes
    half the scores, so these are faster unless many sequences have more than half of the longest
    length, and leave rows empty that can't hold a second one.

    Args:
        sizes: tokens of each sequence.
        shape: of micro-batches; rows that are no longer than the longest sequence stay as they are.

    >>> from jaxrl_llm.data.packing import Cost
    >>> shape = RowShape(rows=1, length=320, sequences=64, longest=32, cost=Cost(1e3, 1e9))
    >>> [choose_rows(np.full(64, size), shape)[:2] for size in (32, 20, 9)]
    [(10, 32), (1, 320), (10, 32)]
    """
    if shape.longest is None or not sizes.any():
        return shape

    def time(shape: RowShape) -> float:
        batches = plan_microbatches(sizes, shape)
        return sum(in_bucket(sizes, batch, shape)[1].time for batch in batches)

    return min(shape.in_short_rows, shape, key=time)


def plan_whole(sizes: Int[np.ndarray, " B"], shape: RowShape) -> list[list[int]]:
    """Place all sequences into the rows of a single micro-batch.

    Args:
        sizes: tokens of each sequence.
        shape: of the micro-batch, with as many rows as there are sequences, or enough.

    Returns:
        For each row the indices of the sequences in it; `in_bucket` finds its shape.

    >>> plan_whole(np.array([3, 2, 2, 4]), RowShape(rows=4, length=5, sequences=4))
    [[3], [0, 1], [2]]
    """
    return _over_ranks(best_fit(sizes, shape), shape.cost(sizes), shape)


def in_bucket(
    sizes: Int[np.ndarray, " B"], batch: list[list[int]], shape: RowShape
) -> tuple[list[list[int]], RowShape]:
    """Return the rows of a micro-batch in the smallest bucket that holds them.

    >>> from jaxrl_llm.data.packing import Cost
    >>> shape = RowShape(rows=4, length=4, sequences=4, cost=Cost(breakeven=24576.0, flops=4e10))
    >>> in_bucket(np.array([3, 2]), [[0], [1], [], []], shape)[0]
    [[0], [1]]
    """
    batch = batch + [[]] * (shape.rows - len(batch))
    each = shape.rows // shape.ranks
    ranks = [[row for row in batch[at : at + each] if row] for at in range(0, shape.rows, each)]
    rows = max(map(len, ranks)) * shape.ranks
    length = max(int(sizes[row].sum()) for row in batch if row)
    bucket = next(b for b in shape.buckets if b.rows >= rows and b.length >= length)
    own = bucket.rows // bucket.ranks
    return [row for rank in ranks for row in rank + [[]] * (own - len(rank))], bucket


def padding(sizes: Int[np.ndarray, " B"], batches: list[list[list[int]]], shape: RowShape) -> float:
    """Return the fraction of places that hold no token, in the buckets of all micro-batches.

    >>> padding(np.array([3, 2, 3]), [[[0], [1]], [[2]]], RowShape(rows=2, length=4, sequences=4))
    0.5
    """
    return 1 - int(sizes.sum()) / sum(in_bucket(sizes, batch, shape)[1].tokens for batch in batches)


def _time(sizes: Int[np.ndarray, " B"], batches: list[list[list[int]]], shape: RowShape) -> float:
    """Return the cost of all places of a rank, and that of the slowest ranks' attention."""
    places = sum(in_bucket(sizes, batch, shape)[1].tokens for batch in batches) / shape.ranks
    attention = sum_by_rank(shape.cost(sizes) - sizes, batches, shape.ranks)
    return places + float(attention.max(1).sum())


def _counts(sizes: Int[np.ndarray, " B"], limit: int, shape: RowShape) -> list[int]:
    """Return numbers of micro-batches to try, from the fewest possible to less than `limit`.

    A row has room for no more than k sequences of more than L / (k + 1) tokens.
    """
    k = np.arange(1, shape.sequences_per_row + 1)
    crowded = ((sizes[:, None] * (k + 1) > shape.length).sum(0) / k).max()
    fewest = max(sizes.sum() / shape.tokens, crowded / shape.rows, len(sizes) / shape.sequences)
    steps = (math.ceil(fewest) + 2**n - 1 for n in itertools.count())
    return list(itertools.takewhile(lambda count: count < limit, steps))


def _into_microbatches(sizes: Int[np.ndarray, " B"], shape: RowShape) -> list[list[list[int]]]:
    """Cut the rows of best-fit-decreasing into micro-batches, the rest into small ones."""
    batches: list[list[list[int]]] = []
    used = 0
    for row in best_fit(sizes, shape):
        if not batches or len(batches[-1]) == shape.rows or used + len(row) > shape.sequences:
            batches.append([])
            used = 0
        batches[-1].append(row)
        used += len(row)
    return batches[:-1] + _in_small_buckets(batches[-1], sizes, shape) if batches else []


def _in_small_buckets(
    rows: list[list[int]], sizes: Int[np.ndarray, " B"], shape: RowShape
) -> list[list[list[int]]]:
    """Place a micro-batch's sequences in the one or two buckets of fewest places that hold them."""
    members = np.array([index for row in rows for index in row])
    ways = [w for k in (1, 2) for w in itertools.combinations_with_replacement(shape.buckets, k)]
    for way in sorted(ways, key=lambda way: (sum(bucket.tokens for bucket in way), len(way))):
        lengths = [bucket.length for bucket in way for _ in range(bucket.rows)]
        if sum(lengths) >= sizes[members].sum():
            packed = [members[row].tolist() for row in best_fit(sizes[members], shape, lengths)]
            if len(packed) == len(lengths):
                return [packed[: way[0].rows], packed[way[0].rows :]][: len(way)]
    return [rows]


def _over_ranks(
    rows: list[list[int]], costs: Float[np.ndarray, " B"], shape: RowShape
) -> list[list[int]]:
    """Order the rows of a micro-batch so that its ranks have equal cost."""
    if shape.ranks == 1:
        return [row for row in rows if row]
    rows = rows + [[]] * (shape.rows - len(rows))
    each = np.array([costs[row].sum() for row in rows])
    parts = karmarkar_karp(each, shape.ranks, equal_size=True)
    return [rows[number] for part in parts for number in part]


def _deal_out(
    sizes: Int[np.ndarray, " B"], costs: Float[np.ndarray, " B"], count: int, shape: RowShape
) -> list[list[list[int]]] | None:
    """Place sequences in `count` micro-batches of ranks with equal cost, or find no room."""
    left = np.argsort(-costs, kind="stable")
    ranks: list[Int[np.ndarray, " _"]] = []
    for others in reversed(range(count)):
        taken = _share(sizes[left], costs[left], others, shape)
        chosen, left = left[taken], left[~taken]
        ranks += [chosen[part] for part in karmarkar_karp(costs[chosen], shape.ranks)]
    rows = _into_rows(ranks, sizes, costs, shape)
    if rows is None:
        return None
    batches = [rows[at : at + shape.rows] for at in range(0, len(rows), shape.rows)]
    fits = all(sum(map(len, batch)) <= shape.sequences for batch in batches)
    return [batch for batch in batches if any(batch)] if fits else None


def _share(
    sizes: Int[np.ndarray, " n"], costs: Float[np.ndarray, " n"], others: int, shape: RowShape
) -> Bool[np.ndarray, " n"]:
    """Choose a micro-batch's share of the sequences, which descend, when `others` follow it.

    A sequence of more than a rank's mean cost makes the other ranks wait, unless they get as much:
    then this micro-batch takes more than the others, and one such sequence for each rank. The rest
    of its share is spread evenly over the smaller sequences.
    """
    mean = costs.sum() / (shape.ranks * (others + 1))
    big = np.flatnonzero(costs[: shape.ranks] > mean)
    if len(big) == len(sizes):
        return np.ones(len(sizes), bool)
    rest = slice(len(big), None)
    amounts = np.array([sizes[rest].sum(), len(sizes[rest])])
    room = np.array([shape.tokens, shape.sequences])
    needed = (max(mean, costs[0]) * shape.ranks - costs[big].sum()) / costs[rest].sum()
    upper = (room - [sizes[big].sum(), len(big)]) / amounts
    lower = 1 - others * room / amounts
    share = min(max(min(needed, *upper), *lower, 0), 1)
    steps = np.floor(np.arange(len(sizes[rest]) + 1) * share + 0.5)
    return np.concatenate([np.ones(len(big), bool), np.diff(steps) > 0])


def _into_rows(
    ranks: list[Int[np.ndarray, " _"]],
    sizes: Int[np.ndarray, " B"],
    costs: Float[np.ndarray, " B"],
    shape: RowShape,
) -> list[list[int]] | None:
    """Pack each rank's sequences into its rows; what does not fit goes where it delays least."""
    each = shape.rows // shape.ranks
    rows, unplaced = [], []
    for members in ranks:
        own = [members[row].tolist() for row in _even_rows(sizes[members], each, shape)]
        rows += own[:each] + [[] for _ in range(each - len(own))]
        unplaced += [index for row in own[each:] for index in row]
    tokens = np.array([sizes[row].sum() for row in rows])
    cost = np.array([costs[row].sum() for row in rows])
    for index in sorted(unplaced, key=lambda index: -costs[index]):
        fits = [
            row
            for row in np.flatnonzero(tokens + sizes[index] <= shape.length).tolist()
            if len(rows[row]) < shape.sequences_per_row
        ]
        if not fits:
            return None
        load = cost.reshape(-1, shape.ranks, each).sum(2)
        slack = (load.max(1, keepdims=True) - load).ravel()
        row = max(fits, key=lambda row: slack[row // each])
        rows[row].append(index)
        tokens[row] += sizes[index]
        cost[row] += costs[index]
    return rows


def _even_rows(sizes: Int[np.ndarray, " n"], rows: int, shape: RowShape) -> list[list[int]]:
    """Place a rank's sequences into equally full rows, which have room for many short ones."""
    even = karmarkar_karp(sizes.astype(np.float64), rows)
    fits = all(
        len(row) <= shape.sequences_per_row and sizes[row].sum() <= shape.length for row in even
    )
    return even if fits else best_fit(sizes, shape)


def best_fit(
    sizes: Int[np.ndarray, " B"], shape: RowShape, lengths: Sequence[int] = ()
) -> list[list[int]]:
    """Place sequences, longest first, each in the fullest row with room, or else in a new one.

    Args:
        sizes: tokens of each sequence.
        shape: of a micro-batch, whose length is that of new rows.
        lengths: of the rows to begin with.

    Returns:
        For each row the indices of the sequences in it.

    >>> best_fit(np.array([3, 2, 2, 4]), RowShape(rows=1, length=5, sequences=4))
    [[3], [0, 1], [2]]
    """
    rows: list[list[int]] = [[] for _ in lengths]
    space = sorted((length, row) for row, length in enumerate(lengths))  # tokens left, row
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        at = bisect.bisect_left(space, (size, -1))
        if at == len(space):
            rows.append([])
            left, row = shape.length, len(rows) - 1
        else:
            left, row = space.pop(at)
        rows[row].append(index)
        if len(rows[row]) < shape.sequences_per_row:
            bisect.insort(space, (left - size, row))
    return rows

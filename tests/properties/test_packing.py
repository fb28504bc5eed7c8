"""Packing: nothing is lost, nothing overlaps, and what was packed comes back."""

import math

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

from jaxrl_llm.data.packing import (
    MIN_BUCKET_FLOPS,
    XLA_ATTENTION,
    Cost,
    RowShape,
    choose_rows,
    pack,
    pack_rows,
    padding,
    plan_microbatches,
    row_shape,
    unpack,
)

LARGE = Cost(24576.0, flops=math.inf)  # a model for which all buckets pay
SHAPES = [
    RowShape(rows=2, length=16, sequences=32),
    RowShape(rows=1, length=24, sequences=16),
    RowShape(rows=4, length=16, sequences=64),
    RowShape(rows=4, length=16, sequences=4),  # a small mini-batch: fewer slots than rows could use
    RowShape(rows=2, length=40, sequences=3),
    RowShape(rows=2, length=16, sequences=32, ranks=2),
    RowShape(rows=8, length=16, sequences=16, ranks=4),
    RowShape(rows=9, length=24, sequences=144, ranks=3),
    RowShape(rows=1, length=50, sequences=64, longest=16),  # rows longer than any sequence
    RowShape(rows=2, length=48, sequences=96, ranks=2, longest=16),
]
SHAPES += [shape._replace(cost=LARGE) for shape in SHAPES]


@st.composite
def problems(draw):
    shape = draw(st.sampled_from(SHAPES))
    longest = draw(st.sampled_from([1, 3, shape.width]))
    sizes = draw(st.lists(st.integers(1, longest), min_size=1, max_size=70))
    return np.array(sizes, np.int32), shape


def members(batch):
    return [index for row in batch for index in row]


@given(problems())
def test_every_sequence_is_placed_once_and_no_row_is_overfull(problem):
    sizes, shape = problem
    batches = plan_microbatches(sizes, shape)
    assert batches == plan_microbatches(sizes, shape), "it depends on nothing else"
    assert sorted(index for batch in batches for index in members(batch)) == [*range(len(sizes))]
    for batch in batches:
        assert 1 <= len(batch) <= shape.rows
        assert len(members(batch)) <= shape.sequences
        assert members(batch), "no empty micro-batch"
        for row in batch:
            assert (shape.ranks == 1) <= len(row) <= shape.sequences_per_row
            assert sum(int(sizes[index]) for index in row) <= shape.length


def bucket_of(sizes, batch, shape):
    """Find the smallest bucket with as many rows for every rank, and as long ones."""
    each = shape.rows // shape.ranks
    batch = batch + [[]] * (shape.rows - len(batch))
    rows = max(sum(map(bool, batch[at : at + each])) for at in range(0, shape.rows, each))
    length = max(sum(int(sizes[i]) for i in row) for row in batch)
    fits = [b for b in shape.buckets if b.rows >= rows * shape.ranks and b.length >= length]
    return min(fits, key=lambda bucket: bucket.tokens)


def places(sizes, batches, shape):
    return sum(bucket_of(sizes, batch, shape).tokens for batch in batches)


def spread(seed, count, longest):
    """Draw log-normal lengths (sigma 1) with a mean of a quarter of the longest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(longest / 4) - 0.5, 1.0, count)
    drawn *= longest / 4 * count / np.minimum(drawn, longest).sum()
    return np.clip(drawn.round(), 1, longest).astype(np.int32)


def test_few_places_hold_no_token():
    """At real spreads less than 5 % of them do, unless a step has two or three micro-batches."""
    wrong = []
    for count, ranks, rows, limit in (
        (512, 1, 1, 0.03),
        (512, 1, 16, 0.03),
        (512, 1, 32, 0.05),
        (512, 8, 4, 0.05),
        (256, 1, 16, 0.05),
        (64, 1, 4, 0.06),
    ):
        shape = row_shape(ranks * rows * 512, 512, sequences=count, multiple_of=ranks, cost=LARGE)
        for seed in range(5):
            sizes = spread(seed, count, 512)
            plan = plan_microbatches(sizes, shape)
            wasted = 1 - sizes.sum() / places(sizes, plan, shape)
            wrong += [(count, ranks, rows, wasted)] * int(wasted >= limit)
            assert padding(sizes, plan, shape) == pytest.approx(wasted)
    assert not wrong


def constant(share):
    return lambda rng, count: np.full(count, round(share * 512))


def lognormal(rng, count):
    return np.clip(rng.lognormal(np.log(128) - 0.5, 1.0, count), 1, 512).astype(np.int32)


def two_peaked(rng, count):
    """Answers that are right and short, and answers that were cut off."""
    return np.where(rng.random(count) < 0.5, 512, rng.integers(60, 180, count)).astype(np.int32)


@pytest.mark.parametrize(("ranks", "each"), [(1, 4), (8, 17)])
def test_long_rows_are_full_whatever_the_lengths(ranks, each):
    """Rows no longer than a sequence may be are left nearly half empty by some lengths."""
    for draw in (constant(0.3), constant(0.55), lognormal, two_peaked):
        sizes = draw(np.random.default_rng(0), ranks * each * 32)
        given = {"sequences": len(sizes), "multiple_of": ranks, "cost": LARGE}
        shapes = [row_shape(ranks * each * 512, 512, long_rows=x, **given) for x in (False, True)]
        short, long = (padding(sizes, plan_microbatches(sizes, s), s) for s in shapes)
        assert long < 0.05
        assert long < short + 0.03
        if len({*sizes.tolist()}) == 1:
            assert short > 0.09  # 0.55 of the longest: 0.45


@pytest.mark.parametrize(
    ("draw", "is_long"), [(constant(0.95), False), (constant(0.55), True), (lognormal, False)]
)
def test_rows_are_long_where_that_saves_more_than_it_costs(draw, is_long):
    """Where two sequences fit into no short row, and a token's scores cost a fifth of the rest."""
    ranks = 8
    sizes = draw(np.random.default_rng(0), ranks * 64)
    cost = Cost(breakeven=2 * 512 * XLA_ATTENTION / 0.2, flops=LARGE.flops)
    given = {"sequences": len(sizes), "multiple_of": ranks, "cost": cost, "long_rows": True}
    shape = row_shape(ranks * 8 * 512, 512, **given)
    chosen = choose_rows(sizes, shape)
    assert (chosen.longest is not None) is is_long
    assert chosen in (shape, shape.in_short_rows)
    assert choose_rows(sizes, shape.in_short_rows) == shape.in_short_rows
    # where attention costs nothing, what counts is the padding
    free = shape._replace(cost=Cost(math.inf, LARGE.flops))
    plans = [(plan_microbatches(sizes, s), s) for s in (free, free.in_short_rows)]
    chosen = choose_rows(sizes, free)
    least = min(padding(sizes, *plan) for plan in plans)
    assert padding(sizes, plan_microbatches(sizes, chosen), chosen) == least


def test_rows_stay_short_where_one_micro_batch_holds_all():
    """And has no smaller shape: long ones would compute more for nothing."""
    small, large = (
        row_shape(4096, 16, sequences=128, cost=cost, long_rows=True)
        for cost in (Cost(24576.0, flops=1.0), LARGE)
    )
    assert small[:2] == (128, 16)
    assert large[:2] == (1, 128 * 16)


def test_buckets_are_halves_and_worth_a_compilation():
    shape = RowShape(rows=24, length=16, sequences=64, ranks=4, cost=LARGE)
    assert [b[:2] for b in shape.buckets] == [(4, 16), (8, 16), (12, 16), (24, 16)]
    halves = RowShape(rows=2, length=24, sequences=9, ranks=2, unit=8, cost=LARGE).buckets
    assert [b[:2] for b in halves] == [(2, 8), (2, 16), (2, 24)]
    long = RowShape(rows=1, length=64, sequences=64, longest=16, cost=LARGE)
    assert [b[:2] for b in long.buckets] == [(1, 8), (1, 16), (1, 32), (1, 60), (1, 64)]
    assert [b.width for b in long.buckets] == [8, 16, 16, 16, 16]
    longer = long._replace(length=16 * 18)  # so many that one more or less is no matter
    assert [b.length for b in longer.buckets] == [36, 72, 144, 288]
    assert len(long._replace(cost=Cost(1.0, flops=1.0)).buckets) == 1
    small = shape._replace(cost=Cost(1.0, flops=MIN_BUCKET_FLOPS / (12 * 16)))
    assert [b[:2] for b in small.buckets] == [(12, 16), (24, 16)]


def test_the_rank_beside_a_long_sequence_gets_as_much():
    """Equal micro-batches would wait: 16 tokens beside 12, then 10 beside 10."""
    sizes = np.array([16, *[2] * 16])
    shape = RowShape(rows=2, length=16, sequences=32, ranks=2, cost=Cost(16.0))
    plan = plan_microbatches(sizes, shape)
    assert [[int(sizes[row].sum()) for row in batch] for batch in plan] == [[16, 16], [8, 8]]


def test_sequences_of_many_sizes_share_micro_batches():
    """Best-fit needs 8: its last rows have 16 short sequences and much room."""
    sizes = np.array([16] * 8 + [1] * 64)
    assert len(plan_microbatches(sizes, RowShape(rows=1, length=32, sequences=16))) == 7


def test_sequences_without_tokens_are_nowhere():
    shape = RowShape(rows=2, length=10, sequences=32)
    assert plan_microbatches(np.zeros(0, np.int32), shape) == []
    assert plan_microbatches(np.zeros(3, np.int32), shape) == []
    assert plan_microbatches(np.array([4, 10, 6]), shape) == [[[1], [2, 0]]]
    assert plan_microbatches(np.array([0, 4, 0, 10, 6]), shape) == [[[3], [4, 1]]]


def test_what_fits_nowhere_is_refused():
    for size in (-1, 17):
        with pytest.raises(ValueError, match="sequence 1"):
            plan_microbatches(np.array([3, size, 16]), SHAPES[0])
    with pytest.raises(ValueError, match="8192"):
        row_shape(8191, 1024, sequences=64, multiple_of=8)


@given(problems(), st.integers(0, 2**31))
def test_packed_rows_hold_each_sequence_where_they_say(problem, seed):
    sizes, shape = problem
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 1000, (len(sizes), shape.width))
    for batch in plan_microbatches(sizes, shape):
        rows = pack_rows(tokens, sizes, batch, shape, tokens > 500)
        assert rows.tokens.shape == (shape.rows, shape.length)
        assert rows.row.shape == rows.start.shape == rows.size.shape == (shape.sequences,)
        assert {array.dtype for array in rows[:6]} == {np.dtype(np.int32)}
        expected = np.zeros((3, shape.rows, shape.length), np.int32)
        slot = 0
        for r, indices in enumerate(batch):
            at = 0
            for index in indices:
                for t in range(sizes[index]):
                    expected[:, r, at + t] = tokens[index, t], t, slot + 1
                where = (rows.row[slot], rows.start[slot], rows.size[slot])
                assert where == (r, at, sizes[index])
                at += sizes[index]
                slot += 1
        np.testing.assert_array_equal([rows.tokens, rows.positions, rows.segment_ids], expected)
        assert not rows.size[slot:].any()
        np.testing.assert_array_equal(rows.scored, np.roll(rows.tokens > 500, -1, axis=1))


unpacked = jax.jit(unpack, static_argnums=4)


@given(problems(), st.integers(0, 2**31), st.sampled_from(["float32", "bool"]))
def test_unpack_inverts_pack(problem, seed, dtype):
    sizes, shape = problem
    width = int(sizes.max())  # T may be less than L
    values = np.random.default_rng(seed).integers(1, 100, (len(sizes), width)).astype(dtype)
    for batch in plan_microbatches(sizes, shape):
        indices = members(batch)
        rows = pack_rows(np.ones(values.shape, np.int32), sizes, batch, shape)
        n = len(indices)
        packed = pack(values[indices], rows.row[:n], rows.start[:n], rows.size[:n], shape)
        assert packed.dtype == values.dtype
        np.testing.assert_array_equal(packed != 0, rows.segment_ids != 0)
        back = unpacked(packed, rows.row, rows.start, rows.size, shape.width)
        expected = np.zeros((shape.sequences, shape.width), dtype)
        for slot, index in enumerate(indices):
            expected[slot, : sizes[index]] = values[index, : sizes[index]]
        np.testing.assert_array_equal(back, expected, strict=True)


def test_shapes():
    for tokens, length, sequences, multiple_of, shape in (
        (4096, 1024, 512, 1, (4, 1024, 64)),
        (4096 + 1023, 1024, 512, 1, (4, 1024, 64)),  # no broken row
        (4096, 1024, 512, 3, (3, 1024, 48, 3)),  # rows are split over three devices
        (8192, 1024, 5, 1, (5, 1024, 5)),  # no more rows than sequences
        (8192, 1024, 5, 4, (8, 1024, 8, 4)),  # rounded up, for the devices
        (1024, 1024, 1, 1, (1, 1024, 1)),
        (4096, 1024, 50, 4, (4, 1024, 52, 4)),  # slots are split over devices, too
    ):
        made = row_shape(tokens, length, sequences=sequences, multiple_of=multiple_of)
        assert made == RowShape(*shape)

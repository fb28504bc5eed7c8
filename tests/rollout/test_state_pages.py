"""Slots of states against a plain model: the tokens that each state has seen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout.native.page_pool import PageTable, StatePagePool

SIZE = 3


class Pool:
    """Pages and slots with what is in them: a sequence's tokens, as the engine writes them."""

    def __init__(self, count, slots):
        self.pages, self.content = StatePagePool(count, size=SIZE, slots=slots), {}
        self.states, self.live = {}, []  # [table, tokens, cached] of each sequence

    def start(self, tokens, version=None):
        table = PageTable()
        cached = self.pages.match_prefix(table, tokens[:-1], version)
        if not self.pages.allocate(table, len(tokens) - 1):
            assert self.live or self.pages.pages_needed(table, len(tokens) - 1) > (
                self.pages.available
            ), "slots are never all taken where nothing runs"
            self.pages.free(table)
            return
        sequence = [table, list(tokens), cached]
        self.live.append(sequence)
        self.check()
        for end in sorted({table.branch, len(tokens) - 1}):
            if end > sequence[2]:
                self.write(sequence, end)
                self.pages.cache_prefix(table, tokens[:end])
                self.check()

    def extend(self, sequence, new):
        table, tokens, cached = sequence
        if new and self.pages.allocate(table, cached + len(new)):
            tokens += new
            self.write(sequence, len(tokens) - 1)

    def write(self, sequence, end):
        """Write what is new as the engine does: whole pages from rows, a state to its slot."""
        table, tokens, cached = sequence
        row = self.row(sequence) + tokens[cached:end]
        if table.written or table.snapshot:
            assert self.states[self.pages.slot_to_read(table)] == tokens[:cached]
        else:
            assert (cached, self.pages.slot_to_read(table)) == (0, self.pages.slots)
        targets = self.pages.pages_to_write(table, cached, end)
        for i, page in enumerate(targets, cached // SIZE):
            self.content[page] = tuple(row[i * SIZE : (i + 1) * SIZE])
        self.states[self.pages.slot_to_write(table, end)] = tokens[:end]
        sequence[2] = end

    def row(self, sequence):
        table, _, cached = sequence
        pages = self.pages.pages_to_read(table, cached)
        return [t for page in pages for t in self.content[page]][:cached]

    def end(self, sequence, *, cut=False):
        """End a sequence; of one that is cut the state has seen more than what counts."""
        table, tokens, cached = sequence
        self.pages.retire(table, tokens[: cached - cut])
        self.live.remove(sequence)

    def nodes(self):
        """Return all pages of trees."""
        nodes, left = [], list(self.pages._trees.values())
        while left:
            node = left.pop()
            left += node.children.values()
            nodes += node.children.values()
        return nodes

    def check(self):
        for sequence in self.live:
            assert self.row(sequence) == sequence[1][: sequence[2]]
        tables = [table for table, *_ in self.live]
        read = {table.snapshot for table in tables if table.snapshot}
        kept = {node for node in self.nodes() if node.slot is not None} | read
        taken = [table.slot for table in tables] + [node.slot for node in kept]
        assert len(taken) == len(set(taken)), "no slot has two owners"
        assert sorted([*taken, *self.pages._free_slots]) == list(range(self.pages.slots))
        unread = {node for node in kept if not node.readers}
        assert unread == set(self.pages._unread)
        for node in kept - read:
            path, at = [], node
            while at.parent is not None:
                path, at = [*at.tokens, *path], at.parent
            assert self.states[node.slot] == path
        for node in self.nodes():
            assert node.children or node.slot is not None or node.ref_count, "none is useless"


TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=14)
WHO = st.integers(0, 9)
OPERATION = st.one_of(
    st.tuples(st.just("start"), TOKENS),
    st.tuples(st.just("extend"), WHO, st.lists(st.integers(0, 1), max_size=5)),
    st.tuples(st.just("again"), WHO, st.lists(st.integers(0, 1), min_size=1, max_size=5)),
    st.tuples(st.just("end"), WHO, st.booleans()),
    st.tuples(st.just("forget"), st.booleans()),
    st.tuples(st.just("go on"), TOKENS, st.integers(0, 3)),
)


@settings(max_examples=300)
@given(
    count=st.integers(5, 14), slots=st.integers(2, 9), operations=st.lists(OPERATION, max_size=60)
)
def test_each_sequence_goes_on_from_its_own_state(count, slots, operations):
    pool, version = Pool(count, slots), 0
    for name, *arguments in operations:
        if name == "start":
            pool.start(arguments[0])
        elif name == "forget":
            version += 1
            pool.pages.reset_prefix_cache(version, keep=arguments[0])
        elif name == "go on":
            pool.start(arguments[0], max(0, version - arguments[1]))
        elif pool.live:
            sequence = pool.live[arguments[0] % len(pool.live)]
            if name == "extend":
                pool.extend(sequence, arguments[1])
            else:
                pool.end(sequence, cut=name == "end" and arguments[1])
            if name == "again":  # the next turn, or a sequence that gave its pages back
                pool.start((sequence[1] + arguments[1])[:14])
        pool.check()
    while pool.live:
        pool.end(pool.live[0])
        pool.check()
    assert (pool.pages.available, pool.pages.available_slots) == (count, slots)
    pool.pages.reset_prefix_cache()
    assert len(pool.pages._free_slots) == slots
    assert len(pool.pages._free) == count


def read(pool, tokens):
    """Read a prompt and end; return how much of it was there."""
    table = PageTable()
    cached = pool.match_prefix(table, tokens)
    assert pool.allocate(table, len(tokens))
    for end in sorted({table.branch, len(tokens)}):
        if end > cached:
            pool.pages_to_write(table, cached, end)
            pool.slot_to_write(table, end)
            pool.cache_prefix(table, tokens[:end])
    pool.retire(table, tokens)
    return cached


@pytest.mark.parametrize(
    ("again", "cached"),
    [
        ((1, 2, 3, 4, 5), 5),
        ((1, 2, 3, 4, 5, 6), 5),  # the page of 4 and 5 is borrowed
        ((1, 2, 3, 4), 0),  # no part of a page
        ((1, 2, 3), 0),  # a page without a state
        ((1, 2, 9), 0),
        ((9,), 0),
    ],
)
def test_only_where_a_state_was_kept(again, cached):
    pool = StatePagePool(6, size=SIZE, slots=4)
    read(pool, (1, 2, 3, 4, 5))
    assert pool.match_prefix(PageTable(), again) == cached


def test_the_deepest_state_is_found_also_beside_whole_pages():
    pool = StatePagePool(9, size=SIZE, slots=9)
    assert read(pool, (1, 2)) == 0
    assert read(pool, (1, 2, 3, 4)) == 2
    assert read(pool, (1, 2, 3, 9)) == 2  # it leaves a state after 3
    assert pool.match_prefix(PageTable(), (1, 2, 3, 7)) == 3


def test_the_end_of_what_is_shared_gets_a_state_at_the_second_reading():
    pool = StatePagePool(20, size=SIZE, slots=9)
    cached = [read(pool, (1, 2, 3, 4, 5, 6, 7, last)) for last in (11, 12, 13, 14)]
    assert cached == [0, 0, 6, 6]


def test_what_was_read_least_recently_goes_first_with_its_pages():
    pool = StatePagePool(9, size=SIZE, slots=3)
    for first in (1, 2, 1, 3):
        read(pool, (first,) * 5)
    assert len(pool._free) == 9 - 2 * 2  # of those that begin with 1 and 3
    assert [pool.match_prefix(PageTable(), (first,) * 5) for first in (1, 2, 3)] == [5, 0, 5]


def test_a_state_is_not_kept_where_no_slot_is_left():
    pool, tables = StatePagePool(9, size=SIZE, slots=3), [PageTable(), PageTable()]
    for first, table in enumerate(tables):
        assert pool.allocate(table, 4)
        pool.slot_to_write(table, 4)
        pool.cache_prefix(table, (first,) * 4)
    assert [pool.slot_to_read(table) for table in tables] == [0, 2]  # a snapshot; its own
    assert pool.match_prefix(PageTable(), (1, 1, 1, 1)) == 0
    assert not pool.allocate(PageTable(), 1)
    pool.retire(tables[1], (1, 1, 1, 1))  # its slot is free for what it has read
    again = PageTable()
    assert (pool.match_prefix(again, (1, 1, 1, 1)), pool.slot_to_read(again)) == (4, 2)
    assert not pool.allocate(again, 6)
    pool.free(again)
    pool.free(tables[0])
    assert pool.available_slots == 3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout.native.page_pool import PagePool, PageTable, StatePagePool

SIZE = 3


class Pool:
    """Pages together with what is in them, written as the engine writes: whole pages from rows."""

    def __init__(self, pages):
        self.pages, self.content = pages, {}
        self.live = []  # [table, tokens, cached] of each sequence

    def start(self, tokens, version=None):
        table = PageTable()
        cached = self.pages.match_prefix(table, tokens[:-1], version)
        if not self.pages.allocate(table, len(tokens) - 1):
            needed = self.pages.pages_needed(table, len(tokens) - 1)
            assert self.live or needed > self.pages.available, "all is free where nothing runs"
            self.pages.free(table)
            return
        sequence = [table, list(tokens), cached]
        self.live.append(sequence)
        self.check()
        self.read(sequence)

    def read(self, sequence):
        table, tokens, cached = sequence
        if len(tokens) - 1 > cached:
            self.write(sequence, len(tokens) - 1)
        self.pages.cache_prefix(table, tokens[:-1])

    def extend(self, sequence, new):
        """Decode: append tokens; all but the newest are written."""
        table, tokens, cached = sequence
        if new and self.pages.allocate(table, cached + len(new)):
            tokens += new
            self.write(sequence, len(tokens) - 1)

    def write(self, sequence, end):
        table, tokens, cached = sequence
        row = self.row(sequence) + tokens[cached:end]
        first = cached // SIZE
        targets = self.pages.pages_to_write(table, cached, end)
        assert len(targets) == -(-end // SIZE) - first
        for i, page in enumerate(targets, first):
            self.content[page] = tuple(row[i * SIZE : (i + 1) * SIZE])
        sequence[2] = end

    def row(self, sequence):
        table, _, cached = sequence
        pages = self.pages.pages_to_read(table, cached)
        # a page of which only the first tokens are used is always the last
        return [t for page in pages for t in self.content[page]][:cached]

    def end(self, sequence, *, seals=True):
        table, tokens, cached = sequence
        if seals:
            self.pages.cache_prefix(table, tokens[:cached])
        self.pages.free(table)
        self.live.remove(sequence)

    def check(self):
        for sequence in self.live:
            assert self.row(sequence) == sequence[1][: sequence[2]]
        tables = [table for table, *_ in self.live]
        nodes = {node for t in tables for node in [*t.shared, *filter(None, [t.borrowed])]}
        owned = [page for table in tables for page in table.own] + [node.page for node in nodes]
        assert len(owned) == len(set(owned)), "no page has two owners"
        assert self.pages.available + len(owned) == self.pages.count


class StatePool(Pool):
    """Slots of states, too: the tokens that each has seen."""

    def __init__(self, pages):
        super().__init__(pages)
        self.states = {}

    def read(self, sequence):
        table, tokens, _ = sequence
        for end in sorted({table.branch, len(tokens) - 1}):
            if end > sequence[2]:
                self.write(sequence, end)
                self.pages.cache_prefix(table, tokens[:end])
                self.check()

    def write(self, sequence, end):
        table, tokens, cached = sequence
        slot = self.pages.slot_to_read(table)
        if table.written or table.snapshot:
            assert self.states[slot] == tokens[:cached]
        else:
            assert (cached, slot) == (0, self.pages.slots)
        super().write(sequence, end)
        self.states[self.pages.slot_to_write(table, end)] = tokens[:end]

    def end(self, sequence, *, seals=True):
        """End a sequence; the state of one that is cut has seen more than what counts."""
        table, tokens, cached = sequence
        self.pages.retire(table, tokens[: cached - (not seals)])
        self.live.remove(sequence)

    def nodes(self):
        """Return all pages of trees."""
        nodes, left = [], list(self.pages._trees.values())
        while left:
            children = left.pop().children.values()
            left += children
            nodes += children
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
        assert {node for node in kept if not node.readers} == set(self.pages._unread)
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
OPERATIONS = st.lists(OPERATION, max_size=60)


def perform(pool, operations):
    version = 0
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
                pool.end(sequence, seals=name == "again" or arguments[1])
            if name == "again":  # the next turn, or a sequence that gave its pages back
                pool.start((sequence[1] + arguments[1])[:14])
        pool.check()
    while pool.live:
        pool.end(pool.live[0])
        pool.check()
    assert pool.pages.available == pool.pages.count
    pool.pages.reset_prefix_cache()


@settings(max_examples=300)
@given(count=st.integers(5, 14), operations=OPERATIONS)
def test_each_sequence_reads_its_own_tokens(count, operations):
    pool, whole = Pool(PagePool(count, size=SIZE)), PageTable()
    perform(pool, operations)
    assert pool.pages.allocate(whole, count * SIZE)
    assert sorted(whole.own) == list(range(count))


@settings(max_examples=300)
@given(count=st.integers(5, 14), slots=st.integers(2, 9), operations=OPERATIONS)
def test_each_sequence_goes_on_from_its_own_state(count, slots, operations):
    pool = StatePool(StatePagePool(count, size=SIZE, slots=slots))
    perform(pool, operations)
    assert pool.pages.available_slots == len(pool.pages._free_slots) == slots
    assert len(pool.pages._free) == count


def keep(pages, tokens, table=None):
    """Write tokens and end, so that they are found; return the table."""
    table = table or PageTable()
    assert pages.allocate(table, len(tokens))
    pages.cache_prefix(table, tokens)
    pages.free(table)
    return table


def matched(pages, tokens, *version):
    """Return how many tokens are found."""
    table = PageTable()
    count = pages.match_prefix(table, tokens, *version)
    pages.free(table)
    return count


def in_common(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


BITS = st.integers(0, 1)
MANY = st.lists(st.lists(BITS, min_size=4, max_size=6), min_size=20, max_size=60)


@given(count=st.integers(9, 40), held=MANY, asked=st.lists(BITS, max_size=2))
def test_of_many_pages_the_oldest_of_those_most_alike_is_found(count, held, asked):
    pages = PagePool(count, size=6)  # the least recently used go where they are few
    root, asked = pages._trees[0], (*asked, 2)
    for tokens in held:
        table = keep(pages, tuple(tokens))
        cached = pages.match_prefix(table, asked)
        best = max(root.children, key=lambda kept: in_common(kept, asked))
        assert cached == in_common(best, asked)
        if cached:
            assert pages.pages_to_read(table, cached) == [root.children[best].page]
        pages.free(table)


@pytest.mark.parametrize("touch", [False, True])
def test_what_was_used_least_recently_goes_first(touch):
    pages, first, second = PagePool(4, size=SIZE), (1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12)
    for tokens in (first, second):
        keep(pages, tokens)
    if touch:
        pages.touch((*first, 99))
    else:
        assert [matched(pages, again) for again in ((1, 2, 9, 4), (9,), first)] == [2, 0, 6]
    assert pages.allocate(PageTable(), 6)
    assert [matched(pages, tokens) for tokens in (first, second)] == [6, 0]


def test_kept_pages_are_of_who_was_begun_under_their_weights():
    pages = PagePool(6, size=SIZE)
    for version in (1, 2):
        pages.reset_prefix_cache(version, keep=True)
        table = PageTable()
        pages.match_prefix(table, (1, 1, 1))
        keep(pages, (1, 1, version), table)
    pages.reset_prefix_cache(3, keep=True)
    found = [matched(pages, (1, 1, last), of) for last, of in ((1, 1), (2, 2), (1, 2), (1, 3))]
    assert [*found, matched(pages, (1, 1, 1), None)] == [SIZE, SIZE, 2, 0, 0]
    table = PageTable()
    pages.match_prefix(table, (3, 3, 3))
    pages.reset_prefix_cache(4)
    keep(pages, (3, 3, 3), table)  # what was begun before all was forgotten is not shared
    assert [matched(pages, (n, 1 + 2 * (n == 3), n)) for n in (1, 2, 3)] == [0, 0, 0]
    assert pages.available == 6


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


def test_only_where_a_state_was_kept():
    whole = (1, 2, 3, 4, 5)
    found = {whole: 5, (*whole, 6): 5}  # the page of 4 and 5 is borrowed
    found |= {(1, 2, 3, 4): 0, (1, 2, 3): 0}  # no part of a page; a page without a state
    for again, cached in (found | {(1, 2, 9): 0, (9,): 0}).items():
        pool = StatePagePool(6, size=SIZE, slots=4)
        read(pool, whole)
        assert pool.match_prefix(PageTable(), again) == cached
    pool = StatePagePool(9, size=SIZE, slots=9)  # the deepest, also beside whole pages
    assert [read(pool, tokens) for tokens in ((1, 2), (1, 2, 3, 4), (1, 2, 3, 9))] == [0, 2, 2]
    assert pool.match_prefix(PageTable(), (1, 2, 3, 7)) == 3  # the last has left a state after 3
    pool = StatePagePool(20, size=SIZE, slots=9)  # the end of what is shared gets one, too
    cached = [read(pool, (1, 2, 3, 4, 5, 6, 7, last)) for last in (11, 12, 13, 14)]
    assert cached == [0, 0, 6, 6]


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

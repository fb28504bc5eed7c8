"""Allocation of pages against a plain model: what each page holds, token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout.native.page_pool import PagePool, PageTable

SIZE = 3


class Pool:
    """Pages together with what is in them, written as the engine writes: whole pages from rows."""

    def __init__(self, count):
        self.pages, self.content = PagePool(count, size=SIZE), {}
        self.live = []  # [table, tokens, cached] of each sequence

    def start(self, tokens, version=None):
        table = PageTable()
        cached = self.pages.match_prefix(table, tokens[:-1], version)
        if not self.pages.allocate(table, len(tokens) - 1):
            self.pages.free(table)
            return
        self.live.append([table, list(tokens), cached])
        assert self.row(self.live[-1]) == tokens[:cached], "what it found is what it begins with"
        self.write(self.live[-1], len(tokens) - 1)
        self.pages.cache_prefix(table, tokens[:-1])

    def extend(self, sequence, new):
        """Decode: append tokens; all but the newest are written."""
        table, tokens, cached = sequence
        if self.pages.allocate(table, cached + len(new)):
            tokens += new
            self.write(sequence, len(tokens) - 1)

    def write(self, sequence, end):
        table, tokens, cached = sequence
        if end == cached:
            return
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

    def end(self, sequence, *, seals):
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


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)
OPERATION = st.one_of(
    st.tuples(st.just("start"), TOKENS),
    st.tuples(st.just("extend"), st.integers(0, 9), st.lists(st.integers(0, 1), max_size=5)),
    st.tuples(st.just("end"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("forget"), st.booleans()),
    st.tuples(st.just("go on"), TOKENS, st.integers(0, 3)),
)


@settings(max_examples=300)
@given(count=st.integers(4, 12), operations=st.lists(OPERATION, max_size=60))
def test_each_sequence_reads_its_own_tokens(count, operations):
    pool, version = Pool(count), 0
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
                pool.end(sequence, seals=arguments[1])
        pool.check()
    while pool.live:
        pool.end(pool.live[0], seals=True)
    assert pool.pages.available == count
    pool.pages.reset_prefix_cache()
    whole = PageTable()
    assert pool.pages.allocate(whole, count * SIZE)
    assert sorted(whole.own) == list(range(count))


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


def test_the_longest_common_beginning_is_found():
    for again, cached in (((1, 2, 3, 4, 5, 6), 5), ((1, 2, 9, 4), 2), ((9,), 0)):
        pages = PagePool(4, size=SIZE)
        keep(pages, (1, 2, 3, 4, 5))
        assert matched(pages, again) == cached


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
    """Also where a request has only looked, which waits."""
    pages, first, second = PagePool(4, size=SIZE), (1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12)
    for tokens in (first, second):
        keep(pages, tokens)
    if touch:
        pages.touch((*first, 99))
    else:
        assert matched(pages, first) == 6
    assert pages.allocate(PageTable(), 6)
    assert [matched(pages, tokens) for tokens in (first, second)] == [6, 0]


def test_two_that_wrote_the_same_share_it_in_the_end():
    pages, both = PagePool(4, size=SIZE), (PageTable(), PageTable())
    for table in both:
        assert pages.allocate(table, SIZE + 1)
    for table in both:
        pages.cache_prefix(table, (1, 1, 1))
    assert both[0].shared == both[1].shared
    assert pages.available == 1  # the second's copy; each has a page of its own besides
    for table in both:
        pages.free(table)
    assert pages.available == 4


def test_what_was_begun_before_all_was_forgotten_is_not_shared():
    pages, table = PagePool(2, size=SIZE), PageTable()
    pages.match_prefix(table, (1, 1, 1))
    pages.allocate(table, SIZE)
    pages.reset_prefix_cache()
    pages.cache_prefix(table, (1, 1, 1))
    assert matched(pages, (1, 1, 1)) == 0
    pages.free(table)
    assert pages.available == 2


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
    pages.reset_prefix_cache(4)
    assert [matched(pages, (1, 1, version), version) for version in (1, 2)] == [0, 0]
    assert pages.available == 6

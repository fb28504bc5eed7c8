"""What the engine has room for: shapes of its programs, pages of the cache, slots of states."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, Shaped

from jaxrl_llm.sharding.layout import Layout, batch_shards

# The few shapes that the engine's programs have.

PAGE = 16
"""Tokens that a page holds."""

FEWEST_ROWS = 8
SHORTEST_ROW = 128  # tokens
PREFILL_LENGTHS = (32, 256)  # tokens of a prompt that are read at once
PREFILL_TOKENS = (256, 1024)  # tokens of all prompts

PATCH_LENGTHS = (256, 1024, 4096, 16384, 65536)  # patches that a part reads at once
PATCHES_AT_ONCE = 4096  # of several images
SHORT_FRAME = 1024  # patches; where all frames are so short, attention over many takes less


class Sizes(NamedTuple):
    """The shapes of all programs.

    Attributes:
        parts: of a batch, each with pages of its own.
        pages: of a part.
        rows: how many sequences are decoded at once; one of these numbers.
        widths: how many tokens a row holds; one of these numbers.
        prefill_shapes: how many prompts are read at once, and of how many tokens.
        steps: tokens that are decoded in a chunk.
        has_rows: whether pages are gathered into rows, for which there is as much room again.
        slots: of a part, each for a state; 0 for a model without.
        visual_tokens: of images and videos whose features a part holds; 0 for a model of text.
        patch_shapes: how many patches a part reads at once, and the longest frame of them.
    """

    parts: int
    pages: int
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    prefill_shapes: tuple[tuple[int, int], ...]
    steps: int
    has_rows: bool = True
    slots: int = 0
    visual_tokens: int = 0
    patch_shapes: tuple[tuple[int, int], ...] = ()

    @property
    def capacity(self) -> int:
        """Return how many tokens the pool holds, and the rows at most."""
        return self.parts * self.pages * PAGE

    def fits(self, rows: int, width: int) -> bool:
        """Return whether so many rows may be decoded at once."""
        return not self.has_rows or rows * width <= self.capacity or rows == self.rows[0]

    @property
    def largest(self) -> tuple[int, int]:
        """Return rows and width of the most that is decoded at once."""
        fitting = [(n, w) for n in self.rows for w in self.widths if self.fits(n, w)]
        return max(fitting, key=lambda shape: (shape[0] * shape[1], shape[1]))

    def width(self, length: int) -> int:
        """Return the narrowest row that holds so many tokens."""
        return next(width for width in self.widths if width >= length)


def choose_sizes(
    *, parts: int, max_running_sequences: int, max_tokens: int, steps: int, pages: int | None = None
) -> Sizes:
    """Choose few shapes: parts of the running sequences, and of the longest one.

    Args:
        parts: of a batch.
        max_running_sequences: a multiple of the parts.
        max_tokens: the longest sequence.
        steps: tokens decoded in a chunk.
        pages: of a part; None is enough for all.

    >>> choose_sizes(parts=1, max_running_sequences=32, max_tokens=600, steps=16).rows
    (8, 16, 32)
    >>> choose_sizes(parts=1, max_running_sequences=32, max_tokens=600, steps=16).widths
    (160, 304, 608)
    """
    longest, running = _up(max_tokens, PAGE), max_running_sequences
    widths = {_up(longest / n, PAGE) for n in (4, 2) if longest >= n * SHORTEST_ROW}
    rows = {_up(running / n, parts) for n in (16, 4, 2) if running >= n * FEWEST_ROWS}
    lengths = {min(length, longest) for length in PREFILL_LENGTHS}
    prefill_shapes = {
        (_up(min(max(1, tokens // length), running), parts), length)
        for tokens, length in itertools.product(PREFILL_TOKENS, lengths)
    }
    return Sizes(
        parts,
        running // parts * (longest // PAGE + 1) if pages is None else pages,
        tuple(sorted(rows | {running})),
        tuple(sorted(widths | {longest})),
        tuple(sorted(prefill_shapes)),
        steps,
    )


def with_visuals(sizes: Sizes, patches: int, tokens: int) -> Sizes:
    """Return shapes with those of a vision tower.

    Args:
        sizes: of the text.
        patches: of the largest image, or more.
        tokens: of images whose features a part holds.

    >>> sizes = choose_sizes(parts=1, max_running_sequences=8, max_tokens=600, steps=16)
    >>> with_visuals(sizes, 4800, 4800).patch_shapes
    ((256, 256), (1024, 1024), (4096, 1024), (4096, 4096), (4800, 1024), (4800, 4800))
    """
    largest = min(patches, PATCH_LENGTHS[-1])
    lengths = [length for length in PATCH_LENGTHS if length < largest] + [largest]
    # a part attends to itself and to one on each side of it
    short = {(length, SHORT_FRAME) for length in lengths if length > 3 * SHORT_FRAME}
    shapes = short | {(length, length) for length in lengths}
    return sizes._replace(visual_tokens=tokens, patch_shapes=tuple(sorted(shapes)))


def _up(number: int | float, unit: int) -> int:
    return math.ceil(number / unit) * unit


def touched(tokens: int) -> int:
    """Return how many pages so many tokens side by side touch at most.

    >>> touched(16), touched(1)
    (2, 1)
    """
    return (tokens + PAGE - 2) // PAGE + 1


def count_parts(layout: Layout, max_running_sequences: int) -> int:
    """Return into how many parts a batch is split.

    Raises:
        ValueError: the sequences can't be shared evenly, or the mesh has stages or contexts.
    """
    idle = [axis for axis in ("stage", "context") if layout.mesh.shape[axis] > 1]
    if idle:
        raise ValueError(f"nothing is decoded over the axis {idle[0]!r}; expected a size of 1")
    parts = batch_shards(layout.mesh)
    if max_running_sequences % parts:
        raise ValueError(
            f"rollout.max_running_sequences={max_running_sequences} can't be shared evenly by the "
            f"{parts} parts of a batch; expected a multiple of {parts}"
        )
    return parts


FEW = 8
"""Pages that are compared one by one."""


# Which pages of the pool hold what: allocation, and prefixes that several sequences share.
#
# Pages whose tokens are known and will not change form a tree: a node is one page, its path from
# the root the tokens before it. A sequence that starts with the same tokens uses the same pages,
# as in RadixAttention (https://arxiv.org/abs/2312.07104, section 3) with pages (PagedAttention,
# https://arxiv.org/abs/2309.06180, section 4). A page that nobody uses stays until its room is
# needed; the one that was used least recently goes first.
#
# A sequence writes only into pages of its own. Where it goes on within a shared page, that page
# is read and its content written, with the new tokens, into a page of its own.


@dataclass(eq=False)
class Node:
    """A page of the tree; `tokens` are fewer than a page holds where a prompt ended there.

    Attributes:
        slot: of the state after its last token, if there is one; see `StatePagePool`.
        readers: how many sequences are to read that state.
        index: of the children, once one of many was looked for.
    """

    parent: "Node | None"
    tokens: tuple[int, ...]
    page: int
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    ref_count: int = 0
    is_in_tree: bool = True
    slot: int | None = None
    readers: int = 0
    index: "PrefixIndex | None" = None

    def most_alike(self, tokens: tuple[int, ...]) -> "tuple[Node | None, int]":
        """Return the child that begins most like these tokens, and in how many; the oldest such."""
        if self.index is None and len(self.children) > FEW:
            self.index = PrefixIndex(self.children.values())
        if self.index is not None:
            return self.index.most_alike(tokens)
        return _most_alike(self.children.values(), tokens)


class PrefixIndex:
    """Pages after the same one that begin with the same tokens, by the token after these.

    Args:
        nodes: the pages, oldest first.
        depth: how many tokens they have in common.
    """

    def __init__(self, nodes: Iterable[Node], depth: int = 0) -> None:
        """Split many of them by their next token, and so on."""
        self.nodes: OrderedDict[Node, None] = OrderedDict()
        self.depth = depth
        self.branches: dict[int, PrefixIndex] | None = None
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        """Add the newest page."""
        self.nodes[node] = None
        if self.branches is not None:
            self._add_to_branch(node, self.branches)
        elif len(self.nodes) > FEW:
            self.branches = {}
            for each in self.nodes:
                self._add_to_branch(each, self.branches)

    def remove(self, node: Node) -> None:
        """Forget a page."""
        del self.nodes[node]
        if self.branches is not None and len(node.tokens) > self.depth:
            branch = self.branches[node.tokens[self.depth]]
            branch.remove(node)
            if not branch.nodes:
                del self.branches[node.tokens[self.depth]]

    def most_alike(self, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """Return the page that begins most like these tokens, as `Node.most_alike`."""
        if self.branches is None:
            return _most_alike(self.nodes, tokens)
        branch = self.branches.get(tokens[self.depth]) if len(tokens) > self.depth else None
        if branch is not None:
            return branch.most_alike(tokens)
        return next(iter(self.nodes), None), self.depth

    def _add_to_branch(self, node: Node, branches: dict[int, "PrefixIndex"]) -> None:
        if len(node.tokens) > self.depth:  # at most one page ends here
            token = node.tokens[self.depth]
            if token not in branches:
                branches[token] = PrefixIndex((), self.depth + 1)
            branches[token].add(node)


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence, in order: shared ones that are full, then its own.

    Attributes:
        shared: full pages of the tree.
        borrowed: a page of the tree of which the first tokens are used; its place is that of the
            first page of its own, until that has been written.
        own: pages that only this sequence uses.
        epoch: of the tree in which it began.
        slot: its own, where sequences have states; the others are then of use, too.
        written: after how many tokens the state is that it has written there; 0: none yet.
        snapshot: the page whose state it reads until it has written one.
        branch: where the tokens that it shares with others end, if that is later than the snapshot.
    """

    shared: list[Node] = field(default_factory=list)
    borrowed: Node | None = None
    own: list[int] = field(default_factory=list)
    epoch: int = 0
    slot: int | None = None
    written: int = 0
    snapshot: Node | None = None
    branch: int = 0


class PagePool:
    """The pages of one part of the pool.

    Args:
        count: pages.
        size: tokens that a page holds.

    >>> pages = PagePool(4, size=2)
    >>> first, second = PageTable(), PageTable()
    >>> pages.allocate(first, 3)
    True
    >>> pages.cache_prefix(first, (5, 6, 7))
    >>> matched = pages.match_prefix(second, (5, 6, 7, 8))
    >>> matched, pages.pages_to_read(second, matched)
    (3, [0, 1])
    """

    def __init__(self, count: int, *, size: int) -> None:
        """All pages are free."""
        self.count, self.size, self.slots = count, size, 0
        self._free = list(range(count))[::-1]
        self._epoch, self._trees = 0, {0: Node(None, (), -1)}
        self._versions = dict[int, int]()  # of the weights, to the epochs of their trees
        self._idle: OrderedDict[Node, None] = OrderedDict()  # of the tree, used by nobody

    @property
    def available(self) -> int:
        """Return the number of pages that are free or used by nobody."""
        return len(self._free) + len(self._idle)

    @property
    def available_slots(self) -> int:
        """Return the number of slots of states that a sequence can have; there are none here."""
        return 0

    def match_prefix(
        self, table: PageTable, tokens: Sequence[int], version: int | None = None
    ) -> int:
        """Let a sequence that holds nothing use what there is of its tokens; return how many.

        One that was begun under weights whose pages are kept uses these, by the version.
        """
        epoch = self._epoch if version is None else self._versions.get(version, self._epoch)
        table.epoch = epoch if epoch in self._trees else self._epoch
        return self._match(table, tokens)

    def touch(self, tokens: Sequence[int], version: int | None = None) -> None:
        """Count the pages that a sequence could use as used now: they are the last to go."""
        table = PageTable()
        self.match_prefix(table, tokens, version)
        self.free(table)

    def pages_needed(self, table: PageTable, length: int) -> int:
        """Return how many pages a sequence needs besides its own to hold so many tokens."""
        return max(0, -(-length // self.size) - len(table.shared) - len(table.own))

    def allocate(self, table: PageTable, length: int) -> bool:
        """Give a sequence pages of its own for so many tokens; False if there are not enough."""
        needed = self.pages_needed(table, length)
        if needed > self.available:
            return False
        table.own += [self._pop_free() for _ in range(needed)]
        return True

    def pages_to_read(self, table: PageTable, length: int) -> list[int]:
        """Return where a sequence's first tokens are read."""
        shared = [node.page for node in table.shared]
        own = table.own if table.borrowed is None else [table.borrowed.page, *table.own[1:]]
        return (shared + own)[: -(-length // self.size)]

    def pages_to_write(self, table: PageTable, start: int, end: int) -> list[int]:
        """Return the pages into which tokens start … end - 1 are written; they are its own."""
        first = start // self.size - len(table.shared)
        if table.borrowed is not None:
            self._release(table.borrowed)
            table.borrowed = None
        return table.own[first : -(-end // self.size) - len(table.shared)]

    def cache_prefix(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Put the pages that hold these tokens, all that a sequence has written, into the tree.

        Not those of a sequence that began before pages were forgotten.
        """
        if table.epoch not in self._trees or table.borrowed is not None:
            return
        while len(tokens) >= (len(table.shared) + 1) * self.size:
            start = len(table.shared) * self.size
            table.shared.append(self._insert(table, tuple(tokens[start : start + self.size])))
        rest = tuple(tokens[len(table.shared) * self.size :])
        if rest:
            table.borrowed = self._insert(table, rest)

    def free(self, table: PageTable) -> None:
        """Take back all pages of a sequence; those of the tree stay for others."""
        self._free += table.own
        for node in [*table.shared, *([table.borrowed] if table.borrowed else [])][::-1]:
            self._release(node)
        table.shared, table.borrowed, table.own = [], None, []

    def retire(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Take back all pages of a sequence; these tokens, all that it has written, stay."""
        self.cache_prefix(table, tokens)
        self.free(table)

    def reset_prefix_cache(self, version: int | None = None, *, keep: bool = False) -> None:
        """Let nobody use what is there now; those who do go on.

        Args:
            version: of the weights that compute what comes.
            keep: let those use it who were begun under the weights that have computed it.
        """
        if not keep:
            self._free += [node.page for node in self._idle]
            self._idle.clear()
            nodes = list(self._trees.values())
            while nodes:
                node = nodes.pop()
                node.is_in_tree = False
                nodes += node.children.values()
            self._trees, self._versions = {}, {}
        self._trees = {epoch: root for epoch, root in self._trees.items() if root.children}
        self._epoch += 1
        self._trees[self._epoch] = Node(None, (), -1)
        if version is not None:
            self._versions[version] = self._epoch

    def _match(self, table: PageTable, tokens: Sequence[int]) -> int:
        """Do so in the tree of its epoch."""
        node, matched = self._trees[table.epoch], 0
        while child := node.children.get(tuple(tokens[matched : matched + self.size])):
            if len(child.tokens) < self.size:
                break
            table.shared.append(self._acquire(child))
            node, matched = child, matched + self.size
        best, count = node.most_alike(tuple(tokens[matched : matched + self.size]))
        if best is not None and count:
            table.borrowed = self._acquire(best)
        return matched + count

    def _insert(self, table: PageTable, tokens: tuple[int, ...]) -> Node:
        """Move a sequence's first own page to the tree, or take the one that is there."""
        parent = table.shared[-1] if table.shared else self._trees[table.epoch]
        page = table.own.pop(0)
        if tokens in parent.children:
            self._free.append(page)
            return self._acquire(parent.children[tokens])
        parent.children[tokens] = node = Node(parent, tokens, page, ref_count=1)
        if parent.index is not None:
            parent.index.add(node)
        return node

    def _acquire(self, node: Node) -> Node:
        node.ref_count += 1
        self._idle.pop(node, None)
        return node

    def _release(self, node: Node) -> None:
        node.ref_count -= 1
        if node.ref_count == 0 and node.is_in_tree:
            self._idle[node] = None
        elif node.ref_count == 0:
            self._free.append(node.page)

    def _pop_free(self) -> int:
        """Return a free page; drop the page of the tree that was used least recently if need be.

        Whoever uses a page uses all before it and leaves them later: the oldest has no children.
        """
        if not self._free:
            self._drop(next(iter(self._idle)))
        return self._free.pop()

    def _drop(self, node: Node) -> None:
        """Take a page that nobody uses, and none comes after, out of the tree."""
        assert node.parent is not None and not node.children  # for pyright
        del self._idle[node], node.parent.children[node.tokens]
        if node.parent.index is not None:
            node.parent.index.remove(node)
        self._free.append(node.page)


def _most_alike(nodes: Iterable[Node], tokens: Sequence[int]) -> tuple[Node | None, int]:
    """Compare pages one by one; return the first that begins most like these tokens."""
    best, most = None, 0
    for node in nodes:
        count = 0
        for one, other in zip(node.tokens, tokens, strict=False):
            if one != other:
                break
            count += 1
        if count > most:
            best, most = node, count
    return best, most


# Pages of sequences that also have a state, as of a DeltaNet: who may go on from where.
#
# A state is that after all tokens so far; unlike keys and values it can't be cut. So a sequence
# goes on only from where a state was kept, its snapshot: at the end of a prompt that was read, or
# of a sequence that ended or gave its pages back. A page of the tree owns the snapshot after its
# last token; pages that no snapshot comes after are of no use to anyone, and go first.
#
# Where a sequence reads tokens that others have read as well, a snapshot is also kept at the end
# of the last page that they share (as Marconi, https://arxiv.org/abs/2411.19379, section 4.1):
# the next one goes on from there.
#
# Slots of states are written by one sequence each. One that begins at a snapshot reads it once,
# and writes into its own.


class StatePagePool(PagePool):
    """The pages and slots of one part of the pool.

    Args:
        count: pages.
        size: tokens that a page holds.
        slots: of states; at least two, for a sequence and the snapshot that it reads.

    >>> pages = StatePagePool(4, size=2, slots=3)
    >>> first, second = PageTable(), PageTable()
    >>> pages.allocate(first, 3), pages.slot_to_write(first, 3)
    (True, 0)
    >>> pages.cache_prefix(first, (5, 6, 7))
    >>> pages.match_prefix(second, (5, 6, 7, 8)), pages.slot_to_read(second)
    (3, 0)
    >>> pages.match_prefix(PageTable(), (5, 6, 8))
    0
    """

    def __init__(self, count: int, *, size: int, slots: int) -> None:
        """All pages and slots are free."""
        super().__init__(count, size=size)
        self.slots = slots
        self._free_slots = list(range(slots))[::-1]
        self._unread: OrderedDict[Node, None] = OrderedDict()  # with a snapshot that nobody reads

    @property
    def available_slots(self) -> int:
        """Return the number of slots that are free or of a snapshot that nobody reads."""
        return len(self._free_slots) + len(self._unread)

    def allocate(self, table: PageTable, length: int) -> bool:
        """Give a sequence pages for so many tokens, and a slot; False if there are not enough."""
        if self.pages_needed(table, length) > self.available:
            return False
        if table.slot is None:
            table.slot = self._pop_free_slot()
        return table.slot is not None and super().allocate(table, length)

    def slot_to_read(self, table: PageTable) -> int:
        """Return where a sequence's state is read; a number past the slots if it has none yet."""
        if table.written:
            assert table.slot is not None  # for pyright: it has written there
            return table.slot
        if table.snapshot is None:
            return self.slots
        assert table.snapshot.slot is not None  # for pyright: it is kept while someone reads it
        return table.snapshot.slot

    def slot_to_write(self, table: PageTable, end: int) -> int:
        """Return where a sequence's state after its first `end` tokens is written: its own slot."""
        assert table.slot is not None  # for pyright: `allocate` gave it one
        self._stop_reading(table)
        table.written = end
        return table.slot

    def cache_prefix(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Put pages into the tree as `PagePool`, and the state after these tokens.

        The sequence gets another slot of its own. Where there is none it keeps its own, and the
        state is not shared.
        """
        node = self._insert_all(table, tokens)
        if node is None:
            return
        if node.slot is None:
            other = self._pop_free_slot()
            if other is None:
                return
            node.slot, table.slot = table.slot, other
        self._begin_to_read(table, node)

    def retire(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Take back all pages of a sequence and its slot; what it has written stays."""
        node = self._insert_all(table, tokens)
        if node is not None:
            if node.slot is None:
                node.slot, table.slot = table.slot, None
            self._begin_to_read(table, node)  # it counts as used now
        self.free(table)

    def free(self, table: PageTable) -> None:
        """Take back all pages of a sequence and its slot; those of the tree stay for others."""
        self._stop_reading(table)
        if table.slot is not None:
            self._free_slots.append(table.slot)
        table.slot, table.written, table.branch = None, 0, 0
        super().free(table)

    def reset_prefix_cache(self, version: int | None = None, *, keep: bool = False) -> None:
        """Let nobody use what is there now, as `PagePool`; snapshots that are read go later."""
        super().reset_prefix_cache(version, keep=keep)
        if not keep:
            for node in list(self._unread):
                self._drop_snapshot(node)

    def _match(self, table: PageTable, tokens: Sequence[int]) -> int:
        """Use the pages before the last snapshot; note where those of whole pages end."""
        node, path, usable = self._trees[table.epoch], list[Node](), list[Node]()
        while True:
            rest = tuple(tokens[len(path) * self.size : (len(path) + 1) * self.size])
            for length in range(len(rest), 0, -1):
                child = node.children.get(rest[:length])
                if child is not None and child.slot is not None:
                    usable = [*path, child]
                    break
            whole = node.children.get(rest)
            if whole is None or len(rest) < self.size:
                break
            path.append(whole)
            node = whole
        if len(path) >= len(usable):
            table.branch = len(path) * self.size
        if not usable:
            return 0
        table.shared = [self._acquire(node) for node in usable]
        self._begin_to_read(table, usable[-1])
        if len(usable[-1].tokens) < self.size:
            table.borrowed = table.shared.pop()
        return sum(len(node.tokens) for node in usable)

    def _insert_all(self, table: PageTable, tokens: Sequence[int]) -> Node | None:
        """Put the pages of a sequence into the tree if it has a state of just these tokens.

        Returns:
            The page at their end; None without such a state.
        """
        if not tokens or table.written != len(tokens) or table.epoch not in self._trees:
            return None
        super().cache_prefix(table, tokens)
        return table.borrowed or table.shared[-1]

    def _begin_to_read(self, table: PageTable, node: Node) -> None:
        """Let a sequence go on from a snapshot."""
        node.readers += 1
        self._unread.pop(node, None)
        table.snapshot, table.written = node, 0

    def _stop_reading(self, table: PageTable) -> None:
        node, table.snapshot = table.snapshot, None
        if node is None:
            return
        node.readers -= 1
        if node.readers == 0:
            self._unread[node] = None
            if not node.is_in_tree:
                self._drop_snapshot(node)

    def _drop_snapshot(self, node: Node) -> None:
        """Free the slot of a page whose state nobody reads."""
        del self._unread[node]
        assert node.slot is not None  # for pyright
        self._free_slots.append(node.slot)
        node.slot = None

    def _pop_free_slot(self) -> int | None:
        """Return a free slot; drop the snapshot that was used least recently if need be.

        None where all are of running sequences or are read.
        """
        if not self._free_slots:
            if not self._unread:
                return None
            node = next(iter(self._unread))
            self._drop_snapshot(node)
            if self._is_useless(node):
                self._drop(node)
        return self._free_slots.pop()

    def _release(self, node: Node) -> None:
        super()._release(node)
        if self._is_useless(node):
            self._drop(node)

    def _drop(self, node: Node) -> None:
        """Take a page that nobody uses out of the tree, and all before it that are useless then."""
        if node in self._unread:
            self._drop_snapshot(node)
        parent = node.parent
        super()._drop(node)
        while parent is not None and self._is_useless(parent):
            before = parent.parent
            super()._drop(parent)
            parent = before

    def _is_useless(self, node: Node) -> bool:
        """Return whether nobody uses a page, and nobody can: no snapshot is there or after it."""
        return node in self._idle and not node.children and node.slot is None


StateSlots = tuple[Int[Any, " B"], Int[Any, " B"]]
"""Where the states of rows are read, by slots of the row's part, and where they go.

A number past the slots gives zeros, and is dropped.
"""


def gather_states(held: Any, slots: Int[Array, " B"] | None) -> Any:
    """Return the states of rows.

    Args:
        held: arrays [parts, slots, …], as `Cache.states` of a pool; rows belong to the parts in
            order, as many to each.
        slots: of each row; a number past the slots gives zeros.

    >>> import jax.numpy as jnp
    >>> gather_states((jnp.array([[3.0, 4.0]]),), jnp.array([1, 2, 0]))[0].tolist()
    [4.0, 0.0, 3.0]
    """
    if slots is None:
        return ()

    def gathered(held: Shaped[Array, "parts slots ..."]) -> Shaped[Array, "B ..."]:
        by_part = slots.reshape(len(held), -1)
        rows = jax.vmap(lambda held, at: held.at[at].get(mode="fill", fill_value=0))(held, by_part)
        return jax.lax.collapse(rows, 0, 2)

    return jax.tree.map(gathered, held)


def scatter_states(held: Any, rows: Any, slots: Int[Array, " B"] | None) -> Any:
    """Write the states of rows to their slots.

    Args:
        held: as `gather_states`.
        rows: the states.
        slots: of each row, no slot twice; a number past the slots is dropped. None: nothing is
            written.

    >>> import jax.numpy as jnp
    >>> states = (jnp.array([[3.0, 4.0]]),)
    >>> scatter_states(states, (jnp.array([5.0, 6.0]),), jnp.array([1, 2]))[0].tolist()
    [[3.0, 5.0]]
    """
    if slots is None:
        return held

    def scattered(
        held: Shaped[Array, "parts slots ..."], rows: Shaped[Array, "B ..."]
    ) -> Shaped[Array, "parts slots ..."]:
        by_part = slots.reshape(len(held), -1)
        new = rows.reshape(*by_part.shape, *rows.shape[1:])
        return jax.vmap(lambda held, at, x: held.at[at].set(x, mode="drop"))(held, by_part, new)

    return jax.tree.map(scattered, held, rows)

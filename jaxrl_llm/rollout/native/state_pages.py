"""Pages of sequences that also have a state, as of a DeltaNet: who may go on from where.

A state is that after all tokens so far; unlike keys and values it can't be cut. So a sequence goes
on only from where a state was kept, its snapshot: at the end of a prompt that was read, or of a
sequence that ended or gave its pages back. A page of the tree owns the snapshot after its last
token; pages that no snapshot comes after are of no use to anyone, and go first.

Where a sequence reads tokens that others have read as well, a snapshot is also kept at the end of
the last page that they share (as Marconi, https://arxiv.org/abs/2411.19379, section 4.1): the next
one goes on from there.

Slots of states are written by one sequence each. One that begins at a snapshot reads it once, and
writes into its own.
"""

from collections import OrderedDict
from collections.abc import Sequence

from jaxrl_llm.rollout.native.pages import Node, PagePool, PageTable


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

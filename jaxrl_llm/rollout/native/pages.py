"""Which pages of the pool hold what: allocation, and prefixes that several sequences share.

Pages whose tokens are known and will not change form a tree: a node is one page, its path from the
root the tokens before it. A sequence that starts with the same tokens uses the same pages, as in
RadixAttention (https://arxiv.org/abs/2312.07104, section 3) with pages (PagedAttention,
https://arxiv.org/abs/2309.06180, section 4). A page that nobody uses stays until its room is
needed; the one that was used least recently goes first.

A sequence writes only into pages of its own. Where it goes on within a shared page, that page is
read and its content written, with the new tokens, into a page of its own.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """A page of the tree; `tokens` are fewer than a page holds where a prompt ended there."""

    parent: "Node | None"
    tokens: tuple[int, ...]
    page: int
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    users: int = 0
    alive: bool = True


@dataclass(eq=False)
class Held:
    """The pages of one sequence, in order: shared ones that are full, then its own.

    Attributes:
        shared: full pages of the tree.
        borrowed: a page of the tree of which the first tokens are used; its place is that of the
            first page of its own, until that has been written.
        own: pages that only this sequence uses.
        epoch: how often pages had been forgotten when it began.
    """

    shared: list[Node] = field(default_factory=list)
    borrowed: Node | None = None
    own: list[int] = field(default_factory=list)
    epoch: int = 0


class Pages:
    """The pages of one part of the pool.

    Args:
        count: pages.
        size: tokens that a page holds.

    >>> pages = Pages(4, size=2)
    >>> first, second = Held(), Held()
    >>> pages.reserve(first, 3)
    True
    >>> pages.seal(first, (5, 6, 7))
    >>> found = pages.match(second, (5, 6, 7, 8))
    >>> found, pages.read(second, found)
    (3, [0, 1])
    """

    def __init__(self, count: int, *, size: int) -> None:
        """All pages are free."""
        self.count, self.size = count, size
        self._free = list(range(count))[::-1]
        self._root = Node(None, (), -1)
        self._epoch = 0
        self._idle: OrderedDict[Node, None] = OrderedDict()  # of the tree, used by nobody

    @property
    def available(self) -> int:
        """Return the number of pages that are free or used by nobody."""
        return len(self._free) + len(self._idle)

    def match(self, held: Held, tokens: Sequence[int]) -> int:
        """Let a sequence that holds nothing use what there is of its tokens; return how many."""
        held.epoch = self._epoch
        node, found = self._root, 0
        while child := node.children.get(tuple(tokens[found : found + self.size])):
            if len(child.tokens) < self.size:
                break
            held.shared.append(self._use(child))
            node, found = child, found + self.size
        rest = tuple(tokens[found : found + self.size])
        alike = {child: _common(child.tokens, rest) for child in node.children.values()}
        best = max(alike, key=lambda child: alike[child], default=None)
        if best is None or not alike[best]:
            return found
        held.borrowed = self._use(best)
        return found + alike[best]

    def lacks(self, held: Held, length: int) -> int:
        """Return how many pages a sequence needs besides its own to hold so many tokens."""
        return max(0, -(-length // self.size) - len(held.shared) - len(held.own))

    def reserve(self, held: Held, length: int) -> bool:
        """Give a sequence pages of its own for so many tokens; False if there are not enough."""
        needed = self.lacks(held, length)
        if needed > self.available:
            return False
        held.own += [self._take() for _ in range(needed)]
        return True

    def read(self, held: Held, length: int) -> list[int]:
        """Return where a sequence's first tokens are read."""
        shared = [node.page for node in held.shared]
        own = held.own if held.borrowed is None else [held.borrowed.page, *held.own[1:]]
        return (shared + own)[: -(-length // self.size)]

    def write(self, held: Held, start: int, end: int) -> list[int]:
        """Return the pages into which tokens start … end - 1 are written; they are its own."""
        first = start // self.size - len(held.shared)
        if held.borrowed is not None:
            self._leave(held.borrowed)
            held.borrowed = None
        return held.own[first : -(-end // self.size) - len(held.shared)]

    def seal(self, held: Held, tokens: Sequence[int]) -> None:
        """Put the pages that hold these tokens, all that a sequence has written, into the tree.

        Not those of a sequence that began before pages were forgotten.
        """
        if held.epoch != self._epoch or held.borrowed is not None:
            return
        while len(tokens) >= (len(held.shared) + 1) * self.size:
            start = len(held.shared) * self.size
            held.shared.append(self._insert(held, tuple(tokens[start : start + self.size])))
        rest = tuple(tokens[len(held.shared) * self.size :])
        if rest:
            held.borrowed = self._insert(held, rest)

    def release(self, held: Held) -> None:
        """Take back all pages of a sequence; those of the tree stay for others."""
        self._free += held.own
        for node in [*held.shared, *([held.borrowed] if held.borrowed else [])][::-1]:
            self._leave(node)
        held.shared, held.borrowed, held.own = [], None, []

    def forget(self) -> None:
        """Let nobody use what is there now; those who do go on."""
        self._free += [node.page for node in self._idle]
        self._idle.clear()
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            node.alive = False
            nodes += node.children.values()
        self._root = Node(None, (), -1)
        self._epoch += 1

    def _insert(self, held: Held, tokens: tuple[int, ...]) -> Node:
        """Move a sequence's first own page to the tree, or take the one that is there."""
        parent = held.shared[-1] if held.shared else self._root
        page = held.own.pop(0)
        if tokens in parent.children:
            self._free.append(page)
            return self._use(parent.children[tokens])
        parent.children[tokens] = node = Node(parent, tokens, page, users=1)
        return node

    def _use(self, node: Node) -> Node:
        node.users += 1
        self._idle.pop(node, None)
        return node

    def _leave(self, node: Node) -> None:
        node.users -= 1
        if node.users == 0 and node.alive:
            self._idle[node] = None
        elif node.users == 0:
            self._free.append(node.page)

    def _take(self) -> int:
        """Return a free page; drop the page of the tree that was used least recently if need be.

        Whoever uses a page uses all before it and leaves them later: the oldest has no children.
        """
        if not self._free:
            node, _ = self._idle.popitem(last=False)
            assert node.parent is not None and not node.children  # for pyright; see above
            del node.parent.children[node.tokens]
            return node.page
        return self._free.pop()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))

"""Which of several replicas of an engine a request goes to."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16
MAX_TRACKED_BLOCKS = 2**18
SLACK = 8  # requests


class Router:
    """Sends what shares most of its prompt to one replica, and balances the rest.

    A replica caches what it has prefilled: the samples of one prompt go where the first of them
    went, and a conversation goes on where it began, unless that replica has more left to do than
    another by some requests. All else goes where the fewest tokens are outstanding.

    Args:
        replicas: how many there are.

    >>> router = Router(2)
    >>> first = tuple(range(64))
    >>> router.choose(first, 100), router.choose(first, 100), router.choose((7,) * 64, 100)
    (0, 0, 1)
    """

    def __init__(self, replicas: int) -> None:
        """Know no prompt."""
        self.outstanding = [0] * replicas
        self._seen: OrderedDict[int, int] = OrderedDict()  # replica, by hash of all up to a block

    def choose(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Return a replica for a request, and count its tokens there.

        Args:
            prompt: token ids.
            max_tokens: tokens that prompt and answer have at most; `done` takes them off again.
        """
        blocks = self._blocks(prompt)
        cached = [self._seen[block] for block in blocks if block in self._seen]
        replica = min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
        if len(cached) * 2 > len(blocks):
            busier = self.outstanding[cached[-1]] - self.outstanding[replica]
            replica = cached[-1] if busier <= SLACK * max_tokens else replica
        self.outstanding[replica] += max_tokens
        self._remember(blocks, replica)
        return replica

    def done(self, replica: int, max_tokens: int, tokens: Sequence[int]) -> None:
        """Note the end of a request, and that prompt and answer are known at its replica."""
        self.outstanding[replica] -= max_tokens
        self._remember(self._blocks(tokens), replica)

    def _blocks(self, tokens: Sequence[int]) -> list[int]:
        hashes, before = [], 0
        for start in range(0, len(tokens), BLOCK_TOKENS):
            before = hash((before, *tokens[start : start + BLOCK_TOKENS]))
            hashes.append(before)
        return hashes

    def _remember(self, blocks: list[int], replica: int) -> None:
        for block in blocks:
            self._seen[block] = replica
            self._seen.move_to_end(block)
        while len(self._seen) > MAX_TRACKED_BLOCKS:
            self._seen.popitem(last=False)

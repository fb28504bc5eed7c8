"""Which of several sidecars a request goes to."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16  # tokens
REMEMBERED = 2**18  # blocks
SLACK = 8  # requests


class Router:
    """Sends what shares most of its prompt to one place, and balances the rest.

    A place keeps what it has read: the samples of one prompt go where the first of them went, and a
    conversation goes on where it began, unless that place has more left to do than another by some
    requests. All else goes where the fewest tokens are outstanding.

    Args:
        places: how many there are.

    >>> router = Router(2)
    >>> first = tuple(range(64))
    >>> router.choose(first, 100), router.choose(first, 100), router.choose((7,) * 64, 100)
    (0, 0, 1)
    """

    def __init__(self, places: int) -> None:
        """Know no prompt."""
        self.outstanding = [0] * places
        self._seen: OrderedDict[int, int] = OrderedDict()  # place, by the hash of all up to a block

    def choose(self, prompt: Sequence[int], most: int) -> int:
        """Return a place for a request, and count its tokens there.

        Args:
            prompt: token ids.
            most: tokens that prompt and answer have at most; `done` takes them off again.
        """
        blocks = self._blocks(prompt)
        known = [self._seen[block] for block in blocks if block in self._seen]
        place = min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
        if len(known) * 2 > len(blocks):
            busier = self.outstanding[known[-1]] - self.outstanding[place]
            place = known[-1] if busier <= SLACK * most else place
        self.outstanding[place] += most
        self._remember(blocks, place)
        return place

    def done(self, place: int, most: int, tokens: Sequence[int]) -> None:
        """Note the end of a request, and that prompt and answer are known at its place."""
        self.outstanding[place] -= most
        self._remember(self._blocks(tokens), place)

    def _blocks(self, tokens: Sequence[int]) -> list[int]:
        found, before = [], 0
        for start in range(0, len(tokens), BLOCK):
            before = hash((before, *tokens[start : start + BLOCK]))
            found.append(before)
        return found

    def _remember(self, blocks: list[int], place: int) -> None:
        for block in blocks:
            self._seen[block] = place
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

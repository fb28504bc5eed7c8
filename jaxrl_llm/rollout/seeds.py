"""Seeds of an episode's turns and tools."""

import hashlib
from collections.abc import Sequence

import numpy as np

TURN, TOOL, REQUEST = 1, 2, 3
"""What a seed is for, as a part of its entropy."""


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: that of a plain answer for the first one.

    >>> turn_seed(7, 0), turn_seed(7, 1) == turn_seed(7, 2)
    (7, False)
    """
    if turn == 0:
        return seed
    return int(np.random.SeedSequence((seed, TURN, turn)).generate_state(1)[0])


def tool_seed(seed: int) -> int:
    """Return the seed of an episode's tools and environment.

    >>> tool_seed(7) == tool_seed(8)
    False
    """
    return int(np.random.SeedSequence((seed, TOOL)).generate_state(1)[0])


def request_seed(seed: int, prompt: Sequence[int], number: int) -> int:
    """Return the seed of a turn that a program has asked for, whenever it did.

    Args:
        seed: of the episode.
        prompt: token ids.
        number: of the request among those of the episode with this prompt.

    >>> request_seed(7, (1, 2), 0) == request_seed(7, (1, 2), 1)
    False
    """
    digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).digest()[:8]
    entropy = (seed, REQUEST, int.from_bytes(digest, "little"), number)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])

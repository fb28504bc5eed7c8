"""Seeds of an episode's turns and tools."""

import numpy as np

TURN, TOOL = 1, 2
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

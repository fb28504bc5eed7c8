"""Environments by generator functions: `answer = yield Observation(…)` takes a turn's text.

A configuration names one: `rollout.environment: {fn: guess_number, high: 31}`. What the first
`yield` gives is told behind the prompt, and nothing where its text is empty; each further one
answers the turn before, and its reward is that turn's. `return` ends the episode with its score.
An environment asks by name for `row`, `ground_truth`, `extra_info`, `data_source`, `rng`, `state`
or `seconds`; keywords are the configuration's. Worker processes import this: no array library.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from random import Random
from typing import Any

from jaxrl_llm.config.functions import FunctionSpec, find_function
from jaxrl_llm.rollout.observation import Observation

Play = Generator[Observation, str, float]

MOVES: Mapping[str, tuple[int, int]] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Rows and columns by which a move changes a cell."""

_SIDEWAYS = {"U": "LR", "D": "LR", "L": "UD", "R": "UD"}


def guess_number(ground_truth: Any, *, high: int = 31, guesses: int = 5, cost: float = 0.1) -> Play:
    """Have a secret number guessed: told is `<` where it is less than the guess, `>` where more.

    Found by guess k, an episode's reward is 1 - cost·(k - 1): bisection is the best way, with
    129/31 guesses on average for 31 numbers.

    Args:
        ground_truth: the secret, from 1.
        high: the largest number; `?` answers a text that is no number from 1 to it.
        guesses: so many may be made, then the episode ends with score 0.
        cost: of every guess that another one follows.

    Yields:
        What answers a guess.

    Returns:
        1.0 where the number was found, else 0.0.

    >>> game = guess_number("9", high=31)
    >>> next(game).text, game.send("16").text, game.send("8"), game.send("x").text
    ('', '<', Observation(text='>', reward=-0.1, end=False), '?')
    >>> game.send("9")
    Traceback (most recent call last):
    StopIteration: 1.0
    """
    secret = int(ground_truth)
    answer = yield Observation()
    for left in reversed(range(guesses)):
        text = answer.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        if guess == secret:
            return 1.0
        if left:
            told = "?" if not 1 <= guess <= high else "<" if secret < guess else ">"
            answer = yield Observation(told, -cost)
    return 0.0


def grid(
    extra_info: Mapping[str, Any],
    rng: Random,
    *,
    steps: int = 10,
    slip: float = 0.2,
    cost: float = 0.05,
) -> Play:
    """Have the way to a goal walked on slippery ground; told is the cell that a move led to.

    Reached by step k, an episode's reward is 1 - cost·(k - 1).

    Args:
        extra_info: `map`, as for `moved`, whose capital letter is the goal, and the cell `start`.
        rng: of the slips.
        steps: so many may be made, then the episode ends with score 0.
        slip: chance that a move goes to one of its two sides instead.
        cost: of every step that another one follows.

    Yields:
        The letter of the cell after a step. A text that is no move stays where it is.

    Returns:
        1.0 where the goal was reached, else 0.0.

    >>> walk = grid({"map": "abC#efg#ijk#mnop", "start": "a"}, Random(0), slip=0.0)
    >>> next(walk).text, walk.send("R").text, walk.send("U").text
    ('', 'b', 'b')
    >>> walk.send("R")
    Traceback (most recent call last):
    StopIteration: 1.0
    """
    cells, cell = extra_info["map"], extra_info["start"]
    answer = yield Observation()
    for left in reversed(range(steps)):
        move, chance = answer.strip(), rng.random()
        if chance < slip and move in MOVES:
            move = _SIDEWAYS[move][chance < slip / 2]
        cell = moved(cells, cell, move)
        if cell.upper() in cells:
            return 1.0
        if left:
            answer = yield Observation(cell, -cost)
    return 0.0


def moved(cells: str, cell: str, move: str) -> str:
    """Return the cell that a move leads to: walls, edges and what is no move leave it.

    Args:
        cells: a square map, row by row: each cell's letter, `#` for a wall.
        cell: a letter, of which case makes no difference.
        move: one of `MOVES`.

    >>> [moved("abc#efghi", "b", move) for move in "UDLR"]
    ['b', 'e', 'a', 'c']
    """
    side = math.isqrt(len(cells))
    row, column = divmod(ord(cell.lower()) - ord("a"), side)
    down, right = MOVES.get(move, (0, 0))
    row, column = row + down, column + right
    inside = 0 <= row < side and 0 <= column < side
    there = chr(ord("a") + row * side + column)
    return there if inside and cells[row * side + column] != "#" else cell.lower()


def gymnasium(
    rng: Random,
    *,
    id: str,
    actions: Sequence[str] = (),
    observe: str | None = None,
    act: str | None = None,
    **options: Any,
) -> Play:
    """Have an environment of gymnasium's played, which needs the package `gymnasium`.

    The reward of a step is its turn's, and that of the last step is the score, so that an episode's
    reward is the environment's return. A text that is no action costs a turn and changes nothing.
    The seed is the episode's. With `render_mode: rgb_array` what it draws is told before the text.

    Args:
        rng: of the episode.
        id: of the environment, such as `FrozenLake-v1`; `my_package:My-v0` imports the package.
        actions: names of a discrete space's actions, in its order; none are whole numbers.
        observe: function, as `my_file.py:name`, from an observation to what is told; None is `str`.
        act: function from a turn's text to an action, in place of `actions`; it raises ValueError
            where the text is none.
        **options: of `gymnasium.make`.

    Yields:
        What the environment shows first, and after each step.

    Returns:
        The reward of the step that terminated or truncated the episode.
    """
    import gymnasium

    shown = find_function(FunctionSpec(observe), "", key="observe") if observe else str
    chosen = find_function(FunctionSpec(act), "", key="act") if act else _action_of(actions)
    env = gymnasium.make(id, **options)
    try:
        observation, _ = env.reset(seed=rng.getrandbits(31))
        text, reward, ended = shown(observation), 0.0, False
        while not ended:
            draws = env.render_mode == "rgb_array"
            answer = yield Observation([env.render(), text] if draws else text, reward)
            try:
                action = chosen(answer)
                if not env.action_space.contains(action):
                    raise ValueError(f"{action!r} is not in {env.action_space}")
            except ValueError as error:
                text, reward = f"error: {error}", 0.0
                continue
            observation, gained, terminated, truncated, _ = env.step(action)
            text, reward, ended = shown(observation), float(gained), terminated or truncated
        return reward
    finally:
        env.close()


def _action_of(names: Sequence[str]) -> Callable[[str], int]:
    def action(text: str) -> int:
        word = text.strip()
        if not names:
            if not word.lstrip("-").isdecimal() or not word.isascii() or len(word) > 9:
                raise ValueError(f"expected a whole number, got {word[:40]!r}")
            return int(word)
        if word not in names:
            raise ValueError(f"expected one of {', '.join(names)}, got {word[:40]!r}")
        return names.index(word)

    return action

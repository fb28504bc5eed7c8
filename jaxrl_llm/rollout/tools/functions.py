"""Tools by name, as `rollout.tools: [look_up]` names them. Worker processes import this."""

from random import Random

from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.code import python
from jaxrl_llm.rollout.tools.mcp import mcp_tools
from jaxrl_llm.rollout.tools.search import retrieve, search
from jaxrl_llm.rollout.tools.verifiers import verifiers_tools
from jaxrl_llm.rollout.tools.verl import verl_tools
from jaxrl_llm.sandbox.arithmetic import calculate

__all__ = [
    "calculator",
    "look_up",
    "mcp_tools",
    "python",
    "retrieve",
    "search",
    "verifiers_tools",
    "verl_tools",
]


def calculator(
    expression: str, rng: Random | None = None, *, failing: float = 0.0, answer: str | None = None
) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: of numbers, parentheses and + - * / // % **, such as (17 + 4) * 0.5.
        rng: of the episode, for `failing`.
        failing: the chance that `!` is told instead, to see whether a model learns to try again.
        answer: told for every call instead, to see what a model does without the tool.

    Returns:
        The number; a fraction where it has no end as a decimal.

    Raises:
        ValueError: it is no such expression, or a number in it gets too large.

    >>> calculator("0.1 + 0.2"), calculator("2 ** 70"), calculator("2 / 6")
    ('0.3', '1180591620717411303424', '1/3, about 0.333333333333')
    """
    if answer is not None:
        return answer
    if rng is not None and rng.random() < failing:
        return "!"
    return calculate(expression)


def look_up(letter: str, row: EpisodeRow, *, answer: str | None = None) -> str:
    """Read the letter that stands for a letter in the table of the episode.

    Args:
        letter: one from a to z.
        row: of the episode; its `extra_info` has the `table`, 26 letters.
        answer: told for every call instead, to see what a model does without the tool.

    Returns:
        The letter of the table.

    Raises:
        ValueError: it is not one letter from a to z.

    >>> look_up("c", EpisodeRow(0, extra_info={"table": "bcdefghijklmnopqrstuvwxyza"}))
    'd'
    """
    if len(letter) != 1 or not "a" <= letter <= "z":
        raise ValueError(f"expected one letter from a to z, got {letter[:20]!r}")
    return row.extra_info["table"][ord(letter) - ord("a")] if answer is None else answer

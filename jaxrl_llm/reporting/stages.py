"""Where the time of a run's steps went."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.reporting.curves import short, split_evenly

BARS = 240
"""Bars at most; those of a longer run are means over a few steps."""

BESIDE = ("step", "engine_idle")
"""What is timed besides the stages: the whole step, and the engine's idle time in it."""


def stage_seconds(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds of the stages of each step, in the order in which a step takes them.

    Args:
        lines: of the steps.

    Returns:
        `stages`, the names; `steps`, the first and last step of each bar; `seconds`, for each stage
        the seconds of a step of each bar; `whole`, those of the whole steps.
    """
    timed = [line for line in lines if line.get("timing_s/step") is not None]
    orders = dict.fromkeys(tuple(n for n in line if n.startswith("timing_s/")) for line in timed)
    stages = [n for n in _merge(orders) if n.removeprefix("timing_s/") not in BESIDE]
    bars = split_evenly(timed, BARS)

    def mean(part: Sequence[Mapping[str, Any]], name: str) -> float:
        return short(sum(line.get(name) or 0.0 for line in part) / len(part))

    return {
        "stages": [name.removeprefix("timing_s/") for name in stages],
        "steps": [[part[0]["step"], part[-1]["step"]] for part in bars],
        "seconds": [[mean(part, name) for part in bars] for name in stages],
        "whole": [mean(part, "timing_s/step") for part in bars],
    }


def _merge(orders: Iterable[Sequence[str]]) -> list[str]:
    """Return all names in an order that agrees with the given ones, as far as they agree.

    >>> _merge([["gen", "adv"], ["gen", "reward", "adv"], ["gen", "adv", "testing"]])
    ['gen', 'reward', 'adv', 'testing']
    """
    merged = list[str]()
    for order in orders:
        at = 0
        for name in order:
            if name not in merged:
                merged.insert(at, name)
            at = merged.index(name) + 1
    return merged

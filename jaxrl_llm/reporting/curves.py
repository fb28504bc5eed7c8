"""The curves of a run, in groups, with a sentence on each metric; long ones with fewer points."""

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.reporting.meanings import GROUPS

AXIS_POINTS = 4000
"""Points at most by which a step's seconds and tokens are found; between them they are straight."""


def describe_metric(metric: str) -> tuple[str, str]:
    """Return the group of a metric, and a sentence on it, empty where it is not known.

    >>> describe_metric("response_length/max")
    ('Lengths and turns', 'tokens that were generated for an answer, stop token included')
    >>> describe_metric("actor/of_my_own")
    ('Other', '')
    """
    for group, meanings in GROUPS.items():
        for pattern, meaning in meanings.items():
            if fnmatch.fnmatchcase(metric, pattern):
                return group, meaning
    return "Other", ""


def curves(lines: Sequence[Mapping[str, Any]], points: int) -> dict[str, dict[str, Any]]:
    """Return the curve of each metric, with `points` points at most.

    Args:
        lines: of the steps, in order; None stands for values that are not finite.
        points: of a curve, at least 4.

    Returns:
        For each metric `x` (steps) and `y`, and `gaps`, the steps whose value is not finite. Of a
        curve with too many points `x` and `y` are the lowest and the highest of each of equal
        parts, `mean_x` and `mean_y` the parts' means, and `per_part` the points of a part.
    """
    named = dict[str, list[tuple[int, float | None]]]()
    for line in lines:
        for name, value in line.items():
            if name != "step":
                named.setdefault(name, []).append((line["step"], value))
    return {name: _curve(pairs, points) for name, pairs in named.items()}


def _curve(pairs: Sequence[tuple[int, float | None]], points: int) -> dict[str, Any]:
    known = [(step, value) for step, value in pairs if value is not None]
    gaps = [step for step, value in pairs if value is None]
    kept = known if len(known) <= points else extremes(known, points)
    curve: dict[str, Any] = {"x": [x for x, _ in kept], "y": [short(y) for _, y in kept]}
    if gaps:
        curve["gaps"] = gaps[:: max(1, len(gaps) // points)]
    if len(known) > points:
        parts = split_evenly(known, points // 2)
        curve["mean_x"] = [part[len(part) // 2][0] for part in parts]
        curve["mean_y"] = [short(sum(y for _, y in part) / len(part)) for part in parts]
        curve["per_part"] = -(-len(known) // len(parts))
    return curve


def extremes(pairs: Sequence[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    """Return the lowest and the highest of each of equal parts, and both ends.

    >>> extremes([(0, 0.0), (1, 9.0), (2, 1.0), (3, -5.0), (4, 0.0), (5, 0.5)], 4)
    [(0, 0.0), (1, 9.0), (3, -5.0), (5, 0.5)]
    """
    kept = {pairs[0], pairs[-1]}
    for part in split_evenly(pairs, points // 2):
        kept |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
    return sorted(kept)


def split_evenly(values: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Return consecutive parts whose lengths differ by one at most, none of them empty.

    >>> split_evenly([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4, 5]]
    """
    parts = min(parts, len(values))
    edges = [len(values) * i // parts for i in range(parts + 1)] if parts else []
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def axes(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[int | float]]:
    """Return for some steps, the first and the last among them, all seconds and tokens so far."""
    rows, seconds, tokens = [], 0.0, 0.0
    for line in lines:
        seconds += line.get("timing_s/step") or 0.0
        tokens += line.get("perf/total_num_tokens") or 0.0
        rows.append((line["step"], round(seconds, 2), int(tokens)))
    stride = -(-len(rows) // AXIS_POINTS) or 1
    rows = [row for i, row in enumerate(rows) if i % stride == 0 or i == len(rows) - 1]
    return {name: [row[i] for row in rows] for i, name in enumerate(("step", "seconds", "tokens"))}


def short(value: float) -> float:
    """Return a number with five significant digits, which take less room.

    >>> short(1234.5678), short(1 / 3)
    (1234.6, 0.33333)
    """
    return float(f"{value:.5g}")

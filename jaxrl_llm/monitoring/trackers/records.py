"""What a tracker is given: the run, and a step at a time."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.load import dotted_items
from jaxrl_llm.monitoring.writer import Sink

BINS = 64
LARGEST = 1e38
"""Values beyond it are counted as this one; the range of float32."""

Plain = bool | int | float | str | None


class TrackedRun(NamedTuple):
    """The run that a tracker function is called with.

    Attributes:
        folder: of the run.
        config: the resolved config, as nested mappings, without its secrets.
        first_step: the first one that is written; an earlier run of this folder may have written
            this step and later ones before it was killed.
    """

    folder: Path
    config: Mapping[str, Any]
    first_step: int

    @property
    def id(self) -> str:
        """Return 32 hexadecimal digits that a run has again when its folder is continued."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:32]


class Distribution(NamedTuple):
    """How many values lie where.

    Attributes:
        counts: values in each bin [n].
        edges: of the bins, ascending [n + 1].
        total: sum of the values.
        squares: sum of their squares.
    """

    counts: np.ndarray
    edges: np.ndarray
    total: float
    squares: float

    @property
    def centres(self) -> np.ndarray:
        """Return the middle of each bin [n]."""
        return (self.edges[1:] + self.edges[:-1]) / 2


class TrackedStep(NamedTuple):
    """A step, as a tracker is to write it.

    Attributes:
        step: its number.
        metrics: numbers by name.
        answers: rows of a table, each a mapping of columns to text, numbers or None.
        histograms: distributions by name.
    """

    step: int
    metrics: Mapping[str, float]
    answers: Sequence[Mapping[str, Plain]] = ()
    histograms: Mapping[str, Distribution] = {}


Tracker = Sink[TrackedStep]
"""What a tracker function returns."""


def distribution(values: np.ndarray) -> Distribution | None:
    """Return the distribution of the finite values in an array, or None where there is none.

    >>> distribution(np.array([1.0, 1.0, 3.0, np.nan])).counts.sum()
    np.int64(3)
    """
    flat = np.asarray(values, np.float64).ravel()
    flat = np.clip(flat[np.isfinite(flat)], -LARGEST, LARGEST)
    if not flat.size:
        return None
    low, high = float(flat.min()), float(flat.max())
    narrowest = max(1e-6 * max(abs(low), abs(high)), 1e-12)  # floats must tell the bins apart
    counts, edges = np.histogram(flat, BINS, range=(low, max(high, low + narrowest)))
    return Distribution(counts, edges, float(flat.sum()), float(np.square(flat).sum()))


def plain_rows(answers: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Plain], ...]:
    """Return rows with their texts and numbers; columns with other values are left out.

    >>> plain_rows([{"answer": "4", "score": np.float32(1), "tokens": [7, 8]}])
    ({'answer': '4', 'score': 1.0},)
    """
    rows = []
    for answer in answers:
        row: dict[str, Plain] = {}
        for name, given in answer.items():
            value = given.item() if isinstance(given, np.generic) else given
            if isinstance(value, str):
                row[str(name)] = value.encode(errors="replace").decode()  # half a character
            elif isinstance(value, float):
                row[str(name)] = value if math.isfinite(value) else None
            elif value is None or isinstance(value, int):
                row[str(name)] = value
        rows.append(row)
    return tuple(rows)


def as_table(rows: Sequence[Mapping[str, Plain]]) -> tuple[list[str], list[list[Plain]]]:
    """Return the columns of rows, and their values; None where a row has no such column.

    >>> as_table([{"answer": "4"}, {"answer": "5", "score": 1.0}])
    (['answer', 'score'], [['4', None], ['5', 1.0]])
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def dotted_keys(tree: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the values of a nested mapping by their dotted keys; lists as text, without nulls.

    >>> dotted_keys({"a": {"b": 1, "c": [2, 3]}, "d": None})
    {'a.b': 1, 'a.c': '[2, 3]'}
    """
    return {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in dotted_items(tree)
        if value is not None
    }

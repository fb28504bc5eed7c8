"""A run's metrics and config as the checks of its health read them, and what they find."""

import fcntl
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from jaxrl_llm.config.load import read_yaml
from jaxrl_llm.runs.files import RunFiles

WINDOW = 5
"""Steps whose mean stands for a time of the run, where it has twice as many."""


class Sign(NamedTuple):
    """What a check has found.

    Attributes:
        detail: the numbers that say so, in a sentence or two.
        steps: where it shows; empty where it is about the whole run.
        is_error: whether the run can't learn what it should, or has ended too early.
    """

    detail: str
    steps: tuple[int, ...] = ()
    is_error: bool = False


class Series(NamedTuple):
    """The finite values of one metric, in the order of the steps that have it.

    Attributes:
        steps: that have the metric.
        values: one for each of them.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def newest(self, n: int) -> "Series":
        """Return the last n, or all where there are fewer.

        >>> Series((1, 2, 3), (0.1, 0.2, 0.3)).newest(2)
        Series(steps=(2, 3), values=(0.2, 0.3))
        """
        return Series(self.steps[-n:], self.values[-n:])

    def where(self, keep: Iterable[bool]) -> tuple[int, ...]:
        """Return the steps that a sequence of the same length keeps."""
        return tuple(step for step, kept in zip(self.steps, keep, strict=True) if kept)

    @property
    def mean(self) -> float:
        """Of all values; NaN without any."""
        return fmean(self.values) if self.values else math.nan

    @property
    def ends(self) -> tuple[float, float] | None:
        """The means of the first and of the newest `WINDOW` steps; None below four steps.

        Of fewer than twice as many steps they are the means of both halves.
        """
        n = min(WINDOW, len(self.values) // 2)
        return (fmean(self.values[:n]), fmean(self.values[-n:])) if n > 1 else None

    @property
    def begin_and_now(self) -> tuple[float, float]:
        """The value of the first step and the mean of the newest `WINDOW`; (0, 0) below four steps.

        The first step measures what the run began with; what comes after may already have changed.
        """
        known = len(self.values) >= 4
        return (self.values[0], fmean(self.values[-WINDOW:])) if known else (0.0, 0.0)

    @property
    def smoothed(self) -> "Series":
        """The means of `WINDOW` steps in a row, each at the last of them."""
        ends = range(WINDOW, len(self.values) + 1)
        means = tuple(fmean(self.values[end - WINDOW : end]) for end in ends)
        return Series(self.steps[WINDOW - 1 :], means)

    @property
    def usual_change(self) -> float:
        """The median of the changes between two steps, without their sign; 0 below two steps."""
        pairs = zip(self.values, self.values[1:], strict=False)
        return median([abs(b - a) for a, b in pairs] or [0.0])


class RunHistory:
    """What a run has logged, and its config.

    Args:
        rows: the lines of metrics.jsonl, in their order; NaN and infinity count as null there.
        config: the resolved config as a tree.
        is_open: tells whether a process holds the run's folder.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        is_open: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep what is given."""
        self.rows = [{name: _finite(value) for name, value in row.items()} for row in rows]
        self.trained = [row for row in self.rows if row["step"] > 0]
        self.is_open = is_open
        self._config = config

    def key(self, name: str, default: Any = None) -> Any:
        """Return a key of the config, as in `rollout.max_new_tokens`; the default without one."""
        at: Any = self._config
        for part in name.split("."):
            at = at.get(part) if isinstance(at, Mapping) else None
        return default if at is None else at

    def series(self, name: str) -> Series:
        """Return a metric of the training steps, without values that are not finite."""
        pairs = [(row["step"], row[name]) for row in self.trained if row.get(name) is not None]
        return Series(tuple(step for step, _ in pairs), tuple(float(value) for _, value in pairs))

    def together(self, *names: str) -> tuple[Series, ...]:
        """Return several metrics, at the steps that have all of them."""
        rows = [row for row in self.trained if all(row.get(name) is not None for name in names)]
        steps = tuple(row["step"] for row in rows)
        return tuple(Series(steps, tuple(float(row[name]) for row in rows)) for name in names)

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they first came."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    @functools.cached_property
    def validations(self) -> dict[str, Series]:
        """The mean@k of each data source by its metric's name, the value before training first."""
        names = [n for n in self.names if n.startswith("val-core/") and "/mean@" in n]
        found = {}
        for name in names:
            rows = [row for row in self.rows if row.get(name) is not None]
            values = tuple(float(row[name]) for row in rows)
            found[name] = Series(tuple(row["step"] for row in rows), values)
        return found

    @functools.cached_property
    def score_span(self) -> float:
        """The highest score of an answer less the lowest, over all steps; 0 without scores."""
        lowest, highest = (self.series(f"critic/score/{end}").values for end in ("min", "max"))
        return max(highest) - min(lowest) if lowest and highest else 0.0

    @functools.cached_property
    def nearly_best_score(self) -> float:
        """What the mean score of a step must reach for its answers to count as nearly all right.

        It is the highest score of an answer so far, less a tenth of the span of scores; infinite
        where all scores are the same, as nothing tells right from wrong then.
        """
        highest = self.series("critic/score/max").values
        return max(highest) - 0.1 * self.score_span if self.score_span else math.inf

    @functools.cached_property
    def is_better_than_at_first(self) -> bool:
        """Whether the mean score has risen, and the validation of some source; as far as logged."""
        score = self.series("critic/score/mean").ends
        pairs = [(s.values[0], s.values[-1]) for s in self.validations.values() if len(s.steps) > 1]
        has_risen = [any(newest > first for first, newest in pairs)] if pairs else []
        return all([*has_risen, score is None or score[1] > score[0]])


def read_history(run: RunFiles) -> RunHistory:
    """Read what the checks need from a run's folder.

    Raises:
        ConfigError: it has no config.yaml.
    """
    config = read_yaml(run.folder / "config.yaml")
    return RunHistory(run.metrics, config, lambda: is_held(run.folder))


def is_held(folder: Path) -> bool:
    """Tell whether a process holds a run's folder; also where it can't be found out.

    A shared lock is asked for, for a moment, so that readers do not hinder each other.
    """
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

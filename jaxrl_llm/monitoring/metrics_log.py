"""Where a step's metrics go: a JSONL file, and the run's trackers."""

import collections
import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import FunctionSpec, described_failure, load_function
from jaxrl_llm.config.load import as_tree, without_secrets
from jaxrl_llm.config.programs import RunConfig
from jaxrl_llm.monitoring.trackers import TrackedRun, TrackedStep, Tracker, distribution, plain_rows
from jaxrl_llm.monitoring.writer import BackgroundWriter, Outages, Sink
from jaxrl_llm.sharding.distributed import is_first, run_on_first

KEY = "log.trackers"

ALWAYS_ON = {
    "console": "the terminal has a line for each step in any case",
    "file": "metrics.jsonl in run_dir has every step in any case",
}
"""Names of verl's that no run here can do without."""


def load_trackers(specs: Sequence[FunctionSpec], run: TrackedRun) -> list[Tracker]:
    """Return a run's trackers, none of which is open.

    It is called before anything is loaded, to see that it works, and when the run begins.

    Args:
        specs: tracker functions, each called with the run.
        run: to be tracked.

    Raises:
        ConfigError: a function can't be found, called or used, or a package is not installed.
    """
    trackers = []
    for spec in specs:
        if spec.given is None and spec.fn in ALWAYS_ON:
            raise ConfigError(f"{KEY}: remove {spec.fn!r}, {ALWAYS_ON[spec.fn]}")
        make = load_function(spec, functions.TRACKERS, passed=None, key=KEY)
        try:
            tracker = make(run)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{KEY}: {spec.fn!r}: {described_failure(error, make)}") from error
        if not isinstance(tracker, Sink):
            raise ConfigError(
                f"{KEY}: expected from {spec.fn!r} an object with name, open, write and close, got "
                f"a {type(tracker).__name__}"
            )
        trackers.append(tracker)
    return trackers


def check_trackers(config: RunConfig) -> None:
    """See that a run's trackers can be used, in the process that will have them.

    Raises:
        ConfigError: a function can't be found, called or used, or a package is not installed.
    """
    run = TrackedRun(Path(config.run_dir), without_secrets(as_tree(config)), first_step=0)
    run_on_first(lambda: load_trackers(config.log.trackers, run) and None)


log = logging.getLogger(__name__)

KEPT_LINES = 100_000
"""Lines of metrics.jsonl that wait in memory at most, about 300 MB."""

DETAILED = 20
"""Steps that wait for a tracker with their answers and distributions; more wait without them."""

TRACKERS_CLOSE_S = 30.0
"""Seconds that the end of a run waits at most for its trackers."""


class MetricsFile:
    """`metrics.jsonl`: one line for each step. A resumed run cuts it back to its checkpoint.

    Lines that can't be written, as on a full disk, are kept in memory, and written before the next
    one when they can. The file always ends with a whole line.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        """Open the file and cut off what lies behind `position`, in bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        length = self._file.seek(0, os.SEEK_END)
        if length < position:
            log.warning("%s has lost lines: %d bytes, expected %d", path, length, position)
        self._end = self._synced = min(position, length)
        self._file.truncate(self._end)
        self._is_torn = False
        self._kept: collections.deque[bytes] = collections.deque()
        self._outages = Outages(str(path), "its lines are kept in memory")
        self.dropped = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, now or as soon as it can be written."""
        known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._kept.append(json.dumps({"step": step, **known}).encode() + b"\n")
        if len(self._kept) > KEPT_LINES:
            self._kept.popleft()
            self.dropped += 1
        try:
            self._write_kept()
        except OSError as error:
            self._outages.begin(error)

    def position(self) -> int:
        """Return the length in bytes of what is safely on disk, which is all that was written.

        Raises:
            OSError: it can't be written; it is kept.
        """
        self._write_kept()
        try:
            os.fsync(self._file.fileno())
        except OSError:
            self._take_back()
            raise
        self._synced = self._end
        return self._end

    def close(self) -> None:
        """Write what is kept if that is possible, and close the file."""
        try:
            self._write_kept()
        except OSError as error:
            self._outages.begin(error)
            self.dropped += len(self._kept)
        self._outages.close(self.dropped)
        self._file.close()

    def _write_kept(self) -> None:
        while self._kept:
            self._append(self._kept[0])
            self._kept.popleft()
        self._outages.end(self.dropped)

    def _append(self, line: bytes) -> None:
        """Write a line whole or not at all."""
        self._cut()
        self._is_torn = True
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # else it is cut before the next line
                self._cut()
            raise
        self._end, self._is_torn = self._end + len(line), False

    def _cut(self) -> None:
        """Cut off what is no whole line."""
        if self._is_torn:
            self._file.truncate(self._end)
            self._is_torn = False

    def _take_back(self) -> None:
        """Keep the lines that the disk has not confirmed: after an error it may say it has them."""
        self._file.seek(self._synced)
        lines = self._file.read(self._end - self._synced).splitlines(keepends=True)
        self._kept.extendleft(reversed(lines))
        self._end, self._is_torn = self._synced, True


class MetricsLog:
    """All sinks at once; of several processes the first one writes.

    Args:
        run_dir: holds metrics.jsonl, and what trackers write to the run's folder.
        step: the step after which the run starts.
        position: bytes of metrics.jsonl to keep.
        trackers: functions that return the run's trackers.
        config: the resolved config, for trackers that show it.

    Raises:
        ConfigError: a tracker can't be used, as its package is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        step: int,
        position: int,
        trackers: Sequence[FunctionSpec],
        config: Mapping[str, Any],
    ) -> None:
        """Open every sink, all but the file in the background."""
        self._file: MetricsFile | None = None
        self._trackers: list[BackgroundWriter[TrackedStep]] = []
        if not is_first():
            return
        run = TrackedRun(run_dir, without_secrets(config), first_step=step + 1 if step else 0)
        opened = load_trackers(trackers, run)
        self._file = MetricsFile(run_dir / "metrics.jsonl", position)
        self._trackers = [BackgroundWriter(tracker) for tracker in opened]

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        answers: Sequence[Mapping[str, Any]] = (),
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write one step to every sink. What they can't write does not end the run.

        Args:
            step: its number.
            metrics: by name.
            answers: rows of a table of answers (`prompt`, `answer`, `score`, …), for trackers;
                columns that are neither text nor numbers are left out.
            histograms: values by name, whose distributions trackers show.
        """
        if self._file is None:
            return
        row = dict(metrics)
        if self._trackers:
            dropped = self._file.dropped + sum(writer.dropped for writer in self._trackers)
            row["perf/dropped_log_records"] = float(dropped)
        self._file.write(step, row)
        if not self._trackers:
            return
        seen = {name: distribution(values) for name, values in (histograms or {}).items()}
        record = TrackedStep(
            step, row, plain_rows(answers), {k: v for k, v in seen.items() if v is not None}
        )
        for writer in self._trackers:
            is_behind = writer.waiting >= DETAILED
            writer.write(TrackedStep(step, row) if is_behind else record)

    def position(self, step: int) -> int:
        """Return the length in bytes of what is safely on disk; 0 where nothing is written.

        Args:
            step: that is saved, for messages.

        Raises:
            RunError: lines of metrics.jsonl can't be written, so the step can't be saved.
        """
        try:
            return self._file.position() if self._file else 0
        except OSError as error:
            raise RunError(
                f"can't save step {step}: metrics.jsonl: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        """Close every sink; wait for trackers, which end side by side, only so long."""
        if self._file:
            self._file.close()
        for writer in self._trackers:
            writer.end()
        for writer in self._trackers:
            writer.close(TRACKERS_CLOSE_S)

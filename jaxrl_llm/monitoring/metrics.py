"""Where metrics go: a JSONL file, TensorBoard, Weights & Biases, and the screen."""

import collections
import contextlib
import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.monitoring.streams import BackgroundFile, Stream
from jaxrl_llm.monitoring.trackers import (
    BackgroundWriter,
    Outages,
    Row,
    TensorBoard,
    Tracker,
    WeightsAndBiases,
)
from jaxrl_llm.sharding.distributed import is_first

log = logging.getLogger(__name__)

PHASE = "phase"
"""What marks the stages of a step among a trace's other events."""

KEPT_LINES = 100_000
"""Lines of metrics.jsonl that wait in memory at most, about 300 MB."""

TRACKERS_CLOSE_S = 30.0
SCREEN_CLOSE_S = 5.0
"""Seconds that the end of a run waits at most for a tracker, and for stdout."""


class Clock:
    """Wall-clock seconds of the named stages of a step, as `timing_s/<stage>`."""

    def __init__(self) -> None:
        """Start."""
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time one stage, and mark it in a trace if one is being written."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(stage, **{PHASE: 1}):
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return the seconds of every stage, and of the step so far."""
        total = time.perf_counter() - self._start
        return {f"timing_s/{stage}": s for stage, s in {**self.seconds, "step": total}.items()}


class CompileCounter:
    """Counts the functions that XLA compiles while it is open, or finds compiled in its cache."""

    def __init__(self) -> None:
        """Start to count."""
        self.count, self._hits, self._seconds = 0, 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_to_cache)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == "/jax/core/compile/backend_compile_duration":  # of a hit, too
            self.count += 1
            self._seconds += duration_secs

    def _listen_to_cache(self, event: str, **kwargs: str | int) -> None:
        del kwargs
        self._hits += event == "/jax/compilation_cache/cache_hits"

    def take(self) -> int:
        """Return the count since the last call."""
        count, self.count = self.count, 0
        return count

    def metrics(self) -> dict[str, float]:
        """Return what was compiled and what was found since the last call."""
        found = {
            "perf/compilations": float(self.count - self._hits),
            "perf/compilation_cache_hits": float(self._hits),
            "perf/compile_seconds": self._seconds,
        }
        self.count, self._hits, self._seconds = 0, 0, 0.0
        return found

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_to_cache)


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
            log.warning("%s has lost lines: %d bytes, wanted %d", path, length, position)
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
        run_dir: holds metrics.jsonl and tensorboard.
        step: the step after which the run starts.
        position: bytes of metrics.jsonl to keep.
        tensorboard: whether to write TensorBoard files.
        wandb: project at Weights & Biases, or None.
        config: the resolved config, for Weights & Biases.

    Raises:
        ConfigError: the package wandb is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        step: int,
        position: int,
        tensorboard: bool,
        wandb: str | None,
        config: Mapping[str, Any],
    ) -> None:
        """Open every sink, all but the file in the background."""
        self._file: MetricsFile | None = None
        self._trackers: list[BackgroundWriter[Row]] = []
        if not is_first():
            return
        trackers: list[Tracker] = []
        if wandb:
            trackers.append(WeightsAndBiases(wandb, run_dir, config))
        if tensorboard:
            trackers.append(TensorBoard(run_dir / "tensorboard", step + 1 if step else 0))
        self._file = MetricsFile(run_dir / "metrics.jsonl", position)
        self._trackers = [BackgroundWriter(tracker) for tracker in trackers]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics to every sink. What they can't write does not end the run."""
        if self._file is None:
            return
        row = dict(metrics)
        if self._trackers:
            dropped = self._file.dropped + sum(writer.dropped for writer in self._trackers)
            row["perf/dropped_log_records"] = float(dropped)
        self._file.write(step, row)
        for writer in self._trackers:
            writer.write((step, row))

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
        """Close every sink; wait for trackers only so long."""
        if self._file:
            self._file.close()
        for writer in self._trackers:
            writer.close(TRACKERS_CLOSE_S)


class Display:
    """A live progress bar on a terminal, plain lines elsewhere; of the first process only.

    What is shown goes to stdout in the background: where nobody reads it, the run goes on.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        """Show the bar."""
        self._writer, file = None, None
        if is_first() and sys.stdout is not None:  # None: there is no stdout
            self._writer = BackgroundWriter(Stream("stdout", sys.stdout))
            file: Any = BackgroundFile(self._writer, sys.stdout)
        self.console = Console(
            file=file, soft_wrap=True, highlight=False, quiet=self._writer is None
        )
        self._progress = None
        if self.console.is_terminal and is_first():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task(title, total=total, completed=done)
            self._progress.start()

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        self.console.print(text, markup=False)

    def advance(self, text: str) -> None:
        """Print a step's line and move the bar."""
        self.line(text)
        if self._progress:
            self._progress.advance(self._task)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table."""
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def close(self) -> None:
        """Remove the bar, and wait until all is printed, if it is read."""
        try:
            if self._progress:
                self._progress.stop()
        finally:
            if self._writer:
                self._writer.close(SCREEN_CLOSE_S)


class LauncherDisplay(Display):
    """The same at the launcher of a job on a cluster."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        """Show the bar there."""
        context.show("open", title, total, done)

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        context.show("line", text)

    def advance(self, text: str) -> None:
        """Print a step's line and move the bar."""
        context.show("advance", text)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table."""
        context.show("table", title, columns, rows)

    def close(self) -> None:
        """Remove the bar."""
        context.show("close")


def open_display(title: str, total: int, done: int) -> Display:
    """Show a run's progress: here, or where a job on a cluster was launched."""
    kind = Display if context.current() is None else LauncherDisplay
    return kind(title, total, done)


def due(step: int, every: int, last: int) -> bool:
    """Tell whether something is done at this step: every n steps, and at the last one."""
    return step == last or (every > 0 and step % every == 0)


def summary(name: str, values: Any) -> dict[str, float]:
    """Return `name/mean`, `name/max` and `name/min` of an array.

    >>> import numpy as np
    >>> summary("response_length", np.array([1, 3]))
    {'response_length/mean': 2.0, 'response_length/max': 3.0, 'response_length/min': 1.0}
    """
    if not values.size:
        return {f"{name}/{how}": 0.0 for how in ("mean", "max", "min")}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def memory_metrics() -> dict[str, float]:
    """Return the peak memory so far, in GiB: of this process, and of its first device if known."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scale = 2**30 if sys.platform == "darwin" else 2**20
    found = {"perf/cpu_memory_used_gb": peak / scale}
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        found["perf/max_memory_allocated_gb"] = stats["peak_bytes_in_use"] / 2**30
    return found

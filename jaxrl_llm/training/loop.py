"""The loop that `train`, `sft` and `prefer` share: a run where it stands, and the steps left of it.

`open_files` opens a run's data, checkpoints and logs at its newest checkpoint, or at its beginning.
`run_steps` takes the steps that are left, and validates, logs and saves where that is due. What a
step is, the program's trainer says. Its metrics go to `metrics.jsonl` and to the run's trackers.
"""

import collections
import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.compilation import BACKGROUND, compiling_on_demand
from jaxrl_llm.config.errors import ConfigError, Preempted, RunError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import as_tree, without_secrets
from jaxrl_llm.config.programs import (
    PreferConfig,
    PreferValidationConfig,
    RunConfig,
    SftConfig,
    TrainConfig,
)
from jaxrl_llm.config.sections import ValidationConfig
from jaxrl_llm.data.dataset import batches
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity
from jaxrl_llm.monitoring.clock import Clock, CompileCounter, Pace, is_due, reporting_compilation
from jaxrl_llm.monitoring.display import Display, open_display
from jaxrl_llm.monitoring.profiler import Profiler
from jaxrl_llm.monitoring.trackers import (
    TrackedRun,
    TrackedStep,
    distribution,
    load_trackers,
    plain_rows,
)
from jaxrl_llm.monitoring.writer import BackgroundWriter, Outages, quiet_libraries
from jaxrl_llm.runs.checkpoint import Checkpoints, Saved
from jaxrl_llm.runs.directory import ending_together, join
from jaxrl_llm.runs.preemption import Preemption, Watchdog
from jaxrl_llm.sharding.checksum import checksum_of_leaves
from jaxrl_llm.sharding.distributed import is_first
from jaxrl_llm.sharding.reshard import on_device
from jaxrl_llm.training.load_model import all_devices
from jaxrl_llm.training.run_files import opening_lines
from jaxrl_llm.training.update import Learner, TrainableModel, TrainState
from jaxrl_llm.training.validation import headline

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


Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class OpenFiles:
    """The files of a run, and what measures and ends its steps.

    Attributes:
        config: of the run.
        total_steps: steps in all.
        stream: the data, from its beginning.
        start_digests: of the weights and data that the run began with.
        preemption: whether the run was preempted.
        watchdog: ends the run when it hangs.
    """

    config: TrainConfig | SftConfig | PreferConfig
    total_steps: int
    stream: Any
    start_digests: dict[str, Any]
    checkpoints: Checkpoints
    log: MetricsLog
    display: Display
    preemption: Preemption
    watchdog: Watchdog
    profiler: Profiler
    compiled: CompileCounter


class Trainer:
    """A model that learns a step at a time; `run_steps` runs it.

    Args:
        files: of the run.
        saved: where the run stands, as its newest checkpoint has it.
        validation: when it validates; None: nothing is held out.

    Attributes:
        number: steps done.
        states: parameters and optimizer states by the model's name, as a checkpoint holds them.
        has_ended: whether the run was preempted; it has saved then.
    """

    def __init__(
        self,
        files: OpenFiles,
        saved: Saved,
        validation: ValidationConfig | PreferValidationConfig | None = None,
    ) -> None:
        """Begin where the run stands."""
        self.files, self.validation, self.has_ended = files, validation, False
        self.number, self.states = saved.step, saved.state
        self._has_line = Pace(files.total_steps)
        if saved.extra:
            self.set_state(saved.extra)

    def step(self, clock: Clock) -> Metrics:
        """Take the step after `number`, and return its metrics, to which the loop adds."""
        raise NotImplementedError

    def validate(self, number: int) -> Metrics:
        """Return metrics of the models as they are after a step, by what is held out."""
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the states, as JSON can hold it."""
        return {"data": self.files.stream.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` has returned."""
        self.files.stream.set_state(state["data"])

    def line(self, number: int, metrics: Metrics) -> str:
        """Return a step's line on the screen."""
        raise NotImplementedError

    def report(self, number: int, metrics: Metrics) -> None:
        """Write a step's metrics, and some of the lines on the screen."""
        self.files.log.write(number, metrics)
        line = self.line(number, metrics) if self._has_line(number) else ""
        self.files.display.advance(line)
        self.files.display.plot(number, metrics)


def validate_before(trainer: Trainer) -> None:
    """Validate what a run begins with where that is asked for, and log it as step 0."""
    validation, files = trainer.validation, trainer.files
    if trainer.number or validation is None or not validation.before:
        return
    metrics = trainer.validate(0)
    files.watchdog.beat()
    files.log.write(0, metrics)
    files.display.line(trainer.line(0, metrics))
    files.display.plot(0, metrics)


def run_steps(trainer: Trainer) -> Iterator[int]:
    """Take the steps of a run that are left, and yield the number of each when it is done.

    Once the run is preempted, each step saves, and `has_ended` tells the caller to stop.
    """
    files, validation = trainer.files, trainer.validation
    total, every = files.total_steps, files.config.checkpoint.every
    while trainer.number < total:
        number = trainer.number + 1
        files.watchdog.beat()
        files.profiler.turn_to(number)
        clock = Clock()
        metrics = trainer.step(clock)
        if validation is not None and is_due(number, validation.every, total):
            with clock("testing"):
                metrics |= trainer.validate(number)
        metrics |= clock.metrics() | files.compiled.metrics()
        trainer.report(number, metrics)
        files.watchdog.beat()
        trainer.number = number
        BACKGROUND.release()  # the other programs, now that there is a step to see
        files.checkpoints.check()
        trainer.has_ended = files.preemption.requested()
        if trainer.has_ended or is_due(number, every, total):
            save(trainer, metrics)
        yield number


@activity("saving")
def save(trainer: Trainer, metrics: Metrics) -> None:
    """Save everything from which the run continues bit for bit."""
    files, number = trainer.files, trainer.number
    extra = {
        **trainer.get_state(),
        "metrics_bytes": files.log.position(number),
        "origin": files.start_digests,
    }
    validated = {name: value for name, value in metrics.items() if "/mean@" in name}
    score = {"validation": headline(validated)} if validated else None
    files.checkpoints.save(number, trainer.states, extra, score)


def train_to_the_end(trainer: Trainer, steps: Iterator[int]) -> None:
    """Take all steps that are left, and wait for the last checkpoint.

    Raises:
        Preempted: the run was preempted, and has saved.
    """
    while not trainer.has_ended and next(steps, None) is not None:
        pass
    trainer.files.profiler.close()
    with activity("saving"):
        trainer.files.checkpoints.wait()
    step, total = trainer.number, trainer.files.total_steps
    if step < total:
        saved = f"saved after step {step} of {total}" if step else "there was no step to save"
        raise Preempted(f"{saved}; the same command continues")


@activity("reading the weights' checksums")
def starting_digests(
    models: Mapping[str, TrainableModel], items: Sequence[Any], frozen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return digests of the weights and the tokenised data that a run starts from."""
    data = hashlib.sha256()
    for item in items:
        data.update(np.asarray(item.tokens, np.int32).tobytes() + b"|")
        data.update(b"" if (load := getattr(item, "load", None)) is None else load.digest())
        given = {n: v for n, v in getattr(item, "columns", {}).items() if not n.startswith("ref_")}
        data.update(repr(sorted(given.items())).encode() if given else b"")
    loaded = {name: m.model for name, m in models.items()}
    weights = {name: (m.params, m.frozen, m.tower_params) for name, m in loaded.items()}
    sums = {}
    for name, tree in (weights | {**frozen}).items():
        with on_device(tree) as held:  # some wait on the host
            sums[name] = int(checksum_of_leaves(held))
    return {**sums, "data": data.hexdigest()}


def restore_or_start(
    checkpoints: Checkpoints,
    models: Mapping[str, TrainableModel],
    *,
    resume: str,
    digests: dict[str, Any],
    extra_states: Mapping[str, TrainState],
) -> Saved:
    """Return the step, states and other contents of the newest checkpoint, or a fresh start.

    Args:
        checkpoints: of the run.
        models: to train, by name.
        resume: the key checkpoint.resume.
        digests: `starting_digests` of the run as it is configured now.
        extra_states: by name, that checkpoints hold besides the models', as the run starts.

    Raises:
        ConfigError: the run in this folder started from other weights or other data.
    """
    if checkpoints.latest() is None:
        begun = {name: m.learner.init(m.model.params) for name, m in models.items()}
        return Saved(0, {**begun, **extra_states}, {})
    if resume == "never" and not job_context.is_restarted():
        raise ConfigError(
            f"checkpoint.resume=never, but {str(checkpoints.directory)!r} holds step "
            f"{checkpoints.latest()}: set it to auto, or name another run_dir"
        )
    like = {name: trainable.learner.state_like() for name, trainable in models.items()}
    like |= jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), {**extra_states}
    )
    with activity("reading the checkpoint"):
        saved = checkpoints.restore(like)
    keys = {name: trainable.key for name, trainable in models.items()} | {"data": "data.train"}
    for name, digest in digests.items():
        if saved.extra["origin"][name] != digest:
            raise ConfigError(
                f"{keys.get(name, name)}: its contents are not those that this run began with, so "
                "it can't be continued: put them back, or name another run_dir than "
                f"{checkpoints.directory}"
            )
    log.info("continuing after step %d", saved.step)
    return saved


def enter_process(
    config: RunConfig, stack: contextlib.ExitStack, *rules: Callable[[Any, int], Iterator[str]]
) -> None:
    """Join the other processes of a run, and open the devices.

    Args:
        config: of the run.
        stack: of the whole program.
        rules: as for `join`.
    """
    join(config, *rules)
    stack.enter_context(ending_together())
    stack.enter_context(ACTIVITIES.reported())
    quiet_libraries()
    all_devices()


def compile_on_demand(stack: contextlib.ExitStack) -> None:
    """Report what is compiled while a run is open, and compile first what its next step needs."""
    stack.enter_context(reporting_compilation())
    stack.enter_context(compiling_on_demand())


def open_watchdog(config: RunConfig) -> Watchdog:
    """Return the watchdog that ends a run that hangs; on a cluster the launcher does it."""
    return Watchdog(config.stall_timeout_s if job_context.current() is None else None)


def _title_and_size(config: TrainConfig | SftConfig | PreferConfig) -> tuple[str, int]:
    """Return what a run does, and how many items a step of it has."""
    if isinstance(config, TrainConfig):
        return "training", config.batch.prompts_per_step
    if isinstance(config, SftConfig):
        return "supervised training", config.batch.examples_per_step
    return "training on preferences", config.batch.pairs_per_step


def count_steps(config: RunConfig, items: int, per_step: int) -> int:
    """Return the steps of a run, all together."""
    return config.steps or items * config.epochs // per_step


def open_executor(threads: int, name: str, stack: contextlib.ExitStack) -> ThreadPoolExecutor:
    """Return threads that end with a run."""
    executor = ThreadPoolExecutor(threads, name)
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    return executor


def open_files(
    config: TrainConfig | SftConfig | PreferConfig,
    models: Mapping[str, TrainableModel],
    items: Sequence[Any],
    watchdog: Watchdog,
    stack: contextlib.ExitStack,
    *,
    best: str | None = None,
    frozen: Mapping[str, Any] | None = None,
    extra_states: Mapping[str, TrainState] | None = None,
) -> tuple[OpenFiles, Saved]:
    """Open a run's data, checkpoints and metrics: all that a trainer needs besides its models.

    Args:
        config: of the run.
        models: to train, by name.
        items: the tokenised data, in the files' order.
        watchdog: of the run.
        stack: closes the files at the run's end.
        best: metric by which the best checkpoint is kept besides the newest.
        frozen: parameters of models that the run does not train, by their config key.
        extra_states: that checkpoints hold besides those of `models`, as the run starts.

    Returns:
        The files, and where the run stands: at its start, or at the newest checkpoint.
    """
    title, size = _title_and_size(config)
    folder = Path(config.run_dir)
    with config_errors_at("data.train"):
        stream = batches(
            items,
            batch_size=size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            epochs=None if config.steps else config.epochs,
            drop_remainder=True,
        )
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep, best=best)
    stack.callback(checkpoints.close)
    digests = starting_digests(models, items, frozen or {})
    saved = restore_or_start(
        checkpoints,
        models,
        resume=config.checkpoint.resume,
        digests=digests,
        extra_states=extra_states or {},
    )
    metrics_log = MetricsLog(
        folder,
        step=saved.step,
        position=saved.extra.get("metrics_bytes", 0),
        trackers=config.log.trackers,
        config=as_tree(config),
    )
    stack.callback(metrics_log.close)
    total = count_steps(config, len(items), size)
    display = open_display(title, total, saved.step)
    stack.callback(display.close)
    trained = {n: m.model.like for n, m in models.items() if isinstance(m.learner, Learner)}
    for line in opening_lines(config, trained, len(items), total):
        display.line(line)
    preemption = stack.enter_context(Preemption(config.checkpoint.grace_s))
    compiled = CompileCounter()
    stack.callback(compiled.close)
    left = range(saved.step + 1, total + 1)
    profiler = Profiler(left, config.log.profile_steps, folder, display)
    stack.callback(profiler.close)
    files = OpenFiles(
        config=config,
        total_steps=total,
        stream=stream,
        start_digests=digests,
        checkpoints=checkpoints,
        log=metrics_log,
        display=display,
        preemption=preemption,
        watchdog=watchdog,
        profiler=profiler,
        compiled=compiled,
    )
    return files, saved

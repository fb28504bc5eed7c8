"""How XLA compiles programs: by which flags, and before they run.

A CPU's programs are compiled in threads while others run, in the order in which they are likely to
be needed. Who needs one that no thread has begun compiles it itself. A GPU's compiler measures
kernels on the GPU, and several processes must compile in one order: there, each pass is compiled
for all its shapes before it first runs.
"""

import collections
import contextlib
import enum
import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.sharding import distributed

BEGUN = "/jaxrl_llm/compilation/begun"
"""Event of `jax.monitoring`: a program with a `label` is being compiled."""
ENDED = "/jaxrl_llm/compilation/ended"
ADDED = "/jaxrl_llm/compilation/added"
"""Event: there is one more program to compile."""
WAITED = "/jaxrl_llm/compilation/waited"
"""Duration: how long a thread has waited for a program."""


class _ThreadState(threading.local):
    """What a thread does: compile a `PendingProgram`, wait for one."""

    compiles = waits = False


_thread_state = _ThreadState()


class PendingProgram:
    """What is compiled once: by the thread that needs it, or by another one before that.

    Args:
        label: of the program, for a reader.
        compile: traces, lowers and compiles it.
    """

    def __init__(self, label: str, compile: Callable[[], Any]) -> None:
        """Compile nothing yet."""
        self.label, self.is_done = label, False
        self._compile: Callable[[], Any] | None = compile
        self._lock, self._is_listed = threading.Lock(), False  # held by the thread that compiles
        self._compiled: Any = None
        self._error: Exception | None = None

    def result(self) -> Any:
        """Return it compiled; compile it here, or wait for the thread that does."""
        if not self.is_done:
            with waiting(), self._lock:
                self._run()
        if self._error is not None:
            raise self._error
        return self._compiled

    @property
    def has_failed(self) -> bool:
        """Whether `result` raises."""
        return self._error is not None

    def announce(self) -> None:
        """Report once that it is to be compiled."""
        if not self._is_listed:
            self._is_listed = True
            jax.monitoring.record_event(ADDED, label=self.label)

    def try_to_compile(self) -> None:
        """Compile it, unless a thread has begun to."""
        if self._lock.acquire(blocking=False):
            try:
                self._run()
            finally:
                self._lock.release()

    def _run(self) -> None:
        """Compile it, unless that is done; a thread that is interrupted leaves it to others."""
        if self.is_done:
            return
        assert self._compile is not None
        self.announce()
        jax.monitoring.record_event(BEGUN, label=self.label)
        _thread_state.compiles = True
        try:
            self._compiled = self._compile()
            distributed.wait_for_all(f"compiled {self.label}")
            self.is_done = True
        except Exception as error:  # whoever needs it gets to know
            self._error, self.is_done = error, True
        finally:
            _thread_state.compiles = False
            jax.monitoring.record_event(ENDED, label=self.label)
        self._compile = None


class CompileQueue:
    """Threads that compile programs: last, and one at a time, those that can wait.

    A thread ends when it finds no work. What none has begun when the process ends is dropped.

    Args:
        threads: at most; None: as many as there are cores.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Begin without programs, and without threads."""
        self._most, self._threads = threads or os.cpu_count() or 1, 0
        self._changed = threading.Condition()
        self._soon: collections.deque[PendingProgram] = collections.deque()
        self._later: collections.deque[PendingProgram] = collections.deque()
        self._running: set[PendingProgram] = set()
        self._is_held = False

    def add(self, programs: Iterable[PendingProgram], *, later: bool = False) -> None:
        """Compile programs after those that are there.

        Args:
            programs: to compile.
            later: after those that are needed soon.
        """
        programs = [program for program in programs if not program.is_done]
        if not (later and self._is_held):
            for program in programs:
                program.announce()
        with self._changed:
            (self._later if later else self._soon).extend(programs)
            self._start()

    def hold(self) -> None:
        """Begin with none that can wait, until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Go on with those that can wait."""
        for program in list(self._later):
            program.announce()
        with self._changed:
            self._is_held = False
            self._start()

    def drop(self, programs: Iterable[PendingProgram]) -> None:
        """Forget programs that no thread has begun; wait for those that are compiled now.

        Who needs one of them later compiles it.
        """
        dropped = {*programs}
        with self._changed:
            for queue in (self._soon, self._later):
                kept = [program for program in queue if program not in dropped]
                queue.clear()
                queue.extend(kept)
            self._changed.wait_for(lambda: not self._running & dropped)

    def clear(self) -> None:
        """Drop all programs, and end a `hold`."""
        with self._changed:
            self._soon.clear()
            self._later.clear()
        self._is_held = False
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is left to compile that is not held."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads)

    def _start(self) -> None:
        left = len(self._soon) + bool(self._later and not self._is_held)
        for _ in range(min(left, self._most - self._threads)):
            threading.Thread(target=self._work, name="compile").start()
            self._threads += 1

    def _work(self) -> None:
        program: PendingProgram | None = None
        try:
            while (program := self._take(program)) is not None:
                program.try_to_compile()
        except BaseException:
            with self._changed:
                self._leave(program)
            raise

    def _take(self, done: PendingProgram | None) -> PendingProgram | None:
        """Return the next program for a thread; None: it ends."""
        with self._changed:
            self._running.discard(done)
            self._changed.notify_all()
            queue = None
            if threading.main_thread().is_alive():  # else the process ends
                if self._soon:
                    queue = self._soon
                elif self._later and not self._is_held and self._threads == 1:
                    queue = self._later
            if queue is None:
                self._leave(None)  # with the lock still held: who adds programs starts a thread
                return None
            program = queue.popleft()
            self._running.add(program)
            return program

    def _leave(self, program: PendingProgram | None) -> None:
        self._threads -= 1
        self._running.discard(program)
        self._changed.notify_all()


BACKGROUND = CompileQueue()
"""What this process compiles while it does other things."""


class AheadOfCall:
    """A jitted step with one program, compiled in another thread before the step is called.

    Args:
        label: of the step.
        step: jitted.
        devices: on which it runs.
    """

    def __init__(self, label: str, step: Any, devices: Iterable[Any]) -> None:
        """Compile nothing yet."""
        self._label, self._step, self._is_ahead = label, step, compiles_ahead(devices)
        self._program: PendingProgram | None = None

    def begin(self, inputs: Callable[[], tuple[Any, ...]]) -> None:
        """Say what the program's inputs are, and begin to compile it where other threads can.

        Args:
            inputs: of the step, as shapes.
        """
        if self._program is None or self._program.has_failed:
            step = self._step
            self._program = PendingProgram(self._label, lambda: step.lower(*inputs()).compile())
            if self._is_ahead:
                BACKGROUND.add([self._program])

    def __call__(self, *inputs: Any) -> Any:
        """Run the step; its call finds what was compiled."""
        if self._program is not None:
            self._program.result()
        return self._step(*inputs)


def compiles_ahead(devices: Iterable[Any]) -> bool:
    """Tell whether programs for devices are compiled while others run there.

    >>> compiles_ahead(jax.devices("cpu"))
    True
    """
    return distributed.process_count() == 1 and all(d.platform == "cpu" for d in devices)


@contextlib.contextmanager
def compiling_on_demand() -> Iterator[None]:
    """Hold what is needed later until `BACKGROUND.release`, and drop what is left at the end."""
    BACKGROUND.hold()
    try:
        yield
    finally:
        BACKGROUND.clear()


def compile_all(programs: Sequence[PendingProgram]) -> None:
    """Compile programs, several at a time, and wait for them."""
    if all(program.is_done for program in programs):
        return
    # several processes keep the same order
    at_once = 1 if distributed.process_count() > 1 else os.cpu_count()
    with waiting(), ThreadPoolExecutor(at_once) as threads:
        list(threads.map(PendingProgram.try_to_compile, programs))
    for program in programs:
        program.result()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Report how long this thread waits for a program, once where waits lie within each other."""
    if _thread_state.waits:
        yield
        return
    _thread_state.waits, start = True, time.perf_counter()
    try:
        yield
    finally:
        _thread_state.waits = False
        jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - start)


def is_accounted() -> bool:
    """Tell whether what this thread compiles now is a `PendingProgram`, or is waited for as one."""
    return _thread_state.compiles or _thread_state.waits


def abstract(tree: Any) -> Any:
    """Return arrays as shapes with their layouts, by which a program is compiled without them."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        layout = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=layout, weak_type=leaf.weak_type
        )

    return jax.tree.map(shape, tree)


# The flags of XLA's GPU compiler that a run sets, for each task.
#
# They are options of the compiled programs, so that training and decoding in one process can
# differ. Few are set: docs/performance.md says what the compiled programs show of these and of
# others.


log = logging.getLogger(__name__)


class Task(enum.StrEnum):
    """What a program is for."""

    TRAIN = enum.auto()
    DECODE = enum.auto()


FLAGS: dict[Task, dict[str, bool | str]] = {
    Task.TRAIN: {
        # starts collectives before the products that do not wait for them; XLA does so by itself on
        # Hopper and later only
        "xla_gpu_enable_latency_hiding_scheduler": True
    },
    Task.DECODE: {},
}
"""Flags of XLA's GPU compiler, without dashes. None for decoding: XLA's own choice launches all
layers of a token as one CUDA graph."""


def compiler_options(task: Task, devices: Iterable[Any]) -> dict[str, bool | str] | None:
    """Return `compiler_options` for the programs of a task; None without a GPU.

    A flag that the environment's `XLA_FLAGS` name is left to them, and one that this XLA does not
    know is left out: they differ from version to version.

    Args:
        task: what the programs are for.
        devices: that they run on, which may be those of a topology.

    >>> compiler_options(Task.TRAIN, jax.devices("cpu"))
    """
    device = min(devices, key=lambda d: (d.process_index != jax.process_index(), d.id))
    if not is_gpu(device):
        return None
    given = flags_of_environment(os.environ.get("XLA_FLAGS", ""))
    flags = {name: value for name, value in FLAGS[task].items() if name not in given}
    return {name: flags[name] for name in flags if is_known(name, flags[name], device)} or None


def is_gpu(device: Any) -> bool:
    """Tell whether XLA's GPU compiler makes a device's programs.

    >>> is_gpu(jax.devices("cpu")[0])
    False
    """
    return device.platform in ("gpu", "cuda", "rocm")


def flags_of_environment(text: str) -> set[str]:
    """Return the names of the flags in `XLA_FLAGS`, which may name a file of them instead.

    >>> sorted(flags_of_environment("--xla_a=true --xla_b"))
    ['xla_a', 'xla_b']
    """
    text = text.strip()
    if text and not text.startswith("-") and Path(text).is_file():
        text = Path(text).read_text()
    return set(re.findall(r"(?:^|\s)--(\w+)", text))


@functools.cache
def is_known(name: str, value: bool | str, device: Any) -> bool:
    """Tell whether a device's compiler knows a flag, by a program of one number."""
    place = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    same = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), np.float32, sharding=place))
    try:
        same.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        log.warning("XLA's flag %s is not set: %s", name, str(error).splitlines()[0])
        return False
    return True

"""Programs that XLA compiles before they run: at once those that are waited for, others meanwhile.

A CPU's programs are compiled in threads while others run, in the order in which they are likely to
be needed. Who needs one that no thread has begun compiles it itself. A GPU's
compiler measures kernels on the GPU, and several processes must compile in one order: there, each
pass is compiled for all its shapes before it first runs.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxrl_llm.sharding import distributed

BEGUN = "/jaxrl_llm/compilation/begun"
"""Event of `jax.monitoring`: a program with a `label` is being compiled."""
ENDED = "/jaxrl_llm/compilation/ended"
ADDED = "/jaxrl_llm/compilation/added"
"""Event: there is one more program to compile."""
WAITED = "/jaxrl_llm/compilation/waited"
"""Duration: how long a thread has waited for a program."""

_thread_state = threading.local()


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
        self._changed, self._is_claimed, self._is_listed = threading.Condition(), False, False
        self._compiled: Any = None
        self._error: Exception | None = None

    def result(self) -> Any:
        """Return it compiled; compile it here, or wait for the thread that does."""
        if not self.is_done:
            with waiting():
                while not self.is_done:  # the other thread may have been interrupted
                    self.try_to_compile()
                    self.wait()
        if self._error is not None:
            raise self._error
        return self._compiled

    @property
    def has_failed(self) -> bool:
        """Whether `result` raises."""
        return self._error is not None

    def wait(self) -> None:
        """Wait as long as a thread compiles it."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_done or not self._is_claimed)

    def announce(self) -> None:
        """Report once that it is to be compiled."""
        if not self._is_listed:
            self._is_listed = True
            jax.monitoring.record_event(ADDED, label=self.label)

    def try_to_compile(self) -> None:
        """Compile it, unless a thread has begun to."""
        with self._changed:
            if self._is_claimed:
                return
            self._is_claimed = True
        assert self._compile is not None
        is_done = False
        try:
            self.announce()
            jax.monitoring.record_event(BEGUN, label=self.label)
            with _compiling():
                self._compiled = self._compile()
            distributed.wait_for_all(f"compiled {self.label}")
            is_done = True
        except Exception as error:  # whoever needs it gets to know
            self._error, is_done = error, True
        finally:
            with self._changed:
                self._is_claimed = self.is_done = is_done
                self._changed.notify_all()
            jax.monitoring.record_event(ENDED, label=self.label)
        self._compile = None


class CompileQueue:
    """Threads that compile programs: a single one those that are needed later.

    They end with the work.
    """

    def __init__(self) -> None:
        """Begin without programs, and without threads."""
        self._changed = threading.Condition()
        self._soon: collections.deque[PendingProgram] = collections.deque()
        self._later: collections.deque[PendingProgram] = collections.deque()
        self._threads, self._is_held = 0, False

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
        """Begin with none that are needed later, until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Go on with those that are needed later."""
        for program in list(self._later):
            program.announce()
        with self._changed:
            self._is_held = False
            self._start()

    def drop(self, programs: Iterable[PendingProgram]) -> None:
        """Forget programs that no thread has begun; wait for those that are compiled now.

        Who needs one of them later compiles it.
        """
        dropped = set(programs)
        with self._changed:
            for queue in (self._soon, self._later):
                kept = [program for program in queue if program not in dropped]
                queue.clear()
                queue.extend(kept)
        for program in dropped:
            program.wait()

    def clear(self) -> None:
        """Drop all programs, and end a `hold`."""
        with self._changed:
            programs = [*self._soon, *self._later]
        self.drop(programs)
        self.release()
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is left to compile that is not held."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads)

    def _start(self) -> None:
        left = len(self._soon) + bool(self._later and not self._is_held)
        for _ in range(min(left, (os.cpu_count() or 1) - self._threads)):
            threading.Thread(target=self._work, name="compile").start()
            self._threads += 1

    def _work(self) -> None:
        try:
            while (program := self._take()) is not None:
                program.try_to_compile()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        with self._changed:
            self._threads -= 1
            self._changed.notify_all()

    def _take(self) -> PendingProgram | None:
        with self._changed:
            if threading.main_thread().is_alive():  # else the process ends
                if self._soon:
                    return self._soon.popleft()
                if self._later and not self._is_held and self._threads == 1:
                    return self._later.popleft()
            self._leave()  # with the lock still held: who adds programs then starts a thread
            return None


BACKGROUND = CompileQueue()
"""What this process compiles while it does other things."""


class StepPrograms:
    """The programs of a jitted step: one for each key that its caller tells them apart by.

    Args:
        label: of the step.
        step: jitted; a call of it finds what is compiled here.
        devices: on which it runs.
    """

    def __init__(self, label: str, step: Any, devices: Iterable[Any]) -> None:
        """Begin without any."""
        self._label, self._step, self._is_ahead = label, step, compiles_ahead(devices)
        self._programs: dict[Any, PendingProgram] = {}

    def begin(self, key: Any, inputs: Callable[[], tuple[Any, ...]]) -> PendingProgram:
        """Return a program; begin to compile it where others can wait.

        Args:
            key: of the program.
            inputs: of the step, as shapes.
        """
        if key not in self._programs or self._programs[key].has_failed:
            step = self._step
            self._programs[key] = PendingProgram(
                self._label, lambda: step.lower(*inputs()).compile()
            )
            if self._is_ahead:
                BACKGROUND.add([self._programs[key]])
        return self._programs[key]


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
    if getattr(_thread_state, "waits", False):
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
    return getattr(_thread_state, "compiles", False) or getattr(_thread_state, "waits", False)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    _thread_state.compiles = True
    try:
        yield
    finally:
        _thread_state.compiles = False


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

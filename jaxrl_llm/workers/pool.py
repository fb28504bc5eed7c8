"""Worker processes that answer tasks: started when there is work, replaced when they are lost.

The caller decides which worker gets which tasks, and what becomes of those of a worker that is
lost. One thread runs a pool; only `close` may be called from another.
"""

import functools
import logging
import selectors
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.workers import process
from jaxrl_llm.workers.process import (
    BAD_OUTPUT,
    LAUNCH_HERE,
    LaunchOptions,
    WorkerProcess,
    WorkerProgram,
    stop_all,
)
from jaxrl_llm.workers.protocol import decode_load_error

log = logging.getLogger(__name__)


class Answered(NamedTuple):
    """What a worker has answered.

    Attributes:
        worker: that did.
        number: of the task.
        value: that `decode` has read.
    """

    worker: WorkerProcess
    number: int
    value: Any


class Lost(NamedTuple):
    """A worker that the pool has ended.

    Attributes:
        worker: that is lost.
        pending: numbers of the tasks that it has not answered, in order.
        kind: `timeout`, `died`, or `invalid` where it wrote something else than answers.
        message: says how it was lost.
    """

    worker: WorkerProcess
    pending: list[int]
    kind: str
    message: str


class WorkerPool(ABC):
    """Worker processes with a time limit for each task; a subclass says what tasks are.

    Args:
        program: what workers run.
        spec: what they are told first, as a pickle.
        timeout_s: seconds that one task may take.
        launch: how they start.
        name: of the pool, for the log.
        loads: what workers load, for messages.
    """

    def __init__(
        self,
        program: WorkerProgram,
        spec: Any,
        timeout_s: float,
        launch: LaunchOptions = LAUNCH_HERE,
        *,
        name: str,
        loads: str,
    ) -> None:
        self._new_worker = functools.partial(WorkerProcess, program, spec, timeout_s, launch)
        self._name, self._loads = name, loads
        self.workers: list[WorkerProcess] = []
        self.closed = threading.Event()
        self.stop = weakref.finalize(self, stop_all, self.workers)  # at exit, too

    @abstractmethod
    def decode(self, line: bytes, pending: Sequence[int]) -> list[tuple[int, Any]] | None:
        """Return what a line answers to pending tasks, if anything; None where it is no answer."""

    @abstractmethod
    def error(self, message: str) -> Exception:
        """Return what is raised where no worker can start."""

    def close(self) -> None:
        """Kill the workers, which wakes `poll`; `stop` waits until they have ended."""
        self.closed.set()
        for worker in list(self.workers):
            worker.kill()

    def dismiss(self, worker: WorkerProcess) -> None:
        """End a worker."""
        self.workers.remove(worker)
        worker.stop()

    def start_workers(self, count: int) -> None:
        """Start workers until there are so many, in place of idle ones that ended or wrote, too."""
        for worker in [w for w in self.workers if w.is_idle and w.has_activity()]:
            worker.channel.receive()
            reason = worker.end_reason() if worker.has_ended() else BAD_OUTPUT
            message = "%s: a process that had nothing to do %s; it is replaced"
            log.warning(message, self._name, reason)
            self.dismiss(worker)
        while len(self.workers) < count and not self.closed.is_set():
            self.workers.append(self._new_worker())

    def poll(
        self, wait_s: float | None = None, woken: socket.socket | None = None
    ) -> Iterator[Answered | Lost]:
        """Wait until something happens, and yield what; nothing once the pool is closed.

        Who takes these does so at once: time limits of other workers run meanwhile.

        Args:
            wait_s: seconds to wait at most; None waits for what happens.
            woken: wakes this when it can be read.

        Raises:
            Exception: a worker can't start, as `error` has it.
        """
        busy = [worker for worker in self.workers if not worker.is_idle]
        now = time.monotonic()
        waits = [max(worker.deadline - now, 0.0) for worker in busy]
        waits += [] if wait_s is None else [wait_s]
        if self.closed.is_set():
            return
        with selectors.DefaultSelector() as selector:
            if woken is not None:
                selector.register(woken, selectors.EVENT_READ)
            for worker in busy:
                worker.watch(selector)
            active = {key.data for key, _ in selector.select(min(waits, default=None))}
        for worker in busy:
            if self.closed.is_set():
                return
            if worker in active:
                yield from self._receive(worker)
            is_busy = worker in self.workers and not worker.is_idle
            if is_busy and time.monotonic() > worker.deadline:
                fault = f"no answer within {worker.timeout_s:g} s"
                yield self._lose(worker, "timeout", fault)

    def _receive(self, worker: WorkerProcess) -> Iterator[Answered | Lost]:
        """Take what a worker has written; it is lost where that is wrong, or when it has ended."""
        worker.channel.flush()
        lines = worker.channel.receive()
        for line in lines:
            if not worker.ready:
                self._check_loaded(worker, line)
                continue
            answers = self.decode(line, worker.pending)
            if answers is None:
                yield self._lose(worker, "invalid", BAD_OUTPUT)
                return
            worker.restart_deadline()
            for number, value in answers:
                worker.pending.remove(number)
                yield Answered(worker, number, value)
        if worker.channel.is_overfull:
            yield self._lose(worker, "invalid", BAD_OUTPUT)
        elif not lines and worker.has_ended():
            yield self._lose(worker, "died", worker.end_reason())

    def _check_loaded(self, worker: WorkerProcess, line: bytes) -> None:
        try:
            load_error = decode_load_error(line)
        except ValueError:
            self._lose(worker, "invalid", BAD_OUTPUT)
        else:
            if load_error is not None:
                self.dismiss(worker)
                raise self.error(f"a worker can't load {self._loads}: {load_error}")
            worker.ready = True

    def _lose(self, worker: WorkerProcess, kind: str, fault: str) -> Lost:
        """End a worker for what it did, or did not do in time."""
        self.dismiss(worker)
        if not worker.ready:
            raise self.error(
                f"no worker came up within {process.START_TIMEOUT_S:g} s"
                if kind == "timeout"
                else f"a worker {fault} while it started; see its messages on stderr"
            )
        message = fault if kind == "timeout" else f"its process {fault}"
        return Lost(worker, list(worker.pending), kind, message)

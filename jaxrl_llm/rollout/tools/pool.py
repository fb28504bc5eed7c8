"""The workers of tools and environments, and where the state of each episode lives.

One thread owns all workers. A worker does one task at a time. What an episode keeps lives in one
worker; where that worker is lost, the next task of the episode builds it up again in another one,
by the requests of the episode that were answered.
"""

import itertools
import logging
import pickle
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

from jaxrl_llm.config.errors import described_error
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.tool import ToolError, ToolResult
from jaxrl_llm.rollout.tools.worker import (
    CLEAN_UP,
    Toolbox,
    ToolboxSpec,
    ToolRequest,
    decode_tool_result,
    error_text,
)
from jaxrl_llm.workers.limits import Limits
from jaxrl_llm.workers.pool import Answered, WorkerPool
from jaxrl_llm.workers.process import LaunchOptions, WorkerProcess, WorkerProgram, stop_all

log = logging.getLogger(__name__)

PROGRAM = WorkerProgram("jaxrl_llm.rollout.tools.worker:run_tools", keys="rollout.tool_process.")
CLOSED = "tools: the pool is closed"

Report = Callable[[str, str, str], None]
"""Takes note of an error: of which tool, what kind, and where it was raised."""


class Placement:
    """How much of an episode's state is in its worker. Only the thread of the workers changes it.

    Args:
        episode: its number, one for each placement.
        row: of data.
        seed: of the episode.
    """

    def __init__(self, episode: int, row: EpisodeRow, seed: int) -> None:
        self.opening = ToolRequest("open", episode, row=row, seed=seed)
        self.reset()

    def reset(self) -> None:
        """Build the state up again at the next request, in whatever worker."""
        self.is_open = False
        self.applied = 0  # of the requests that make the state


class ToolTask:
    """A request to workers.

    Args:
        request: to be answered.
        placement: of an episode whose state it needs; None needs none.
        earlier: the episode's requests that made its state.
        is_fresh: whether the state must be made anew.

    Attributes:
        future: gets the result, or `ToolError`.
    """

    def __init__(
        self,
        request: ToolRequest,
        placement: Placement | None = None,
        earlier: Sequence[ToolRequest] = (),
        *,
        is_fresh: bool = False,
    ) -> None:
        self.request, self.placement, self.earlier = request, placement, earlier
        self.is_fresh = is_fresh
        self.future = Future[ToolResult]()
        self._requests: list[ToolRequest] = []
        self._results: list[ToolResult] = []

    def begin(self) -> list[ToolRequest]:
        """Return what a worker must be asked: to catch up first, where it is behind."""
        self._began = time.monotonic()
        place, is_close = self.placement, self.request.kind == "close"
        if place is not None:
            if is_close and not place.is_open:
                return []
            if self.is_fresh:
                place.reset()
            self._requests += [] if place.is_open else [place.opening]
            self._requests += [] if is_close else self.earlier[place.applied :]
        self._requests.append(self.request)
        return self._requests

    def add(self, result: ToolResult) -> bool:
        """Take the result of the next request; return whether there are all."""
        self._results.append(result)
        return len(self._results) == len(self._requests)

    def lose(self, failure: str, message: str) -> None:
        """Take note that its worker is lost: the request it was at is to blame."""
        blamed = self._requests[len(self._results)]
        if blamed.kind == "close":
            lost = ToolResult(error=CLEAN_UP, trace=message)
        elif blamed is not self.request:
            text = error_text(f"its state could not be built up again: {message}")
            lost = ToolResult(text=text, failure="retry", error=failure, trace=message)
        else:
            text = error_text(message)
            lost = ToolResult(text=text, failure=failure, error=failure, trace=message)
        while not self.add(lost):
            pass

    def finish(self, report: Report) -> None:
        """Give the result to who waits for it, and report what went wrong."""
        for request, result in zip(self._requests, self._results, strict=True):
            if result.error and (request is self.request or result.error == CLEAN_UP):
                report(request.name or request.kind, result.error, result.trace)
        *catching_up, result = self._results or [ToolResult()]
        failed = [r for r in catching_up if r.failure in ("retry", "broken")]
        if failed:
            result = failed[0]._replace(failure="retry")
        place = self.placement
        if place is not None and (failed or self.request.kind == "close"):
            place.reset()
        elif place is not None:
            place.is_open = True
            place.applied = len(self.earlier) + (result.failure in (None, "failed"))
        seconds = time.monotonic() - self._began
        self.future.set_result(
            result._replace(name=self.request.name, seconds=seconds, error="", trace="")
        )


class InProcess:
    """Does tasks in this process, at once and without a time limit."""

    def __init__(self, spec: ToolboxSpec, report: Report) -> None:
        self._toolbox, self._report, self._closed = Toolbox(spec), report, False

    def submit(self, task: ToolTask) -> None:
        """Answer a request."""
        if self._closed:
            raise ToolError(CLOSED)
        for request in pickle.loads(pickle.dumps(task.begin())):  # tools may change what they get
            task.add(self._toolbox.answer(request))
        task.finish(self._report)

    def close(self) -> None:
        """Clean up what is open."""
        self._closed = True
        for error in self._toolbox.close():
            self._report("close", CLEAN_UP, described_error(error))


class ToolWorkers(WorkerPool):
    """Worker processes of tools, and the thread that owns them.

    Args:
        spec: what each worker loads.
        size: the number of processes.
        limits: of each.
        report: takes note of errors, in the pool's thread.
    """

    def __init__(self, spec: ToolboxSpec, size: int, limits: Limits, report: Report) -> None:
        launch = LaunchOptions(limits=limits)
        super().__init__(PROGRAM, spec, spec.seconds, launch, name="tools", loads="them")
        self._size, self._report = size, report
        self._running: dict[WorkerProcess, ToolTask] = {}
        self._homes: dict[Placement, WorkerProcess] = {}
        self._waiting = deque[ToolTask]()
        self._inbox = SimpleQueue[ToolTask]()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tools", daemon=True)

    def error(self, message: str) -> ToolError:
        """Return what is raised where no worker can start."""
        return ToolError(f"tools: {message}")

    def decode(self, line: bytes, pending: Sequence[int]) -> list[tuple[int, ToolResult]] | None:
        """Return the result of the first pending request; None where the line is another."""
        result = decode_tool_result(line, pending[0]) if pending else None
        return result and [(pending[0], result)]

    def submit(self, task: ToolTask) -> None:
        """Have a request answered, from any thread.

        Raises:
            ToolError: the pool is closed.
        """
        with self._lock:
            if self.closed.is_set():
                raise ToolError(CLOSED)
            self._inbox.put(task)
            if not self._thread.ident:
                self._thread.start()
            self._wake_up()

    def close(self) -> None:
        """End all workers at once, whatever they do; what waits for results gets `ToolError`."""
        with self._lock:
            super().close()
            self._wake_up()
        if self._thread.ident and threading.current_thread() is not self._thread:
            self._thread.join()
        self._woken.close()
        self._wake.close()

    def _wake_up(self) -> None:
        with suppress(OSError):  # it is full: the thread will wake up
            self._wake.send(b"x")

    def _run(self) -> None:
        while not self.closed.is_set():
            try:
                self._turn()
            except ToolError as error:
                self._abort(error)
            except Exception as error:
                log.exception("tools: the workers are ended")
                self._abort(self.error(described_error(error)))
        self._abort(ToolError(CLOSED))

    def _abort(self, error: ToolError) -> None:
        """End all workers, and tell all who wait why."""
        self._take_inbox()
        waiting = [task for task in self._waiting if task.future.set_running_or_notify_cancel()]
        failed = [*self._running.values(), *waiting]
        stop_all(self.workers)
        self._running.clear()
        self._waiting.clear()
        self._homes.clear()
        for task in failed:
            task.future.set_exception(error)

    def _turn(self) -> None:
        self._take_inbox()
        self.start_workers(min(self._size, len(self._running) + len(self._waiting)))
        for _ in range(len(self._waiting)):
            task = self._waiting.popleft()
            if not self._start(task):
                self._waiting.append(task)
        for event in self.poll(woken=self._woken):
            task = self._running.get(event.worker)
            if task is None:  # it had nothing to do
                continue
            if isinstance(event, Answered):
                is_done = task.add(event.value)
            else:
                task.lose("timeout" if event.kind == "timeout" else "died", event.message)
                is_done = True
            if is_done:
                del self._running[event.worker]
                self._finish(task)
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _take_inbox(self) -> None:
        with suppress(Empty):
            while True:
                self._waiting.append(self._inbox.get_nowait())

    def _start(self, task: ToolTask) -> bool:
        """Give a task to its worker; return whether it need not wait any more."""
        if task.future.cancelled():
            return True
        place = task.placement
        if place is None:
            worker = next((w for w in self.workers if w.is_idle), None)
        else:
            worker = self._homes.get(place)
            if worker not in self.workers:
                place.reset()
            if task.request.kind == "close" and not place.is_open:
                task.begin()
                self._finish(task)
                return True
            if worker not in self.workers:
                episodes = Counter(self._homes.values())
                worker = min(self.workers, key=lambda w: episodes[w], default=None)
            if worker is not None:
                self._homes[place] = worker
        if worker is None or not worker.is_idle:
            return False
        if task.future.set_running_or_notify_cancel():
            self._running[worker] = task
            worker.submit([(next(self._numbers), request) for request in task.begin()])
        return True

    def _finish(self, task: ToolTask) -> None:
        if task.placement is not None and task.request.kind == "close":
            self._homes.pop(task.placement, None)
        task.finish(self._report)

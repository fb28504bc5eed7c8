"""The workers of tools and environments, and where the state of each episode lives.

One thread owns all workers: it starts them, gives them requests, takes their answers, and ends
those that take too long. A worker does one job at a time. What an episode keeps lives in one
worker; where that worker is lost, the next job of the episode builds it up again in another one,
by the requests of the episode that were answered.
"""

import itertools
import logging
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from jaxrl_llm.config.errors import described_error
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.tool import ToolError
from jaxrl_llm.rollout.tools.worker import (
    CLEAN_UP,
    ToolAnswer,
    Toolbox,
    ToolboxSpec,
    ToolRequest,
    decode_tool_answer,
    error_text,
)
from jaxrl_llm.workers import process
from jaxrl_llm.workers.limits import Limits
from jaxrl_llm.workers.process import (
    BAD_OUTPUT,
    LaunchOptions,
    WorkerProcess,
    WorkerProgram,
    stop_all,
)
from jaxrl_llm.workers.protocol import decode_load_error

log = logging.getLogger(__name__)

PROGRAM = WorkerProgram("jaxrl_llm.rollout.tools.worker:run_tools", keys="rollout.tool_process.")
CLOSED = "tools: the pool is closed"

Report = Callable[[str, str, str], None]
"""Takes note of an error: of which tool, what kind, and where it was raised."""


class Seat:
    """Where the state of an episode lives. Only the thread of a crew changes it.

    Args:
        episode: its number, one for each seat.
        row: of data.
        seed: of the episode.
    """

    def __init__(self, episode: int, row: EpisodeRow, seed: int) -> None:
        self.episode = episode
        self._opening = ToolRequest("open", episode, row=row, seed=seed)
        self.home: WorkerProcess | None = None
        self.is_open = False
        self._applied = 0

    def forget(self) -> None:
        """Build the state up again at the next request, in whatever worker."""
        self.is_open, self._applied = False, 0

    def requests(self, job: "Job") -> list[ToolRequest]:
        """Return what a worker must be asked for a job: to catch up first, where it is behind."""
        if job.is_fresh:
            self.forget()
        opening = [] if self.is_open else [self._opening]
        earlier = [] if job.request.kind == "close" else job.earlier[self._applied :]
        return [*opening, *earlier, job.request]

    def settle(self, job: "Job", answers: Sequence[ToolAnswer]) -> ToolAnswer:
        """Take note of what a worker has done; return the answer of the job."""
        *catching_up, answer = answers
        failed = [a for a in catching_up if a.failure in ("retry", "broken")]
        if failed or job.request.kind == "close":
            self.forget()
            return failed[0]._replace(failure="retry") if failed else answer
        done = answer.failure in (None, "failed")
        self.is_open, self._applied = True, len(job.earlier) + done
        return answer


class Job(NamedTuple):
    """A request, and what it needs.

    Attributes:
        request: to be answered.
        future: gets the answer, or `ToolError`.
        seat: of an episode whose state it needs; None needs none.
        earlier: the episode's requests that made its state.
        is_fresh: whether the state must be made anew.
    """

    request: ToolRequest
    future: Future[ToolAnswer]
    seat: Seat | None = None
    earlier: Sequence[ToolRequest] = ()
    is_fresh: bool = False

    def requests(self) -> list[ToolRequest]:
        """Return what a worker is asked."""
        return [self.request] if self.seat is None else self.seat.requests(self)

    def finish(
        self,
        requests: Sequence[ToolRequest],
        answers: Sequence[ToolAnswer],
        report: Report,
        seconds: float,
    ) -> None:
        """Give the answer to who waits for it, and report what went wrong."""
        for request, answer in zip(requests, answers, strict=True):
            if answer.error and (request is requests[-1] or answer.error == CLEAN_UP):
                report(request.name or request.kind, answer.error, answer.trace)
        answer = self.seat.settle(self, answers) if self.seat is not None else answers[-1]
        self.future.set_result(answer._replace(seconds=seconds))


class InProcess:
    """Answers requests in this process, at once and without a time limit."""

    def __init__(self, spec: ToolboxSpec, report: Report) -> None:
        self._toolbox, self._report, self._closed = Toolbox(spec), report, False

    def submit(self, job: Job) -> None:
        """Answer a request."""
        if self._closed:
            raise ToolError(CLOSED)
        began = time.monotonic()
        requests = job.requests()
        copies = pickle.loads(pickle.dumps(requests))  # tools may change what they are given
        answers = [self._toolbox.answer(request) for request in copies]
        job.finish(requests, answers, self._report, time.monotonic() - began)

    def close(self) -> None:
        """Clean up what is open."""
        self._closed = True
        for error in self._toolbox.close():
            self._report("close", CLEAN_UP, described_error(error))


class _Running:
    """What a worker does now."""

    def __init__(self, job: Job, requests: list[ToolRequest]) -> None:
        self.job, self.requests, self.began = job, requests, time.monotonic()
        self.answers: list[ToolAnswer] = []

    def lose(self, failure: str, message: str) -> list[ToolAnswer]:
        """Return the answers of a worker that is lost: the request it was at is to blame."""
        request = self.requests[len(self.answers)]
        if request.kind == "close":
            lost = ToolAnswer(error=CLEAN_UP, trace=message)
        elif request is not self.job.request:
            text = error_text(f"its state could not be built up again: {message}")
            lost = ToolAnswer(text, failure="retry", error=failure, trace=message)
        else:
            lost = ToolAnswer(error_text(message), failure=failure, error=failure, trace=message)
        rest = len(self.requests) - len(self.answers)
        return [*self.answers, *[lost] * rest]


class Crew:
    """Worker processes of tools, started when there is work, replaced when they are lost.

    Args:
        spec: what each worker loads.
        size: the number of processes.
        limits: of each.
        report: takes note of errors, in the crew's thread.
    """

    def __init__(self, spec: ToolboxSpec, size: int, limits: Limits, report: Report) -> None:
        self._spec, self._size, self._report = spec, size, report
        self._launch = LaunchOptions(limits=limits)
        self.workers: list[WorkerProcess] = []
        self._running: dict[WorkerProcess, _Running] = {}
        self._seats: dict[WorkerProcess, set[Seat]] = {}
        self._waiting = deque[Job]()
        self._inbox = SimpleQueue[Job]()
        self._numbers = itertools.count(1)
        self._lock, self._closed = threading.Lock(), False
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tools", daemon=True)

    def submit(self, job: Job) -> None:
        """Have a request answered, from any thread.

        Raises:
            ToolError: the crew is closed.
        """
        with self._lock:
            if self._closed:
                raise ToolError(CLOSED)
            self._inbox.put(job)
            if not self._thread.ident:
                self._thread.start()
            self._wake_up()

    def close(self) -> None:
        """End all workers at once, whatever they do; what waits for answers gets `ToolError`."""
        with self._lock:
            self._closed = True
            self._wake_up()
        for worker in list(self.workers):
            worker.kill()
        if self._thread.ident and threading.current_thread() is not self._thread:
            self._thread.join()
        self._woken.close()
        self._wake.close()

    def _wake_up(self) -> None:
        with suppress(OSError):  # it is full: the thread will wake up
            self._wake.send(b"x")

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except ToolError as error:
                self._abort(error)
            except Exception as error:
                log.exception("tools: the workers are ended")
                self._abort(ToolError(f"tools: {described_error(error)}"))
        self._abort(ToolError(CLOSED))

    def _abort(self, error: ToolError) -> None:
        """End all workers, and tell all who wait why."""
        self._take_inbox()
        jobs = [running.job for running in self._running.values()]
        waiting = [job for job in self._waiting if job.future.set_running_or_notify_cancel()]
        for worker in self.workers:
            self._leave(worker)
        stop_all(self.workers)
        self._running.clear()
        self._waiting.clear()
        for job in jobs + waiting:
            job.future.set_exception(error)

    def _turn(self) -> None:
        self._take_inbox()
        for worker in [w for w in self.workers if self._is_idle(w) and w.has_activity()]:
            worker.channel.receive()
            reason = worker.end_reason() if worker.has_ended() else BAD_OUTPUT
            log.warning("tools: a process that had nothing to do %s; it is replaced", reason)
            self._dismiss(worker)
        wanted = min(self._size, len(self._running) + len(self._waiting))
        while len(self.workers) < wanted and not self._closed:
            timeout_s = self._spec.seconds
            self.workers.append(WorkerProcess(PROGRAM, self._spec, timeout_s, self._launch))
        for _ in range(len(self._waiting)):
            job = self._waiting.popleft()
            if not self._start(job):
                self._waiting.append(job)
        self._wait()

    def _take_inbox(self) -> None:
        with suppress(Empty):
            while True:
                self._waiting.append(self._inbox.get_nowait())

    def _is_idle(self, worker: WorkerProcess) -> bool:
        return worker.ready and worker not in self._running

    def _start(self, job: Job) -> bool:
        """Give a job to its worker; return whether it need not wait any more."""
        if job.future.cancelled():
            return True
        seat = job.seat
        if seat is None:
            worker = next((w for w in self.workers if self._is_idle(w)), None)
        elif job.request.kind == "close" and not seat.is_open:
            if seat.home is not None:
                self._seats[seat.home].discard(seat)
            job.finish([job.request], [ToolAnswer()], self._report, 0.0)
            return True
        else:
            worker = seat.home or min(
                self.workers, key=lambda w: len(self._seats.get(w, ())), default=None
            )
            if worker is not None:
                self._seats.setdefault(worker, set()).add(seat)
                seat.home = worker
        if worker is None or not self._is_idle(worker):
            return False
        if job.future.set_running_or_notify_cancel():
            requests = job.requests()
            self._running[worker] = _Running(job, requests)
            worker.submit([(next(self._numbers), request) for request in requests])
        return True

    def _wait(self) -> None:
        """Wait until something happens, and take note of it."""
        watched = [w for w in self.workers if not self._is_idle(w)]
        now = time.monotonic()
        rest = min((max(w.deadline - now, 0.0) for w in watched), default=None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for worker in watched:
                worker.watch(selector)
            active = {key.data for key, _ in selector.select(rest)}
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        if self._closed:
            return
        for worker in watched:
            if worker in active:
                self._receive(worker)
            if worker in self.workers and not self._is_idle(worker):
                self._check_time(worker)

    def _receive(self, worker: WorkerProcess) -> None:
        """Take what a worker has written; it is lost where that is wrong, or when it has ended."""
        worker.channel.flush()
        lines = worker.channel.receive()
        for line in lines:
            if not worker.ready:
                self._take_load_error(worker, line)
                continue
            answer = decode_tool_answer(line, worker.pending[0]) if worker.pending else None
            if answer is None:
                self._lose(worker, "died", BAD_OUTPUT)
                return
            worker.pending.popleft()
            worker.restart_deadline()
            running = self._running[worker]
            running.answers.append(answer)
            if not worker.pending:
                del self._running[worker]
                self._finish(running, running.answers)
        if worker.channel.is_overfull:
            self._lose(worker, "died", BAD_OUTPUT)
        elif not lines and worker.has_ended():
            self._lose(worker, "died", worker.end_reason())

    def _take_load_error(self, worker: WorkerProcess, line: bytes) -> None:
        try:
            load_error = decode_load_error(line)
        except ValueError:
            self._lose(worker, "died", BAD_OUTPUT)
            return
        if load_error is not None:
            raise ToolError(f"tools: a worker can't load them: {load_error}")
        worker.ready = True

    def _check_time(self, worker: WorkerProcess) -> None:
        if time.monotonic() <= worker.deadline:
            return
        if not worker.ready:
            raise ToolError(f"tools: no worker came up within {process.START_TIMEOUT_S:g} s")
        self._lose(worker, "timeout", f"no answer within {self._spec.seconds:g} s")

    def _lose(self, worker: WorkerProcess, failure: str, fault: str) -> None:
        """Lose a worker for what it did: the request that it was at is to blame."""
        if not worker.ready:
            raise ToolError(f"tools: a worker {fault} while it started; see its messages on stderr")
        running = self._running.pop(worker, None)
        self._dismiss(worker)
        if running is not None:
            message = fault if failure == "timeout" else f"its process {fault}"
            self._finish(running, running.lose(failure, message))

    def _finish(self, running: _Running, answers: list[ToolAnswer]) -> None:
        job, seat = running.job, running.job.seat
        if seat is not None and seat.home is not None and job.request.kind == "close":
            self._seats[seat.home].discard(seat)
        job.finish(running.requests, answers, self._report, time.monotonic() - running.began)
        if seat is not None and seat.home is None:
            seat.forget()  # the worker was lost

    def _leave(self, worker: WorkerProcess) -> None:
        """Have the episodes that live in a worker forget it."""
        for seat in self._seats.pop(worker, set()):
            seat.home = None
            seat.forget()

    def _dismiss(self, worker: WorkerProcess) -> None:
        self._leave(worker)
        self.workers.remove(worker)
        worker.stop()

"""Run a reward function in worker processes, so that it can raise, hang or crash and do no harm.

The workers are plain subprocesses, each behind its own pipe and below its own supervisor
(`workers/supervisor.py`). Unlike `multiprocessing`'s they don't import the main program again (and
jax with it), share no lock that a crash could leave held, send no pickle, and any way of dying
shows as a closed pipe.
"""

import functools
import logging
import math
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rewards.runner import (
    OnError,
    Outcomes,
    RewardError,
    RewardRunner,
    check_open,
    chunk_size,
)
from jaxrl_llm.rewards.worker import (
    BEAT,
    BEAT_S,
    DEFAULT_CALLS,
    FAILURES,
    AsyncCalls,
    Outcome,
    RewardItem,
    RewardJob,
    call_function,
    decode_numbered,
    failed_outcome,
    outcomes_in_thread,
)
from jaxrl_llm.workers import process
from jaxrl_llm.workers.limits import DEFAULT_LIMITS, Limits, check_limits
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

MAX_WAIT_S = 0.5  # in seconds: when Ray interrupts its worker, that ends no system call
SILENCE_S = 3 * BEAT_S  # in which a worker that calls an async function may be late
PROGRAM = WorkerProgram("jaxrl_llm.rewards.worker:run_worker", keys="reward.")


class WorkerPool:
    """Worker processes of a reward function, started when there is work, replaced when they die.

    Args:
        job: the reward function, and the seconds that one call may take.
        size: the number of processes.
        closed: set by another thread to end `outcomes`, before it calls `kill`.
        launch: how workers start.
    """

    def __init__(
        self,
        job: RewardJob,
        size: int,
        *,
        closed: threading.Event,
        launch: LaunchOptions = LAUNCH_HERE,
    ) -> None:
        self._job, self._size = job, size
        self._closed, self._launch = closed, launch
        self._patience_s = job.timeout_s + (SILENCE_S if job.calls else 0)
        self.workers: list[WorkerProcess] = []
        self.stop = weakref.finalize(self, stop_all, self.workers)  # at exit, too

    def kill(self) -> None:
        """Kill the workers, which wakes `outcomes`; only that takes a worker out of the pool."""
        for worker in list(self.workers):
            worker.kill()

    def outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        """Yield the number and the outcome of every item, as they come in.

        Raises:
            RewardError: a worker can't start; `closed` is set.
        """
        waiting = deque(range(len(items)))
        left = len(items)
        try:
            while left:
                self._replace_idle()
                while len(self.workers) < min(self._size, left):
                    self.workers.append(
                        WorkerProcess(PROGRAM, self._job, self._patience_s, self._launch)
                    )
                self._hand_out(items, waiting)
                for numbered in self._wait(waiting):
                    left -= 1
                    yield numbered
        finally:  # after an error some are still busy with items that nobody waits for
            for worker in [w for w in self.workers if w.pending]:
                self._stop_worker(worker)

    def _hand_out(self, items: Sequence[RewardItem], waiting: deque[int]) -> None:
        """Give waiting items to workers that have nothing to do."""
        for worker in self.workers:
            if worker.ready and not worker.pending and waiting:
                size = min(chunk_size(len(waiting), self._size), len(waiting))
                numbers = [waiting.popleft() for _ in range(size)]
                worker.submit([(number, items[number]) for number in numbers])

    def _replace_idle(self) -> None:
        """Dismiss workers that ended, or wrote something, while they had nothing to do."""
        for worker in [w for w in self.workers if w.ready and not w.pending and w.has_activity()]:
            message = "reward %r: a process that had nothing to do %s; it is replaced"
            worker.channel.receive()
            log.warning(
                message,
                self._job.spec.fn,
                worker.end_reason() if worker.has_ended() else BAD_OUTPUT,
            )
            self._stop_worker(worker)

    def _wait(self, waiting: deque[int]) -> list[tuple[int, Outcome]]:
        """Wait until something happens; return the outcomes that are in."""
        watched = [w for w in self.workers if w.pending or not w.ready]
        rest = min(w.deadline for w in watched) - time.monotonic()
        check_open(self._closed)
        with selectors.DefaultSelector() as selector:
            for worker in watched:
                worker.watch(selector)
            events = selector.select(min(max(rest, 0.0), MAX_WAIT_S))
        check_open(self._closed)
        active = {key.data for key, _ in events}
        outcomes = []
        for worker in watched:
            if worker in active:
                outcomes += self._receive(worker, waiting)
            if worker in self.workers and time.monotonic() > worker.deadline:
                outcomes += self._time_out(worker, waiting)
        return outcomes

    def _receive(self, worker: WorkerProcess, waiting: deque[int]) -> list[tuple[int, Outcome]]:
        """Take what a worker has written; it is lost where that is wrong, or when it has ended."""
        outcomes = []
        worker.channel.flush()
        lines = worker.channel.receive()
        for line in lines:
            if not worker.ready:
                self._check_loaded(worker, waiting, line)
                continue
            read = self._read(worker, line)
            if read is None:
                return outcomes + self._fail(worker, waiting, "invalid", BAD_OUTPUT)
            for numbered in read:
                worker.pending.remove(numbered[0])
                outcomes.append(numbered)
            worker.restart_deadline()
        if worker.channel.is_overfull:
            outcomes += self._fail(worker, waiting, "invalid", BAD_OUTPUT)
        elif not lines and worker.has_ended():
            outcomes += self._fail(worker, waiting, "died", worker.end_reason())
        return outcomes

    def _read(self, worker: WorkerProcess, line: bytes) -> list[tuple[int, Outcome]] | None:
        """Return what a line says of an item, if anything; None where it should not be there."""
        numbered = decode_numbered(line, [*worker.pending][:1])
        return numbered and [numbered]

    def _check_loaded(self, worker: WorkerProcess, waiting: deque[int], line: bytes) -> None:
        try:
            load_error = decode_load_error(line)
        except ValueError:
            self._fail(worker, waiting, "invalid", BAD_OUTPUT)
        else:
            if load_error is not None:
                self._stop_worker(worker)
                raise RewardError(
                    f"reward: a worker can't load {self._job.spec.fn!r}: {load_error}"
                )
            worker.ready = True

    def _fail(
        self, worker: WorkerProcess, waiting: deque[int], kind: str, fault: str
    ) -> list[tuple[int, Outcome]]:
        """Lose a worker for what it did."""
        if not worker.ready:
            self._stop_worker(worker)
            raise RewardError(
                f"reward: a worker {fault} while it started; see its messages on stderr"
            )
        return self._give_up(worker, waiting, failed_outcome(kind, f"its process {fault}"))

    def _time_out(self, worker: WorkerProcess, waiting: deque[int]) -> list[tuple[int, Outcome]]:
        if not worker.ready:
            self._stop_worker(worker)
            raise RewardError(f"reward: no worker came up within {process.START_TIMEOUT_S:g} s")
        if not worker.pending:
            return []
        return self._give_up(worker, waiting, failed_outcome("timeout", self._overdue))

    @property
    def _overdue(self) -> str:
        return f"no answer within {self._job.timeout_s:g} s"

    def _give_up(
        self, worker: WorkerProcess, waiting: deque[int], outcome: Outcome
    ) -> list[tuple[int, Outcome]]:
        """Give up on a worker: its first item is to blame, the others go back into the queue."""
        blamed = [(worker.pending.popleft(), outcome)] if worker.pending else []
        waiting.extendleft(reversed(worker.pending))
        self._stop_worker(worker)
        return blamed

    def _stop_worker(self, worker: WorkerProcess) -> None:
        self.workers.remove(worker)
        worker.stop()


class AsyncWorkerPool(WorkerPool):
    """Worker processes of an `async def`, each with several calls at once.

    When one of them ends, or its event loop stands still, nobody knows which of its calls is to
    blame. Those are all tried again, each alone in a worker.

    Args:
        job: the reward function, and how it is called.
        size: the number of processes.
        closed: set by another thread to end `outcomes`, before it calls `kill`.
        launch: how workers start.
    """

    def __init__(
        self, job: RewardJob, size: int, *, closed: threading.Event, launch: LaunchOptions
    ) -> None:
        super().__init__(job, size, closed=closed, launch=launch)
        self._suspects = set[int]()

    def outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        """Yield the number and the outcome of every item, as they come in.

        Raises:
            RewardError: a worker can't start; `closed` is set.
        """
        self._suspects.clear()
        yield from super().outcomes(items)

    def _hand_out(self, items: Sequence[RewardItem], waiting: deque[int]) -> None:
        """Give waiting items to the workers that have the fewest, suspects to those without any."""
        assert self._job.calls is not None, "it is an async function"
        room = self._job.calls.concurrency - sum(len(worker.pending) for worker in self.workers)
        ready = [w for w in self.workers if w.ready and self._suspects.isdisjoint(w.pending)]
        while waiting and room > 0 and ready:
            worker = min(ready, key=lambda w: len(w.pending))
            if waiting[0] in self._suspects:
                if worker.pending:
                    return
                ready.remove(worker)
            number = waiting.popleft()
            worker.submit([(number, items[number])])
            room -= 1

    def _read(self, worker: WorkerProcess, line: bytes) -> list[tuple[int, Outcome]] | None:
        if line == BEAT.strip():
            return []
        numbered = decode_numbered(line, worker.pending, (*FAILURES, "timeout"))
        return numbered and [numbered]

    def _give_up(
        self, worker: WorkerProcess, waiting: deque[int], outcome: Outcome
    ) -> list[tuple[int, Outcome]]:
        if len(worker.pending) > 1:
            waiting.extendleft(reversed(worker.pending))
            self._suspects |= set(worker.pending)
            self._stop_worker(worker)
            return []
        return super()._give_up(worker, waiting, outcome)

    @property
    def _overdue(self) -> str:
        return (
            f"no sign of life within {self._patience_s:g} s: it keeps its event loop from going on "
            "(expected no call that blocks)"
        )


def make_worker_pool(
    job: RewardJob, size: int, *, closed: threading.Event, launch: LaunchOptions
) -> WorkerPool:
    """Return the worker processes for a reward function, which may be an `async def`."""
    if job.calls is None:
        return WorkerPool(job, size, closed=closed, launch=launch)
    return AsyncWorkerPool(job, min(size, job.calls.concurrency), closed=closed, launch=launch)


class RewardPool(RewardRunner):
    """Score replies in worker processes, with a time limit that really ends a hung call.

    The reward function is any function with verl's parameters `(data_source, solution_str,
    ground_truth, extra_info)`, which are passed by name. It returns a number, or a dict with a
    number under `score` and more keys to keep. A call that raises (`exception`), takes too long
    (`timeout`), ends its process (`died`) or returns anything else, NaN and infinity included
    (`invalid`), is counted in `counts` and logged; then the reply gets `on_error`, or `RewardError`
    is raised. One that raises `Unscored` has not failed: its reply gets no reward.

    It may be an `async def`: then several calls run at once in each process, each with its own time
    limit, and those that fail for what may pass are tried again.

    Workers start at the first `score` and live until `close`; one that dies is replaced. The reward
    function's time limit starts when its item does, so it covers imports inside the reward
    function.

    Args:
        spec: the reward function: a name in `jaxrl_llm.rewards.functions`, or `my_file.py:name`.
        workers: number of processes; 0 calls the reward function in this process, which is handy in
            a notebook but has no time limit and no protection from a crash.
        timeout_s: seconds that one call may take.
        on_error: the reward of a reply whose reward function failed; None stops with `RewardError`,
            "unscored" leaves it without a reward.
        calls: how an `async def` is called.
        limits: of each process, and its environment; `workers=0` has none of them.

    Raises:
        ValueError: a number out of range; `ConfigError` (a ValueError) when the reward function
            can't be found, or can't be called with the four parameters and its keywords.

    >>> with RewardPool(FunctionSpec("arithmetic"), workers=0, timeout_s=5, on_error=0.0) as pool:
    ...     pool.score([RewardItem("arithmetic", "2+2=4", "4", None)])
    [Score(score=1.0, extra={'acc': 1.0, 'pred': '4'}, error=None, step_rewards=())]
    """

    def __init__(
        self,
        spec: FunctionSpec,
        *,
        workers: int,
        timeout_s: int | float = 30.0,
        on_error: OnError = None,
        calls: AsyncCalls = DEFAULT_CALLS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        check_limits(limits)
        if workers < 0 or not 0 < timeout_s < math.inf:
            raise ValueError(
                "reward: expected workers >= 0 and a positive time limit, got"
                f" workers={workers}, timeout_s={timeout_s}"
            )
        super().__init__(spec, timeout_s=timeout_s, on_error=on_error, calls=calls)
        launch = LaunchOptions(limits=limits)
        self._worker_pool = make_worker_pool(self._job, workers, closed=self._closed, launch=launch)
        self._in_process = workers == 0

    def close(self) -> None:
        """End the workers; `score` can't be called any more, and ends if another thread runs it."""
        self._closed.set()
        self._worker_pool.kill()
        with self._lock:
            self._worker_pool.stop()

    def _outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        if not self._in_process:
            return self._worker_pool.outcomes(items)
        if self._job.calls is not None:
            still_open = functools.partial(check_open, self._closed)
            return outcomes_in_thread(self._function, items, self._job, still_open)
        return ((number, call_function(self._function, item)) for number, item in enumerate(items))

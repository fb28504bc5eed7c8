"""Run a reward function in tasks of a Ray cluster, where the CPUs of one machine are too few.

Ray finds a free CPU for each task and tells when a worker or a node is lost. The reward function
itself runs in a process below the Ray worker, the same as `RewardPool`'s. So the time limit starts
with the call and not with the wait for a CPU, it ends a call that holds the interpreter lock or
ignores signals, a crash is blamed on the one item that caused it, and the Ray worker, which only
waits, always answers when its task is cancelled.
"""

import functools
import logging
import math
import pickle
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rewards.pool import AsyncWorkerPool, WorkerPool, make_worker_pool
from jaxrl_llm.rewards.runner import (
    OnError,
    Outcomes,
    RewardError,
    RewardRunner,
    check_open,
    chunk_size,
)
from jaxrl_llm.rewards.worker import (
    DEFAULT_CALLS,
    AsyncCalls,
    Outcome,
    RewardItem,
    failed_outcome,
)
from jaxrl_llm.workers.limits import DEFAULT_LIMITS, Limits, check_limits
from jaxrl_llm.workers.process import LaunchOptions

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2  # how soon `score` notices that another thread has closed it
CANCEL_ATTEMPTS = (False, False, False, True, True, True)  # each waits a second; True is by force


class RewardTasks(RewardRunner):
    """Score replies in Ray tasks of one CPU each, in the cluster that this process has joined.

    The reward function, its results and its failures are those of `RewardPool`, but for `died`: an
    item whose process died is tried again alone, and so are the items of a task whose Ray worker or
    node was lost; `counts["retried"]` counts them. Each Ray worker keeps the reward function's
    process, with what it has imported, until it is given another reward function or ends. On every
    node, this library must be installed, and the user's files must lie at the same paths as here.

    Args:
        spec: the reward function: a name in `jaxrl_llm.rewards.functions`, or `my_file.py:name`.
        tasks: the most tasks at once; there are fewer while the cluster has fewer CPUs free.
        timeout_s: seconds that one call may take.
        retries: how often an item whose process died is tried again before it counts as `died`.
        on_error: the reward of a reply whose reward function failed; None stops with `RewardError`,
            "unscored" leaves it without a reward.
        calls: how an `async def` is called; the tasks share its concurrency.
        limits: of each process below a Ray worker, and its environment.

    Raises:
        ValueError: a number out of range; `ConfigError` (a ValueError) when the reward function
            can't be found, or can't be called with the four parameters and its keywords.
        RewardError: this process has joined no cluster, or Ray is not installed.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        *,
        tasks: int,
        timeout_s: int | float = 30.0,
        retries: int = 2,
        on_error: OnError = None,
        calls: AsyncCalls = DEFAULT_CALLS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        check_limits(limits)
        if tasks < 1 or retries < 0 or not 0 < timeout_s < math.inf:
            raise ValueError(
                "reward: expected tasks >= 1, retries >= 0 and a positive time limit, got"
                f" tasks={tasks}, retries={retries}, timeout_s={timeout_s}"
            )
        super().__init__(spec, timeout_s=timeout_s, on_error=on_error, calls=calls)
        self.counts["retried"] = 0
        job = self._job
        if job.calls is not None:
            tasks = min(tasks, calls.concurrency)
            job = job._replace(calls=calls._replace(concurrency=calls.concurrency // tasks))
        self._tasks, self._retries = tasks, retries
        launch = LaunchOptions(str(Path.cwd()), tuple(sys.path), limits)
        self._pickled = pickle.dumps((job, launch))
        self._remote = _cluster().remote(num_cpus=1, max_retries=0)(_score_chunk)

    def close(self) -> None:
        """Refuse to `score` from now on; a call in another thread ends, its tasks are cancelled."""
        self._closed.set()
        with self._lock:
            pass

    def _outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        ray = _cluster()
        queue = _Queue(len(items), self._tasks, self._retries)
        running: dict[Any, list[int]] = {}
        try:
            while queue or running:
                while queue and len(running) < self._tasks:
                    numbers = queue.take()
                    chunk = [items[number] for number in numbers]
                    running[self._remote.remote(self._pickled, chunk)] = numbers
                done, _ = ray.wait(list(running), timeout=POLL_INTERVAL_S)
                check_open(self._closed)
                for ref in done:
                    numbers = running.pop(ref)
                    final, retried = queue.sort(numbers, _receive(ray, ref, numbers))
                    self._report(retried)
                    yield from final
        finally:
            _cancel(ray, list(running))

    def _report(self, retried: list[int]) -> None:
        self.counts["retried"] += len(retried)
        if retried:
            rows = ", ".join(str(self._rows[number]) for number in retried)
            log.warning(
                "reward %r lost its process, Ray worker or node; tried again: row %s",
                *(self._spec.fn, rows),
            )


class _Queue:
    """The items that have no outcome and are in no task; those tried again go first, and alone."""

    def __init__(self, count: int, tasks: int, retries: int) -> None:
        self._waiting = deque(range(count))
        self._alone = deque[int]()
        self._tasks, self._retries = tasks, retries
        self._deaths = Counter[int]()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._alone)

    def take(self) -> list[int]:
        """Return the numbers of the next task's items."""
        if self._alone:
            return [self._alone.popleft()]
        size = min(chunk_size(len(self._waiting), self._tasks), len(self._waiting))
        return [self._waiting.popleft() for _ in range(size)]

    def sort(
        self, numbers: list[int], outcomes: list[Outcome]
    ) -> tuple[list[tuple[int, Outcome]], list[int]]:
        """Return what is final of a task's outcomes, and which items are tried again.

        Args:
            numbers: the task's items.
            outcomes: those of its first items; the others wait again, alone where there is none.
        """
        final, retried, rest = [], [], numbers[len(outcomes) :]
        for number, outcome in zip(numbers, outcomes, strict=False):
            self._deaths[number] += outcome.failure == "died"
            if outcome.failure == "died" and self._deaths[number] <= self._retries:
                retried.append(number)
            else:
                final.append((number, outcome))
        if outcomes:
            self._waiting.extendleft(reversed(rest))
        else:
            retried += rest
        self._alone.extend(retried)
        return final, retried


def _cluster() -> Any:
    """Return the module `ray`, where a cluster is joined: calls would start one of their own."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise RewardError("reward: got no Ray; pip install 'jaxrl_llm[ray]'") from error
    if not ray.is_initialized():
        raise RewardError(
            "reward: expected ray.init() before rewards are tasks, got no Ray cluster"
        )
    return ray


def _receive(ray: Any, ref: Any, numbers: list[int]) -> list[Outcome]:
    """Return the outcomes of a task's first items; of none where it is lost, and held several."""
    kinds = ray.exceptions
    lost = (
        kinds.WorkerCrashedError,
        kinds.OutOfMemoryError,
        kinds.NodeDiedError,
        kinds.ObjectLostError,
        kinds.TaskCancelledError,
    )
    try:
        return ray.get(ref)
    except lost as error:
        message = f"its Ray worker was lost ({type(error).__name__})"
        return [failed_outcome("died", message)] if len(numbers) == 1 else []
    except kinds.RayError as error:
        if isinstance(error, kinds.RayTaskError) and isinstance(error.cause, RewardError):
            raise RewardError(str(error.cause)) from error
        last = str(error).rstrip().rpartition("\n")[2]
        raise RewardError(f"reward: a Ray task failed: {last}") from error


def _cancel(ray: Any, refs: list[Any]) -> None:
    """End tasks, and wait for it, again and again: Ray forgets a request that outruns its task."""
    for force in CANCEL_ATTEMPTS:
        if not refs:
            return
        for ref in refs:
            ray.cancel(ref, force=force)
        _, refs = ray.wait(refs, num_returns=len(refs), timeout=1.0)
    log.warning("reward: %d Ray tasks may go on, though cancelled", len(refs))


def _score_chunk(job: bytes, items: list[RewardItem]) -> list[Outcome]:
    """Return the items' outcomes, in a Ray worker; the last may be one that ended the process."""
    outcomes, pool = [], _worker_pool(job)
    if isinstance(pool, AsyncWorkerPool):  # it has tried those again alone that may be to blame
        by_number = dict(pool.outcomes(items))
        return [by_number[number] for number in range(len(items))]
    with closing(pool.outcomes(items)) as numbered:
        for _, outcome in numbered:  # in order, since one process takes them
            outcomes.append(outcome)
            if outcome.failure in ("timeout", "died"):
                break  # others may take the rest meanwhile
    return outcomes


@functools.lru_cache(maxsize=1)
def _worker_pool(job: bytes) -> WorkerPool:
    described, launch = pickle.loads(job)
    return make_worker_pool(described, 1, closed=threading.Event(), launch=launch)

"""Run a reward function: in this process, in worker processes, or in tasks of a Ray cluster.

The workers are plain subprocesses, each behind its own pipe and below its own supervisor
(`workers/supervisor.py`), so that a reward function can raise, hang or crash and do no harm. Unlike
`multiprocessing`'s they don't import the main program again (and jax with it), share no lock that a
crash could leave held, send no pickle, and any way of dying shows as a closed pipe.

Ray serves where the CPUs of one machine are too few: it finds a free CPU for each task and tells
when a worker or a node is lost. The reward function itself runs in a process below the Ray worker,
the same as `RewardPool`'s. So the time limit starts with the call and not with the wait for a CPU,
it ends a call that holds the interpreter lock or ignores signals, a crash is blamed on the one item
that caused it, and the Ray worker, which only waits, always answers when its task is cancelled.
"""

import functools
import inspect
import logging
import math
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rewards.code import check_python_tests, python_tests
from jaxrl_llm.rewards.remote import check_judge, classify, judge
from jaxrl_llm.rewards.worker import (
    BEAT,
    BEAT_S,
    FAILURES,
    RewardItem,
    RewardJob,
    Score,
    call_function,
    decode_numbered,
    failed_score,
    is_async,
    load_reward_function,
    scores_in_thread,
)
from jaxrl_llm.rollout.servers import check_client
from jaxrl_llm.workers.pool import Limits, WorkerPool, WorkerProgram
from jaxrl_llm.workers.values import UNSCORED, shorten

if TYPE_CHECKING:  # Ray's workers start without pydantic
    from jaxrl_llm.config.sections import ScoringConfig

log = logging.getLogger(__name__)

PROGRAM = WorkerProgram("jaxrl_llm.rewards.worker:run_worker", keys="reward.")
MAX_CHUNK_ITEMS = 16
MAX_WAIT_S = 0.5  # in seconds: when Ray interrupts its worker, that ends no system call
SILENCE_S = 3 * BEAT_S  # in which a worker that calls an async function may be late
FAILED = "reward %r failed on %d of %d answers (%s); the first: %s"
GAVE_NO_SCORE = "reward %r gave no score to %d of %d answers (%s); the first: %s"
FUNCTION_COMPONENT = "function"
"""Name of a reward function's own score among what it reports, where a reward model scores."""
ASKING = (judge, classify)
"""The reward functions that ask a server."""

Outcomes = Generator[tuple[int, Score], None, None]


class RewardError(RunError):
    """A reward function failed, and the config says to stop; the message names the row."""


class RewardRunner(ABC):
    """Score replies; a subclass says where the reward function's calls run, by `_outcomes`.

    The reward function is any function with verl's parameters `(data_source, solution_str,
    ground_truth, extra_info)`, which are passed by name. It returns a number, or a dict with a
    number under `score` and more keys to keep. A call that raises (`exception`), takes too long
    (`timeout`), ends its process (`died`) or returns anything else, NaN and infinity included
    (`invalid`), is counted in `counts` and logged; then the reply gets `on_error`, or `RewardError`
    is raised. One that raises `Unscored` has not failed: its reply gets no reward.

    It may be an `async def`: then several calls run at once in each process, each with its own time
    limit, and those that fail for what may pass are tried again.

    Args:
        spec: the reward function: a name in `jaxrl_llm.rewards.functions`, or `my_file.py:name`.
        config: how it is called.

    Raises:
        ConfigError: the reward function can't be found, or can't be called with the four parameters
            and its keywords.
    """

    def __init__(self, spec: FunctionSpec, config: "ScoringConfig") -> None:
        self._spec, self._function = spec, check_reward_function(spec)
        self._job = RewardJob(
            spec, config.timeout_s, is_async(self._function), config.concurrency, config.retries
        )
        limits = Limits(config.memory_gb, config.max_processes, config.pass_env)
        self._program = PROGRAM._replace(limits=limits)
        self._on_error = math.nan if config.on_error == UNSCORED else config.on_error
        self.counts: dict[str, int] = dict.fromkeys(("exception", "timeout", "died", "invalid"), 0)
        self._rows: Sequence[int] = ()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what runs; `score` can't be called any more, and ends if another thread runs it."""

    @abstractmethod
    def _outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        """Yield each item's number and outcome, as they come in; if closed, end what still runs."""

    def score(
        self, items: Sequence[RewardItem], *, rows: Sequence[int] | None = None
    ) -> list[Score]:
        """Return the score of every item, in order.

        Args:
            items: the replies; the strings, and whatever else they hold, must be picklable.
            rows: of the dataset that they answer, for messages; None: they are counted from 0.

        Failures are logged on one line, with the first of them and one that is another; so are
        replies that the reward function leaves unscored.

        Raises:
            RewardError: a call failed and `on_error` is None; a worker can't start; the pool is
                closed.
        """
        failures: dict[int, Score] = {}
        with (
            self._lock,
            activity("scoring", len(items)) as progress,
            closing(self._outcomes(items)) as outcomes,
        ):
            self._rows = range(len(items)) if rows is None else rows
            check_open(self._closed)
            scores = {}
            for number, outcome in outcomes:
                progress.advance()
                scores[number] = self._to_score(number, items[number], outcome)
                if outcome.failure is not None:
                    failures[number] = outcome
            unscored = {n: f for n, f in failures.items() if f.failure == UNSCORED}
            failed = {n: f for n, f in failures.items() if n not in unscored}
            self._warn(items, failed, FAILED)
            self._warn(items, unscored, GAVE_NO_SCORE)
        return [scores[number] for number in range(len(items))]

    def _warn(self, items: Sequence[RewardItem], failures: dict[int, Score], message: str) -> None:
        """Log on one line how many calls failed, and the first two ways in which they did."""
        if not failures:
            return
        kinds = Counter(outcome.failure for outcome in failures.values())
        ways: dict[str | None, int] = {}
        for number in sorted(failures):
            ways.setdefault(failures[number].error, number)
        described = [self._described(n, items[n], failures[n]) for n in [*ways.values()][:2]]
        log.warning(
            message,
            self._spec.fn,
            len(failures),
            len(items),
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
            "; another: ".join(described),
        )

    def _to_score(self, number: int, item: RewardItem, outcome: Score) -> Score:
        if outcome.failure is None:
            return outcome
        if outcome.failure == UNSCORED:
            return outcome._replace(score=math.nan)
        self.counts[outcome.failure] += 1
        if self._on_error is None:
            described = self._described(number, item, outcome)
            raise RewardError(f"reward {self._spec.fn!r} failed on {described}")
        return outcome._replace(score=float(self._on_error))

    def _described(self, number: int, item: RewardItem, outcome: Score) -> str:
        """Return which reply a failed call was of, and how it failed."""
        reply, truth = (shorten(repr(part), 120) for part in (item.solution_str, item.ground_truth))
        return (
            f"row {self._rows[number]} (data_source {item.data_source!r}, reply {reply},"
            f" ground truth {truth}): {outcome.error}"
        )


def check_reward_function(spec: FunctionSpec) -> Callable[..., Any]:
    """Import a reward function, and return it if it takes what it is called with.

    Raises:
        ConfigError: it can't be imported, or can't be called with the four parameters and its
            keywords.

    >>> check_reward_function(FunctionSpec("arithmetic")).__name__
    'arithmetic'
    """
    function = load_reward_function(spec)
    try:
        inspect.signature(function).bind(**dict.fromkeys(RewardItem._fields))
    except TypeError as error:
        raise ConfigError(
            f"reward.function: {spec.fn!r} can't be called with {', '.join(RewardItem._fields)}: "
            f"{error}"
        ) from error
    except ValueError:
        pass  # a builtin without a signature: the call itself will check
    if isinstance(function, functools.partial) and function.func in ASKING:
        check_client(spec.fn)
        if function.func is judge:
            check_judge(function.keywords)
    if isinstance(function, functools.partial) and function.func is python_tests:
        check_python_tests(function.keywords)
    return function


def check_open(closed: threading.Event) -> None:
    """Raise `RewardError` once the pool is closed."""
    if closed.is_set():
        raise RewardError("reward: the pool is closed")


def chunk_size(waiting: int, workers: int) -> int:
    """Return how many of the waiting items, one or more, a free worker is given at once.

    Chunks save messages; they get smaller towards the end, so that no worker waits long.

    >>> [chunk_size(waiting, workers=4) for waiting in (1000, 100, 10)]
    [16, 7, 1]
    """
    return min(MAX_CHUNK_ITEMS, 1 + waiting // (4 * workers))


class RewardWorkers(WorkerPool):
    """Worker processes of a reward function.

    Each has a chunk of items, which it scores one after the other. Of an `async def` each has
    several calls at once. When such a worker ends, or its event loop stands still, nobody knows
    which of its calls is to blame: those are all tried again, each alone in a worker.

    Args:
        job: the reward function, and how it is called.
        size: the number of processes.
        program: that calls it.
    """

    def __init__(self, job: RewardJob, size: int, program: WorkerProgram) -> None:
        self.job = job
        self._size = min(size, job.concurrency) if job.is_async else size
        self._patience_s = job.timeout_s + (SILENCE_S if job.is_async else 0)
        function = repr(job.spec.fn)
        name = f"reward {function}"
        super().__init__(program, job, self._patience_s, name=name, loads=function)

    def error(self, message: str) -> RewardError:
        """Return what is raised where no worker can start."""
        return RewardError(f"reward: {message}")

    def decode(self, line: bytes, pending: Sequence[int]) -> list[tuple[int, Score]] | None:
        """Return the item of which a line tells what, if any; None where it should not be there."""
        if not self.job.is_async:
            numbered = decode_numbered(line, [*pending][:1])
        elif line == BEAT.strip():
            return []
        else:
            numbered = decode_numbered(line, pending, (*FAILURES, "timeout"))
        return numbered and [numbered]

    def outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        """Yield the number and the outcome of every item, as they come in.

        Raises:
            RewardError: a worker can't start; the pool is closed.
        """
        waiting, suspects = deque(range(len(items))), set[int]()
        left = len(items)
        try:
            while left:
                self.start_workers(min(self._size, left))
                if self.job.is_async:
                    self._hand_out_calls(items, waiting, suspects)
                else:
                    self._hand_out(items, waiting)
                check_open(self.closed)
                for event in self.poll(MAX_WAIT_S):
                    if event.failure is None:
                        left -= 1
                        yield event.numbers[0], event.value
                    elif self.job.is_async and len(event.numbers) > 1:
                        waiting.extendleft(reversed(event.numbers))
                        suspects.update(event.numbers)
                    elif event.numbers:
                        first, *rest = event.numbers
                        waiting.extendleft(reversed(rest))
                        left -= 1
                        yield first, self._lost_outcome(event.failure, event.message)
        finally:  # after an error some are still busy with items that nobody waits for
            for worker in [w for w in self.workers if w.pending]:
                self.dismiss(worker)

    def _hand_out(self, items: Sequence[RewardItem], waiting: deque[int]) -> None:
        """Give waiting items to workers that have nothing to do."""
        for worker in self.workers:
            if worker.is_idle and waiting:
                size = chunk_size(len(waiting), self._size)
                numbers = [waiting.popleft() for _ in range(size)]
                worker.submit([(number, items[number]) for number in numbers])

    def _hand_out_calls(
        self, items: Sequence[RewardItem], waiting: deque[int], suspects: set[int]
    ) -> None:
        """Give waiting items to the workers that have the fewest, suspects to those without any."""
        room = self.job.concurrency - sum(len(worker.pending) for worker in self.workers)
        ready = [w for w in self.workers if w.ready and suspects.isdisjoint(w.pending)]
        while waiting and room > 0 and ready:
            worker = min(ready, key=lambda w: len(w.pending))
            if waiting[0] in suspects:
                if worker.pending:
                    return
                ready.remove(worker)
            number = waiting.popleft()
            worker.submit([(number, items[number])])
            room -= 1

    def _lost_outcome(self, kind: str, message: str) -> Score:
        if kind == "timeout" and self.job.is_async:
            message = (
                f"no sign of life within {self._patience_s:g} s: it keeps its event loop from "
                "going on (expected no call that blocks)"
            )
        return failed_score(kind, message)


class RewardPool(RewardRunner):
    """Score replies in worker processes, with a time limit that really ends a hung call.

    Workers start at the first `score` and live until `close`; one that dies is replaced. The reward
    function's time limit starts when its item does, so it covers imports inside the reward
    function. With `workers=0` it is called in this process, which has no time limit and no
    protection from a crash.
    """

    def __init__(self, spec: FunctionSpec, config: "ScoringConfig") -> None:
        super().__init__(spec, config)
        self._worker_pool = RewardWorkers(self._job, config.workers, self._program)
        self._in_process = config.workers == 0

    def close(self) -> None:
        """End the workers; `score` can't be called any more, and ends if another thread runs it."""
        self._closed.set()
        self._worker_pool.close()
        with self._lock:
            self._worker_pool.stop()

    def _outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        if not self._in_process:
            return self._worker_pool.outcomes(items)
        if self._job.is_async:
            still_open = functools.partial(check_open, self._closed)
            return scores_in_thread(self._function, items, self._job, still_open)
        return ((number, call_function(self._function, item)) for number, item in enumerate(items))


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
        config: how it is called; of an `async def` the tasks share the concurrency.
        tasks: the most tasks at once; there are fewer while the cluster has fewer CPUs free.
        retries: how often an item whose process died is tried again before it counts as `died`.

    Raises:
        ConfigError: as of `RewardRunner`.
        RewardError: this process has joined no cluster, or Ray is not installed.
    """

    def __init__(
        self, spec: FunctionSpec, config: "ScoringConfig", *, tasks: int, retries: int
    ) -> None:
        super().__init__(spec, config)
        self.counts["retried"] = 0
        job = self._job
        if job.is_async:
            tasks = min(tasks, job.concurrency)
            job = job._replace(concurrency=job.concurrency // tasks)
        self._tasks, self._retries = tasks, retries
        program = self._program._replace(folder=str(Path.cwd()), search=tuple(sys.path))
        self._pickled = pickle.dumps((job, program))
        self._remote = _cluster().remote(num_cpus=1, max_retries=0)(_score_chunk)

    def close(self) -> None:
        """Refuse to `score` from now on; a call in another thread ends, its tasks are cancelled."""
        self._closed.set()
        with self._lock:
            pass

    def _outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        ray, deaths = _cluster(), Counter[int]()
        waiting, alone = deque(range(len(items))), deque[int]()  # what is tried again goes alone
        running: dict[Any, list[int]] = {}
        try:
            while waiting or alone or running:
                while (waiting or alone) and len(running) < self._tasks:
                    size = 1 if alone else chunk_size(len(waiting), self._tasks)
                    numbers = [(alone or waiting).popleft() for _ in range(size)]
                    chunk = [items[number] for number in numbers]
                    running[self._remote.remote(self._pickled, chunk)] = numbers
                done, _ = ray.wait(list(running), timeout=POLL_INTERVAL_S)
                check_open(self._closed)
                for ref in done:
                    numbers = running.pop(ref)
                    outcomes = _receive(ray, ref, numbers)
                    final, retried, rest = [], [], numbers[len(outcomes) :]
                    for number, outcome in zip(numbers, outcomes, strict=False):
                        deaths[number] += outcome.failure == "died"
                        if outcome.failure == "died" and deaths[number] <= self._retries:
                            retried.append(number)
                        else:
                            final.append((number, outcome))
                    if outcomes:
                        waiting.extendleft(reversed(rest))
                    else:  # nobody knows which of them has lost the Ray worker
                        retried += rest
                    alone.extend(retried)
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
                self._spec.fn,
                rows,
            )


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


def _receive(ray: Any, ref: Any, numbers: list[int]) -> list[Score]:
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
        return [failed_score("died", message)] if len(numbers) == 1 else []
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


def _score_chunk(job: bytes, items: list[RewardItem]) -> list[Score]:
    """Return the items' outcomes, in a Ray worker; the last may be one that ended the process."""
    outcomes, pool = [], _worker_pool(job)
    if pool.job.is_async:  # it has tried those again alone that may be to blame
        by_number = dict(pool.outcomes(items))
        return [by_number[number] for number in range(len(items))]
    with closing(pool.outcomes(items)) as numbered:
        for _, outcome in numbered:  # in order, since one process takes them
            outcomes.append(outcome)
            if outcome.failure in ("timeout", "died"):
                break  # others may take the rest meanwhile
    return outcomes


@functools.lru_cache(maxsize=1)
def _worker_pool(job: bytes) -> RewardWorkers:
    described, program = pickle.loads(job)
    return RewardWorkers(described, 1, program)

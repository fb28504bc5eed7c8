"""Run a reward function in worker processes, so that it can raise, hang or crash and do no harm.

The workers are plain subprocesses, each behind its own pipe. Unlike `multiprocessing`'s they don't
import the main program again (and jax with it), share no lock that a crash could leave held, and
any way of dying shows as a closed pipe.
"""

import inspect
import json
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from jaxrl_llm.functions import ConfigError, FunctionSpec, RunError
from jaxrl_llm.rewards.worker import Outcome, RewardItem, evaluate, failed, load_scorer, shorten

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # for a worker to come up: importing the user's module may be slow
GIVE_UP_SECONDS = 10.0  # after its time-out, a worker that nobody killed ends itself
LARGEST_CHUNK = 16
SCORER = "scorer"  # a scorer's own score among what it reports, where a reward model scores
ROOT = str(Path(__file__).parents[2])  # where this package was imported from
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]);"
    " from jaxrl_llm.rewards.worker import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"
)


class RewardError(RunError):
    """A reward function failed, and the config says to stop; the message names the row."""


class Score(NamedTuple):
    """The reward of one reply, what else its scorer reported, and what went wrong, if anything."""

    score: float
    extra: dict[str, Any]
    error: str | None


class _Worker:
    """One subprocess, the items it was given, and when the first of them is overdue."""

    def __init__(self, spec: FunctionSpec, timeout_s: float) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        search = json.dumps([*sys.path, ROOT])
        arguments = [str(theirs.fileno()), str(os.getpid()), search]
        # Its own session: Ctrl-C is ours to handle, and what a scorer starts dies with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, *arguments],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.timeout_s = timeout_s
        self.ready = False
        self.pending: deque[int] = deque()
        self.deadline = time.monotonic() + START_SECONDS
        with suppress(OSError):  # it died at once: the closed pipe will tell
            self.connection.send((spec, timeout_s + GIVE_UP_SECONDS))

    def give(self, numbers: Sequence[int], items: Sequence[RewardItem]) -> None:
        self.pending.extend(numbers)
        self.touch()
        with suppress(OSError):  # it died while idle: the closed pipe will tell
            self.connection.send([(number, items[number]) for number in numbers])

    def touch(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    def exit_code(self) -> int | str:
        try:
            return self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:  # the scorer closed our pipe under us
            return "none yet"

    def kill(self) -> None:
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()


def _stop_all(crew: list[_Worker]) -> None:
    while crew:
        crew.pop().stop()


class RewardPool:
    """Score replies in worker processes, with a time limit that really ends a hung call.

    The scorer is any function with verl's parameters `(data_source, solution_str, ground_truth,
    extra_info)`, which are passed by name. It returns a number, or a dict with a number under
    `score` and more keys to keep. A call that raises (`exception`), takes too long (`timeout`),
    ends its process (`died`) or returns anything else, NaN and infinity included (`invalid`), is
    counted in `counts` and logged; then the reply gets `on_error`, or `RewardError` is raised.

    Workers start at the first `score` and live until `close`; one that dies is replaced. The
    scorer's time limit starts when its item does, so it covers imports inside the scorer.

    Args:
        spec: the scorer: a name in `jaxrl_llm.rewards.scorers`, or `my_file.py:name`.
        workers: number of processes; 0 calls the scorer in this process, which is handy in a
            notebook but has no time limit and no protection from a crash.
        timeout_s: seconds that one call may take.
        on_error: the reward of a reply whose scorer failed; None stops with `RewardError`.

    Raises:
        ValueError: a number out of range; `ConfigError` (a ValueError) when the scorer can't be
            found, or can't be called with the four parameters and its keywords.

    >>> with RewardPool(FunctionSpec("arithmetic"), workers=0, timeout_s=5, on_error=0.0) as pool:
    ...     pool.score([RewardItem("arithmetic", "2+2=4", "4", None)])
    [Score(score=1.0, extra={'acc': 1.0, 'pred': '4'}, error=None)]
    """

    def __init__(
        self,
        spec: FunctionSpec,
        *,
        workers: int,
        timeout_s: int | float = 30.0,
        on_error: int | float | None = None,
    ) -> None:
        if workers < 0 or not 0 < timeout_s < math.inf:
            raise ValueError(
                f"reward: got workers={workers}, timeout_s={timeout_s}; wanted workers >= 0 and a"
                " positive time limit"
            )
        if on_error is not None and not math.isfinite(on_error):
            raise ValueError(f"reward: got on_error={on_error}, wanted a finite number or nothing")
        self._scorer = load_scorer(spec)
        try:
            inspect.signature(self._scorer).bind(**dict.fromkeys(RewardItem._fields))
        except TypeError as error:
            raise ConfigError(
                f"reward: {spec.fn!r} can't be called with {', '.join(RewardItem._fields)}: {error}"
            ) from error
        self.counts: dict[str, int] = dict.fromkeys(("exception", "timeout", "died", "invalid"), 0)
        self._spec, self._workers = spec, workers
        self._timeout_s, self._on_error = float(timeout_s), on_error
        self._crew: list[_Worker] = []
        self._first = 0
        self._lock = threading.Lock()
        self._closed = False
        self._closer = weakref.finalize(self, _stop_all, self._crew)  # at exit, too

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; `score` can't be called any more, and ends if another thread runs it."""
        self._closed = True
        for worker in list(self._crew):
            worker.kill()  # which wakes `score`, and only that takes a worker out of the crew
        with self._lock:
            self._closer()

    def score(self, items: Sequence[RewardItem], *, first: int = 0) -> list[Score]:
        """Return the score of every item, in order.

        Args:
            items: the replies; the strings, and whatever else they hold, must be picklable.
            first: the first one's row, for messages.

        Raises:
            RewardError: a call failed and `on_error` is None; a worker can't start; the pool is
                closed.
        """
        with self._lock:
            self._first = first
            self._check_open()
            if self._workers == 0:
                return [
                    self._settle(number, item, evaluate(self._scorer, item))
                    for number, item in enumerate(items)
                ]
            try:
                return self._run(items)
            finally:  # after an error some are still busy with items that nobody waits for
                for worker in [w for w in self._crew if w.pending]:
                    self._dismiss(worker)

    def _run(self, items: Sequence[RewardItem]) -> list[Score]:
        scores: dict[int, Score] = {}
        waiting = deque(range(len(items)))
        for worker in [w for w in self._crew if w.process.poll() is not None]:
            self._dismiss(worker)
        while len(scores) < len(items):
            unfinished = len(items) - len(scores)
            while len(self._crew) < min(self._workers, unfinished):
                self._crew.append(_Worker(self._spec, self._timeout_s))
            for worker in self._crew:
                if worker.ready and not worker.pending and waiting:
                    size = min(LARGEST_CHUNK, 1 + len(waiting) // (4 * self._workers))
                    chunk = [waiting.popleft() for _ in range(min(size, len(waiting)))]
                    worker.give(chunk, items)
            for number, outcome in self._events(waiting):
                scores[number] = self._settle(number, items[number], outcome)
        return [scores[number] for number in range(len(items))]

    def _events(self, waiting: deque[int]) -> list[tuple[int, Outcome]]:
        """Wait until something happens; return the outcomes that are in."""
        watched = {w.connection: w for w in self._crew if w.pending or not w.ready}
        rest = min(w.deadline for w in watched.values()) - time.monotonic()
        self._check_open()
        readable = {watched[c] for c in wait(list(watched), timeout=max(rest, 0.0))}  # pyright: ignore
        self._check_open()
        outcomes = []
        for worker in watched.values():
            if worker in readable:
                outcomes += self._receive(worker, waiting)
            elif time.monotonic() > worker.deadline:
                if not worker.ready:
                    raise RewardError(f"reward: no worker came up within {START_SECONDS:g} s")
                message = f"no answer within {self._timeout_s:g} s"
                outcomes.append(self._lose(worker, waiting, failed("timeout", message)))
        return outcomes

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("reward: the pool is closed")

    def _receive(self, worker: _Worker, waiting: deque[int]) -> list[tuple[int, Outcome]]:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            code = worker.exit_code()
            if not worker.ready:
                raise RewardError(
                    f"reward: a worker ended with exit code {code} while it started; see its"
                    " messages on stderr"
                ) from None
            outcome = failed("died", f"its process ended with exit code {code}")
            return [self._lose(worker, waiting, outcome)]
        if not worker.ready:
            if message is not None:
                raise RewardError(f"reward: a worker can't load {self._spec.fn!r}: {message}")
            worker.ready = True
            return []
        worker.pending.popleft()
        worker.touch()
        return [message]

    def _lose(self, worker: _Worker, waiting: deque[int], outcome: Outcome) -> tuple[int, Outcome]:
        """Give up on a worker: its first item is to blame, the others go back into the queue."""
        blamed = worker.pending.popleft()
        waiting.extendleft(reversed(worker.pending))
        self._dismiss(worker)
        return blamed, outcome

    def _dismiss(self, worker: _Worker) -> None:
        self._crew.remove(worker)
        worker.stop()

    def _settle(self, number: int, item: RewardItem, outcome: Outcome) -> Score:
        if outcome.failure is None:
            return Score(outcome.score, outcome.extra, None)
        self.counts[outcome.failure] += 1
        error = f"{outcome.failure}: {outcome.message}"
        reply, truth = (shorten(repr(part), 120) for part in (item.solution_str, item.ground_truth))
        row = (
            f"row {self._first + number} (data_source {item.data_source!r}, reply {reply},"
            f" ground truth {truth})"
        )
        if self._on_error is None:
            raise RewardError(f"reward {self._spec.fn!r} failed on {row}: {error}")
        log.warning("reward %r failed on %s: %s", self._spec.fn, row, error)
        return Score(float(self._on_error), {}, error)

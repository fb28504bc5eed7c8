"""Run a reward function in worker processes, so that it can raise, hang or crash and do no harm.

The workers are plain subprocesses, each behind its own pipe. Unlike `multiprocessing`'s they don't
import the main program again (and jax with it), share no lock that a crash could leave held, and
any way of dying shows as a closed pipe.
"""

import json
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
from typing import NamedTuple

from jaxrl_llm.functions import FunctionSpec
from jaxrl_llm.rewards.runner import (
    Outcomes,
    RewardError,
    RewardRunner,
    check_open,
    chunk_size,
)
from jaxrl_llm.rewards.worker import Outcome, RewardItem, evaluate, failed

START_SECONDS = 120.0  # for a worker to come up: importing the user's module may be slow
GIVE_UP_SECONDS = 10.0  # after its time-out, a worker that nobody killed ends itself
LONGEST_WAIT = 0.5  # in seconds: when Ray interrupts its worker, that ends no system call
ROOT = str(Path(__file__).parents[2])  # where this package was imported from
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]);"
    " from jaxrl_llm.rewards.worker import serve;"
    " serve(int(sys.argv[1]), int(sys.argv[2]), tied=sys.argv[4] == 'tied')"
)


class Launch(NamedTuple):
    """How workers start: where, with what on `sys.path`, and whether tied to who starts them.

    A tied worker is killed as soon as the thread that started it ends, on Linux; another one ends
    after its item, or `GIVE_UP_SECONDS` after that item's time-out.
    """

    folder: str | None = None
    search: Sequence[str] = ()
    tied: bool = False


HERE = Launch()


class _Worker:
    """One subprocess, the items it was given, and when the first of them is overdue."""

    def __init__(self, spec: FunctionSpec, timeout_s: float, launch: Launch) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        search = json.dumps([*launch.search, *sys.path, ROOT])
        tied = "tied" if launch.tied else "free"
        arguments = [str(theirs.fileno()), str(os.getpid()), search, tied]
        # Its own session: Ctrl-C is ours to handle, and what a scorer starts dies with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, *arguments],
            cwd=launch.folder,
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


class Crew:
    """Worker processes of one scorer, started when there is work and replaced when they die.

    Args:
        spec: the scorer.
        size: the number of processes.
        timeout_s: seconds that one call may take.
        closed: set by another thread to end `outcomes`, before it calls `kill`.
        launch: how workers start.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        size: int,
        timeout_s: float,
        *,
        closed: threading.Event,
        launch: Launch = HERE,
    ) -> None:
        self._spec, self._size, self._timeout_s = spec, size, timeout_s
        self._closed, self._launch = closed, launch
        self.workers: list[_Worker] = []
        self.stop = weakref.finalize(self, _stop_all, self.workers)  # at exit, too

    def kill(self) -> None:
        """Kill the workers, which wakes `outcomes`; only that takes a worker out of the crew."""
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
            for worker in [w for w in self.workers if w.process.poll() is not None]:
                self._dismiss(worker)
            while left:
                while len(self.workers) < min(self._size, left):
                    self.workers.append(_Worker(self._spec, self._timeout_s, self._launch))
                for worker in self.workers:
                    if worker.ready and not worker.pending and waiting:
                        size = min(chunk_size(len(waiting), self._size), len(waiting))
                        worker.give([waiting.popleft() for _ in range(size)], items)
                for found in self._events(waiting):
                    left -= 1
                    yield found
        finally:  # after an error some are still busy with items that nobody waits for
            for worker in [w for w in self.workers if w.pending]:
                self._dismiss(worker)

    def _events(self, waiting: deque[int]) -> list[tuple[int, Outcome]]:
        """Wait until something happens; return the outcomes that are in."""
        watched = {w.connection: w for w in self.workers if w.pending or not w.ready}
        rest = min(w.deadline for w in watched.values()) - time.monotonic()
        rest = min(max(rest, 0.0), LONGEST_WAIT)
        check_open(self._closed)
        readable = {watched[c] for c in wait(list(watched), timeout=rest)}  # pyright: ignore
        check_open(self._closed)
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
        self.workers.remove(worker)
        worker.stop()


class RewardPool(RewardRunner):
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
        super().__init__(spec, on_error=on_error)
        self._crew = Crew(spec, workers, float(timeout_s), closed=self._closed)
        self._in_process = workers == 0

    def close(self) -> None:
        """End the workers; `score` can't be called any more, and ends if another thread runs it."""
        self._closed.set()
        self._crew.kill()
        with self._lock:
            self._crew.stop()

    def _outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        if not self._in_process:
            return self._crew.outcomes(items)
        return ((number, evaluate(self._scorer, item)) for number, item in enumerate(items))

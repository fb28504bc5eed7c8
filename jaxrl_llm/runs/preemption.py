"""What a run does when it is told to end: it saves at the next step's border.

Schedulers send SIGTERM some time before they kill: Slurm when a job is preempted or out of time,
Kubernetes when a pod is evicted, clouds when a spot machine is taken back. By hand, as jax's own
notice (`reached_preemption_sync_point`) needs its distributed runtime, which one process has not.
"""

import contextlib
import faulthandler
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from jaxrl_llm.monitoring import job_context
from jaxrl_llm.sharding import distributed

KILLED = 128 + signal.SIGTERM
"""The exit status of a run that could not save in time, or was told twice, as shells show it."""


class Preemption:
    """Listens for SIGTERM while it is open; a second one ends the process at once.

    A thread of its own takes the signals, as the main one may wait for the devices for long. Where
    no signal can be taken, in another thread than the main one and in processes of a cluster, whose
    launcher takes it, only `requested` works.

    Args:
        grace_s: seconds until the process ends, whatever it does.
    """

    def __init__(self, grace_s: float) -> None:
        """Don't listen yet."""
        self._grace_s = grace_s
        self._told = threading.Event()
        self._listens = False

    def __enter__(self) -> "Preemption":
        """Begin to listen."""
        in_main = threading.current_thread() is threading.main_thread()
        self._listens = in_main and job_context.current() is None
        if self._listens:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._handler = signal.signal(signal.SIGTERM, _ignore)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._take, daemon=True, name="preemption").start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Let the signal do again what it did before."""
        if self._listens:
            self._listens = False
            signal.set_wakeup_fd(self._wakeup)
            known = self._handler is not None  # else it was set by another language's code
            signal.signal(signal.SIGTERM, self._handler if known else signal.SIG_DFL)
            os.close(self._writer)  # which ends the thread

    def is_told(self) -> bool:
        """Return whether this process was told to end."""
        return self._told.is_set()

    def requested(self) -> bool:
        """Return whether any process of the run was told to end; all of them ask together."""
        return any(distributed.all_gather(self.is_told() or job_context.is_stop_requested()))

    def _take(self) -> None:
        """Take signals until `close`, or until the grace is over."""
        until = None
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                _end(f"it has not ended within checkpoint.grace_s={self._grace_s:g}")
            signals = os.read(self._reader, 64)
            if not signals:
                os.close(self._reader)
                return
            for _ in range(signals.count(signal.SIGTERM)):
                if until is not None:
                    _end("it was told twice")
                until = time.monotonic() + self._grace_s
                self._told.set()
                _write(
                    f"SIGTERM: the run saves at the end of this step, within {self._grace_s:g} s "
                    "(checkpoint.grace_s); a second one ends it at once"
                )


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the thread does it."""


def _write(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def _end(why: str) -> NoReturn:
    _write(f"SIGTERM: {why}; the same command continues from the newest checkpoint")
    os._exit(KILLED)


@contextlib.contextmanager
def interrupted_between_steps() -> Iterator[None]:
    """Let a step end before Ctrl-C raises KeyboardInterrupt; a second one raises at once.

    An update writes over the parameters that it was given, so a step can't be left in its middle
    and the run be gone on with. Where no signal can be taken, as in another thread than the main
    one, or Ctrl-C does something else, nothing changes.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    told = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            signal.default_int_handler(number, frame)
        told = True
        _write("Ctrl-C: the run stops after this step; a second one stops it at once")

    signal.signal(signal.SIGINT, take)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if told:
        raise KeyboardInterrupt


STDERR = 2
BACKUP_S = 30.0  # after which faulthandler ends a process whose interpreter lock is never free


class Watchdog:
    """Prints the stacks of all threads and ends the process when there is no progress for long.

    Args:
        limit_s: seconds from one `beat` to the next; None watches nothing.

    >>> with Watchdog(60.0) as watchdog:
    ...     watchdog.beat()
    """

    def __init__(self, limit_s: float | None) -> None:
        """Don't watch yet."""
        self._limit_s = limit_s
        self._closed = threading.Event()
        self._last = 0.0

    def __enter__(self) -> "Watchdog":
        """Begin to watch."""
        self.beat()
        if self._limit_s is not None:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Watch no more."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def beat(self) -> None:
        """Note progress."""
        self._last = time.monotonic()
        if self._limit_s is not None:
            faulthandler.dump_traceback_later(self._limit_s + BACKUP_S, exit=True, file=STDERR)

    def rest(self) -> None:
        """Expect no progress until the next `beat`, as between two steps of a notebook."""
        self._last = math.inf
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        assert self._limit_s is not None
        while not self._closed.wait(self._left(self._limit_s)):
            if time.monotonic() - self._last < self._limit_s:
                continue
            faulthandler.dump_traceback(STDERR, all_threads=True)
            text = (
                f"error: there was no step for {self._limit_s:g} s (stall_timeout_s); the threads' "
                "stacks are above; the same command continues from the newest checkpoint\n"
            )
            os.write(STDERR, text.encode())
            os._exit(1)

    def _left(self, limit_s: float) -> float:
        """Return the seconds until there is something to look at."""
        return min(limit_s, max(0.0, self._last + limit_s - time.monotonic()))

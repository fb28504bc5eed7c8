"""What ends a run that hangs, so that nobody waits for it and its machine is free."""

import faulthandler
import math
import os
import threading
import time

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

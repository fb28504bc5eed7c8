"""A line in the log where something is waited for that takes long, and what it is."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

STALL_S = 120.0
"""Seconds of waiting after which there is a line, and then again."""


@contextlib.contextmanager
def reporting_stall(describe: Callable[[], str], every_s: float = STALL_S) -> Iterator[None]:
    """Log what is waited for within a `with`, each time that so many seconds have passed.

    Args:
        describe: returns what is waited for; called in a thread of its own.
        every_s: seconds between two lines.
    """
    ended = threading.Event()

    def report() -> None:
        waited = every_s
        while not ended.wait(every_s):
            log.warning("waiting for %.0f s: %s", waited, describe())
            waited += every_s

    thread = threading.Thread(target=report, daemon=True, name="stall")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

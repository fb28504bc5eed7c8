"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: It did not within these seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it has not happened within {seconds:g} s"
        time.sleep(0.005)


def ended(pid):
    """Return whether a process has ended, waited for or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

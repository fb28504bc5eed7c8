"""What is below a process, in which session ever: find it, reap it, end it.

A process that adopts orphans is the parent of whatever its children leave behind when they end.
"""

import ctypes
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_INTERVAL_S = 0.1  # between two looks at what is below
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


def ignore_signals() -> None:
    """Ignore the signals that ask a process to end; whoever wants us to has another way."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def adopt_orphans() -> bool:
    """Have orphans below us become our children; tell whether that and finding them is possible."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return False
    return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def poll_for(lifeline: int) -> tuple[Any, int]:
    """Return what waits for a lifeline and for ends of children, and a descriptor to empty then."""
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    poller.register(awake, select.POLLIN)
    return poller, awake


def reap(child: int, adopts: bool) -> int | None:
    """Reap the children that have ended; return a child's status as soon as it is among them.

    Args:
        child: whose status is asked for.
        adopts: whether all children are reaped, adopted ones included.

    Raises:
        ChildProcessError: there are no children any more.
    """
    while True:
        pid, status = os.waitpid(-1 if adopts else child, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None


def end_descendants(child: int, adopts: bool) -> None:
    """Kill everything below this process, and wait until it has ended.

    Args:
        child: that has started it.
        adopts: whether orphans become our children; else its process group is all that is found.
    """
    if not adopts:
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)
    stopped: set[int] = set()
    pause = 0.001
    with suppress(ChildProcessError):
        while True:
            reap(child, adopts)
            new = set(list_descendants() if adopts else [child]) - stopped
            for pid in new or stopped:  # none that is stopped starts another while we look
                with suppress(OSError):
                    os.kill(pid, signal.SIGSTOP if new else signal.SIGKILL)
            if new:
                stopped |= new
                continue
            stopped.clear()
            time.sleep(pause)
            pause = min(2 * pause, POLL_INTERVAL_S)


def list_descendants() -> list[int]:
    """Return the processes below this one, the ended ones that nobody has waited for included."""
    below: list[int] = []
    parents = [os.getpid()]
    while parents:
        tasks = f"/proc/{parents.pop()}/task"
        with suppress(OSError):  # it has ended meanwhile
            for task in os.listdir(tasks):  # noqa: PTH208
                with open(f"{tasks}/{task}/children") as file:  # noqa: PTH123
                    children = [int(pid) for pid in file.read().split()]
                below += children
                parents += children
    return below

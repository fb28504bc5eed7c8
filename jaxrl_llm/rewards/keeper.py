"""The keeper of one scoring process: starts it, watches it, and leaves nothing behind.

A keeper is a fresh interpreter that loads nothing of the user's. It adopts what the worker's
children leave behind when they end, so that whatever the worker starts stays below it, in which
session ever. When the worker ends, when it has too many processes, or when the pool has gone, the
keeper kills everything that is below it, and ends. Linux only: elsewhere it kills the worker's
process group.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.rewards import cgroup

LOOK_SECONDS = 0.1  # between two counts of processes
PARENT_SECONDS = 1.0  # between two looks whether the pool's process is still there
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
PR_SET_CHILD_SUBREAPER = 36


class Settings(NamedTuple):
    """What a keeper is told: file descriptors, the pool's process, and the limits.

    Args:
        answers: our end of the connection on which the worker gets items and gives answers.
        lifeline: our end of the connection that the pool closes to end the worker; the keeper
            writes on it how the worker ended.
        parent: the pool's process id.
        memory_gb: of `Limits`.
        max_processes: of `Limits`.
        group: the control group's path; None has none.
    """

    answers: int
    lifeline: int
    parent: int
    memory_gb: float | None
    max_processes: int | None
    group: str | None


def keep(settings: Settings) -> None:
    """Start a keeper and its worker; this returns in the worker's process, once it has served.

    Between the pool and the keeper stays this process. It only waits: Ray kills the children of a
    worker that it ends, and a keeper that is killed so could end nothing itself.
    """
    for fd in (settings.answers, settings.lifeline):
        os.set_inheritable(fd, False)  # what a scorer starts must not hold them
    child_ended, held_by_child = os.pipe()
    between = os.getpid()
    if os.fork() == 0:
        os.close(child_ended)
        _keep_worker(settings._replace(parent=between), held_by_child)
        return
    for fd in (settings.answers, settings.lifeline, held_by_child):
        os.close(fd)
    _ignore_signals()
    poller = select.poll()
    poller.register(child_ended)
    while os.getppid() == settings.parent and not poller.poll(PARENT_SECONDS * 1000):
        pass
    os._exit(0)


def _keep_worker(settings: Settings, held: int) -> None:
    """Start the worker and keep it; return in the worker's process, once it has served."""
    memory_bytes = None if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    adopts = _adopt_orphans()
    group = cgroup.make(settings.group, memory_bytes, settings.max_processes)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(settings.lifeline)
        os.close(held)
        _become_worker(keeper, group, memory_bytes)
        from jaxrl_llm.rewards.worker import serve  # the keeper itself stays small

        serve(settings.answers, memory_gb=settings.memory_gb)
        return
    os.close(settings.answers)
    _ignore_signals()
    note = _watch(settings, worker, group, adopts)
    if note is not None:
        with suppress(OSError):
            os.write(settings.lifeline, json.dumps(note).encode())
    _end_all(worker, group, adopts)
    if group is not None:
        cgroup.discard(str(group))
    os._exit(0)  # there is nothing to clean up, and the pool waits


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # whoever wants us to end closes the lifeline


def _adopt_orphans() -> bool:
    """Have orphans below us become our children; tell whether that and finding them is possible."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return False
    return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _become_worker(keeper: int, group: Path | None, memory_bytes: int | None) -> None:
    os.setsid()  # a scorer that kills its process group kills no keeper
    # schedulers send it to all processes of a job, which has a step to end
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(1)
    if group is not None:
        cgroup.enter(group)
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            memory_bytes = min(memory_bytes, hard)
        # RLIMIT_AS would count what is only reserved, too: CUDA reserves terabytes
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _watch(
    settings: Settings, worker: int, group: Path | None, adopts: bool
) -> dict[str, Any] | None:
    """Wait until everything must end; return how the worker ended, or None if the pool ends it."""
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(settings.lifeline, select.POLLIN)
    poller.register(awake, select.POLLIN)
    while os.getppid() == settings.parent:  # a copy of the lifeline may be held by others
        status = _reap(worker, adopts)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return {"exit_code": code, "reason": _reason(settings, group)}
        count = len(_descendants()) - 1 if settings.max_processes is not None and adopts else 0
        if count > (settings.max_processes or 0):
            limit = f"at most {settings.max_processes} (reward.max_processes)"
            return {"exit_code": None, "reason": f"had started {count} processes, wanted {limit}"}
        if any(fd == settings.lifeline for fd, _ in poller.poll(LOOK_SECONDS * 1000)):
            return None
        with suppress(BlockingIOError):
            os.read(awake, 4096)
    return None


def _reason(settings: Settings, group: Path | None) -> str | None:
    if group is None or not cgroup.ran_out_of_memory(group):
        return None
    return f"took more than {settings.memory_gb:g} GB with all it started (reward.memory_gb)"


def _reap(worker: int, adopts: bool) -> int | None:
    """Reap the children that have ended; return the worker's status as soon as it is among them.

    Raises:
        ChildProcessError: there are no children any more.
    """
    while True:
        pid, status = os.waitpid(-1 if adopts else worker, os.WNOHANG)
        if pid == worker:
            return status
        if pid == 0:
            return None


def _end_all(worker: int, group: Path | None, adopts: bool) -> None:
    """Kill everything below this process, and wait until it has ended."""
    if group is not None:
        cgroup.kill(group)
    if not adopts:
        with suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    stopped: set[int] = set()
    pause = 0.001
    with suppress(ChildProcessError):
        while True:
            _reap(worker, adopts)
            new = set(_descendants() if adopts else [worker]) - stopped
            for pid in new or stopped:  # none that is stopped starts another while we look
                with suppress(OSError):
                    os.kill(pid, signal.SIGSTOP if new else signal.SIGKILL)
            if new:
                stopped |= new
                continue
            stopped.clear()
            time.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS)


def _descendants() -> list[int]:
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

"""The supervisor of one worker process: starts it, watches it, and leaves nothing behind.

A supervisor is a fresh interpreter that loads nothing of the user's. It adopts what the worker's
children leave behind when they end, so that whatever the worker starts stays below it, in which
session ever. When the worker ends, when it has too many processes, or when the pool has gone, the
supervisor kills everything that is below it, and ends. Linux only: elsewhere it kills the worker's
process group.
"""

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.workers import descendants
from jaxrl_llm.workers.descendants import (
    POLL_INTERVAL_S,
    adopt_orphans,
    end_descendants,
    ignore_signals,
    list_descendants,
    poll_for,
    reap,
)

PARENT_POLL_S = 1.0  # between two looks whether the pool's process is still there
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


class SupervisorOptions(NamedTuple):
    """What a supervisor needs: file descriptors, the pool's process, and the limits.

    Args:
        answers: our end of the connection on which the worker gets items and gives answers.
        lifeline: our end of the connection that the pool closes to end the worker; the supervisor
            writes on it how the worker ended.
        parent: the pool's process id.
        memory_gb: of `Limits`.
        max_processes: of `Limits`.
        group: the control group's path; None has none.
        program: the `module:function` that serves in the worker, called with the descriptor of our
            end of the connection and with `memory_gb`.
        keys: how the config's keys for the limits begin, for messages.
    """

    answers: int
    lifeline: int
    parent: int
    memory_gb: float | None
    max_processes: int | None
    group: str | None
    program: str
    keys: str


def supervise(options: SupervisorOptions) -> None:
    """Start a supervisor and its worker; this returns in the worker's process, once it has served.

    Between the pool and the supervisor stays this process. It only waits: Ray kills the children of
    a worker that it ends, and a supervisor that is killed so could end nothing itself.
    """
    for fd in (options.answers, options.lifeline):
        os.set_inheritable(fd, False)  # what a user's function starts must not hold them
    child_ended, held_by_child = os.pipe()
    waiter = os.getpid()
    if os.fork() == 0:
        os.close(child_ended)
        _supervise_worker(options._replace(parent=waiter), held_by_child)
        return
    for fd in (options.answers, options.lifeline, held_by_child):
        os.close(fd)
    ignore_signals()
    poller = select.poll()
    poller.register(child_ended)
    while os.getppid() == options.parent and not poller.poll(PARENT_POLL_S * 1000):
        pass
    os._exit(0)


def _supervise_worker(options: SupervisorOptions, held: int) -> None:
    """Start the worker and watch it; return in the worker's process, once it has served."""
    memory_bytes = None if options.memory_gb is None else int(options.memory_gb * 1e9)
    adopts = adopt_orphans()
    group = descendants.create_group(options.group, memory_bytes, options.max_processes)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(options.lifeline)
        os.close(held)
        _become_worker(supervisor, group, memory_bytes)
        module, function = options.program.split(":")  # the supervisor itself stays small
        serve = getattr(importlib.import_module(module), function)
        serve(options.answers, memory_gb=options.memory_gb)
        return
    os.close(options.answers)
    ignore_signals()
    report = _watch(options, worker, group, adopts)
    if report is not None:
        with suppress(OSError):
            os.write(options.lifeline, json.dumps(report).encode())
    if group is not None:
        descendants.kill(group)
    end_descendants(worker, adopts)
    if group is not None:
        descendants.discard(str(group))
    os._exit(0)  # there is nothing to clean up, and the pool waits


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, have as many descriptors as they may.

    Each open episode takes some: of its connection, its program or its sandbox. 1,024 in all are
    the usual limit, and far more may be asked for.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS says that there is no limit, and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _become_worker(supervisor: int, group: Path | None, memory_bytes: int | None) -> None:
    os.setsid()  # a function that kills its process group kills no supervisor
    # schedulers send it to all processes of a job, which has a step to end
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    raise_descriptor_limit()
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)
    if group is not None:
        descendants.enter(group)
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            memory_bytes = min(memory_bytes, hard)
        # RLIMIT_AS would count what is only reserved, too: CUDA reserves terabytes
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _watch(
    options: SupervisorOptions, worker: int, group: Path | None, adopts: bool
) -> dict[str, Any] | None:
    """Wait until everything must end; return how the worker ended, or None if the pool ends it."""
    poller, awake = poll_for(options.lifeline)
    while os.getppid() == options.parent:  # a copy of the lifeline may be held by others
        status = reap(worker, adopts)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return {"exit_code": code, "reason": _reason(options, group)}
        count = len(list_descendants()) - 1 if options.max_processes is not None and adopts else 0
        if count > (options.max_processes or 0):
            limit = f"at most {options.max_processes} ({options.keys}max_processes)"
            return {"exit_code": None, "reason": f"had started {count} processes, expected {limit}"}
        if any(fd == options.lifeline for fd, _ in poller.poll(POLL_INTERVAL_S * 1000)):
            return None
        with suppress(BlockingIOError):
            os.read(awake, 4096)
    return None


def _reason(options: SupervisorOptions, group: Path | None) -> str | None:
    if group is None or not descendants.ran_out_of_memory(group):
        return None
    key = f"{options.keys}memory_gb"
    return f"took more than {options.memory_gb:g} GB with all it started ({key})"

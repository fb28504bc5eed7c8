"""The supervisor of one worker process, and what serves in it.

It starts the worker, watches it, and leaves nothing behind.

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
import pickle
import resource
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxrl_llm.workers.values import shorten

POLL_INTERVAL_S = 0.1  # between two looks at what is below
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


# What is below a process, in which session ever: find it, reap it, end it.
#
# A process that adopts orphans is the parent of whatever its children leave behind when they end.


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


THREADS_BESIDE_CORES = 16  # what libraries start in a process beside a thread for each core
REMOVE_TIMEOUT_S = 2.0  # for killed processes to end


# A control group for a worker and what it starts, where the kernel allows one (Linux, version 2).
#
# A group is ended as a whole, whatever its processes have done to hide from each other. Where the
# system has handed us its controllers, it limits memory and threads of all of them together.


def new_group_path() -> str | None:
    """Return a path for a group inside this process's own; None where there can't be one."""
    try:
        own = next(
            line[3:]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        root, mounted = next(m[3:5] for m in mounts if m[m.index("-") + 1] == "cgroup2")
        within = Path(own).relative_to(root)
    except (OSError, StopIteration, ValueError):
        return None
    folder = Path(mounted) / within
    if ".." in folder.parts or not os.access(folder, os.W_OK):
        return None
    return str(folder / f"jaxrl_llm-worker-{secrets.token_hex(8)}")


def create_group(
    folder: str | None, memory_bytes: int | None, max_processes: int | None
) -> Path | None:
    """Create a group, with limits where these can be; return None where there can be no group."""
    if folder is None:
        return None
    group = Path(folder)
    try:
        group.mkdir()
    except OSError:
        return None
    if not (group / "cgroup.kill").exists():  # Linux before 5.14
        discard(folder)
        return None
    set_limits(group, memory_bytes, max_processes)
    return group


def set_limits(group: Path, memory_bytes: int | None, max_processes: int | None) -> None:
    """Limit memory and threads of a group, where the system has handed us these controllers."""
    if memory_bytes is not None:
        _write(group / "memory.max", memory_bytes)
        _write(group / "memory.swap.max", 0)
    if max_processes is not None:
        threads = (os.cpu_count() or 1) + THREADS_BESIDE_CORES
        _write(group / "pids.max", (1 + max_processes) * threads)


def enter(group: Path) -> None:
    """Move this process into a group."""
    with suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def kill(group: Path) -> None:
    """Kill every process in a group and in the groups below it."""
    _write(group / "cgroup.kill", 1)


def ran_out_of_memory(group: Path) -> bool:
    """Tell whether the kernel has killed a process because the group had taken all it may."""
    try:
        lines = (group / "memory.events").read_text().splitlines()
    except OSError:
        return False
    return any(int(line.split()[1]) > 0 for line in lines if line.startswith("oom_kill "))


def discard(folder: str) -> None:
    """Kill what is in a group, if there still is one, and remove it."""
    end = time.monotonic() + REMOVE_TIMEOUT_S
    while Path(folder).is_dir() and time.monotonic() < end:
        kill(Path(folder))
        for path, _, _ in os.walk(folder, topdown=False):
            with suppress(OSError):  # what was killed has not ended yet
                Path(path).rmdir()
                continue
            time.sleep(0.01)


def _write(file: Path, value: int) -> None:
    if file.exists():
        with suppress(OSError):
            file.write_text(str(value))


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
    group = create_group(options.group, memory_bytes, options.max_processes)
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
        kill(group)
    end_descendants(worker, adopts)
    if group is not None:
        discard(str(group))
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
        enter(group)
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
    if group is None or not ran_out_of_memory(group):
        return None
    key = f"{options.keys}memory_gb"
    return f"took more than {options.memory_gb:g} GB with all it started ({key})"


# What goes between a pool and its workers: pickles there, and lines of JSON back.
#
# Nothing in a line is taken on trust: a user's function may have written it.

MAX_LINE_BYTES = 64_000_000  # of an answer of a worker, with all that it holds
MAX_LOAD_ERROR_CHARS = 2000

Serve = Callable[[BinaryIO, BinaryIO], None]
"""Reads requests and writes answers until there are no more, which is an EOFError or an OSError."""


def encode_load_error(message: str | None) -> bytes:
    """Return a worker's first line: what is wrong with what it should run, or null.

    >>> encode_load_error(None)
    b'{"load_error": null}\\n'
    """
    shortened = None if message is None else shorten(message, MAX_LOAD_ERROR_CHARS)
    return json.dumps({"load_error": shortened}).encode() + b"\n"


def serve_requests(
    fd: int, load: Callable[[Any], Serve], describe_load_error: Callable[[Exception], str]
) -> None:
    """Answer lists of `(number, request)` until the pool closes the connection.

    The pool sends pickles: first a spec, then the lists. It gets lines, as what runs here is not
    trusted and could write on the connection, too: first what is wrong with the spec or null, then
    an answer for each request.

    Args:
        fd: the file descriptor of our end of the connection.
        load: from the spec to what answers.
        describe_load_error: returns what is told of an error of `load`.
    """
    with (
        suppress(EOFError, OSError),
        open(fd, "rb") as requests,
        open(fd, "wb", closefd=False) as out,
    ):
        serve, load_error = None, None
        try:
            serve = load(pickle.load(requests))
        except EOFError:
            raise
        except Exception as error:  # also of a function given from Python, which is unpickled
            load_error = describe_load_error(error)
        out.write(encode_load_error(load_error))
        out.flush()
        if serve is not None:
            serve(requests, out)


def answering_in_turn(answer: Callable[[int, Any], bytes]) -> Serve:
    """Return what answers one request after another.

    Args:
        answer: (number, request) -> a line.
    """

    def serve(requests: BinaryIO, out: BinaryIO) -> None:
        while True:
            for number, request in pickle.load(requests):
                out.write(answer(number, request))
                out.flush()

    return serve

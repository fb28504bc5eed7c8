"""What is below a process, in which session ever: find it, reap it, end it, hold it in a cgroup."""

import ctypes
import os
import secrets
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

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

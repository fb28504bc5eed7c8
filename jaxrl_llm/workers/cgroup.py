"""A control group for a worker and what it starts, where the kernel allows one (Linux, version 2).

A group is ended as a whole, whatever its processes have done to hide from each other. Where the
system has handed us its controllers, it limits memory and threads of all of them together.
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

THREADS_BESIDE_CORES = 16  # what libraries start in a process beside a thread for each core
REMOVE_TIMEOUT_S = 2.0  # for killed processes to end


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

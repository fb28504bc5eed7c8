"""What a session of code takes: processor time, memory, processes, and files in its folder."""

import math
import os
import stat
from contextlib import suppress
from typing import Any, NamedTuple

from jaxrl_llm.workers.descendants import list_descendants

MAX_FOLDER_FILES = 4096
MB = 10**6
TICKS = os.sysconf("SC_CLK_TCK")
Breach = dict[str, Any]


class WatchedLimits(NamedTuple):
    """What a session may take.

    Attributes:
        cpu_s: seconds of processor time of a run, of all its processes.
        memory_bytes: that all of them may hold.
        processes: processes and threads at once.
        file_bytes: of the files in its folder.
    """

    cpu_s: float
    memory_bytes: int
    processes: int
    file_bytes: int


class Usage:
    """Looks at what is below this process.

    Args:
        first: the first process of the jail, which is not the code's.
        limits: of the code.
        folder: of the code, to be looked at; None where the kernel bounds it.
    """

    def __init__(self, first: int, limits: WatchedLimits, folder: str | None) -> None:
        self._first = first
        self._limits = limits
        self._folder = folder
        self._seen: dict[int, float] = {}
        self._spent_s = 0.0
        self._own_bytes = _read_memory(os.getpid())  # the interpreter's, which is a copy of ours

    def begin_run(self) -> None:
        """Let the processor time of the next run begin."""
        self._spent_s = 0.0

    def breach(self) -> Breach | None:
        """Return which limit is broken, as a report; None if none is."""
        processes, threads, memory = [p for p in list_descendants() if p != self._first], 0, 0
        seen: dict[int, float] = {}
        for pid in processes:
            with suppress(OSError):  # it has ended meanwhile
                spent, count = _read_stat(pid)
                memory += _read_memory(pid)
                threads += count
                seen[pid] = spent
                self._spent_s += max(0.0, spent - self._seen.get(pid, 0.0))
        self._seen = seen
        limits = self._limits
        if self._spent_s > limits.cpu_s:
            return _report("timeout", f"took more than {limits.cpu_s:g} s of processor time")
        if threads > limits.processes:
            return _report("killed", f"had more than {limits.processes} processes and threads")
        most = limits.memory_bytes + self._own_bytes
        if memory > most and sum(map(_shared_out, processes)) > most:
            megabytes = limits.memory_bytes // MB
            return _report("memory", f"took more than {megabytes} MB of memory")
        if self._folder is not None and _folder_bytes(self._folder, processes) > limits.file_bytes:
            megabytes = limits.file_bytes // MB
            return _report("killed", f"its files took more than {megabytes} MB, or were too many")
        return None


def _report(failure: str, reason: str) -> Breach:
    return {"failure": failure, "reason": reason}


def _read_stat(pid: int) -> tuple[float, int]:
    """Return the seconds of processor time of a process, and its threads."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS, int(fields[17])


def _read_memory(pid: int) -> int:
    """Return the bytes of a process's memory that are no files; shared ones count in each."""
    with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
        rows = [row.split() for row in file if row.startswith((b"RssAnon", b"RssShmem"))]
    return sum(int(row[1]) for row in rows) * 1024


def _shared_out(pid: int) -> int:
    """Return the same, but of what is shared a fair part."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123
            rows = [row.split() for row in file if row.startswith((b"Pss_Anon", b"Pss_Shmem"))]
    except OSError:
        return 0  # it has ended
    return sum(int(row[1]) for row in rows) * 1024


def _folder_bytes(folder: str, processes: list[int]) -> float:
    """Return the bytes in a folder and in removed files that are still open; inf if uncountable."""
    files: dict[tuple[int, int], int] = {}
    folders = [folder]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except FileNotFoundError:
            continue
        except OSError:  # too deep, or closed to its own user
            return math.inf
        for entry in entries:
            with suppress(OSError):
                _count(files, entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        if len(files) > MAX_FOLDER_FILES:
            return math.inf
    for pid in processes:
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                with suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{fd}")  # noqa: PTH116
                    if status.st_nlink == 0:
                        _count(files, status)
    return sum(files.values())


def _count(files: dict[tuple[int, int], int], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        files[status.st_dev, status.st_ino] = status.st_blocks * 512

"""Starts the jail of one session of code, watches it, and leaves nothing of it behind.

Three processes: this one, below it the first process of the jail, which reaps what the code leaves,
and below that the one that runs code. When the first two or whoever has asked for the session have
ended, or the code breaks a limit, all that is below this process is killed.
"""

import ast
import atexit
import builtins
import io
import json
import linecache
import math
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NamedTuple, NoReturn

from jaxrl_llm.sandbox import jail
from jaxrl_llm.workers.supervisor import (
    adopt_orphans,
    end_descendants,
    ignore_signals,
    list_descendants,
    poll_for,
    reap,
)

STDIN_FILE = ".stdin"
MAX_REASON_CHARS = 300
Outcome = tuple[str | None, str]  # the failure, and its reason


# Runs code inside the jail, and answers over a pipe that the code may write to as well.
#
# Whatever happens here, the code may have done: whoever reads the answers believes none of them.


def serve_code(requests: int, answers: int, *, keep_state: bool) -> NoReturn:
    """Run code as it is asked for, until nobody asks any more.

    Args:
        requests: descriptor of the pipe on which lines of JSON come.
        answers: descriptor of the pipe for the answers.
        keep_state: whether the code finds the names that earlier code has bound.
    """
    own, runs = os.getpid(), 0
    builtins.exit = builtins.quit = sys.exit  # which the module `site` would define
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            request, runs = json.loads(line), runs + 1
            name = f"<run {runs}>" if keep_state else "<code>"
            failure, reason = _run(request, name, names, finish=not keep_state)
            if os.getpid() != own:  # a child that the code has forked
                os._exit(0)
            answer = {"nonce": request["nonce"], "failure": failure, "reason": reason}
            os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _open_streams() -> None:
    """Let the code write text of any kind to descriptors 1 and 2."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115
            fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open_stdin(text: str) -> None:
    """Let the code read its input from descriptor 0, which may be a file without a name."""
    opened = os.open(STDIN_FILE, os.O_RDWR | os.O_CREAT, 0o600) if text else os.open("/dev/null", 0)
    if text:
        os.unlink(STDIN_FILE)  # noqa: PTH108
    os.dup2(opened, 0)
    os.close(opened)
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(0, data) :]
    if text:
        os.lseek(0, 0, os.SEEK_SET)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _run(request: dict[str, str], name: str, names: dict[str, Any], *, finish: bool) -> Outcome:
    """Run code, show the value of its last expression, and tell what came of it."""
    _open_streams()
    outcome = _outcome(lambda: _open_stdin(request["stdin"]))  # its folder may be full
    outcome = outcome if outcome[0] else _outcome(lambda: _execute(request["code"], name, names))
    if finish:
        ended = _outcome(_finish)
        outcome = outcome if outcome[0] else ended
    flushed = _outcome(lambda: (sys.stdout.flush(), sys.stderr.flush()))
    return outcome if outcome[0] else flushed


def _outcome(act: Callable[[], object]) -> Outcome:
    try:
        act()
    except SystemExit as error:
        return _exit_outcome(error.code)
    except BaseException as error:  # Ctrl-C of the code's own included
        return _failure(error)
    return None, ""


def _exit_outcome(code: object) -> Outcome:
    if code is None or code == 0:
        return None, ""
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
    return "error", f"SystemExit: {code}"[:MAX_REASON_CHARS]


def _failure(error: BaseException) -> Outcome:
    kind = "memory" if isinstance(error, MemoryError) else "error"
    try:
        frames = _frames_of_code(error.__traceback__)
        traceback.print_exception(type(error), error, frames)
        reason = traceback.format_exception_only(type(error), error)[-1].strip()
    except BaseException:  # an exception of the code's own that can't be shown; or no memory
        return kind, type(error).__name__
    return kind, reason.encode("utf-8", "replace").decode()[:MAX_REASON_CHARS]


def _frames_of_code(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without our own frames."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _execute(code: str, name: str, names: dict[str, Any]) -> None:
    linecache.cache[name] = (len(code), None, io.StringIO(code, newline=None).readlines(), name)
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(_compile(tree, name), names)
        return
    tree.body.pop()
    exec(_compile(tree, name), names)
    value = eval(_compile(ast.Expression(last.value), name), names)
    if value is not None:
        print(repr(value))  # noqa: T201


def _compile(tree: ast.Module | ast.Expression, name: str) -> CodeType:
    kind = "eval" if isinstance(tree, ast.Expression) else "exec"
    return compile(tree, name, kind, dont_inherit=True)


def _finish() -> None:
    """Do what an interpreter does at its end, which code may count on."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


MAX_FOLDER_FILES = 4096
MB = 10**6
TICKS = os.sysconf("SC_CLK_TCK")
Breach = dict[str, Any]


class Usage:
    """Looks at what is below this process.

    Args:
        first: the first process of the jail, which is not the code's.
        limits: of the code.
        folder: of the code, to be looked at; None where the kernel bounds it.
    """

    def __init__(self, first: int, limits: jail.CodeLimits, folder: str | None) -> None:
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
        most = limits.memory_mb * MB + self._own_bytes
        if memory > most and sum(map(_shared_out, processes)) > most:
            return _report("memory", f"took more than {limits.memory_mb} MB of memory")
        folder, most = self._folder, limits.file_mb * MB
        if folder is not None and _folder_bytes(folder, processes) > most:
            reason = f"its files took more than {limits.file_mb} MB, or were too many"
            return _report("killed", reason)
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


RUN_POLL_S = 0.05  # between two looks at what a run takes
IDLE_POLL_S = 1.0  # the same, between two runs
FIRST_USERS, LAST_USERS = 1_900_000_000, 2_100_000_000  # which systems give to nobody
FOLDER_PREFIX = "jaxrl_llm-code-"
RUN_BEGINS, RUN_ENDS = b"r", b"i"  # what the asker tells over the lifeline
READY = b"ready"  # what we tell it first


class LaunchedSession(NamedTuple):
    """What a launcher is told.

    Attributes:
        lifeline: descriptor of the connection over which the asker says when runs begin and end,
            and we how the session ended; it ends when the asker closes it.
        requests: descriptor for the runner's requests.
        answers: descriptor for its answers.
        parent: the asker's process id.
        layers: of `Layers`.
        readable: of `JailOptions`.
        programs: of `JailOptions`.
        search: where the code's imports are looked up, beside the standard library.
        temporary: the folder in which the code gets one, where there are no namespaces.
        limits: of `CodeLimits`.
        keep_state: of the runner.
    """

    lifeline: int
    requests: int
    answers: int
    parent: int
    layers: list[Any]
    readable: list[str]
    programs: list[str]
    search: list[str]
    temporary: str
    limits: list[Any]
    keep_state: bool


def launch_session(session: LaunchedSession) -> NoReturn:
    """Start a session, and end with it."""
    ignore_signals()
    os.umask(0o022)
    os.chdir("/")
    limits = jail.CodeLimits(*session.limits)
    report, child, folder = {"failed": "it has not started"}, None, None
    adopts = adopt_orphans()
    try:
        if not adopts:
            raise OSError("the kernel does not tell the children of a process in /proc")
        options, folder = _options(session, limits)
        child, trouble = _start(session, options)
        _release(session)
        words = _read_all(trouble)
        usage = Usage(child, limits, folder)
        if not words:
            os.write(session.lifeline, READY)
        report = {"failed": words} if words else _watch(session, child, usage)
    except OSError as error:
        report = {"failed": str(error)}
    if report is not None:
        with suppress(OSError):
            os.write(session.lifeline, json.dumps(report).encode())
    if child is not None:
        end_descendants(child, adopts)
    if folder is not None:
        _remove(folder)
    os._exit(0)


def _options(
    session: LaunchedSession, limits: jail.CodeLimits
) -> tuple[jail.JailOptions, str | None]:
    """Return what the jail is made of, and the folder to remove at its end."""
    layers = jail.Layers(*session.layers)
    user = _unused_user() if layers.own_user else None
    folder = None
    if not layers.namespaces:
        import tempfile  # which takes long to import

        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=session.temporary)
        if user is not None:
            os.chown(folder, user, user)
    options = jail.JailOptions(
        layers=layers,
        readable=tuple(sorted(session.readable, key=len)),
        programs=tuple(session.programs),
        folder=folder or jail.FOLDER,
        user=user,
        file_bytes=limits.file_mb * MB,
        memory_bytes=limits.memory_mb * MB + jail.reserved_bytes(),
        processes=limits.processes + (0 if layers.own_user else _own_tasks(layers)),
        cpu_s=None if session.keep_state else int(limits.cpu_s) + 1,
    )
    return options, folder


def _unused_user() -> int:
    """Return a user id that nobody else is likely to have, among those that we may become."""
    ranges = [
        (int(first), int(count))
        for first, _, count in (line.split() for line in open("/proc/self/uid_map"))  # noqa: PTH123, SIM115
    ]
    first, count = max(ranges, key=lambda r: r[1])
    if first + count > LAST_USERS:
        first, count = FIRST_USERS, LAST_USERS - FIRST_USERS
    else:
        first, count = first + count // 2, count // 2
    return first + int.from_bytes(os.urandom(8), "little") % count


def _own_tasks(layers: jail.Layers) -> int:
    """Return how many processes and threads the kernel counts for this user beside the code's."""
    if layers.namespaces:
        return 2  # this process, and the first one of the jail
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            count += len(list(path.glob("task/*"))) if path.stat().st_uid == os.getuid() else 0
    return count


def _start(session: LaunchedSession, options: jail.JailOptions) -> tuple[int, int]:
    """Fork the first process of the jail; return its id, and where it tells what went wrong."""
    trouble, tell = os.pipe()
    if options.layers.namespaces:
        jail.enter_namespaces()
    launcher = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(session.lifeline)
            os.close(trouble)
            jail.die_with_parent(0 if options.layers.namespaces else launcher)
            _be_first(session, options, tell)
        except BaseException as error:  # there is nobody above us
            _tell(tell, error)
        os._exit(1)
    os.close(tell)
    return child, trouble


def _be_first(session: LaunchedSession, options: jail.JailOptions, tell: int) -> NoReturn:
    """Start the process that runs code, reap what it leaves, and end as it did."""
    if options.layers.namespaces:
        jail.enter_small_root(options)
    first = os.getpid()
    runner = os.fork()
    if runner == 0:
        try:
            _become_runner(session, options, tell, first)
        except BaseException as error:  # there is nobody above us
            _tell(tell, error)
        os._exit(1)
    os.close(tell)
    _release(session)
    while True:
        pid, status = os.wait()
        if pid == runner:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _become_runner(
    session: LaunchedSession, options: jail.JailOptions, tell: int, first: int
) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o077)
    os.chdir(options.folder)
    os.environ.update(HOME=options.folder, TMPDIR=options.folder, PWD=options.folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "jaxrl_llm"]:
        del sys.modules[name]
    sys.path[:] = [os.path.realpath(path) for path in sys.path if "jaxrl_llm" not in path]
    sys.path += session.search
    sys.argv[:] = [""]
    sys.executable = session.programs[0]
    requests, answers, tell = _keep_alone(session.requests, session.answers, tell)
    try:
        jail.confine(options, first)
    except BaseException as error:
        _tell(tell, error)
        os._exit(1)
    os.close(tell)
    serve_code(requests, answers, keep_state=session.keep_state)


def _keep_alone(*descriptors: int) -> list[int]:
    """Move descriptors to the numbers from 3 on, and close all others but the first three."""
    high = [os.dup2(fd, 100 + i) for i, fd in enumerate(descriptors)]
    kept = [os.dup2(fd, 3 + i, inheritable=False) for i, fd in enumerate(high)]
    os.closerange(3 + len(kept), os.sysconf("SC_OPEN_MAX"))
    return kept


def _release(session: LaunchedSession) -> None:
    """Close what belongs to the code alone, so that its end is seen at the other end."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (1, 2, session.requests, session.answers):
        os.dup2(null, fd)
    os.close(null)


def _watch(session: LaunchedSession, child: int, usage: Usage) -> dict[str, Any] | None:
    """Wait until the session must end; return how it ended, or None if the asker ends it."""
    poller, awake = poll_for(session.lifeline)
    pause = IDLE_POLL_S
    while os.getppid() == session.parent:  # a copy of the lifeline may be held by others
        status = reap(child, True)
        if status is not None:
            return {"exit": os.waitstatus_to_exitcode(status)}
        events = [fd for fd, _ in poller.poll(pause * 1000)]
        if session.lifeline in events:
            words = os.read(session.lifeline, 16)
            if not words:
                return None
            pause = RUN_POLL_S if words == RUN_BEGINS else IDLE_POLL_S
            if words == RUN_BEGINS:
                usage.begin_run()
        with suppress(BlockingIOError):
            os.read(awake, 4096)
        breach = usage.breach()
        if breach is not None:
            return breach
    return None


def _read_all(fd: int) -> str:
    with os.fdopen(fd, "rb") as file:
        return file.read().decode("utf-8", "replace")


def _tell(fd: int, error: BaseException) -> None:
    with suppress(OSError):
        os.write(fd, (str(error) or type(error).__name__).encode("utf-8", "replace")[:4096])


def _remove(folder: str) -> None:
    """Remove the code's folder, however deep it is and whatever its modes are."""
    import shutil  # these take long to import
    import subprocess

    environment = {"PATH": "/usr/bin:/bin"}
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        with suppress(OSError):
            null = subprocess.DEVNULL
            subprocess.run([*command, folder], env=environment, stderr=null, check=False)
    shutil.rmtree(folder, ignore_errors=True)  # where the machine lacks these programs

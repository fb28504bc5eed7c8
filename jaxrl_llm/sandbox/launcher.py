"""Starts the jail of one session of code, watches it, and leaves nothing of it behind.

Three processes: this one, below it the first process of the jail, which reaps what the code leaves,
and below that the one that runs code. When the first two or whoever has asked for the session have
ended, or the code breaks a limit, all that is below this process is killed.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxrl_llm.sandbox import jail
from jaxrl_llm.sandbox.runner import serve_code
from jaxrl_llm.sandbox.watch import Usage, WatchedLimits
from jaxrl_llm.workers.descendants import (
    adopt_orphans,
    end_descendants,
    ignore_signals,
    poll_for,
    reap,
)

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
        limits: of `WatchedLimits`.
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
    limits = WatchedLimits(*session.limits)
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
    session: LaunchedSession, limits: WatchedLimits
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
        file_bytes=limits.file_bytes,
        memory_bytes=limits.memory_bytes + jail.reserved_bytes(),
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

"""The level `process`: CPython, kept from the machine by Linux's kernel (docs/sandbox.md)."""

import functools
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.sandbox.interpreter import (
    BoundedOutput,
    CodeLimits,
    CodeResult,
    Failure,
    Interpreter,
)
from jaxrl_llm.sandbox.jail import AUDIT_ARCHS, Layers, landlock_version
from jaxrl_llm.sandbox.launcher import READY, RUN_BEGINS, RUN_ENDS, LaunchedSession

PACKAGE_ROOT = str(Path(__file__).parents[2])  # where this package was imported from
LAUNCHER_PROGRAM = (
    "import json, sys; root, options = json.loads(sys.argv[1]); sys.path.append(root);"
    " from jaxrl_llm.sandbox.launcher import LaunchedSession, launch_session;"
    " sys.path.remove(root);"
    " launch_session(LaunchedSession(*options))"
)
SYSTEM_FILES = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"),
    *("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"),
)
"""What code may read of the system: libraries and time zones."""

ENVIRONMENT = {
    **{"LANG": "C.UTF-8", "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
    **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}
READ_BYTES = 2**16
MAX_ANSWER_BYTES = 8192
MAX_REASON_CHARS = 500
START_TIMEOUT_S = 60.0  # for an interpreter to be ready; none of it is the code's time
END_TIMEOUT_S = 60.0  # for a launcher to kill what is below it, and to remove its files
FORGED = "wrote to the pipe of its interpreter"


# One session of code at the level `process`: the pipes to its interpreter, and what comes back.
#
# Nothing here blocks on what the code does or leaves undone, and nothing that it writes is
# believed.


class SessionEnded(Exception):
    """The session has ended, or must.

    Args:
        failure: of the run.
        reason: of the failure.
    """

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure: Failure = failure
        self.reason = reason


class CodeSession:
    """A launcher and the interpreter below it, and the pipes to them.

    Raises:
        SessionEnded: there can be none.
        OSError: this process may open or start no more.
    """

    def __init__(self, limits: CodeLimits, layers: Layers, keep_state: bool) -> None:
        self._limits = limits
        with ExitStack() as ours, ExitStack() as theirs:
            self._lifeline, lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(self._lifeline.close)
            theirs.callback(lifeline.close)
            requests, self._requests = _open_pipe(theirs, ours)
            self._answers, answers = _open_pipe(ours, theirs)
            outputs_of = (_open_pipe(ours, theirs) for _ in range(2))
            self._outputs, outputs = zip(*outputs_of, strict=True)
            self._lifeline.setblocking(False)
            for fd in (self._requests, self._answers, *self._outputs):
                os.set_blocking(fd, False)
            session = LaunchedSession(
                lifeline=lifeline.fileno(),
                requests=requests,
                answers=answers,
                parent=os.getpid(),
                layers=list(layers),
                temporary=tempfile.gettempdir(),
                limits=list(limits),
                keep_state=keep_state,
                **_files_of_code(),
            )
            options = json.dumps([PACKAGE_ROOT, session])
            command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", LAUNCHER_PROGRAM, options]
            self._launcher = subprocess.Popen(
                command,
                env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(session.search)},
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
                pass_fds=[session.lifeline, requests, answers],
                start_new_session=True,
            )
            self._ours = ours.pop_all()
        self._await_start()

    def _await_start(self) -> None:
        self._lifeline.settimeout(START_TIMEOUT_S)
        try:
            report = self._lifeline.recv(READ_BYTES)
        except OSError as error:
            self.close()
            raise SessionEnded("unavailable", f"the interpreter does not start: {error}") from None
        if report != READY:
            wrong = _describe_end(report, self._limits)
            errors = BoundedOutput(MAX_REASON_CHARS)
            _drain(self._outputs[1], errors)
            self.close()
            raise SessionEnded("unavailable", f"{wrong.reason} {errors.text()}".strip())
        self._lifeline.setblocking(False)

    def run(
        self, code: str, stdin: str, outputs: tuple[BoundedOutput, BoundedOutput]
    ) -> tuple[Failure | None, str]:
        """Run code; return what kind of failure it was and why, if it was one.

        Raises:
            SessionEnded: the session can't go on.
        """
        deadline = time.monotonic() + self._limits.wall_s
        nonce = secrets.token_hex(16)
        request = json.dumps({"nonce": nonce, "code": code, "stdin": stdin}).encode() + b"\n"
        self._tell_launcher(RUN_BEGINS)
        try:
            line = self._exchange(request, outputs, deadline)
            answer = _decode_answer(line, nonce)
            self._tell_launcher(RUN_ENDS)
            return answer
        finally:
            for fd, kept in zip(self._outputs, outputs, strict=True):
                _drain(fd, kept)

    def _exchange(
        self, request: bytes, outputs: tuple[BoundedOutput, BoundedOutput], deadline: float
    ) -> bytes:
        """Send a request, and read what is written until its answer has come."""
        rest, answer = memoryview(request), b""
        sinks = dict(zip(self._outputs, outputs, strict=True))
        with selectors.DefaultSelector() as selector:
            selector.register(self._lifeline, selectors.EVENT_READ)
            selector.register(self._requests, selectors.EVENT_WRITE)
            for source in (self._answers, *sinks):
                selector.register(source, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SessionEnded("timeout", f"took longer than {self._limits.wall_s:g} s")
                ready = {key.fd for key, _ in selector.select(left)}
                if self._requests in ready:
                    rest = rest[_write(self._requests, rest) :]
                ended = {fd for fd in sinks.keys() & ready if not _read_into(fd, sinks[fd].write)}
                if self._answers in ready:
                    data = _read(self._answers)
                    answer += data
                    ended |= set() if data else {self._answers}
                if answer.endswith(b"\n"):
                    return answer
                if len(answer) > MAX_ANSWER_BYTES:
                    raise SessionEnded("killed", FORGED)
                if self._lifeline.fileno() in ready:
                    raise _describe_end(_read(self._lifeline.fileno()), self._limits)
                for fd in ended if rest else ended | (ready & {self._requests}):
                    selector.unregister(fd)

    def _tell_launcher(self, word: bytes) -> None:
        with suppress(OSError):  # it has ended, which is seen when its report is read
            self._lifeline.send(word)

    def close(self) -> None:
        """Have the launcher kill all that is below it, and wait until it has."""
        with suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)
        try:
            self._launcher.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it is stopped, or something can't be killed
            self._launcher.kill()
            self._launcher.wait()
        self._ours.close()


def _open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Return the ends of a pipe, which are closed with these."""
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


@functools.cache
def _files_of_code() -> dict[str, Any]:
    """Return what code may read and run, as `LaunchedSession` has it."""
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    search = [os.path.realpath(paths[name]) for name in ("purelib", "platlib")]
    readable = {os.path.realpath(p) for p in (*libraries, f"{sys.base_prefix}/lib")}
    readable |= {p for p in SYSTEM_FILES if os.path.exists(p)}  # noqa: PTH110
    return {
        "readable": sorted(p for p in readable if os.path.exists(p)),  # noqa: PTH110
        "programs": [os.path.realpath(sys.executable), *_loaders()],
        "search": list(dict.fromkeys(search)),
    }


def _loaders() -> list[str]:
    """Return the programs that load others, without which none can start."""
    loaders = (p for folder in ("/lib64", "/lib") for p in Path(folder).glob("ld-*.so*"))
    return sorted({os.path.realpath(path) for path in loaders})


def _decode_answer(line: bytes, nonce: str) -> tuple[Failure | None, str]:
    """Return what an answer says; nothing is taken on trust, for the code may have written it.

    Raises:
        SessionEnded: it is no answer.
    """
    try:
        answer = json.loads(line)
        kind, reason, given = answer["failure"], answer["reason"], answer["nonce"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind, reason, given = None, None, None
    sound = kind is None or kind in ("error", "memory")  # others are not the code's to tell
    if not sound or not isinstance(reason, str) or given != nonce:
        raise SessionEnded("killed", FORGED)
    reason = " ".join(reason[:MAX_REASON_CHARS].split())
    return cast(Failure | None, kind), reason.encode("utf-8", "replace").decode()


def _describe_end(report: bytes, limits: CodeLimits) -> SessionEnded:
    """Return how a session has ended, as its launcher says."""
    if not report:
        return SessionEnded("unavailable", "the interpreter's launcher has ended.")
    end = json.loads(report)
    if "failed" in end:
        return SessionEnded("unavailable", f"the interpreter can't start: {end['failed']}")
    if "exit" in end:
        return _describe_exit(end["exit"], limits)
    return SessionEnded(end["failure"], end["reason"])


def _describe_exit(code: int, limits: CodeLimits) -> SessionEnded:
    if code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
        return SessionEnded("timeout", f"took more than {limits.cpu_s:g} s of processor time")
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        with suppress(ValueError):
            name = signal.Signals(number).name
            return SessionEnded("killed", f"its interpreter was ended by {name}")
    return SessionEnded(
        "error", f"ended its interpreter with exit code {code} before the code's end"
    )


def _write(fd: int, data: memoryview) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0
    except OSError:  # the other side has closed it, which its end will tell
        return len(data)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, READ_BYTES)
    except OSError:
        return b""


def _read_into(fd: int, write: Any) -> bool:
    data = _read(fd)
    write(data)
    return bool(data)


def _drain(fd: int, kept: BoundedOutput) -> None:
    """Take what is in a pipe now; of what others still write, no more than it can hold."""
    for _ in range(64):
        if not _read_into(fd, kept.write):
            return


log = logging.getLogger(__name__)

STATE_LOST = "; the names of earlier runs are lost"


class ProcessInterpreter(Interpreter):
    """Runs code in a process of its own, behind the layers that this machine has.

    Args:
        limits: of each run.
        layers: to use.
        keep_state: whether a run finds the names that earlier runs have bound.
    """

    def __init__(self, limits: CodeLimits, layers: Layers, *, keep_state: bool) -> None:
        self._limits = limits
        self._layers = layers
        self._keep_state = keep_state
        self._session: CodeSession | None = None

    def run(self, code: str, *, stdin: str = "") -> CodeResult:
        """Run code, and show the value of its last expression as a notebook does."""
        began = time.monotonic()
        outputs = BoundedOutput(self._limits.output_bytes), BoundedOutput(self._limits.output_bytes)
        failure, reason = None, ""
        try:
            if self._session is None:
                self._session = CodeSession(self._limits, self._layers, self._keep_state)
            failure, reason = self._session.run(code, stdin, outputs)
            if not self._keep_state:
                self.close()
        except SessionEnded as error:
            self.close()
            failure, reason = error.failure, error.reason
            reason += STATE_LOST if self._keep_state else ""
        except OSError as error:  # as where a worker has too many open files
            self.close()
            failure, reason = "unavailable", f"can't run code: {error}"
        except BaseException:
            self.close()
            raise
        output, errors = (kept.text() for kept in outputs)
        return CodeResult(output, errors, failure, reason, time.monotonic() - began)

    def close(self) -> None:
        """Kill everything that the code has started, and remove its files."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


@functools.cache
def find_layers() -> Layers:
    """Return what this machine has to keep code from it, by trying; once per process.

    Raises:
        ConfigError: it lacks what is always needed, which is named.
    """
    if sys.platform != "linux":
        raise ConfigError(f"sandbox process: expected Linux, got {sys.platform}")
    if os.uname().machine not in AUDIT_ARCHS:
        wanted = " or ".join(AUDIT_ARCHS)
        raise ConfigError(f"sandbox process: expected {wanted}, got {os.uname().machine}")
    version = landlock_version()
    if version == 0:
        raise ConfigError(
            "sandbox process: expected Landlock (Linux 5.13 or later with `landlock` in"
            " /sys/kernel/security/lsm, and a container that allows it), got none in Linux"
            f" {os.uname().release}"
        )
    reasons = []
    for namespaces in (True, False):
        layers = Layers(version, namespaces, own_user=os.geteuid() == 0)
        with ProcessInterpreter(CodeLimits(), layers, keep_state=False) as interpreter:
            result = interpreter.run("6 * 7")
        if result.output == "42\n" and result.failure is None:
            log.info("sandbox process: %s", describe_layers(layers, reasons))
            return layers
        reasons.append(result.reason or result.errors)
    raise ConfigError(f"sandbox process: {reasons[-1]}; with namespaces: {reasons[0]}")


def describe_layers(layers: Layers, reasons: list[str]) -> str:
    """Return what keeps code from the machine, in a line.

    >>> describe_layers(Layers(7, True, False), [])
    'Landlock 7, seccomp, namespaces'
    """
    parts = [f"Landlock {layers.landlock}", "seccomp"]
    parts += ["namespaces"] if layers.namespaces else []
    parts += ["a user of its own"] if layers.own_user else []
    why = f" (no namespaces: {reasons[0]})" if reasons else ""
    return ", ".join(parts) + why


def open_level(limits: CodeLimits, *, keep_state: bool, url: str | None) -> ProcessInterpreter:
    """Return an interpreter.

    Raises:
        ConfigError: this machine lacks what it needs.
    """
    return ProcessInterpreter(limits, find_layers(), keep_state=keep_state)

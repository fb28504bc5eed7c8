"""Worker processes that answer tasks: started when there is work, replaced when they are lost.

The caller decides which worker gets which tasks, and what becomes of those of a worker that is
lost. One thread runs a pool; only `close` may be called from another.
"""

import functools
import json
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.workers.supervisor import (
    MAX_LINE_BYTES,
    MAX_LOAD_ERROR_CHARS,
    SupervisorOptions,
    discard,
    new_group_path,
)
from jaxrl_llm.workers.values import shorten

PASSED_VARIABLES = """
    PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE LC_* TZ TMPDIR TEMP TMP XDG_*
    VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV LD_LIBRARY_PATH LD_PRELOAD DYLD_*
    PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONWARNINGS
    PYTHONNOUSERSITE PYTHONUSERBASE PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
    PYTHONUNBUFFERED PYTHONFAULTHANDLER PYTHONMALLOC
    OMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* VECLIB_* MALLOC_* TOKENIZERS_PARALLELISM
    CUDA_VISIBLE_DEVICES CUDA_HOME JAX_PLATFORMS XLA_*
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_ENDPOINT HF_HUB_OFFLINE HF_DATASETS_OFFLINE
    TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE NLTK_DATA TIKTOKEN_CACHE_DIR
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
"""Names (`*` stands for any letters) of the variables that every worker gets. None of them usually
holds a secret, which a proxy's address may."""


class Limits(NamedTuple):
    """What each worker process may take.

    Args:
        memory_gb: GB of memory of each process; None sets no limit.
        max_processes: processes that a user's function may have started at once; None sets no
            limit.
        pass_env: names of environment variables that it gets beside `PASSED_VARIABLES`; `*` stands
            for any letters.
    """

    memory_gb: int | float | None = 4.0
    max_processes: int | None = 64
    pass_env: tuple[str, ...] = ()


def passed_environment(environment: Mapping[str, str], more: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that a worker gets: `PASSED_VARIABLES`, and those of a config.

    >>> passed_environment({"LC_ALL": "C", "HF_TOKEN": "x", "MY_URL": "y"}, ("MY_*",))
    {'LC_ALL': 'C', 'MY_URL': 'y'}
    """
    patterns = (*PASSED_VARIABLES.split(), *more)
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


# One worker process as its pool sees it: a supervisor, its worker, and what goes back and forth.
#
# Nothing here blocks on what the worker does or leaves undone, and nothing that it writes is more
# than text until it has been checked.

START_TIMEOUT_S = 120.0  # for a worker to come up: importing the user's module may be slow
STOP_TIMEOUT_S = 10.0  # for a supervisor to kill what is below it
END_REPORT_TIMEOUT_S = 1.0  # for a supervisor to say how its worker ended
READ_BYTES = 2**18
BAD_OUTPUT = "wrote something else than its answer on the pool's connection"
PACKAGE_ROOT = str(Path(__file__).parents[2])  # where this package was imported from
SUPERVISOR_PROGRAM = (
    "import json, sys; search, options = json.loads(sys.argv[1]); sys.path[:] = search;"
    " from jaxrl_llm.workers.supervisor import SupervisorOptions as Options, supervise;"
    " supervise(Options(*options))"
)


class WorkerProgram(NamedTuple):
    """What workers run, and how they start.

    Args:
        function: `module:function`, as of `SupervisorOptions.program`.
        keys: how the config's keys for the limits begin, for messages.
        limits: of each worker.
        folder: in which it starts; None: this process's.
        search: what is on its `sys.path` first.
    """

    function: str
    keys: str
    limits: Limits = Limits()
    folder: str | None = None
    search: Sequence[str] = ()


class Channel:
    """The pool's end of a connection: bytes go out and lines come in, and neither ever blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.closed = False  # by the other side
        self.incoming = bytearray()  # a part of a line
        self._outgoing = memoryview(b"")

    def send(self, data: bytes) -> None:
        """Send what the other side takes at once; `flush` sends more."""
        self._outgoing = memoryview(bytes(self._outgoing) + data)
        self.flush()

    def flush(self) -> None:
        """Send more of what waits."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self.connection.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which `receive` tells once all that it wrote is read
            self._outgoing = memoryview(b"")

    def receive(self) -> list[bytes]:
        """Return the lines that are complete now."""
        try:
            data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self.incoming) + lines[0]
            self.incoming.clear()
        self.incoming += rest
        return lines

    @property
    def events(self) -> int:
        """What to wait for, as `selectors` has it."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)


def decode_load_error(line: bytes) -> str | None:
    """Return what a worker's first line says is wrong with what it should run; None if nothing is.

    Raises:
        ValueError: it is another line.

    >>> decode_load_error(b'{"load_error": null}')
    """
    try:
        first = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(first, dict) or first.keys() != {"load_error"}:
        raise ValueError(f"expected an object with load_error, got {shorten(repr(first))}")
    message = first["load_error"]
    return None if message is None else shorten(str(message), MAX_LOAD_ERROR_CHARS)


class WorkerProcess:
    """A worker with its supervisor, the items it was given, and when the first of them is overdue.

    Args:
        program: what it runs.
        spec: what it is told first, as a pickle.
        timeout_s: seconds that one item may take.
    """

    def __init__(self, program: WorkerProgram, spec: Any, timeout_s: float) -> None:
        ours, answers = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self._group = new_group_path()
        limits = program.limits
        options = SupervisorOptions(
            answers=answers.fileno(),
            lifeline=lifeline.fileno(),
            parent=os.getpid(),
            memory_gb=limits.memory_gb,
            max_processes=limits.max_processes,
            group=self._group,
            program=program.function,
            keys=program.keys,
        )
        search = [*program.search, *sys.path, PACKAGE_ROOT]
        with ExitStack() as undo, answers, lifeline:
            undo.enter_context(ours)
            undo.enter_context(self._lifeline)
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR_PROGRAM, json.dumps([search, options])],
                cwd=program.folder,
                env=passed_environment(os.environ, limits.pass_env),
                stdin=subprocess.DEVNULL,
                pass_fds=[options.answers, options.lifeline],
                start_new_session=True,  # Ctrl-C is ours to handle
            )
            undo.pop_all()
        self.channel = Channel(ours)
        self.timeout_s = timeout_s
        self.ready = False
        self.pending: deque[int] = deque()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.channel.send(pickle.dumps(spec))

    @property
    def is_idle(self) -> bool:
        """Whether it has started, and has nothing to do."""
        return self.ready and not self.pending

    def submit(self, numbered: Sequence[tuple[int, Any]]) -> None:
        """Send it some items with their numbers; the first one's time begins."""
        self.pending.extend(number for number, _ in numbered)
        self.restart_deadline()
        self.channel.send(pickle.dumps(numbered))

    def restart_deadline(self) -> None:
        """Let the next item's time begin."""
        self.deadline = time.monotonic() + self.timeout_s

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wait for whatever this process may do next."""
        selector.register(self.channel.connection, self.channel.events, self)
        selector.register(self._lifeline, selectors.EVENT_READ, self)

    def has_activity(self) -> bool:
        """Tell whether something came, or it ended, though it has nothing to do."""
        with selectors.DefaultSelector() as selector:
            self.watch(selector)
            return bool(self.channel.incoming) or bool(selector.select(0))

    def has_ended(self) -> bool:
        """Tell whether nothing more will come from it."""
        if self.channel.closed:
            return True
        with selectors.DefaultSelector() as selector:
            self.watch(selector)
            readable = {key.fileobj for key, _ in selector.select(0)}
        return self._lifeline in readable and self.channel.connection not in readable

    def end_reason(self) -> str:
        """Return what its supervisor says of its end."""
        report = {"exit_code": "none yet", "reason": None}
        self._lifeline.settimeout(END_REPORT_TIMEOUT_S)
        with suppress(OSError, ValueError):  # it has closed our pipe, and is still there
            text = self._lifeline.recv(4096)
            report |= (
                json.loads(text) if text else {"reason": "ended, for its supervisor was killed"}
            )
        return report["reason"] or f"ended with exit code {report['exit_code']}"

    def kill(self) -> None:
        """Have its supervisor end it, from any thread; `stop` waits until that is done."""
        with suppress(OSError):  # the supervisor, or another thread, was sooner
            self._lifeline.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """End it with all that it has started."""
        self.kill()
        try:
            self._supervisor.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it is stopped, or something can't be killed
            os.killpg(self._supervisor.pid, signal.SIGKILL)
            self._supervisor.wait()
        if self._group is not None:
            discard(self._group)
        self.channel.connection.close()
        self._lifeline.close()


def stop_all(workers: list[WorkerProcess]) -> None:
    """End workers, and empty the list."""
    for worker in workers:  # all at once
        worker.kill()
    while workers:
        workers.pop().stop()


log = logging.getLogger(__name__)


class PoolEvent(NamedTuple):
    """An answer of a worker, or the loss of one, which the pool has ended.

    Attributes:
        worker: that has answered, or is lost.
        numbers: of the task that is answered, or of those that are not, in order.
        value: of the answer, as `decode` has read it.
        failure: None; of a worker that is lost `timeout`, `died`, or `invalid` where it wrote
            something else than answers.
        message: says how it was lost.
    """

    worker: WorkerProcess
    numbers: list[int]
    value: Any = None
    failure: str | None = None
    message: str = ""


class WorkerPool(ABC):
    """Worker processes with a time limit for each task; a subclass says what tasks are.

    Args:
        program: what workers run.
        spec: what they are told first, as a pickle.
        timeout_s: seconds that one task may take.
        name: of the pool, for the log.
        loads: what workers load, for messages.
    """

    def __init__(
        self, program: WorkerProgram, spec: Any, timeout_s: float, *, name: str, loads: str
    ) -> None:
        self._new_worker = functools.partial(WorkerProcess, program, spec, timeout_s)
        self._name, self._loads = name, loads
        self.workers: list[WorkerProcess] = []
        self.closed = threading.Event()
        self.stop = weakref.finalize(self, stop_all, self.workers)  # at exit, too

    @abstractmethod
    def decode(self, line: bytes, pending: Sequence[int]) -> list[tuple[int, Any]] | None:
        """Return what a line answers to pending tasks, if anything; None where it is no answer."""

    @abstractmethod
    def error(self, message: str) -> Exception:
        """Return what is raised where no worker can start."""

    def close(self) -> None:
        """Kill the workers, which wakes `poll`; `stop` waits until they have ended."""
        self.closed.set()
        for worker in list(self.workers):
            worker.kill()

    def dismiss(self, worker: WorkerProcess) -> None:
        """End a worker."""
        self.workers.remove(worker)
        worker.stop()

    def start_workers(self, count: int) -> None:
        """Start workers until there are so many, in place of idle ones that ended or wrote, too."""
        for worker in [w for w in self.workers if w.is_idle and w.has_activity()]:
            worker.channel.receive()
            reason = worker.end_reason() if worker.has_ended() else BAD_OUTPUT
            message = "%s: a process that had nothing to do %s; it is replaced"
            log.warning(message, self._name, reason)
            self.dismiss(worker)
        while len(self.workers) < count and not self.closed.is_set():
            self.workers.append(self._new_worker())

    def poll(
        self, wait_s: float | None = None, woken: socket.socket | None = None
    ) -> Iterator[PoolEvent]:
        """Wait until something happens, and yield what; nothing once the pool is closed.

        Who takes these does so at once: time limits of other workers run meanwhile.

        Args:
            wait_s: seconds to wait at most; None waits for what happens.
            woken: wakes this when it can be read.

        Raises:
            Exception: a worker can't start, as `error` has it.
        """
        busy = [worker for worker in self.workers if not worker.is_idle]
        now = time.monotonic()
        waits = [max(worker.deadline - now, 0.0) for worker in busy]
        waits += [] if wait_s is None else [wait_s]
        if self.closed.is_set():
            return
        with selectors.DefaultSelector() as selector:
            if woken is not None:
                selector.register(woken, selectors.EVENT_READ)
            for worker in busy:
                worker.watch(selector)
            active = {key.data for key, _ in selector.select(min(waits, default=None))}
        for worker in busy:
            if self.closed.is_set():
                return
            if worker in active:
                yield from self._receive(worker)
            is_busy = worker in self.workers and not worker.is_idle
            if is_busy and time.monotonic() > worker.deadline:
                fault = f"no answer within {worker.timeout_s:g} s"
                yield self._lose(worker, "timeout", fault)

    def _receive(self, worker: WorkerProcess) -> Iterator[PoolEvent]:
        """Take what a worker has written; it is lost where that is wrong, or when it has ended."""
        worker.channel.flush()
        lines = worker.channel.receive()
        for line in lines:
            if not worker.ready:
                self._check_loaded(worker, line)
                continue
            answers = self.decode(line, worker.pending)
            if answers is None:
                yield self._lose(worker, "invalid", BAD_OUTPUT)
                return
            worker.restart_deadline()
            for number, value in answers:
                worker.pending.remove(number)
                yield PoolEvent(worker, [number], value)
        if len(worker.channel.incoming) > MAX_LINE_BYTES:  # longer than any answer
            yield self._lose(worker, "invalid", BAD_OUTPUT)
        elif not lines and worker.has_ended():
            yield self._lose(worker, "died", worker.end_reason())

    def _check_loaded(self, worker: WorkerProcess, line: bytes) -> None:
        try:
            load_error = decode_load_error(line)
        except ValueError:
            self._lose(worker, "invalid", BAD_OUTPUT)
        else:
            if load_error is not None:
                self.dismiss(worker)
                raise self.error(f"a worker can't load {self._loads}: {load_error}")
            worker.ready = True

    def _lose(self, worker: WorkerProcess, kind: str, fault: str) -> PoolEvent:
        """End a worker for what it did, or did not do in time."""
        self.dismiss(worker)
        if not worker.ready:
            raise self.error(
                f"no worker came up within {START_TIMEOUT_S:g} s"
                if kind == "timeout"
                else f"a worker {fault} while it started; see its messages on stderr"
            )
        message = fault if kind == "timeout" else f"its process {fault}"
        return PoolEvent(worker, list(worker.pending), None, kind, message)

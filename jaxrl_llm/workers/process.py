"""One worker process as its pool sees it: a supervisor, its worker, and what goes back and forth.

Nothing here blocks on what the worker does or leaves undone, and nothing that it writes is more
than text until it has been checked.
"""

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.workers import descendants
from jaxrl_llm.workers.limits import DEFAULT_LIMITS, MAX_LINE_BYTES, Limits, passed_environment
from jaxrl_llm.workers.supervisor import SupervisorOptions

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
    """What workers run.

    Args:
        function: `module:function`, as of `SupervisorOptions.program`.
        keys: how the config's keys for the limits begin, for messages.
    """

    function: str
    keys: str


class LaunchOptions(NamedTuple):
    """How workers start: in which folder, with what on `sys.path`, within which limits."""

    folder: str | None = None
    search: Sequence[str] = ()
    limits: Limits = DEFAULT_LIMITS


LAUNCH_HERE = LaunchOptions()


class Channel:
    """The pool's end of a connection: bytes go out and lines come in, and neither ever blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.closed = False  # by the other side
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

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
            lines[0] = bytes(self._incoming) + lines[0]
            self._incoming.clear()
        self._incoming += rest
        return lines

    @property
    def has_partial_line(self) -> bool:
        """Whether a part of a line has come."""
        return bool(self._incoming)

    @property
    def is_overfull(self) -> bool:
        """Whether the line that comes in is longer than any answer."""
        return len(self._incoming) > MAX_LINE_BYTES

    @property
    def events(self) -> int:
        """What to wait for, as `selectors` has it."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)


class WorkerProcess:
    """A worker with its supervisor, the items it was given, and when the first of them is overdue.

    Args:
        program: what it runs.
        spec: what it is told first, as a pickle.
        timeout_s: seconds that one item may take.
        launch: how it starts.
    """

    def __init__(
        self, program: WorkerProgram, spec: Any, timeout_s: float, launch: LaunchOptions
    ) -> None:
        ours, answers = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self._group = descendants.new_group_path()
        limits = launch.limits
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
        search = [*launch.search, *sys.path, PACKAGE_ROOT]
        with ExitStack() as undo, answers, lifeline:
            undo.enter_context(ours)
            undo.enter_context(self._lifeline)
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR_PROGRAM, json.dumps([search, options])],
                cwd=launch.folder,
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
            return self.channel.has_partial_line or bool(selector.select(0))

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
            descendants.discard(self._group)
        self.channel.connection.close()
        self._lifeline.close()


def stop_all(workers: list[WorkerProcess]) -> None:
    """End workers, and empty the list."""
    for worker in workers:  # all at once
        worker.kill()
    while workers:
        workers.pop().stop()

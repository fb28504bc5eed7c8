"""One sidecar process, and the connection to it."""

import contextlib
import itertools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_llm.rollout.engine import EngineError
from jaxrl_llm.rollout.vllm.sidecar.jaxrl_temporary import remove

AUTH_TIMEOUT_S = 3.0  # until a caller has shown that it has the key
ACCEPT_INTERVAL_S = 0.05
MAX_CALLERS = 32  # at once; each takes a thread and two file descriptors


class _Caller(threading.Thread):
    """Asks the other end of a connection for the key.

    Attributes:
        connection: to the caller.
        deadline: for the whole exchange, by the monotonic clock.
        is_authenticated: whether both sides have shown each other that they have the key.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        """Begin to ask."""
        super().__init__(daemon=True, name="vllm-caller")
        self.connection, self._key = connection, key
        self.deadline = time.monotonic() + AUTH_TIMEOUT_S
        self.has_key = self.is_authenticated = False
        self.start()

    def run(self) -> None:
        # AssertionError: in Python 3.11, of a challenge in another form
        refused = (AuthenticationError, AssertionError, EOFError, OSError)
        with contextlib.suppress(*refused), Connection(os.dup(self.connection.fileno())) as stream:
            deliver_challenge(stream, self._key)
            self.has_key = True
            answer_challenge(stream, self._key)
            self.is_authenticated = True

    def drop(self) -> None:
        """End the connection, and the thread with it."""
        with contextlib.suppress(OSError):  # the caller has ended it already
            self.connection.shutdown(socket.SHUT_RDWR)
        self.join()
        self.connection.close()


def accept_authenticated(
    listener: socket.socket, key: bytes, is_over: Callable[[], bool]
) -> socket.socket | None:
    """Accept callers until one of them has the key; the connections of all others are closed.

    All are asked at the same time, so those that say nothing, or speak slowly, hold nobody up.
    `multiprocessing.connection.Listener` would ask one after the other, and wait for ever. Where
    there are more than `MAX_CALLERS`, the oldest without the key is dropped, else the oldest; the
    sidecar, if it is it, calls again.

    Args:
        listener: that is called.
        key: that both sides show each other that they have.
        is_over: whether to give up.

    Returns:
        the connection; None if it was given up.
    """
    listener.settimeout(ACCEPT_INTERVAL_S)
    callers: list[_Caller] = []  # the oldest first
    try:
        while not is_over():
            for caller in list(callers):
                is_asked = caller.is_alive() and time.monotonic() < caller.deadline
                if caller.is_authenticated:
                    callers.remove(caller)
                    return caller.connection
                if not is_asked:
                    callers.remove(caller)
                    caller.drop()
            if len(callers) == MAX_CALLERS:
                least = next((caller for caller in callers if not caller.has_key), callers[0])
                callers.remove(least)
                least.drop()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it has gone already, or this process has too many files open
                time.sleep(ACCEPT_INTERVAL_S)
                continue
            callers.append(_Caller(connection, key))
        return None
    finally:
        for caller in callers:
            caller.drop()


CODE = Path(__file__).parent / "sidecar"
LOG_LINES = 10
ERROR_LINE = re.compile(r"(?:.*\] +)?((?:\w+\.)*\w*Error: .+)")
POLL_INTERVAL_S = 0.2
BACKLOG = 128  # callers that the kernel holds until they are accepted
EXIT_TIMEOUT_S = 10.0  # for one that can't be killed from here to see its connection's end


class SidecarLost(EngineError):
    """A sidecar died, hung or could not be started."""


class RefusedError(EngineError):
    """A sidecar could not do what it was asked for; it lives."""


class Sidecar:
    """A process that runs `sidecar/jaxrl_sidecar.py`, in a session of its own.

    It calls back on a port that the kernel chooses, with a key that nobody else knows.

    Args:
        command: that starts Python.
        settings: for the sidecar, which get the address and the key here.
        log: file that its output is added to.
        host: address at which it finds this process.
        timeout_s: seconds for an answer, and for any sign of life or progress.
        receive: called with the number of a request and each piece of its answer.

    Raises:
        EngineError: there is no such program.

    Attributes:
        shared: whether it sees this process's memory.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        log: Path,
        *,
        host: str,
        timeout_s: float,
        receive: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """Start the process and return; see `wait_ready`."""
        self._log, self._timeout_s, self._receive = log, timeout_s, receive
        self.shared = False
        self._key = secrets.token_bytes(32)
        self._token = secrets.token_hex(6)  # ends the name of the folder for its temporary files
        self._folder: Path | None = None
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None  # of the connection
        self._sending, self._closing = threading.Lock(), threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}
        self._ready = threading.Event()
        self._failure = ""  # what it said before it ended
        self._reason: SidecarLost | None = None  # why it was given up
        self._ended = False
        self._progress: Any = None
        self._progressed = self._heard = time.monotonic()
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        with contextlib.ExitStack() as failed, log.open("ab") as output:
            failed.callback(self._listener.close)
            self._log_start = output.tell()
            try:
                self._process = subprocess.Popen(
                    [*command, str(CODE / "jaxrl_sidecar.py")],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=env,  # nothing of this process's paths
                )
            except OSError as error:
                raise EngineError(
                    f"can't start the vLLM sidecar by {command[0]!r}: {error}"
                ) from error
            failed.pop_all()
        self._address: tuple[str, int] = self._listener.getsockname()
        address = (host, self._address[1])
        identity = {"address": address, "key": self._key.hex(), "token": self._token}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps({**settings, **identity}).encode() + b"\n")
        threading.Thread(target=self._serve, daemon=True, name="vllm-sidecar").start()

    def wait_ready(self, seconds: float) -> None:
        """Return when it has its engine.

        Raises:
            SidecarLost: it ended, or the time is over.
        """
        until = time.monotonic() + seconds
        while not self._ready.wait(POLL_INTERVAL_S):
            if self._ended:
                raise SidecarLost("the vLLM sidecar was closed")
            self._check_alive()
            if time.monotonic() > until:
                raise self._lost(f"was not ready in {seconds:g} s")

    def watch(self, is_busy: Callable[[], bool]) -> NoReturn:
        """Wait until it is lost.

        Args:
            is_busy: whether tokens should come.

        Raises:
            SidecarLost: it ended, was silent for `timeout_s`, did nothing though it was busy, did
                not answer what it was asked, or was closed.
        """
        while not self._ended:
            self._check_alive()
            now = time.monotonic()
            if not is_busy():
                self._progressed = now
            if now - self._heard > self._timeout_s:
                raise self._lost(f"was silent for {self._timeout_s:g} s")
            if now - self._progressed > self._timeout_s:
                raise self._lost(f"made no token in {self._timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)
        raise self._reason or SidecarLost("the vLLM sidecar was closed")

    def send(
        self,
        op: str,
        data: memoryview | None = None,
        answer: Future[Any] | None = None,
        **fields: Any,
    ) -> int:
        """Send a message; return its number.

        Args:
            op: what is asked for.
            data: sent behind the message.
            answer: gets its only answer; None: `receive` gets each piece.
            **fields: of the message.

        Raises:
            SidecarLost: the connection has ended.
        """
        number = next(self._numbers)
        if answer is not None:
            self._answers[number] = answer
        message = {"id": number, "op": op, "data": data is not None, **fields}
        try:
            with self._sending:
                assert self._connection is not None
                self._connection.send_bytes(json.dumps(message).encode())
                if data is not None:
                    self._connection.send_bytes(data)
        except (OSError, ValueError) as error:  # closed by the other side, or by this one
            raise SidecarLost(f"the sidecar's connection has ended: {error}") from error
        return number

    def ask(self, op: str, data: memoryview | None = None, **fields: Any) -> Callable[[], Any]:
        """Send a message; return a function that waits for its answer.

        Raises:
            SidecarLost: the connection has ended; waiting, also if no answer comes in time.
            RefusedError: waiting, if the answer is an error.
        """
        answer: Future[Any] = Future()
        self.send(op, data, answer, **fields)

        def wait() -> Any:
            try:
                return answer.result(self._timeout_s)
            except TimeoutError:
                raise self._lost(f"did not answer {op!r} in {self._timeout_s:g} s") from None

        return wait

    def cancel(self, number: int) -> None:
        """Give a request up."""
        with contextlib.suppress(SidecarLost):
            self.send("cancel", request=number)

    def close(self) -> None:
        """End the process and all that it has started."""
        with self._closing:
            if self._ended:
                return
            self._ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        # its resource tracker would remove it, but has ended, too, if a container has
        if self._folder is not None and self._folder.name.endswith(self._token):
            remove(self._folder)
        self._fail_answers("was closed")

    def _hang_up(self) -> None:
        """Tell the other side that this is the end, even while a thread waits for what it says."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        """Take what the sidecar says until its connection ends."""
        try:
            self._listen()
        finally:
            self._hang_up()
            with self._sending:
                for end in (self._connection, self._socket):
                    if end is not None:
                        end.close()
        self._fail_answers("was closed" if self._ended else "has ended its connection")

    def _listen(self) -> None:
        with self._listener:
            self._socket = accept_authenticated(self._listener, self._key, lambda: self._ended)
        if self._socket is not None:
            self._connection = Connection(os.dup(self._socket.fileno()))
        while self._connection is not None and not self._ended:
            try:
                message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError, TypeError, ValueError):  # ended, or closed meanwhile
                break
            try:
                self._take(message)
            except Exception as error:  # of this process: with another sidecar it would come again
                self._lost(f"was not understood: {error!r}")
                raise

    def _take(self, message: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        if "beat" in message:
            if message["beat"] != self._progress:
                self._progress, self._progressed = message["beat"], self._heard
        elif "folder" in message:
            self._folder = Path(message["folder"])
        elif "ready" in message:
            self.shared = message["shared"]
            self._ready.set()
        elif "failed" in message:
            self._failure = message["failed"]
        elif "id" in message:
            answer = self._answers.pop(message["id"], None)
            if answer is None:
                self._progressed = self._heard
                self._receive(message["id"], message)
            elif "error" in message:
                answer.set_exception(RefusedError(f"vLLM: {message['error']}"))
            else:
                answer.set_result(message["result"])

    def _fail_answers(self, why: str) -> None:
        while self._answers:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._answers.popitem()[1].set_exception(SidecarLost(f"the vLLM sidecar {why}"))

    def _check_alive(self) -> None:
        status = self._process.poll()
        if status is not None and not self._ended:
            cause = f"signal {-status}" if status < 0 else f"status {status}"
            raise self._lost(f"ended with {cause}")

    def _lost(self, why: str) -> SidecarLost:
        """Make sure that nothing of it is left, and say what happened."""
        message = f" It said: {self._failure}" if self._failure else ""
        with self._log.open(errors="replace") as file:
            file.seek(self._log_start)
            lines = file.read().splitlines()
        errors = [match[1] for match in map(ERROR_LINE.fullmatch, lines) if match]
        shown = [*dict.fromkeys(errors), f"The end of {self._log}:", *lines[-LOG_LINES:]]
        tail = "".join(f"\n    {line}" for line in shown)
        self._reason = self._reason or SidecarLost(f"the vLLM sidecar {why}.{message}{tail}")
        self.close()
        return self._reason

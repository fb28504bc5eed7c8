"""The process from which programs are forked, as the trainer sees it."""

import ast
import itertools
import json
import logging
import math
import os
import pickle
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.workers.pool import Limits, WorkerProcess, WorkerProgram, decode_load_error
from jaxrl_llm.workers.values import to_plain

log = logging.getLogger(__name__)

OWN_KEYS = {"run", "python", "host", "idle_s"}
"""Of `openai_program` with `run`; all others are the function's."""

RUNNER = Path(__file__).with_name("program_runner.py")
PROGRAM = WorkerProgram("jaxrl_llm.rollout.gateway.programs:become_runner", "rollout.tool_process.")
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")


class ProgramSpec(NamedTuple):
    """What to run for each episode.

    Attributes:
        run: `my_agent.py:main` or `pkg.mod:main`; None: a command.
        command: its words.
        python: the interpreter that imports `run`; None: this one.
        keywords: of the function, as JSON has them.
        limits: of each program; their number has none.
    """

    run: str | None
    command: tuple[str, ...]
    python: str | None
    keywords: str
    limits: Limits

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.run or self.command[0]


class ProgramEnd(NamedTuple):
    """How a program has ended.

    Attributes:
        value: that it returned.
        error: why there is none; a line.
        output: the end of what it printed.
    """

    value: float | None
    error: str | None
    output: str


class ProgramPool:
    """Runs a program for each episode.

    Args:
        spec: what to run.

    Attributes:
        ready: ends once the program is imported; with a RunError if it can't be.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        """Start the process that imports it, and return."""
        self._spec, self._numbers = spec, itertools.count()
        self._inbox: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._running: dict[int, Future[ProgramEnd]] = {}
        self.ready: Future[None] = Future()
        self._closed, self._lock = False, threading.Lock()
        limits = Limits(None, None, spec.limits.pass_env)
        told = {name: value for name, value in spec._asdict().items() if name != "limits"} | {
            "keywords": json.loads(spec.keywords),
            "memory_gb": spec.limits.memory_gb,
            "search": [] if spec.python else [p for p in sys.path if p],
        }
        self._worker = WorkerProcess(PROGRAM._replace(limits=limits), told, 0.0)
        self._connection = self._worker.channel.connection
        self._connection.setblocking(True)  # each direction has a thread that may wait
        self._worker.channel.flush()
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name="programs", daemon=True)
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, given: Mapping[str, Any]) -> tuple[int, Future[ProgramEnd]]:
        """Start the program of an episode, once it is imported; return its number and its end.

        Args:
            given: what it may ask for.
        """
        number, future = next(self._numbers), Future[ProgramEnd]()
        with self._lock:
            if self._closed:
                raise RunError(f"rollout.agent: the process of {self._spec.name} has ended")
            self._running[number] = future
        self._inbox.put({"start": number, "given": given})
        return number, future

    def kill(self, number: int) -> None:
        """Kill a program with all that it has started, if it still runs."""
        self._inbox.put({"kill": number})

    def close(self) -> None:
        """Kill all programs."""
        self._fail("it was closed")
        self._worker.stop()
        for thread in self._threads:
            thread.join()

    def _fail(self, reason: str) -> None:
        error = RunError(f"rollout.agent: {self._spec.name}: {reason}")
        with self._lock:
            self._closed = True
            waiting, self._running = list(self._running.values()), {}
        for future in (self.ready, *waiting):
            if not future.done():
                future.set_exception(error)
        self._inbox.put(None)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._fail(repr(error))

    def _write(self) -> None:
        """Send what is asked of the runner, until it is closed or has ended."""
        futures.wait([self.ready])  # before, the process reads its spec, and would lose more
        with suppress(ConnectionError):  # which `_read` sees, too
            while (message := self._inbox.get()) is not None:
                text = json.dumps(message, default=to_plain)
                self._connection.sendall(text.encode() + b"\n")

    def _read(self) -> None:
        """Take the lines that the runner writes, until it has ended."""
        with suppress(ConnectionError), self._connection.makefile("rb") as lines:
            for line in lines:
                if self.ready.done():
                    end = json.loads(line)
                    with self._lock:
                        future = self._running.pop(end["end"], None)
                    if future is not None and future.set_running_or_notify_cancel():
                        future.set_result(ProgramEnd(end["value"], end["error"], end["output"]))
                elif (load_error := decode_load_error(line)) is not None:
                    self._fail(f"it can't be loaded: {load_error}")
                else:
                    self.ready.set_result(None)
        if not self._closed:
            self._fail(f"the process of the programs {self._worker.end_reason()}")


def become_runner(connection: int, *, memory_gb: float | None) -> None:
    """Become the runner, in the interpreter of the programs.

    Args:
        connection: the descriptor of our end of the connection.
        memory_gb: of the worker's limits; the runner sets those of its programs.
    """
    with open(connection, "rb", closefd=False) as requests:  # only the spec is there yet
        told = pickle.load(requests)
    environment, python = dict(os.environ), told["python"] or sys.executable
    if told["python"]:
        for name in OF_THIS_PYTHON:
            environment.pop(name, None)
    os.set_inheritable(connection, True)
    words = [python, str(RUNNER), str(connection), json.dumps(told)]
    os.execve(python, words, environment)


def given_to_program(address: str, secret: str, row: EpisodeRow, seed: int) -> dict[str, Any]:
    """Return what a program may ask for by name, as JSON has it.

    Args:
        address: of the gateway for this episode.
        secret: of the episode.
        row: of the data.
        seed: of the program's random numbers.
    """
    own = {"base_url": address, "api_key": secret, "model": "policy", "seed": seed}
    fields = vars(row)
    return own | {"row": fields} | {name: fields[name] for name in fields if name != "index"}


def check_program(keywords: Mapping[str, Any]) -> None:
    """Refuse what can be seen to be no program, before anything is loaded.

    What is in another interpreter's environment is not imported here.

    Args:
        keywords: of `openai_program`, as the config gives them.

    Raises:
        ConfigError: neither or both of `run` and `command`; there is no such file or function; an
            interpreter, an address or a time can't be had.
    """
    key, run, command = "rollout.agent", keywords.get("run"), keywords.get("command")
    if (run is None) == (not command):
        raise ConfigError(
            f"{key}: openai_program needs either run: my_agent.py:main or command: [...], got "
            f"run={run!r} and command={command!r}"
        )
    python, host = keywords.get("python"), keywords.get("host", "127.0.0.1")
    if python is not None and shutil.which(str(python)) is None:
        raise ConfigError(f"{key}.python: no program {str(python)!r}")
    try:
        socket.create_server((str(host), 0)).close()
    except OSError as error:
        raise ConfigError(f"{key}.host: can't listen on {host!r}: {error}") from error
    idle_s = keywords.get("idle_s", 1.0)
    if type(idle_s) not in (int, float) or not 0 < idle_s < math.inf:
        raise ConfigError(f"{key}.idle_s: expected seconds above 0, got {idle_s!r}")
    if run is None:
        assert command is not None, "checked above"
        if isinstance(command, str) or not all(isinstance(word, str) for word in command):
            raise ConfigError(f"{key}.command: got {command!r}, expected a list of words")
        if more := sorted(keywords.keys() - {"command", "host", "idle_s"}):
            raise ConfigError(f"{key}: a command takes no {', '.join(more)}")
        if shutil.which(command[0]) is None:
            raise ConfigError(f"{key}.command: no program {command[0]!r}")
        return
    where, _, name = run.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"{key}.run: got {run!r}, expected my_agent.py:main or pkg.mod:main")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ConfigError(f"{key}.run: no file {str(Path(where).resolve())!r}")
        _check_function(where, name, keywords.keys() - OWN_KEYS)


def _check_function(file: str, name: str, keywords: Iterable[str]) -> None:
    """Refuse a file without the function, and keywords that this does not take."""
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (SyntaxError, ValueError) as error:  # it may be of a later Python than this one
        log.warning("rollout.agent.run: can't read %s: %s", file, error)
        return
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    functions = {node.name: node.args for node in body if isinstance(node, kinds)}
    if name not in functions:
        raise ConfigError(
            f"rollout.agent.run: no function {name!r} in {file}; " + closest(name, [*functions])
        )
    known = [one.arg for one in (*functions[name].args, *functions[name].kwonlyargs)]
    for keyword in sorted(keywords) if functions[name].kwarg is None else ():
        if keyword not in known:
            raise ConfigError(
                f"rollout.agent: {name} of {file} takes no {keyword!r}; {closest(keyword, known)}"
            )

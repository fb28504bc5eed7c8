"""Runs programs of users, each episode in a process of its own, forked from this one.

This file is run by the interpreter that has what the programs import, and needs nothing but Python
3.9. The trainer sends lines of JSON that start or kill a program by number. It gets a line for the
import, and one for each program's end.
Only this process holds the connection: a program can't answer for another one.
"""

import asyncio
import gc
import importlib
import inspect
import json
import math
import os
import random
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

GIVEN = ("base_url", "api_key", "model", "row", "messages", "ground_truth", "extra_info")
GIVEN += ("data_source", "rng", "seed")
READ_BYTES = 2**16
TAIL_BYTES = 4000  # of what a program prints
RESULT_BYTES = 10**6
DRAIN_S = 0.05  # to read a pipe whose other end a child of the program may hold


class RunningProgram:
    """One program that runs: its process, the file of its result, and the pipe of its output."""

    def __init__(self, number, pid, result, output):
        self.number, self.pid, self.result, self.output = number, pid, result, output
        self.tail = b""

    def read(self):
        """Take what it has printed; return whether there was anything."""
        try:
            data = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return False
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        return bool(data)


class Runner:
    """Starts programs, and tells the trainer how they end."""

    def __init__(self, connection, spec):
        self.connection, self.spec, self.function = socket.socket(fileno=connection), spec, None
        self.programs, self.pending = {}, b""
        self.selector = selectors.DefaultSelector()
        self.awake, self.wake = os.pipe()
        for fd in (self.awake, self.wake):
            os.set_blocking(fd, False)

    def tell(self, **message):
        """Write a line to the trainer."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def run(self):
        """Import the program, and run it until the connection ends."""
        try:
            if self.spec["run"]:
                self.function = load_program(self.spec)
        except BaseException as error:
            self.tell(load_error=described(error))
            return
        gc.collect()
        gc.freeze()  # collections in the programs would write to, and so copy, all of these pages
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        self.selector.register(self.connection, selectors.EVENT_READ)
        self.selector.register(self.awake, selectors.EVENT_READ)
        self.tell(load_error=None)
        while self.turn():
            pass

    def turn(self):
        """Do what has come; return whether the connection is there."""
        for key, _ in self.selector.select():
            if key.fileobj is self.connection:
                data = self.connection.recv(READ_BYTES)
                if not data:
                    return False
                *lines, self.pending = (self.pending + data).split(b"\n")
                for message in map(json.loads, lines):
                    if "start" in message:
                        self.start(message["start"], message["given"])
                    for program in self.programs.values():
                        if program.number == message.get("kill"):
                            kill_all(program.pid)
            elif key.fd == self.awake:
                with suppress(BlockingIOError):
                    os.read(self.awake, READ_BYTES)
            elif key.data in self.programs.values() and not key.data.read():
                self.selector.unregister(key.fd)
        self.reap()
        return True

    def start(self, number, given):
        """Fork a process for a program."""
        ends = ()
        try:
            result, ends = tempfile.TemporaryFile(), os.pipe()  # noqa: SIM115 (`reap` closes it)
            pid = os.fork()
        except OSError as error:  # too many descriptors, or processes
            for fd in ends:
                os.close(fd)
            self.tell(end=number, value=None, error=f"can't be started: {error}", output="")
            return
        output, prints = ends
        if pid == 0:
            try:
                self.become_program(given, result, prints)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(prints)
        os.set_blocking(output, False)
        program = self.programs[pid] = RunningProgram(number, pid, result, output)
        self.selector.register(output, selectors.EVENT_READ, program)

    def become_program(self, given, result, prints):
        """Run a program in the process that was forked for it."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.selector.close()
        others = [fd for p in self.programs.values() for fd in (p.result.fileno(), p.output)]
        for fd in (self.connection.fileno(), self.awake, self.wake, *others):
            with suppress(OSError):
                os.close(fd)
        limit_memory(self.spec["memory_gb"])
        for name in ("base_url", "api_key", "model"):
            os.environ["OPENAI_" + name.upper()] = given[name]
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(given).encode())
            file.seek(0)
            os.dup2(file.fileno() if self.function is None else os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        os.close(prints)
        if self.function is None:
            words = self.spec["command"]
            try:
                os.execvp(words[0], words)
            except OSError as error:
                os.write(2, f"can't run {words[0]!r}: {error}\n".encode())
                os._exit(127)
        message = call_program(self.function, self.spec["keywords"], given)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        result.write(json.dumps(message).encode())
        result.flush()
        os._exit(0)

    def reap(self):
        """Tell how programs have ended, and end what they have left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            program = self.programs.pop(pid, None)
            if program is None:
                continue
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(KeyError):
                self.selector.unregister(program.output)
            end = time.monotonic() + DRAIN_S
            while program.read() and time.monotonic() < end:
                pass
            os.close(program.output)
            output = program.tail.decode(errors="replace")
            with program.result:
                value, error = self.result(program, status, output)
            self.tell(end=program.number, output=output, value=value, error=error)

    def result(self, program, status, output):
        """Return what came of a program: its value, and its error."""
        if status or self.function is None:
            ending = f"ended with exit code {os.WEXITSTATUS(status)}"
            if os.WIFSIGNALED(status):
                ending = f"was killed by signal {os.WTERMSIG(status)}"
            last = output.strip().rpartition("\n")[2]
            return None, ending + (f": {last}" if last else "") if status else None
        program.result.seek(0)
        with suppress(ValueError, RecursionError, TypeError, KeyError):  # whatever it has written
            message = json.loads(program.result.read(RESULT_BYTES))
            value, error = message["value"], message["error"]
            is_number = type(value) is float and math.isfinite(value)
            if isinstance(error, str) or (error is None and (value is None or is_number)):
                return value, error
        return None, "ended without a result"


def call_program(function, keywords, given):
    """Call a program with what it asks for; return its value or its error."""
    random.seed(given["seed"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(given["seed"] % 2**32)
    values = {**given, "row": SimpleNamespace(**given["row"]), "rng": random.Random(given["seed"])}
    asked = {n: values[n] for n in inspect.signature(function).parameters if n in GIVEN}
    try:
        value = function(**asked, **keywords)
        if inspect.isawaitable(value):
            value = asyncio.run(awaited_value(value))
        value = value if value is None else as_number(value)
    except BaseException as error:
        traceback.print_exc()
        return {"value": None, "error": described(error)}
    return {"value": value, "error": None}


async def awaited_value(value):
    """Await something; `asyncio.run` takes coroutines only."""
    return await value


def as_number(value):
    """Return what a program has returned as a finite number."""
    with suppress(TypeError, ValueError, OverflowError):  # the last of an int beyond float64
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
        if math.isfinite(number):
            return number
    raise ValueError(f"the program returned {value!r:.100}, expected None or a finite number")


def load_program(spec):
    """Return the function that a spec names, which takes its keywords."""
    where, _, name = spec["run"].rpartition(":")
    if where.endswith(".py"):
        path = Path(where).resolve()
        sys.path.insert(0, str(path.parent))  # as `python my_agent.py` has it
        module = importlib.import_module(path.stem)
    else:
        module = importlib.import_module(where)
    function = getattr(module, name)
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.name in named and p.default is p.empty]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for keyword in spec["keywords"]:
            if keyword not in named:
                raise TypeError(f"{name} takes no {keyword!r}; it takes {', '.join(named)}")
    for keyword in needed:
        if keyword not in GIVEN and keyword not in spec["keywords"]:
            raise TypeError(
                f"{name} asks for {keyword!r}, which is no key of the config and not among what a "
                f"program is given: {', '.join(GIVEN)}"
            )
    return function


def described(error):
    """Return the last line of an error's traceback, with the place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return " ".join(text.split())[:1000] + place


def limit_memory(memory_gb):
    """Limit what this process and each that it starts may take."""
    if memory_gb is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(memory_gb * 1e9)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def kill_all(pid):
    """Kill a process, its group, and all that it has started and that has not left it."""
    below, parents = [pid], [pid]
    while parents:
        with suppress(OSError, ValueError):
            parent = parents.pop()
            with suppress(OSError):
                os.kill(parent, signal.SIGSTOP)  # it starts nothing while we look
            tasks = Path(f"/proc/{parent}/task")
            for task in tasks.iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                below += children
                parents += children
    for one in below:
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def main():
    """Serve on a connection, given by its number, what the JSON behind it says."""
    connection, spec = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(connection, False)
    sys.path[:0] = spec["search"]
    with suppress(BrokenPipeError, ConnectionResetError):
        Runner(connection, spec).run()


if __name__ == "__main__":
    main()

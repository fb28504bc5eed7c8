"""What attacks are aimed at: a parent with secrets and servers, and what must be as before."""

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.sandbox.attacks import Attack
from jaxrl_llm.sandbox.interpreter import CodeResult, Interpreter
from jaxrl_llm.workers.supervisor import adopt_orphans, list_descendants

SETTLE_S = 5.0  # for what was killed to be gone
BYSTANDER = "import signal, time; signal.pthread_sigmask(0, set(signal.Signals)); time.sleep(9999)"


class Target:
    """A parent like a trainer: a run's folder with answers, a server, a process, an environment.

    Args:
        open_interpreter: opens one that keeps its state, for another episode.
    """

    def __init__(self, open_interpreter: Callable[[], Interpreter]) -> None:
        adopt_orphans()  # so that whatever an attack leaves behind is found below us
        self.token = secrets.token_hex(16)
        self._open = ExitStack()
        self._temporary = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        self._temporary.chmod(0o755)
        self._open.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(self._temporary)
        folder = self._temporary / "run"
        folder.mkdir(0o700)
        self._folder, self._secret = folder, folder / "answers.jsonl"
        self._secret.write_text(self.token)
        os.environ["MY_TOKEN"] = self.token
        abstract = f"\0{secrets.token_hex(8)}"
        self._servers = [socket.create_server(("127.0.0.1", 0))]
        for address in (abstract, str(folder / "socket")):
            server = socket.socket(socket.AF_UNIX)
            server.bind(address)
            server.listen()
            self._servers.append(server)
        for server in self._servers:
            server.setblocking(False)
            self._open.callback(server.close)
        environment = {**os.environ, "MY_TOKEN": self.token}
        self._bystander = subprocess.Popen([sys.executable, "-c", BYSTANDER], env=environment)
        self._open.callback(self._end_bystander)
        self.other = self._open.enter_context(open_interpreter())
        self.other.run("other_episode = 41")
        self._names = {
            "SECRET": repr(str(self._secret)),
            "FOLDER": repr(str(folder)),
            "PORT": repr(self._servers[0].getsockname()[1]),
            "ABSTRACT": repr(abstract),
            "SOCKET": repr(str(folder / "socket")),
            "PARENT": repr(os.getpid()),
            "BYSTANDER": repr(self._bystander.pid),
        }
        self._before = self._state()
        self._processes = set(list_descendants())

    def _end_bystander(self) -> None:
        self._bystander.kill()
        self._bystander.wait()

    def close(self) -> None:
        """Remove all of it."""
        del os.environ["MY_TOKEN"]
        self._open.close()

    def code(self, attack: Attack) -> str:
        """Return an attack's code, told where everything is."""
        names = "\n".join(f"{name} = {value}" for name, value in self._names.items())
        return f"{names}\n{attack.code}"

    def damage(self, attack: Attack, result: CodeResult) -> list[str]:
        """Return what an attack has done that it must not; its interpreter must be closed."""
        found = []
        if "BROKEN" in result.output or any(self.token in text for text in result[:2]):
            found.append(f"got what it must not: {result.output[-300:]}")
        if result.failure not in attack.ends:
            found.append(f"ended with {result.failure} ({result.reason}), expected {attack.ends}")
        if result.seconds > 60:
            found.append(f"took {result.seconds:.0f} s")
        state = self._state()
        found += [f"{k}: {v} became {state[k]}" for k, v in self._before.items() if state[k] != v]
        found += ["a connection came in" for server in self._servers if _has_connection(server)]
        if self.other.run("print(other_episode + 1)").output.strip() != "42":
            found.append("another episode has lost its state")
        left = _left_over(self._processes)
        return found + ([f"left processes behind: {left}"] if left else [])

    def _state(self) -> dict[str, object]:
        found = self._secret.stat()
        return {
            "secret": (self._secret.read_text(), found.st_mode, found.st_mtime, found.st_uid),
            "folder": sorted(path.name for path in self._folder.iterdir()),
            "process": self._bystander.poll(),
            "limits": resource.prlimit(self._bystander.pid, resource.RLIMIT_CPU),
            "priority": os.getpriority(os.PRIO_PROCESS, self._bystander.pid),
            "processors": os.sched_getaffinity(self._bystander.pid),
            "temporary": (sorted(path.name for path in self._temporary.iterdir()), _shared_files()),
        }


def _shared_files() -> list[str]:
    """Return what code may have left in the folders that are for everyone."""
    return sorted(
        path.name
        for folder in ("/dev/shm", "/var/tmp")
        for path in Path(folder).iterdir()
        if path.name.startswith(("jaxrl_llm-x", "psm_", "x"))
    )


def _has_connection(server: socket.socket) -> bool:
    with suppress(BlockingIOError):
        server.accept()[0].close()
        return True
    return False


def _left_over(before: set[int]) -> list[int]:
    end = time.monotonic() + SETTLE_S
    while True:
        with suppress(ChildProcessError):
            for pid in set(list_descendants()) - before:
                os.waitpid(pid, os.WNOHANG)
        left = sorted(set(list_descendants()) - before)
        if not left or time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return left
        time.sleep(0.01)

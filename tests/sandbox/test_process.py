import concurrent.futures
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.sandbox import jail, process
from jaxrl_llm.sandbox.interpreter import BoundedOutput, CodeLimits, open_interpreter
from tests.sandboxes import needs_landlock
from tests.waiting import ended, wait_until

LIMITS = CodeLimits(cpu_s=10.0, wall_s=30.0, memory_mb=256, processes=8, file_mb=4)


@pytest.fixture(scope="module")
def kept():
    with open_interpreter("process", LIMITS, keep_state=True) as interpreter:
        yield interpreter


@pytest.fixture
def fresh():
    with open_interpreter("process", LIMITS) as interpreter:
        yield interpreter


WORKS = {
    **{"1 + 1": "2\n", "x = 5": "", "x + 1": "6\n", "'a'\n'b'": "'b'\n", "None": ""},
    **{"print('é', end='')": "é", "def f():\n    return x\nf()": "5\n", "# nothing": ""},
    **{"import sys\nsys.exit(0)": "", "input() + sys.stdin.read()": "'input'\n"},
    **{"import os\nos.read(0, 2)": "b'in'\n", "print('\\ud800')": "\\ud800\n"},
    "sys.stdout.buffer.write(b'\\xff\\0')": "\ufffd\ufffd2\n",
    "import asyncio\nasync def g():\n    return 3\nasyncio.run(g())": "3\n",
    "from threading import Thread\nt = Thread(target=print)\nt.start()\nt.join()": "\n",
    "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\nP(1)": "P(a=1)\n",
    "open('f', 'w').write('abc')\nopen('f').read()": "'abc'\n",
    "import tempfile\ntempfile.TemporaryFile().write(b'a')": "1\n",
    "import subprocess\nsubprocess.call([sys.executable, '-c', 'print(7)'])": "7\n0\n",
    "import numpy\nint(numpy.ones((50, 50)).sum())": "2500\n",
}
FAILS = {
    "1 / 0": ("error", "ZeroDivisionError: division by zero"),
    "1 +": ("error", "SyntaxError: invalid syntax"),
    "import sys\nsys.exit(3)": ("error", "SystemExit: 3"),
    "sys.exit('no')": ("error", "SystemExit: no"),
    "raise KeyboardInterrupt": ("error", "KeyboardInterrupt"),
    "class E(Exception):\n    def __str__(self): return 'a\\n' * 999\nraise E": ("error", None),
    "bytearray(10**9)": ("memory", "MemoryError"),
}


@needs_landlock
def test_code_does_what_it_does_elsewhere_and_a_failure_is_told_in_a_line(kept):
    for code, output in WORKS.items():
        result = kept.run(code, stdin="in\nput")
        assert (result.output, result.errors, result.failure) == (output, "", None), code
    for code, (failure, reason) in FAILS.items():
        result = kept.run(code)
        assert result.failure == failure, code
        assert reason is None or result.reason == reason
        assert "\n" not in result.reason
        assert kept.run("import sys\nsys.version").failure is None


@needs_landlock
def test_without_state_each_run_has_a_process_of_its_own(fresh):
    errors = fresh.run("def f():\n    return 1 / 0\nf()").errors
    assert "    return 1 / 0\n" in errors and "jaxrl_llm" not in errors
    fresh.run("x = 1\nopen('f', 'w').close()")
    assert fresh.run("x").reason == "NameError: name 'x' is not defined"
    assert fresh.run("import os\nos.listdir()").output == "[]\n"
    code = "import atexit, threading\natexit.register(print, 2)\n"
    code += "threading.Timer(0.05, print, [1]).start()"
    assert fresh.run(code).output == "1\n2\n"  # threads and exit functions end before it


@needs_landlock
def test_what_ends_the_interpreter_ends_its_state(kept):
    kept.run("y = 1")
    result = kept.run("import os\nos._exit(0)")
    assert (result.failure, "exit code 0" in result.reason) == ("error", True)
    assert kept.run("y").failure == "error"
    launcher = kept._session._launcher  # and what is killed from outside is told
    below = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: all(ended(child.pid) for child in below))
    assert kept.run("x").failure == "unavailable"
    assert kept.run("1").output == "1\n"


@needs_landlock
def test_sessions_do_not_meet():
    def run(number):
        with open_interpreter("process", LIMITS, keep_state=True) as interpreter:
            interpreter.run(f"x = {number}\nopen('f', 'w').write(str(x))")
            return interpreter.run("x, open('f').read()").output

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [f"({i}, '{i}')\n" for i in range(3)]


KILLED_TRAINER = """
import sys
from jaxrl_llm.sandbox.interpreter import open_interpreter
interpreter = open_interpreter("process", keep_state=True)
interpreter.run('''import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        time.sleep(1000)
    os._exit(0)
os.wait()''')
print("ready", flush=True)
sys.stdin.read()
"""


@needs_landlock
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command, pipes = [sys.executable, "-c", KILLED_TRAINER], dict.fromkeys(("stdin", "stdout"), -1)
    with subprocess.Popen(command, env=environment, text=True, **pipes) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        below = [child.pid for child in psutil.Process(trainer.pid).children(recursive=True)]
        assert len(below) >= 4  # launcher, first process, interpreter, daemon
        trainer.kill()
    wait_until(lambda: all(ended(pid) for pid in below))
    wait_until(lambda: list(tmp_path.iterdir()) == [])


ALL_CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
refused = []
for number in range(600):
    if number not in ALLOWED:
        result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
        refused.append(ctypes.get_errno() if result == -1 else -number)
print(sorted(set(refused)), len(refused))
"""


@needs_landlock
def test_calls_that_the_table_does_not_name_are_refused(fresh):
    numbers = set(jail.call_numbers(platform.machine()).values())
    numbers |= {335, 336}  # x86-64: the kernel's own probes, which Linux 6.14 does not filter
    output = fresh.run(f"ALLOWED = {sorted(numbers)}{ALL_CALLS}").output
    assert output == f"[1, 38] {600 - len(numbers)}\n"  # EPERM, and ENOSYS above the highest


def test_the_numbers_of_calls_are_those_of_the_kernel():
    headers = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
    for machine, header in headers.items():
        path = Path("/usr/include") / header
        if not path.exists():
            pytest.skip("needs the kernel's headers")
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\n", path.read_text()))
        known = {name: int(number) for name, number in defined.items()}
        if machine == "aarch64":  # the header's names for two
            known |= {"newfstatat": known["fstatat"], "fadvise64": known["fadvise64"]}
        numbers = jail.call_numbers(machine)
        assert len(numbers) > 150
        assert {name: known.get(name) for name in numbers} == numbers


def test_a_machine_that_lacks_what_is_needed_is_refused(monkeypatch):
    fake = os.uname_result(("Linux", "", "6.1", "", "riscv64"))
    for name, value, named in [
        ("sys.platform", "darwin", "darwin"),
        *(("landlock_version", lambda: 0, "Landlock"), ("os.uname", lambda: fake, "riscv64")),
    ]:
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=named):
            patch.setattr(process.sys, "platform", "linux")
            patch.setattr(f"jaxrl_llm.sandbox.process.{name}", value)
            process.find_layers.__wrapped__()


@needs_landlock
def test_a_layer_that_fails_is_refused(monkeypatch):
    """The launcher asks for a Landlock that no kernel has, so that no code may be run."""
    monkeypatch.setattr(process, "landlock_version", lambda: 0x7FFF)
    monkeypatch.setattr(process, "LAUNCHER_PROGRAM", process.LAUNCHER_PROGRAM.replace(
        " sys.path.remove(root);",
        " import jaxrl_llm.sandbox.jail as m; m.FILE_RIGHTS_OF_VERSION = {1: 1 << 63};",
    ))  # fmt: skip
    with pytest.raises(ConfigError, match="Landlock"):
        process.find_layers.__wrapped__()


def test_an_answer_that_is_none_ends_the_session():
    for line in [
        *(b"", b"5\n", b"[" * 8000, b"\xff\n", b"1" * 5000 + b"\n"),
        b'{"nonce": "m", "failure": null, "reason": ""}\n',
        *(b'{"nonce": "n", "failure": null}\n', b'{"nonce": "n", "failure": [], "reason": ""}\n'),
    ]:
        with pytest.raises(process.SessionEnded, match="pipe"):
            process._decode_answer(line, "n")


def test_of_output_the_beginning_and_the_end_are_kept():
    for parts, text in {
        (b"abc", b"d"): "abcd",
        (b"abc", b"defg", b"\xffij"): "ab\n[... 6 bytes left out ...]\nij",
        (b"\0",): "\ufffd",
    }.items():
        output = BoundedOutput(4)
        for part in parts:
            output.write(part)
        assert output.text() == text

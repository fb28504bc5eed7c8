"""Whatever becomes of stdout and stderr, a run goes on and its process ends with its own status."""

import contextlib
import io
import logging
import os
import pty
import select
import subprocess
import sys
import termios
import threading
import time

import pytest

from jaxrl_llm.monitoring import display as module
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.writer import BackgroundWriter, StderrHandler, Stream, log_to_stderr
from tests.waiting import wait_until

SOON_S = 20.0  # what takes longer hangs
LINES = 2000

PROGRAM = f"""
import logging, sys
from jaxrl_llm.monitoring import display as module
from jaxrl_llm.monitoring.writer import StderrHandler
logging.basicConfig(handlers=[StderrHandler()])
module.CLOSE_S = 0.2
print("before", flush=True)
display = module.Display("training", {LINES})
for step in range({LINES}):
    display.advance(f"step {{step}} " + 100 * "x")
display.close()
print("left in the stream " * 250)  # less than Python writes at once
sys.exit(3)
"""


def environment():
    """Return that of a process whose stdout has a buffer, as usual."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return kept | {"JAX_PLATFORMS": "cpu"}


def start(**files):
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, env=environment(), text=True, **files)


def end(process):
    """Wait for a process; return its status and what it said on stderr."""
    try:
        return process.wait(SOON_S), process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()


def test_stdout_that_is_closed_by_its_reader():
    process = start(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "before\n"
    process.stdout.close()
    status, stderr = end(process)
    assert status == 3
    assert "WARNING:jaxrl_llm.monitoring.writer:can't write to stdout: Broken pipe; " in stderr
    assert stderr.count("can't write") == 1 and "ignored" not in stderr


def test_stdout_that_nobody_reads():
    process = start(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process.stdout:
        status, stderr = end(process)
    assert status == 3
    assert "stdout does not keep up" in stderr and "stdout has not ended within 0.2 s" in stderr
    assert "ignored" not in stderr


def test_stdout_and_stderr_in_one_pipe_that_nobody_reads():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    process = start(stdout=writer, stderr=writer)
    os.close(writer)
    try:
        os.read(reader, 4096 * 4)  # or `before` would not come out
        assert process.wait(SOON_S) == 3
    finally:
        process.kill()
        os.close(reader)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_stdout_on_a_disk_that_is_full():
    program = PROGRAM.replace('print("before", flush=True)', "")
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment(),
            text=True,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=SOON_S,
        )
    assert done.returncode == 3
    assert done.stderr.count("No space left on device") == 1 and "ignored" not in done.stderr


class Reader(threading.Thread):
    """Reads a terminal's other end until it is closed."""

    def __init__(self, end):
        super().__init__(daemon=True)
        self.end, self.text = end, b""
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while content := os.read(self.end, 4096):
                self.text += content


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that is stdout: its file, and who reads it."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(slave, "w") as file:  # noqa: PTH123 - a descriptor
        reader = Reader(master)
        yield file, reader
    reader.join(SOON_S)
    os.close(master)


def test_a_terminal_that_is_stopped_and_goes_on(terminal, monkeypatch):
    file, reader = terminal
    monkeypatch.setattr(sys, "stdout", file)
    display = Display("training", 100)
    display.advance("step 0")
    wait_until(lambda: b"step 0" in reader.text and b"1/100" in reader.text)
    termios.tcflow(file, termios.TCOOFF)  # Ctrl-S
    time.sleep(0.3)  # the bar is drawn ten times a second
    before = reader.text
    for step in range(1, 100):
        display.advance(f"step {step}")
    time.sleep(0.3)
    assert reader.text == before
    assert display._writer.waiting <= 1 + 99, "pictures of the bar don't fill the queue"
    termios.tcflow(file, termios.TCOON)
    display.close()
    wait_until(lambda: reader.text.rstrip().endswith(b"\x1b[?25h"))
    shown = [line for line in reader.text.split() if line.isdigit()]
    assert [int(step) for step in shown if int(step) < 100][:100] == list(range(100))
    assert b"100/100" in reader.text
    assert display._writer.dropped == 0


def test_a_terminal_that_stays_stopped(terminal, monkeypatch):
    file, reader = terminal
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    termios.tcflow(file, termios.TCOOFF)
    display = Display("training", LINES)
    start = time.monotonic()
    for step in range(LINES):
        display.advance(f"step {step}")
    display.close()
    assert time.monotonic() - start < SOON_S
    assert reader.text == b""
    assert display._writer.dropped >= LINES
    termios.tcflow(file, termios.TCOON)


def test_a_long_text_comes_out_whole():
    reader, writer = os.pipe()
    collected = Reader(reader)
    text = "".join(f"{number} é\n" for number in range(50_000))
    with open(writer, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
        screen = BackgroundWriter(Stream("stdout", file))
        screen.write(text)
        screen.write("end")
        screen.close(SOON_S)
    collected.join(SOON_S)
    os.close(reader)
    assert collected.text.decode() == text + "end"


# ----------------------------------------------------------------------------------------- stderr


@pytest.fixture
def logger(monkeypatch):
    """A logger of its own, and the end of a pipe to read what it writes to stderr."""
    reader, writer = os.pipe()
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as file:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", file)
        handler = StderrHandler()
        alone = logging.Logger("alone")
        alone.addHandler(handler)
        yield alone, reader
        handler._kept.clear()
    with contextlib.suppress(OSError):
        os.close(reader)


def test_log_lines_are_on_stderr_at_once(logger):
    log, reader = logger
    log.warning("first")
    assert os.read(reader, 100) == b"first\n"
    log.error("%d", 2)
    assert os.read(reader, 100) == b"2\n"


def test_log_lines_wait_for_a_reader_and_hold_nothing_up(logger):
    log, reader = logger
    lines = [f"{number} " + 90 * "x" for number in range(1000)]
    for line in lines:
        log.warning(line)
    text = b""
    while select.select([reader], [], [], 0)[0]:
        text += os.read(reader, 4096)
    assert len(text) < sum(len(line) + 1 for line in lines)
    log.warning("one more")
    while select.select([reader], [], [], 0)[0]:
        text += os.read(reader, 4096)
    assert text.decode().splitlines() == [*lines, "one more"]


def test_a_stderr_that_is_closed_stops_nothing(logger):
    log, reader = logger
    os.close(reader)
    for number in range(3):
        log.warning("%d", number)


def test_a_stream_without_a_file_is_written_at_once():
    text = io.StringIO()
    Stream("stdout", text).write("a line\n" * 500)
    assert text.getvalue() == "a line\n" * 500


def test_pythons_own_handler_is_replaced_and_others_stay(monkeypatch):
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "getLogger", lambda: root)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    root.addHandler(logging.StreamHandler())  # as absl does when it is imported
    for _ in range(2):
        log_to_stderr(logging.INFO, "%(levelname)s: %(message)s")
        root.info("once")
    assert sys.stderr.getvalue() == "INFO: once\n" * 2
    other = logging.NullHandler()
    root.handlers[:] = [other]
    log_to_stderr(logging.DEBUG, "%(message)s")
    assert (root.handlers, root.level) == ([other], logging.INFO)

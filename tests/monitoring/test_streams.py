"""Whatever becomes of stdout and stderr, a run goes on and its process ends with its own status."""

import contextlib
import logging
import os
import pty
import select
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.writer import BackgroundWriter, StderrHandler, Stream
from tests.waiting import wait_until

SOON_S = 120.0  # what takes longer hangs
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


def start(program=PROGRAM, **files):
    """Start a process whose stdout has a buffer, as usual."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=env | {"JAX_PLATFORMS": "cpu"}, text=True, **files)


def end(process):
    """Wait for a process; return its status and what it said on stderr."""
    try:
        return process.wait(SOON_S), process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.parametrize("stdout", ["closed by its reader", "that nobody reads", "on a full disk"])
def test_stdout_that_does_not_take_what_is_written(stdout):
    if stdout == "on a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        with open("/dev/full", "w") as full:  # noqa: PTH123
            program = PROGRAM.replace('print("before", flush=True)', "")
            process, said = start(program, stdout=full, stderr=subprocess.PIPE), "No space left"
    else:
        process, said = start(stdout=subprocess.PIPE, stderr=subprocess.PIPE), "keep up"
        if stdout == "closed by its reader":
            assert process.stdout.readline() == "before\n"
            process.stdout.close()
            said = "Broken pipe"
    status, stderr = end(process)
    if process.stdout is not None:
        process.stdout.close()
    assert status == 3 and said in stderr and "ignored" not in stderr


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
    for step in range(1, 100):
        display.advance(f"step {step}")
    assert display._writer.waiting <= 1 + 99, "pictures of the bar don't fill the queue"
    termios.tcflow(file, termios.TCOON)
    display.close()
    wait_until(lambda: reader.text.rstrip().endswith(b"\x1b[?25h"))
    shown = [int(word) for word in reader.text.split() if word.isdigit()]
    assert [step for step in shown if step < 100][:100] == list(range(100))
    assert b"100/100" in reader.text and display._writer.dropped == 0


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


def test_log_lines_are_on_stderr_at_once_and_one_that_is_closed_stops_nothing(logger):
    log, reader = logger
    log.warning("first")
    assert os.read(reader, 100) == b"first\n"
    os.close(reader)
    for number in range(3):
        log.warning("%d", number)


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

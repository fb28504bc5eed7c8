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

import pytest

from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.writer import StderrHandler
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


@pytest.mark.parametrize(
    ("is_closed", "said"), [(True, "Broken pipe"), (False, "keep up")], ids=["closed", "unread"]
)
def test_stdout_that_does_not_take_what_is_written(is_closed, said):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=env | {"JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == "before\n"
        if is_closed:
            process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(SOON_S) == 3 and said in stderr and "ignored" not in stderr


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


def read_now(end):
    """Return what can be read from a pipe without waiting."""
    text = b""
    while select.select([end], [], [], 0)[0]:
        text += os.read(end, 4096)
    return text.decode()


def test_log_lines_wait_for_a_reader_and_one_that_is_gone_stops_nothing(monkeypatch):
    reader, writer = os.pipe()
    log = logging.Logger("alone")
    lines = [f"{number} " + 90 * "x" for number in range(1000)]
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as file:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", file)
        log.addHandler(handler := StderrHandler())
        log.warning("first")
        assert read_now(reader) == "first\n", "at once"
        for line in lines:
            log.warning(line)
        text = read_now(reader)
        assert len(text) < sum(len(line) + 1 for line in lines)
        log.warning("one more")
        assert (text + read_now(reader)).splitlines() == [*lines, "one more"]
        os.close(reader)
        log.warning("unread")
        handler._kept.clear()

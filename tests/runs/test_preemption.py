"""SIGTERM is taken while the main thread is busy; a second one, or a long step, ends the run."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxrl_llm.runs.preemption import Preemption
from tests.waiting import wait_until

PROGRAM = """
import ctypes, sys, time
from jaxrl_llm.runs.preemption import Preemption

with Preemption(float(sys.argv[1])) as preemption:
    print("listens", flush=True)
    while sys.argv[2] == "blocked":
        ctypes.CDLL(None).sleep(600)
    while not preemption.requested():
        time.sleep(0.01)
print("ended", flush=True)
"""


def start(grace_s, mode):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(grace_s), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout.readline() == "listens\n"
    return process


def test_a_step_ends_and_then_the_run():
    process = start(60, "steps")
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ended\n")
    assert "checkpoint.grace_s" in err


@pytest.mark.parametrize(
    ("grace_s", "signals", "reason"), [(60, 2, "twice"), (0.3, 1, "checkpoint.grace_s")]
)
def test_what_does_not_come_to_an_end_is_ended(grace_s, signals, reason):
    """While the main thread waits in a C function, as it does for devices."""
    process = start(grace_s, "blocked")
    process.terminate()
    assert "checkpoint.grace_s" in process.stderr.readline()
    for _ in range(signals - 1):
        process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert reason in err and "newest checkpoint" in err


def test_the_handlers_are_put_back():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    threads = threading.active_count()
    try:
        with Preemption(60.0) as preemption:
            assert not preemption.requested()
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(preemption.requested)
        assert not calls
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1
    wait_until(lambda: threading.active_count() <= threads)


HANG = """
import re, sys, time
from jaxrl_llm.runs import preemption

preemption.BACKUP_S = 0.5
def hang():
    if sys.argv[1] == "asleep":
        time.sleep(600)
    re.match(r"(a+)+$", "a" * 60 + "b")  # it never lets go of the interpreter
with preemption.Watchdog(1.0) as dog:
    for _ in range(5):
        time.sleep(0.3)
        dog.beat()
    print("beaten", flush=True)
    hang()
"""


@pytest.mark.parametrize("mode", ["asleep", "locked"])
def test_a_run_without_progress_ends_with_its_stacks(mode):
    done = subprocess.run(
        [sys.executable, "-c", HANG, mode], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "beaten\n")
    assert " in hang\n" in done.stderr
    if mode == "asleep":
        assert "stall_timeout_s" in done.stderr.splitlines()[-1]

"""SIGTERM is taken while the main thread is busy; a second one, or a long step, ends the run."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.runs.preemption import Preemption, Watchdog

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
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    return process


def test_a_step_ends_and_then_the_run():
    process = start(60, "steps")
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ended\n")
    assert err == (
        "SIGTERM: the run saves at the end of this step, within 60 s (checkpoint.grace_s); a "
        "second one ends it at once\n"
    )


@pytest.mark.parametrize(
    ("grace_s", "signals", "reason"),
    [(60, 2, "it was told twice"), (0.3, 1, "it has not ended within checkpoint.gr")],
)
def test_what_does_not_come_to_an_end_is_ended(grace_s, signals, reason):
    """While the main thread waits in a C function, as it does for devices."""
    process = start(grace_s, "blocked")
    for _ in range(signals):
        process.terminate()
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"SIGTERM: {reason}" in err
    assert err.endswith("; the same command continues from the newest checkpoint\n")


def test_the_handlers_are_put_back():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    threads = threading.active_count()
    try:
        with Preemption(60.0) as preemption:
            assert not preemption.requested()
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 20
            while not preemption.requested():
                assert time.monotonic() < end
        assert not calls
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1
    while threading.active_count() > threads:
        time.sleep(0.01)


def test_other_threads_take_no_signal():
    before = signal.getsignal(signal.SIGTERM)

    def listen():
        with Preemption(60.0) as preemption:
            assert not preemption.requested()
            assert signal.getsignal(signal.SIGTERM) is before

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()


# ---------------------------------------------------------------------------------- watchdog

HANG = """
import re, sys, time
from jaxrl_llm.runs import preemption

preemption.BACKUP_S = 0.5
def hang():
    if sys.argv[1] == "asleep":
        time.sleep(600)
    re.match(r"(a+)+$", "a" * 60 + "b")  # it never lets go of the interpreter
with preemption.Watchdog(0.5) as dog:
    for _ in range(4):
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
        assert done.stderr.splitlines()[-1].startswith("error: there was no step for 0.5 s (stall")


@pytest.mark.parametrize("limit_s", [None, 0.05])
def test_a_watchdog_that_is_closed_or_has_no_limit_ends_nothing(limit_s):
    with Watchdog(limit_s) as dog:
        dog.beat()
    time.sleep(0.2)

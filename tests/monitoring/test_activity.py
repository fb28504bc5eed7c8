"""Who waits is told what goes on; seconds, compilations and memory of a step."""

import itertools
import logging
import threading
import time
from functools import partial
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from jaxrl_llm.monitoring import activity as module
from jaxrl_llm.monitoring.activity import ACTIVITIES, Activities, Activity, activity
from jaxrl_llm.monitoring.clock import Clock, CompileCounter, Pace, is_due, memory_metrics
from tests.waiting import wait_until


class Watch:
    """A clock that is turned by hand, and what goes on by it."""

    def __init__(self):
        self.seconds = 0.0
        self.activities = Activities(lambda: self.seconds)

    def begin(self, label, total=None, **given):
        begun = Activity(label, total, **given)
        self.activities.begin(begun)
        return begun

    def end(self, begun):
        self.activities.end(begun)

    def pass_time(self, seconds):
        """Return what is logged in so many seconds, each with its time."""
        said = []
        for _ in range(round(seconds * 4)):
            self.seconds += 0.25
            said += [(self.seconds, text) for _, text in self.activities.lines()]
        return said


@pytest.fixture
def watch():
    return Watch()


def test_what_takes_long_is_told_after_two_seconds_and_then_at_growing_intervals(watch):
    begun = watch.begin("validating", 512)
    begun.advance(128)
    assert watch.pass_time(1.75) == []
    assert watch.pass_time(0.25) == [(2.0, "validating 128/512")]
    begun.advance()
    times = [seconds for seconds, _ in watch.pass_time(300)]
    assert times == [6, 14, 30, 62, 122, 182, 242, 302]
    watch.end(begun)
    assert watch.pass_time(100) == []


def test_what_lies_within_something_else_follows_it(watch):
    watch.begin("validating")
    watch.begin("sampling", 512, count=lambda: 87)
    compiling = watch.begin("compiling", 12)
    compiling.thread, compiling.detail, compiling.note = 0, "decode 8 x 32", "; they are kept"
    compiling.advance(3)
    threads = [threading.Thread(target=partial(watch.begin, "scoring", 40)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    text = "validating: sampling 87/512, scoring 0/40, compiling 3/12 (decode 8 x 32)"
    assert watch.activities.text == text
    assert watch.pass_time(7) == [(2.0, f"{text}; they are kept"), (6.0, text)], "a note comes once"


def test_counts_that_fail_do_no_harm(watch):
    watch.begin("sampling", 4, count=lambda: 1 // 0)
    watch.begin("scoring", 4).advance(9)
    watch.begin("loading", 4, count=lambda: -3)
    assert watch.activities.text == "sampling 0/4: scoring 4/4: loading 0/4"


def test_a_wait_without_end_is_described_and_where_a_bar_shows_it_there_are_no_lines(watch):
    watch.begin("sampling", describe=lambda: "6 of 6 answers")
    with watch.activities.shown():
        assert watch.pass_time(60) == []
    said = watch.pass_time(250)
    assert [round(seconds) for seconds, text in said if "6 of 6" in text] == [120, 240]
    assert len(said) > 2


def test_a_thread_logs_what_goes_on_as_long_as_it_should(monkeypatch, caplog):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(ACTIVITIES, "_waits", type(ACTIVITIES._waits)())
    caplog.set_level(logging.INFO, "jaxrl_llm")
    for label in ("loading the weights", "syncing weights"):
        with ACTIVITIES.reported(), ACTIVITIES.reported(), activity(label):
            wait_until(lambda label=label: label in caplog.messages)
        wait_until(lambda: not any(t.name == "activity" for t in threading.enumerate()))
    with activity("not told"):
        pass
    assert "not told" not in caplog.text


def test_supervised_training_has_ten_lines_and_more_where_it_is_slow():
    seconds = [0.0]
    fast = Pace(100, lambda: seconds[0])
    assert [step for step in range(1, 101) if fast(step)] == [1, *range(10, 101, 10)]
    slow, lines = Pace(1000, lambda: seconds[0]), []
    for step in range(1, 1001):
        seconds[0] += 1.0
        if slow(step):
            lines.append(step)
    assert lines[:6] == [1, 3, 7, 15, 31, 63]
    assert max(b - a for a, b in itertools.pairwise(lines)) <= 60


def test_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    for stage, seconds in (("gen", 2.0), ("reward", 1.0), ("gen", 0.5)):
        with clock(stage):
            now[0] += seconds
        now[0] += 0.25  # between the stages
    assert clock.metrics() == {"timing_s/gen": 2.5, "timing_s/reward": 1.0, "timing_s/step": 4.25}


def test_compilations_are_counted():
    counter = CompileCounter()
    double = jax.jit(lambda x: x * 2 + 1)
    ones = {n: np.ones(n, np.float32) for n in (3, 5)}
    before = counter.count
    double(ones[3]).block_until_ready()
    assert counter.count == before + 1
    double(ones[3] * 2).block_until_ready()
    assert counter.count == before + 1, "the same shape is not compiled again"
    double(ones[5]).block_until_ready()
    assert counter.count == before + 2
    counter.close()
    jax.jit(lambda x: x * 3)(ones[3]).block_until_ready()
    assert counter.count == before + 2, "closed"


def test_due():
    for every, last, steps in (
        *((0, 7, [7]), (3, 7, [3, 6, 7]), (1, 3, [1, 2, 3])),
        *((10, 7, [7]), (3, 0, [3, 6]), (0, 0, [])),
    ):
        assert [step for step in range(1, (last or 7) + 1) if is_due(step, every, last)] == steps


def test_memory_is_in_gib(monkeypatch):
    device = Mock(memory_stats=lambda: {"peak_bytes_in_use": 3 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory_metrics()["perf/max_memory_allocated_gb"] == 3.0

"""Who waits is told what goes on: beside a bar, or by a line now and then."""

import itertools
import logging
import threading
from functools import partial

import pytest

from jaxrl_llm.monitoring import activity as module
from jaxrl_llm.monitoring.activity import ACTIVITIES, Activities, Activity, activity
from jaxrl_llm.monitoring.clock import Clock, Pace
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


def test_counts_that_fail_do_no_harm_and_what_two_threads_say_is_told_once(watch):
    watch.begin("sampling", 4, count=lambda: 1 // 0)
    watch.begin("scoring", 4).advance(9)
    watch.begin("loading", 4, count=lambda: -3)
    assert watch.activities.text == "sampling 0/4: scoring 4/4: loading 0/4"
    other = Watch()
    other.begin("scoring")
    thread = threading.Thread(target=partial(other.begin, "scoring", 512))
    thread.start()
    thread.join()
    assert other.activities.text == "scoring 0/512"


def test_a_wait_without_end_is_described_and_where_a_bar_shows_it_there_are_no_lines(watch):
    watch.begin("sampling", describe=lambda: "6 of 6 answers")
    with watch.activities.shown():
        assert watch.pass_time(60) == []
    said = watch.pass_time(250)
    assert [round(seconds) for seconds, text in said if "6 of 6" in text] == [120, 240]
    assert len(said) > 2


def test_stages_of_a_step_are_activities_which_end_with_an_error():
    clock = Clock()
    for stage, label in (("gen", "sampling"), ("update_critic", "updating critic"), ("mine",) * 2):
        with clock(stage):
            assert ACTIVITIES.text == label
    assert [*clock.seconds] == ["gen", "update_critic", "mine"]
    with pytest.raises(RuntimeError), clock("gen"):
        raise RuntimeError
    assert ACTIVITIES.text == ""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    ACTIVITIES._waits.clear()
    yield
    ACTIVITIES._waits.clear()


def test_a_thread_logs_what_goes_on_as_long_as_it_should(impatient, caplog):
    with caplog.at_level(logging.INFO, "jaxrl_llm"):
        with ACTIVITIES.reported(), ACTIVITIES.reported():
            with activity("loading the weights"):
                wait_until(lambda: "loading the weights" in caplog.messages)
            with activity("syncing weights", count=lambda: 1 // 0, total=3):
                wait_until(lambda: "syncing weights 0/3" in caplog.messages)
        wait_until(lambda: not any(t.name == "activity" for t in threading.enumerate()))
        with activity("not told"):
            pass
    assert "not told" not in caplog.text
    with caplog.at_level(logging.INFO, "jaxrl_llm"), ACTIVITIES.reported(), activity("again"):
        wait_until(lambda: "again" in caplog.messages)


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

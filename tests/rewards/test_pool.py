import gc
import logging
import math
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import RewardConfig, ScoringConfig
from jaxrl_llm.rewards import runner
from jaxrl_llm.rewards.runner import RewardError, RewardPool, Score
from jaxrl_llm.rewards.worker import RewardItem
from jaxrl_llm.workers import pool as workers_pool
from tests.refusals import refuses
from tests.waiting import ended, wait_until

FUNCTIONS = """
import ctypes, os, re, subprocess, sys, time
from fractions import Fraction
import numpy as np

def act(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0.0):
    if solution_str == "raise": raise KeyError("no such key")
    if solution_str == "exit": sys.exit(3)
    if solution_str == "hang": time.sleep(600)
    if solution_str == "spin": re.match(r"(a+)+$", "a" * 60 + "b")  # never lets go of the GIL
    if solution_str == "die": os._exit(0)
    if solution_str == "crash": ctypes.string_at(0)
    if solution_str == "pid": return {"score": 0.0, "pid": os.getpid()}
    if solution_str == "jax": return {"score": 0.0, "jax": "jax" in sys.modules}
    if solution_str == "child":
        return {"score": 0.0, "pid": subprocess.Popen(["sleep", "600"]).pid}
    if solution_str == "child, hang":
        open(extra_info["file"], "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    if solution_str == "close":
        os.closerange(3, 64)
        time.sleep(600)
    return RESULTS[solution_str] if solution_str in RESULTS else bonus + float(solution_str)

deep = []
for _ in range(9999): deep = [deep]
RESULTS = {
    "nan": float("nan"), "inf": {"score": float("-inf")}, "none": None, "text": "1.0",
    "no score": {"acc": 1.0}, "bad extra": {"score": 1.0, "f": act}, "array": np.ones(3),
    "wide": 1e39, "many digits": 10**5000, "fraction": Fraction(10**400),
    "many digits beside": {"score": 1.0, "n": 10**5000}, "deep": {"score": 1.0, "n": deep},
    "digits beside": {"score": 0.75, "n": 10**400}, "bool": True, "numpy": np.float32(0.5),
    "zero-d": np.array(0.25), "dict": {"score": 0.5, "acc": 1, "pred": None, "n": np.int64(3)},
}

def three(data_source, solution_str, ground_truth):
    return 0.0
"""


def items(*replies, **extra_info):
    return [RewardItem("test", reply, "truth", extra_info) for reply in replies]


def test_scores_come_in_order(make):
    replies = [str(number) for number in range(100)]
    for workers in (0, 1, 3):
        pool = make(workers, bonus=0.5)
        assert pool.score(items(*replies)) == [Score(n + 0.5, {}, None) for n in range(100)]
        assert pool.score([]) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_numbers_and_dicts_are_taken(make, workers):
    scores = make(workers).score(items("bool", "numpy", "zero-d", "digits beside", "dict"))
    assert [score.score for score in scores] == [1.0, 0.5, 0.25, 0.75, 0.5]
    assert all(type(score.score) is float and score.error is None for score in scores)
    assert scores[-1].extra == {"acc": 1, "pred": None, "n": 3}


def test_workers_start_once_and_without_jax_and_threads_may_share_them(make):
    assert "jax" in sys.modules
    pool = make(workers=2)
    pids = {s.extra["pid"] for _ in range(5) for s in pool.score(items(*["pid"] * 100))}
    assert os.getpid() not in pids and len(pids) <= 2
    assert [s.extra for s in pool.score(items("jax"))] == [{"jax": False}]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda n: pool.score(items(*[str(n)] * 30)), range(6)))
    assert got == [[Score(float(n), {}, None)] * 30 for n in range(6)]


def test_long_replies_pass_through_the_pipe(make):
    scores = make(workers=1).score(items(*["1" + " " * 1_000_000] * 20))
    assert [score.score for score in scores] == [1.0] * 20


FAILURES = {
    "exception": {"raise": "KeyError: 'no such key' (mine.py:7)", "exit": "(mine.py:8)"},
    "invalid": {
        **{"nan": "nan", "inf": "-inf", "none": "None", "text": "'1.0'", "no score": "'score'"},
        **{"bad extra": "", "array": "array", "wide": "1e+39", "many digits": "int"},
        **{"fraction": "Fraction", "many digits beside": "dict", "deep": "dict"},
    },
}
FATAL = {"hang": "timeout", "spin": "timeout", "die": "died", "crash": "died", "close": "died"}


def check_failure(pool, caplog, reply, kind, part=""):
    """Let a reply fail among others."""
    before = pool.counts[kind]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        scores = pool.score(items("1", reply, "2", "3"))
    assert [score.score for score in scores] == [1.0, -1.0, 2.0, 3.0], reply
    error = scores[1].error
    assert error.startswith(f"{kind}: ") and part in error and len(error) < 500
    assert [score.error for score in scores if score is not scores[1]] == [None] * 3
    assert pool.counts[kind] == before + 1
    assert "row 1 " in caplog.text and f"'{reply}'" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_is_counted_logged_and_replaced(make, caplog, workers, impatient):
    pool = make(workers)
    for kind, replies in FAILURES.items():
        for reply, part in replies.items():
            check_failure(pool, caplog, reply, kind, part)
    for reply, kind in FATAL.items() if workers else ():
        impatient(lambda pending, kind=kind: kind == "timeout" and pending[0] == 1)
        check_failure(pool, caplog, reply, kind)
    assert pool.score(items("4"))[0] == Score(4.0, {}, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_failure_stops_when_asked_to_without_waiting_for_others(make, workers):
    pool = make(workers, on_error=None)
    for other in ("1", "hang" if workers else "1"):
        with pytest.raises(RewardError, match=r"row 1 .*KeyError"):
            pool.score(items(other, "raise"))
    assert pool.counts["exception"] == 2
    assert [score.score for score in pool.score(items("5", "6"))] == [5.0, 6.0]


def test_time_limit_is_per_item_not_per_chunk(make, monkeypatch):
    """By this clock each answer takes 400 s; the first chunk of 8 items holds three."""
    (hung,) = make(1, timeout_s=0.5).score(items("hang"))
    assert hung.error.startswith("timeout: ")
    clock, decode = types.SimpleNamespace(now=0.0), runner.RewardWorkers.decode

    def decode_late(self, line, pending):
        clock.now += 400
        return decode(self, line, pending)

    monkeypatch.setattr(runner.RewardWorkers, "decode", decode_late)
    monkeypatch.setattr(workers_pool, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    scores = make(1, timeout_s=590.0).score(items(*["1"] * 8))
    assert [score.score for score in scores] == [1.0] * 8 and clock.now >= 8 * 400


def test_settings_and_the_function_are_checked_before_anything_runs(make):
    for key, value in (
        *(("workers", -1), ("timeout_s", 0.0), ("timeout_s", math.inf), ("concurrency", 0)),
        *(("retries", -1), ("memory_gb", 0), ("memory_gb", math.nan), ("max_processes", 0)),
        ("on_error", "nothing"),
    ):
        with refuses(key):
            ScoringConfig(**{key: value})
    for value in (math.nan, 10**400):
        with refuses("on_error"):
            RewardConfig(on_error=value)
    for keywords, named in (
        *(({"name": "akt"}, "act"), ({"bonsu": 1}, "bonus"), ({"name": "three"}, "extra_info")),
    ):
        with pytest.raises(ConfigError, match=f"'{named}'"):
            make(**keywords)


def test_a_worker_that_can_not_start_says_why(tmp_path, monkeypatch):
    for name, line, named, limit in [
        ("raises", "raise OSError('not here')", r"raises\.py:2: OSError", 600.0),
        *(("ends", "os._exit(7)", "7", 600.0), ("hangs", "time.sleep(600)", r"0\.5 s", 0.5)),
    ]:
        (tmp_path / f"{name}.py").write_text(
            f"import os, time\nif os.getpid() != {os.getpid()}: {line}\n"
            "def act(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
        )
        spec = FunctionSpec(f"{tmp_path}/{name}.py:act")
        monkeypatch.setattr(workers_pool, "START_TIMEOUT_S", limit)
        with (
            RewardPool(spec, ScoringConfig(workers=1)) as pool,
            pytest.raises(RewardError, match=named),
        ):
            pool.score(items("1"))


def test_no_process_of_a_forgotten_pool_is_left_behind(functions_file):
    pool = RewardPool(FunctionSpec(f"{functions_file}:act"), ScoringConfig(workers=2))
    pids = {score.extra["pid"] for score in pool.score(items(*["pid"] * 100, "child"))}
    assert not any(ended(pid) for pid in pids)
    del pool
    gc.collect()
    wait_until(lambda: all(ended(pid) for pid in pids))


def test_closing_ends_a_call_in_another_thread(functions_file, tmp_path):
    file, before = tmp_path / "child", psutil.Process().children()
    config = ScoringConfig(workers=2, timeout_s=590.0)
    pool = RewardPool(FunctionSpec(f"{functions_file}:act"), config)
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(pool.score, items("hang", "child, hang", file=str(file)))
        wait_until(lambda: file.exists() and file.read_text())
        pool.close()
        with pytest.raises(RewardError, match="closed"):
            scoring.result(timeout=60.0)
    with pytest.raises(RewardError, match="closed"):
        pool.score(items("1"))
    assert psutil.Process().children() == before and sum(pool.counts.values()) == 0
    wait_until(lambda: ended(int(file.read_text())))

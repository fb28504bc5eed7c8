import gc
import logging
import math
import os
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import RewardConfig, ScoringConfig
from jaxrl_llm.data.rows import normalize_preference_row
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
    if solution_str == "nap": time.sleep(0.3); return 1.0
    if solution_str == "pid": return {"score": 0.0, "pid": os.getpid()}
    if solution_str == "jax": return {"score": 0.0, "jax": "jax" in sys.modules}
    if solution_str == "child":
        return {"score": 0.0, "pid": subprocess.Popen(["sleep", "600"]).pid}
    if solution_str == "child, hang":
        extra_info["file"] and open(extra_info["file"], "w").write(
            str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    if solution_str == "close":
        os.closerange(3, 64)
        time.sleep(600)
    return RESULTS[solution_str] if solution_str in RESULTS else bonus + float(solution_str)

class Own:
    item = __repr__ = lambda self: 1 / 0

deep = []
for _ in range(9999): deep = [deep]
RESULTS = {
    "nan": float("nan"), "inf": {"score": float("-inf")}, "none": None, "text": "1.0",
    "list": [1.0], "no score": {"acc": 1.0}, "bad extra": {"score": 1.0, "f": act},
    "array": np.ones(3), "bool": True, "int": 2, "numpy": np.float32(0.5),
    "wide": 1e39, "digits": int("9" * 400), "many digits": 10**5000, "own": Own(),
    "fraction": Fraction(10**400), "fraction beside": {"score": 1.0, "n": Fraction(10**400)},
    "many digits beside": {"score": 1.0, "n": 10**5000}, "deep": {"score": 1.0, "n": deep},
    "digits beside": {"score": 0.75, "n": 10**400},
    "zero-d": np.array(0.25), "dict": {"score": 0.5, "acc": 1, "pred": None, "n": np.int64(3)},
}

def three(data_source, solution_str, ground_truth):
    return 0.0
"""


@pytest.fixture
def make(functions_file):
    pools = []

    def build(workers=2, timeout_s=20.0, on_error=-1.0, name="act", **keywords):
        spec = FunctionSpec(f"{functions_file}:{name}", keywords)
        config = ScoringConfig(workers=workers, timeout_s=timeout_s, on_error=on_error)
        pools.append(RewardPool(spec, config))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


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
    replies = ("bool", "int", "numpy", "zero-d", "digits beside", "dict")
    scores = make(workers).score(items(*replies))
    assert [score.score for score in scores] == [1.0, 2.0, 0.5, 0.25, 0.75, 0.5]
    assert all(type(score.score) is float and score.error is None for score in scores)
    assert scores[-1].extra == {"acc": 1, "pred": None, "n": 3}


def test_built_in_reward_function_by_name():
    spec = FunctionSpec("gsm8k", {"flexible": True})
    with RewardPool(spec, ScoringConfig(workers=1)) as pool:
        score = pool.score([RewardItem("openai/gsm8k", "it is 1,200", "1200", None)])[0]
    assert score == Score(1.0, {"acc": 1.0, "pred": "1200"}, None)


def test_workers_start_once_and_without_jax(make):
    assert "jax" in sys.modules
    pool = make(workers=2)
    pids = {s.extra["pid"] for _ in range(5) for s in pool.score(items(*["pid"] * 100))}
    assert os.getpid() not in pids and len(pids) <= 2
    assert [s.extra for s in pool.score(items("jax"))] == [{"jax": False}]


def test_threads_may_share_a_pool(make):
    pool = make(workers=2)
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda n: pool.score(items(*[str(n)] * 30)), range(6)))
    assert got == [[Score(float(n), {}, None)] * 30 for n in range(6)]


def test_long_replies_pass_through_the_pipe(make):
    scores = make(workers=1).score(items(*["1" + " " * 1_000_000] * 40))
    assert [score.score for score in scores] == [1.0] * 40


FAILURES = {
    "exception": {
        "raise": "KeyError: 'no such key' (mine.py:7)",
        "exit": "(mine.py:8)",
        "x": "'x'",
    },
    "invalid": {
        **{"nan": "nan", "inf": "-inf", "none": "None", "text": "'1.0'", "list": "[1.0]"},
        **{"no score": "'score'", "bad extra": "", "array": "array", "wide": "1e+39"},
        **{"digits": "9999999999", "many digits": "int", "fraction": "Fraction", "own": "Own"},
        **{"many digits beside": "dict", "deep": "dict", "fraction beside": "Fraction"},
    },
}
FATAL = {
    **{"hang": "timeout", "spin": "timeout"},
    **{"die": "died", "crash": "died", "close": "died"},
}


def check_failure(pool, caplog, reply, kind, part=""):
    """Let a reply fail among others."""
    before = pool.counts[kind]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        scores = pool.score(items("1", reply, "2", "3"))
    assert [score.score for score in scores] == [1.0, -1.0, 2.0, 3.0], reply
    error = scores[1].error
    assert error.startswith(f"{kind}: ") and part in error
    assert [score.error for score in scores if score is not scores[1]] == [None] * 3
    assert pool.counts[kind] == before + 1
    assert f"row 1 (data_source 'test', reply '{reply}', ground truth 'truth'): " in caplog.text
    assert pool.score(items("4"))[0] == Score(4.0, {}, None)


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_is_counted_logged_and_replaced(make, caplog, workers):
    pool = make(workers)
    for kind, replies in FAILURES.items():
        for reply, part in replies.items():
            check_failure(pool, caplog, reply, kind, part)
    (score,) = pool.score(items("z" * 9000))
    assert len(score.error) < 500
    for reply, kind in FATAL.items() if workers else ():
        check_failure(make(workers, timeout_s=1.0), caplog, reply, kind)


@pytest.mark.parametrize("workers", [0, 2])
def test_failure_stops_when_asked_to(make, workers):
    pool = make(workers, on_error=None)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"row 1 .*KeyError"):
            pool.score(items("1", "raise", "2"))
    assert pool.counts["exception"] == 2
    assert pool.score(items("5"))[0].score == 5.0


def test_stopping_does_not_wait_for_the_others(make):
    pool = make(2, timeout_s=590.0, on_error=None)
    with pytest.raises(RewardError, match="exception"):
        pool.score(items("hang", "raise"))
    assert pool.score(items("6", "7"))[1].score == 7.0


def test_many_failures_at_once(make):
    replies = ["hang", "die", "nan", "raise", "1"] * 2
    scores = make(3, timeout_s=1.0, on_error=0.0).score(items(*replies))
    kinds = [(score.error or "fine").split(":")[0] for score in scores]
    assert kinds == ["timeout", "died", "invalid", "exception", "fine"] * 2


def test_time_limit_is_per_item_not_per_chunk(make):
    # 8 items for one worker: the first chunk holds 3, which take 0.9 s
    scores = make(1, timeout_s=0.8, on_error=None).score(items(*["nap"] * 8))
    assert [score.score for score in scores] == [1.0] * 8


def test_many_failures_are_one_line_with_two_different_ones(make, caplog):
    with caplog.at_level(logging.WARNING):
        make(0, on_error=0.0).score(items("1", *["raise"] * 40, *["none"] * 47))
        make(0).score(items("x" * 5000))
    line, long = caplog.messages
    assert "87 of 88 answers (40 exception, 47 invalid)" in line and line.count("row ") == 2
    assert "row 1 " in line and "row 41 " in line
    assert len(long[long.index("row 0") : long.index("ground truth")]) < 250


def test_a_hung_reward_functions_own_children_are_killed(make, tmp_path):
    file = tmp_path / "pid"
    scores = make(1, timeout_s=1.0).score(items("child, hang", file=str(file)))
    assert "timeout" in scores[0].error
    wait_until(lambda: ended(int(file.read_text())))


def test_settings_and_the_function_are_checked_before_anything_runs(make):
    settings = {"workers": [-1], "on_error": [math.nan], "timeout_s": [0.0, -1.0, math.inf]}
    for key, value in ((key, value) for key, values in settings.items() for value in values):
        with refuses(key):
            ScoringConfig(**{key: value})
    for keywords, named in {
        "name=akt": "act",
        "bonsu=1": "bonus",
        "name=three": "extra_info",
    }.items():
        with pytest.raises(ConfigError, match=f"'{named}'"):
            make(**dict([keywords.split("=")]))


def here_only(folder, elsewhere):
    """Return a reward function of a file that runs a line where it is loaded elsewhere."""
    path = folder / "once.py"
    path.write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}: {elsewhere}\n"
        "def act(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
    )
    return FunctionSpec(f"{path}:act")


CELL = """
import another_module

def act(data_source, solution_str, ground_truth, extra_info=None):
    return another_module.value
"""


def test_a_worker_that_can_not_start_says_why(tmp_path, monkeypatch):
    other = types.ModuleType("another_module")
    monkeypatch.setitem(sys.modules, "another_module", other)
    other.value, cell = 1.0, {"__name__": "__main__"}
    exec(CELL, cell)  # what a worker can't unpickle used to end it without a word
    for spec, named in [
        (here_only(tmp_path, "raise OSError('not here')"), r"once\.py:2: OSError"),
        (FunctionSpec.of(cell["act"]), "another_module"),
    ]:
        with (
            RewardPool(spec, ScoringConfig(workers=1)) as pool,
            pytest.raises(RewardError, match=named),
        ):
            pool.score(items("1"))
    with (
        RewardPool(here_only(tmp_path, "os._exit(7)"), ScoringConfig(workers=2)) as pool,
        pytest.raises(RewardError, match="7"),
    ):
        pool.score(items("1"))
    monkeypatch.setattr(workers_pool, "START_TIMEOUT_S", 0.5)
    with (
        RewardPool(here_only(tmp_path, "time.sleep(600)"), ScoringConfig(workers=1)) as pool,
        pytest.raises(RewardError, match=r"0\.5 s"),
    ):
        pool.score(items("1"))


def test_worker_killed_while_idle_is_replaced(make):
    pool = make(1, on_error=None)
    first = pool.score(items("pid"))[0].extra["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first))  # its supervisor has seen it
    assert pool.score(items("pid"))[0].extra["pid"] != first
    assert sum(pool.counts.values()) == 0


@pytest.mark.parametrize("way", ["close", "with", "collect"])
def test_no_process_is_left_behind(functions_file, way):
    pool = RewardPool(FunctionSpec(f"{functions_file}:act"), ScoringConfig(workers=2))
    replies = items(*["pid"] * 100, "child")
    pids = {score.extra["pid"] for score in pool.score(replies)}
    assert not any(ended(pid) for pid in pids)
    if way == "close":
        pool.close()
    if way == "with":
        with pool:
            pool.score(replies)
    if way == "collect":
        del pool
        gc.collect()
    wait_until(lambda: all(ended(pid) for pid in pids))


@pytest.mark.parametrize("when", ["asked", "starting", "scoring"])
def test_closing_ends_a_call_in_another_thread(functions_file, tmp_path, when):
    file, before = tmp_path / "child", psutil.Process().children()
    config = ScoringConfig(workers=2, timeout_s=590.0)
    pool = RewardPool(FunctionSpec(f"{functions_file}:act"), config)
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(pool.score, items("hang", "child, hang", file=str(file)))
        if when == "starting":
            wait_until(lambda: pool._worker_pool.workers)
        if when == "scoring":
            wait_until(lambda: file.exists() and file.read_text())
        pool.close()
        with pytest.raises(RewardError, match="closed"):
            scoring.result(timeout=60.0)
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.score(items("1"))
    assert psutil.Process().children() == before and sum(pool.counts.values()) == 0
    if when == "scoring":
        wait_until(lambda: ended(int(file.read_text())))


PROGRAM = """
import sys, threading
sys.path[:] = {search!r}
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import ScoringConfig
from jaxrl_llm.rewards import runner as m
pool = m.RewardPool(FunctionSpec({function!r}), ScoringConfig(workers=1, timeout_s=60.0))
print(pool.score([m.RewardItem("", "pid", "", {{}})])[0].extra["pid"], flush=True)
pool.score([m.RewardItem("", {reply!r}, "", {{}})]) if {reply!r} else sys.stdin.read()
"""


@pytest.mark.parametrize("reply", ["", "hang", "spin"])
def test_workers_end_when_their_owner_is_killed(functions_file, reply):
    search = [*sys.path, str(Path(runner.__file__).parents[2])]
    program = PROGRAM.format(search=search, function=f"{functions_file}:act", reply=reply)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as owner:
        worker = int(owner.stdout.readline())
        assert not ended(worker)
        owner.kill()
    wait_until(lambda: ended(worker))


def test_numbers_that_float32_can_not_hold_are_named_by_key_or_row():
    huge, pair = 10**400, {"prompt": "a", "chosen": "b", "rejected": "c"}
    steps = {"prompt": "a", "completions": ["b", "c"], "labels": [1, huge]}
    for row, field in [
        *((pair | {"margin": huge}, "margin"), (pair | {"score_chosen": 1e39}, "score_chosen")),
        (steps, "labels"),
    ]:
        with pytest.raises(ValueError, match=field):
            normalize_preference_row(row)
    with refuses("on_error"):
        RewardConfig(on_error=huge)

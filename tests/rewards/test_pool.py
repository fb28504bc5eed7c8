"""The reward pool: order, speed of recovery, and every way in which a reward function can fail."""

import gc
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
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
    if solution_str == "nap": time.sleep(0.1); return 1.0
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


# ----------------------------------------------------------------------------------- what it gives


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_scores_come_in_order(make, workers):
    replies = [str(number) for number in range(100)]
    scores = make(workers, bonus=0.5).score(items(*replies))
    assert scores == [Score(number + 0.5, {}, None) for number in range(100)]


def test_nothing_to_score(make):
    assert make().score([]) == []


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


def test_many_cheap_items_are_quick(make):
    pool = make(workers=2)
    pool.score(items("1"))
    start = time.monotonic()
    pool.score(items(*["1" * 300] * 1024))
    assert time.monotonic() - start < 3.0  # 0.2 s on an idle machine


def test_threads_may_share_a_pool(make):
    pool = make(workers=2)
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda n: pool.score(items(*[str(n)] * 30)), range(6)))
    assert got == [[Score(float(n), {}, None)] * 30 for n in range(6)]


def test_long_replies_pass_through_the_pipe(make):
    scores = make(workers=1).score(items(*["1" + " " * 1_000_000] * 40))
    assert [score.score for score in scores] == [1.0] * 40


# ------------------------------------------------------------------------------------ what can fail


FAILURES = [
    ("raise", "exception", "exception: KeyError: 'no such key' (mine.py:7)"),
    ("exit", "exception", "exception: SystemExit: 3 (mine.py:8)"),
    ("x", "exception", "exception: ValueError: could not convert string to float: 'x' (mine.py:"),
    ("nan", "invalid", "invalid: expected a finite number (float32) as score, got nan"),
    ("inf", "invalid", "invalid: expected a finite number (float32) as score, got -inf"),
    ("none", "invalid", "invalid: expected a finite number (float32) as score, got None"),
    ("text", "invalid", "invalid: expected a finite number (float32) as score, got '1.0'"),
    ("list", "invalid", "invalid: expected a finite number (float32) as score, got [1.0]"),
    ("no score", "invalid", "invalid: expected a dict with 'score', got keys ['acc']"),
    ("bad extra", "invalid", "a function is not plain data"),
    ("array", "invalid", "(float32) as score, got array([1., 1., 1.])"),
    ("wide", "invalid", "(float32) as score, got 1e+39"),
    ("digits", "invalid", "(float32) as score, got 9999999999"),
    ("many digits", "invalid", "(float32) as score, got an int"),
    ("fraction", "invalid", "(float32) as score, got Fraction(1000000"),
    ("own", "invalid", "(float32) as score, got an Own"),
    ("many digits beside", "invalid", "expected plain data, got a dict: Exceeds the limit"),
    ("deep", "invalid", "expected plain data, got a dict: maximum recursion depth"),
    ("fraction beside", "invalid", "expected plain data, got {'score': 1.0, 'n': Fraction(1"),
]
FATAL = [
    ("hang", "timeout", "timeout: no answer within 1 s"),
    ("spin", "timeout", "timeout: no answer within 1 s"),
    ("die", "died", "died: its process ended with exit code 0"),
    ("crash", "died", "died: its process ended with exit code -11"),
    ("close", "died", "died: its process ended with exit code none yet"),
]


@pytest.mark.parametrize(
    ("workers", "reply", "kind", "message"),
    [(w, *failure) for w in (0, 1) for failure in FAILURES] + [(1, *failure) for failure in FATAL],
)
def test_failure_is_counted_logged_and_replaced(make, caplog, workers, reply, kind, message):
    pool = make(workers, timeout_s=1.0, on_error=-1.0)
    with caplog.at_level(logging.WARNING):
        scores = pool.score(items("1", reply, "2", "3"))
    assert [score.score for score in scores] == [1.0, -1.0, 2.0, 3.0]
    error = scores[1].error
    assert error is not None and message in error
    assert [score.error for score in scores if score is not scores[1]] == [None] * 3
    assert pool.counts == {"exception": 0, "timeout": 0, "died": 0, "invalid": 0, kind: 1}
    assert f"row 1 (data_source 'test', reply '{reply}', ground truth 'truth'): " in caplog.text
    assert message in caplog.text
    assert pool.score(items("4"))[0] == Score(4.0, {}, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_failure_stops_when_asked_to(make, workers):
    pool = make(workers, on_error=None)
    message = r"failed on row 1 \(data_source 'test', reply 'raise', .*\): exception: KeyError"
    for _ in range(2):
        with pytest.raises(RewardError, match=message):
            pool.score(items("1", "raise", "2"))
    assert pool.counts["exception"] == 2
    assert pool.score(items("5"))[0].score == 5.0


def test_stopping_does_not_wait_for_the_others(make):
    pool = make(2, timeout_s=60.0, on_error=None)
    pool.score(items("1", "2"))
    start = time.monotonic()
    with pytest.raises(RewardError, match="exception"):
        pool.score(items("hang", "raise"))
    assert time.monotonic() - start < 20.0
    assert pool.score(items("6", "7"))[1].score == 7.0


def test_many_failures_at_once(make):
    replies = ["hang", "die", "nan", "raise", "1"] * 3
    scores = make(3, timeout_s=0.5, on_error=0.0).score(items(*replies))
    kinds = [(score.error or "fine").split(":")[0] for score in scores]
    assert kinds == ["timeout", "died", "invalid", "exception", "fine"] * 3


def test_time_limit_is_per_item_not_per_chunk(make):
    # 24 items for one worker: the first chunk holds 7, which take 0.7 s
    scores = make(1, timeout_s=0.5, on_error=None).score(items(*["nap"] * 24))
    assert [score.score for score in scores] == [1.0] * 24


def test_many_failures_are_one_line_with_two_different_ones(make, caplog):
    with caplog.at_level(logging.WARNING):
        make(0, on_error=0.0).score(items("1", *["raise"] * 40, *["none"] * 47))
    (line,) = caplog.messages
    assert "failed on 87 of 88 answers (40 exception, 47 invalid); the first: row 1 " in line
    assert "; another: row 41 " in line and "got None" in line
    assert line.count("row ") == 2


def test_long_rows_are_shortened_in_the_log(make, caplog):
    with caplog.at_level(logging.WARNING):
        make(0).score(items("x" * 5000))
    row = caplog.text[caplog.text.index("row 0") : caplog.text.index("ground truth")]
    assert len(row) < 250


def test_a_hung_reward_functions_own_children_are_killed(make, tmp_path):
    file = tmp_path / "pid"
    scores = make(1, timeout_s=1.0).score(items("child, hang", file=str(file)))
    assert "timeout" in (scores[0].error or "")
    wait_until(lambda: ended(int(file.read_text())))


# -------------------------------------------------------------------------- starting and end_reason


@pytest.mark.parametrize(
    ("key", "value"),
    [("workers", -1), ("on_error", math.nan), *(("timeout_s", t) for t in (0.0, -1.0, math.inf))],
)
def test_settings_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"^{key}: expected"):
        ScoringConfig(**{key: value})


def test_reward_function_is_checked_before_anything_runs(make):
    with pytest.raises(ConfigError, match=r"no function 'akt' .*did you mean 'act'"):
        make(name="akt")
    with pytest.raises(ConfigError, match="takes no 'bonsu'; did you mean 'bonus'"):
        make(bonsu=1.0)
    with pytest.raises(ConfigError, match=r"can't be called with data_source, .*'extra_info'"):
        make(name="three")


def test_reward_function_that_only_loads_here(tmp_path):
    path = tmp_path / "once.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise OSError('not here')\n"
        "def act(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
    )
    pool = RewardPool(FunctionSpec(f"{path}:act"), ScoringConfig(workers=1))
    with (
        pool,
        pytest.raises(RewardError, match=r"a worker can't load .*once\.py:2: OSError: not here"),
    ):
        pool.score(items("1"))


CELL = """
import another_module

def act(data_source, solution_str, ground_truth, extra_info=None):
    return another_module.value
"""


def test_a_function_given_from_python_that_only_loads_here(monkeypatch):
    """What a worker can't unpickle used to end it without a word."""
    other = types.ModuleType("another_module")
    monkeypatch.setitem(sys.modules, "another_module", other)
    other.value = 1.0
    cell = {"__name__": "__main__"}
    exec(CELL, cell)
    pool = RewardPool(FunctionSpec.of(cell["act"]), ScoringConfig(workers=1))
    expected = r"a worker can't load '__main__:act': ModuleNotFoundError: .*'another_module'"
    with pool, pytest.raises(RewardError, match=expected):
        pool.score(items("1"))


def test_worker_that_dies_while_starting(tmp_path):
    path = tmp_path / "fatal.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}: os._exit(7)\n"
        "def act(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
    )
    pool = RewardPool(FunctionSpec(f"{path}:act"), ScoringConfig(workers=2))
    with pool, pytest.raises(RewardError, match="a worker ended with exit code 7 while it started"):
        pool.score(items("1"))


def test_worker_that_never_comes_up(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_pool, "START_TIMEOUT_S", 0.5)
    path = tmp_path / "slow.py"
    path.write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}: time.sleep(600)\n"
        "def act(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
    )
    pool = RewardPool(FunctionSpec(f"{path}:act"), ScoringConfig(workers=1))
    with pool, pytest.raises(RewardError, match=r"no worker came up within 0.5 s"):
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


def test_long_messages_are_shortened(make, caplog):
    score = make(1).score(items("z" * 9000))[0]
    assert score.error is not None and len(score.error) < 500


def test_closed_pool_refuses(make):
    pool = make(1)
    pool.close()
    pool.close()
    with pytest.raises(RewardError, match="the pool is closed"):
        pool.score(items("1"))


@pytest.mark.parametrize("when", ["asked", "starting", "scoring"])
def test_closing_ends_a_call_in_another_thread(functions_file, tmp_path, when):
    file = tmp_path / "child"
    before = psutil.Process().children()
    pool = RewardPool(
        FunctionSpec(f"{functions_file}:act"), ScoringConfig(workers=2, timeout_s=60.0)
    )
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(pool.score, items("hang", "child, hang", file=str(file)))
        if when == "starting":
            wait_until(lambda: pool._worker_pool.workers)
        if when == "scoring":
            wait_until(lambda: file.exists() and file.read_text())
        start = time.monotonic()
        pool.close()
        with pytest.raises(RewardError, match="the pool is closed"):
            scoring.result(timeout=10.0)
    assert time.monotonic() - start < 5.0
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
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        time.sleep(0.1)
        assert not ended(worker)
        owner.kill()
    wait_until(lambda: ended(worker))


# --------------------------------------------------------------- numbers beside reward functions


HUGE, SPEC = 10**400, FunctionSpec("gsm8k")
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
STEPS = {"prompt": "a", "completions": ["b", "c"]}


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: normalize_preference_row(PAIR | {"margin": HUGE}), "field 'margin'"),
        (lambda: normalize_preference_row(PAIR | {"score_chosen": 1e39}), "field 'score_cho"),
        (lambda: normalize_preference_row(STEPS | {"labels": [1, HUGE]}), r"field 'labels\[1\]"),
        (lambda: RewardConfig(on_error=HUGE), "on_error"),
    ],
)
def test_numbers_that_float32_can_not_hold_are_named_by_key_or_row(use, message):
    with pytest.raises(ValueError, match=message):
        use()

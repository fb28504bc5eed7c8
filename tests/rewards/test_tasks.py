import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import ScoringConfig
from jaxrl_llm.rewards.runner import RewardError, RewardTasks, Score
from jaxrl_llm.rewards.worker import RewardItem
from tests.waiting import ended, wait_until

ray = pytest.importorskip("ray")
FUNCTIONS = """
import os, re, subprocess, sys, time

def above(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

def rays(): return above(above(os.getppid()))  # between us are our supervisor and what waits for it

def mark(file, *words):
    with open(file, "a") as marks:
        print(*words, file=marks)
    return open(file).read().splitlines()

def act(data_source, solution_str, ground_truth, extra_info, *, bonus=0.0):
    file = extra_info.get("file")
    if solution_str == "raise": raise KeyError("no such key")
    if solution_str == "nan": return float("nan")
    if solution_str == "spin":  # never lets go of the GIL
        file and mark(file, os.getpid(), rays())
        re.match(r"(a+)+$", "a" * 60 + "b")
    if solution_str == "child, hang":
        mark(file, subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)
    if solution_str == "die": mark(file, "died"); os._exit(3)
    if solution_str == "kill Ray's": mark(file, "died"); os.kill(rays(), 9); time.sleep(600)
    if solution_str == "who":
        return {"score": 0.0, "pid": os.getpid(), "jax": "jax" in sys.modules}
    return bonus + float(solution_str)
"""


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_nodes):
    os.environ["OPENAI_API_KEY"] = "secret"
    with ray_nodes(count=1, cpus=2) as address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()
    del os.environ["OPENAI_API_KEY"]


@pytest.fixture
def make(functions_file):
    made = []

    def build(tasks=2, timeout_s=600.0, retries=1, on_error=-1.0, name="act", **keywords):
        spec = FunctionSpec(f"{functions_file}:{name}", keywords)
        config = ScoringConfig(timeout_s=timeout_s, on_error=on_error)
        made.append(RewardTasks(spec, config, tasks=tasks, retries=retries))
        return made[-1]

    yield build
    for tasks in made:
        tasks.close()


def items(*replies, **extra_info):
    extra_info = {key: str(value) for key, value in extra_info.items()}
    return [RewardItem("test", reply, "truth", extra_info) for reply in replies]


def values(scores):
    return [score.score for score in scores]


def lines(file):
    return file.read_text().splitlines() if file.exists() else []


def none_failed(**others):
    return dict.fromkeys(("exception", "timeout", "died", "invalid", "retried"), 0) | others


def test_scores_come_in_order_from_processes_that_are_kept(make):
    with make(tasks=2, bonus=0.5) as tasks:
        scores = tasks.score(items(*map(str, range(100))))
        assert scores == [Score(number + 0.5, {}, None) for number in range(100)]
        assert tasks.score([]) == []
        seen = [score.extra for _ in range(2) for score in tasks.score(items(*["who"] * 50))]
        assert len({extra["pid"] for extra in seen}) <= 2
        assert not any(extra["jax"] for extra in seen) and "jax" in sys.modules
    assert tasks.counts == none_failed()
    with pytest.raises(RewardError, match="closed"):
        tasks.score(items("1"))


def test_users_file_sees_our_folder_and_modules_and_the_limits_hold(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ours_alone.py").write_text("SCORE = 0.25\n")
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, resource, ours_alone\n"
        "def act(data_source, solution_str, ground_truth, extra_info):\n"
        "    names = [n for n in ('OPENAI_API_KEY', 'RAY_JOB_ID') if n in os.environ]\n"
        "    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]\n"
        "    extra = {'folder': str(pathlib.Path.cwd()), 'names': names, 'limit': limit}\n"
        "    return {'score': ours_alone.SCORE} | extra\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    config = ScoringConfig(memory_gb=1.5, pass_env=["RAY_JOB_*"])
    with RewardTasks(FunctionSpec("mine.py:act"), config, tasks=1, retries=2) as tasks:
        (score,) = tasks.score(items("1"))
    extra = {"folder": str(tmp_path), "names": ["RAY_JOB_ID"], "limit": 1.5e9}
    assert (score.score, score.extra) == (0.25, extra)


def test_failure_is_its_items_alone(make, caplog):
    tasks = make(tasks=1)
    with caplog.at_level(logging.WARNING):
        scores = tasks.score(items("1", "raise", "2", "nan", "3"), rows=range(40, 45))
    assert values(scores) == [1.0, -1.0, 2.0, -1.0, 3.0]
    assert scores[1].error.startswith("exception: KeyError: 'no such key' (mine.py:")
    assert scores[3].error.startswith("invalid: ")
    assert tasks.counts == none_failed(exception=1, invalid=1)
    assert "row 41 " in caplog.text


def test_hung_call_ends_and_is_told(make, tmp_path):
    tasks = make(tasks=1, timeout_s=1.0)
    (score,) = tasks.score(items("spin", file=tmp_path / "pids"))
    assert score.score == -1.0 and score.error.startswith("timeout: ")
    assert tasks.counts == none_failed(timeout=1)
    (pids,) = lines(tmp_path / "pids")
    assert ended(int(pids.split()[0]))


@pytest.mark.parametrize(("reply", "held", "retries"), [("die", 0, 1), ("kill Ray's", 11, 0)])
def test_item_that_kills_its_process_is_tried_again(make, tmp_path, reply, held, retries):
    replies = [str(number) for number in range(40)]
    replies[3] = reply
    tasks = make(tasks=1, retries=retries)  # the first task holds 11 items
    scores = tasks.score(items(*replies, file=tmp_path / "tries"))
    assert values(scores) == [*range(3), -1.0, *range(4, 40)]
    assert scores[3].error.startswith("died: ")
    assert tasks.counts == none_failed(died=1, retried=held + retries)
    tries = retries + (2 if held else 1)  # among others it can't be blamed
    assert lines(tmp_path / "tries") == ["died"] * tries


def test_closing_ends_a_call_in_another_thread(make, tmp_path):
    file = tmp_path / "pids"
    tasks = make(timeout_s=590.0)
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(tasks.score, items("child, hang", "spin", file=file))
        wait_until(lambda: len(lines(file)) == 2)
        wait_until(lambda: not ray.available_resources().get("CPU", 0))
        tasks.close()
        wait_until(lambda: all(ended(int(line.split()[0])) for line in lines(file)))
        with pytest.raises(RewardError, match="closed"):
            scoring.result(timeout=60.0)
    assert tasks.counts == none_failed()


def test_what_can_not_be_loaded_says_why(tmp_path, make):
    path = tmp_path / "once.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise OSError('not here')\n"
        "def act(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
    )
    with (
        RewardTasks(FunctionSpec(f"{path}:act"), ScoringConfig(), tasks=1, retries=0) as tasks,
        pytest.raises(RewardError, match="OSError"),
    ):
        tasks.score(items("1"))
    with pytest.raises(ConfigError, match="'act'"):
        make(name="akt")


def test_without_a_cluster(make, monkeypatch):
    tasks = make()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for use in (make, lambda: tasks.score(items("1"))):
        with pytest.raises(RewardError, match="Ray"):
            use()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RewardError, match="pip"):
        make()

import json
import math
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import ScoringConfig
from jaxrl_llm.rewards.runner import RewardPool, Score
from jaxrl_llm.rewards.worker import RewardItem, decode_numbered, encode_answer
from jaxrl_llm.workers import pool as workers_pool
from jaxrl_llm.workers import supervisor
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere less is contained")
FUNCTIONS = """
import ctypes, json, os, pickle, resource, signal, stat, subprocess, sys, threading, time

def connection():
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode): return fd
        except OSError: pass

def write(data):
    while data: data = data[os.write(connection(), data):]

def forge(**changes):
    answer = {"number": 1, "score": 9.0, "extra": {}, "error": None, **changes}
    write(json.dumps(answer).encode() + b"\\n")

def stay(session, middle=False):
    if os.fork() == 0:
        if session: os.setsid()
        if middle and os.fork(): os._exit(0)
        time.sleep(600)

class Bomb:
    def __reduce__(self): return os.mkdir, (os.environ["BOMB"],)

def starting():
    for words in ({}, {"session": True}, {"session": True, "middle": True}):
        stay(**({"session": False} | words))
    subprocess.Popen(["sleep", "600"], start_new_session=True)

def act(data_source, solution_str, ground_truth, extra_info=None):
    word = solution_str
    if word.startswith("big "): return float(len(word))
    if word == "list": memory = []
    while word == "list": memory.append(bytearray(10**6))
    if word == "malloc": ctypes.memset(ctypes.create_string_buffer(10**9), 1, 10**9)
    if word == "null":
        ctypes.CDLL(None).malloc.restype = ctypes.c_void_p
        ctypes.memset(ctypes.CDLL(None).malloc(ctypes.c_size_t(2 * 10**9)) or 0, 1, 10**9)
    if word == "child eats":
        code = subprocess.run([sys.executable, "-c", "bytearray(6 * 10**8)"], stderr=-3).returncode
        return {"score": 1.0, "code": code}
    if word == "limit": return float(resource.getrlimit(resource.RLIMIT_DATA)[0])
    if word == "pid":
        return {"score": 1.0, "pid": os.getpid(), "group": open("/proc/self/cgroup").read()}
    if word == "environment": return {"score": 1.0, **os.environ}
    if word == "start": starting()
    if word == "start, hang": starting(); time.sleep(600)
    if word == "start, kill the group": starting(); os.killpg(0, signal.SIGKILL)
    if word == "start, kill the supervisor":
        starting(); os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)
    if word == "kill the supervisor": os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)
    if word == "stop the supervisor": os.kill(os.getppid(), signal.SIGSTOP); time.sleep(600)
    if word == "fork, terminate":
        child = os.fork()
        while child == 0: time.sleep(1)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if word == "many":
        for _ in range(40): stay(session=True)
        time.sleep(600)
    if word == "bomb":
        for _ in range(7): os.fork()
        time.sleep(600)
    if word == "stop soon":
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return 1.0
    if word == "write soon":
        threading.Timer(0.1, write, (b"late",)).start()
        return 1.0
    if word == "die soon":
        threading.Timer(0.1, os._exit, (4,)).start()
        return 1.0
    if word in ATTACKS: ATTACKS[word](); time.sleep(600)
    if word == "report": return {"score": 1.0, "text": "x" * 7 * 10**7}
    return 1.0

def drip():
    while True: write(b"1")

def flood():
    while True: write(b"x" * 2**20)

ATTACKS = {
    "bytes": lambda: write(bytes(range(256)) * 16),
    "pickle": lambda: write(pickle.dumps((1, Bomb())) + b"\\n"),
    "length": lambda: write((2**62).to_bytes(8)),
    "flood": flood,
    "drip": drip,
    "half": lambda: write(b'{"number": 1, "score": 9'),
    "json list": lambda: write(b"[1, null, 1.0]\\n"),
    "deep": lambda: write(b"[" * 10**5 + b"\\n"),
    "another's": lambda: forge(number=2),
}
"""
EACH = 3  # processes of a worker: itself, its supervisor, and what waits between that and the pool


def can_group():
    folder = supervisor.new_group_path()
    group = supervisor.create_group(folder, None, None)
    if group is not None:
        supervisor.discard(str(group))
    return group is not None


def items(*replies):
    return [RewardItem("test", reply, "truth", {}) for reply in replies]


@pytest.fixture
def mark(monkeypatch):
    """A variable that marks all processes of the test's pools: none may be left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("CONTAINMENT_MARK", mark)
    yield mark
    assert marked(mark) == []


def marked(mark):
    """List the processes that have inherited a mark."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


@pytest.fixture
def groups(monkeypatch):
    """The control groups of the test's workers: none may be left."""
    folders = []
    new_group_path = supervisor.new_group_path

    def noted():
        folders.append(new_group_path())
        return folders[-1]

    monkeypatch.setattr(workers_pool, "new_group_path", noted)
    yield
    assert [folder for folder in folders if folder and Path(folder).exists()] == []


@pytest.fixture(params=["group", "no group"])
def grouped(request, monkeypatch):
    """Whether each worker has a control group."""
    if request.param == "no group":
        monkeypatch.setattr(workers_pool, "new_group_path", lambda: None)
    elif not can_group():
        pytest.skip("there can be no control groups here")
    return request.param == "group"


@pytest.fixture
def make(functions_file, mark, groups):
    pools = []

    def build(timeout_s=600.0, workers=1, **limits):
        limits["pass_env"] = ("CONTAINMENT_MARK", "BOMB", *limits.get("pass_env", ()))
        spec = FunctionSpec(f"{functions_file}:act")
        settings = {"workers": workers, "timeout_s": timeout_s, "on_error": -1.0}
        pools.append(RewardPool(spec, ScoringConfig(**settings, **limits)))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def kinds(scores):
    """Return of each score the kind of its error, or None."""
    return [score.error and score.error.partition(":")[0] for score in scores]


def test_a_group_is_taken_where_there_can_be_one_and_the_mark_is_found(make, mark, grouped):
    score = make().score(items("pid"))[0]
    assert ("jaxrl_llm-worker-" in score.extra["group"]) == grouped
    assert len(marked(mark)) == EACH


def test_a_reward_function_that_eats_memory_costs_its_own_answer(make):
    pool = make(memory_gb=0.5)
    for reply in ("list", "malloc", "null"):
        scores = pool.score(items("1", reply, "2"))
        assert [score.score for score in scores] == [1.0, -1.0, 1.0]
        assert "reward.memory_gb" in scores[1].error or reply == "null"
    assert (pool.counts["exception"], pool.counts["died"]) == (2, 1)
    assert pool.score(items("limit", "child eats")) == [  # of children, too
        *(Score(0.5e9, {}, None), Score(1.0, {"code": 1}, None))
    ]


def test_a_group_gets_the_limits_whose_controllers_it_has_and_tells_of_lost_memory(tmp_path):
    supervisor.set_limits(tmp_path, 10**9, 3)
    assert list(tmp_path.iterdir()) == []
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (tmp_path / name).write_text("max")
    supervisor.set_limits(tmp_path, 10**9, 3)
    values = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert values.pop("pids.max") >= 4 * 16
    assert values == {"memory.max": 10**9, "memory.swap.max": 0}
    assert not supervisor.ran_out_of_memory(tmp_path)
    for kills in (0, 2):
        (tmp_path / "memory.events").write_text(f"low 0\noom 1\noom_kill {kills}\n")
        assert supervisor.ran_out_of_memory(tmp_path) == (kills > 0)


def test_too_many_processes_cost_one_answer(make, mark, grouped):
    pool = make(max_processes=12)
    for reply in ("many", "bomb"):
        scores = pool.score(items("1", reply, "2"))
        assert [score.score for score in scores] == [1.0, -1.0, 1.0]
        assert "reward.max_processes" in scores[1].error
    assert pool.counts["died"] == 2 and len(marked(mark)) == EACH


def test_children_end_with_a_lost_worker_whatever_their_session(make, mark, grouped, impatient):
    pool = make()
    for reply, kind in (("start, hang", "timeout"), ("start, kill the group", "died")):
        impatient(lambda pending, kind=kind: kind == "timeout" and pending[0] == 1)
        assert kinds(pool.score(items("1", reply, "2"))) == [None, kind, None]
        assert len(marked(mark)) == EACH


def test_children_of_good_answers_end_with_the_pool(make, mark, grouped):
    pool = make(workers=2)
    assert [score.error for score in pool.score(items(*["start"] * 4))] == [None] * 4
    wait_until(lambda: len(marked(mark)) == 2 * EACH + 4 * 4)
    pool.close()
    assert marked(mark) == []


def test_a_reward_function_can_end_its_supervisor_and_dies_with_it(make, mark, grouped):
    reply = "start, kill the supervisor" if grouped else "kill the supervisor"
    assert kinds(make().score(items("1", reply, "2"))) == [None, "died", None]
    wait_until(lambda: len(marked(mark)) == EACH)


def test_a_reward_function_that_stops_its_supervisor_is_ended(
    make, mark, grouped, monkeypatch, impatient
):
    monkeypatch.setattr(workers_pool, "STOP_TIMEOUT_S", 0.5)
    impatient(lambda pending: pending[0] == 1)
    scores = make().score(items("1", "stop the supervisor", "2"))
    assert kinds(scores) == [None, "timeout", None]
    wait_until(lambda: len(marked(mark)) == EACH)


PROGRAM = """
import sys
sys.path[:] = {search!r}
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import ScoringConfig
from jaxrl_llm.workers import pool as workers_pool
from jaxrl_llm.rewards.runner import RewardItem, RewardPool
if not {grouped}: workers_pool.new_group_path = lambda: None
config = ScoringConfig(workers=1, timeout_s=60.0, pass_env=["CONTAINMENT_MARK"])
pool = RewardPool(FunctionSpec({function!r}), config)
pool.score([RewardItem("", "start", "", {{}})])
print(pool._worker_pool.workers[0]._group, flush=True)
pool.score([RewardItem("", "start, hang", "", {{}})])
"""


def test_everything_ends_when_the_trainer_is_killed(functions_file, mark, grouped):
    """In a group alone; without one, with its children."""
    search = [*sys.path, workers_pool.PACKAGE_ROOT]
    text = PROGRAM.format(search=search, function=f"{functions_file}:act", grouped=grouped)
    trainer = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    with trainer:
        assert trainer.stdout is not None
        group = trainer.stdout.readline().decode().strip()
        assert Path(group).exists() == grouped
        wait_until(lambda: len(marked(mark)) == 1 + EACH + 4 + 4)
        killed = [] if grouped else psutil.Process(trainer.pid).children()
        for child in killed:  # as Ray does, when a worker of its own ends
            child.kill()
        trainer.kill()
    wait_until(lambda: marked(mark) == [] and not Path(group).exists())


def test_the_environment_holds_what_is_usual_and_what_is_named(make, monkeypatch):
    secrets = {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "SSH_AUTH_SOCK", "my_url"}
    shown = {"OMP_NUM_THREADS", "LC_TIME", "MY_URL", "MY_KEY", "HF_HOME"}
    for name in secrets | shown:
        monkeypatch.setenv(name, "1")
    (score,) = make(pass_env=("MY_*",)).score(items("environment"))
    assert shown | {"PATH"} <= set(score.extra) and not secrets & set(score.extra)


SLOW = ("length", "drip", "half")
WRONG = ("bytes", "pickle", "flood", "json list", "deep", "another's")


def test_what_is_no_answer_costs_one(make, tmp_path, monkeypatch, impatient):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    pool = make()
    for attacks, kind, seconds in ((SLOW, "timeout", 0.5), (WRONG, "invalid", 600.0)):
        impatient(lambda pending: pending[0] == 1, seconds)
        for attack in attacks:
            scores = pool.score(items("0", attack, "2", "3"))
            assert kinds(scores) == [None, kind, None, None], attack
            assert [score.score for score in scores] == [1.0, -1.0, 1.0, 1.0]
        assert pool.counts[kind] == len(attacks)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_errs_while_idle_is_replaced(make):
    pool = make()
    for reply in ("write soon", "die soon"):
        pool.score(items(reply))
        (worker,) = pool._worker_pool.workers
        wait_until(worker.has_activity)
        assert pool.score(items("1")) == [Score(1.0, {}, None)]
        assert sum(pool.counts.values()) == 0 and worker not in pool._worker_pool.workers


def test_a_worker_that_does_not_read_runs_into_the_time_limit(make, impatient):
    pool = make()
    (score,) = pool.score(items("pid"))
    pool.score(items("stop soon"))
    wait_until(lambda: psutil.Process(score.extra["pid"]).status() == psutil.STATUS_STOPPED)
    impatient(lambda pending: True)
    assert kinds(pool.score(items("big " * 10**6))) == ["timeout"]


def test_a_report_that_is_too_long_is_an_error(make):
    (score,) = make().score(items("report"))
    assert "64000000" in score.error


def test_answers_are_read_exactly():
    extra = {"tiny": 5e-324, "third": 1 / 3, "text": "\ud800é\n", "none": None, "list": [1, 2.0]}
    outcome = Score(0.1 + 0.2, extra, None)
    line = encode_answer(7, outcome)
    assert line.count(b"\n") == 1 and decode_numbered(line, [7]) == (7, outcome)
    for changes in (
        *({"number": True}, {"error": ""}, {"score": math.nan}, {"score": 1}, {"score": None}),
        *({"extra": [1]}, {"more": 1}),
    ):
        assert decode_numbered(json.dumps(json.loads(line) | changes).encode(), [7]) is None


def test_a_signal_to_all_processes_of_a_job_loses_no_answer(make):
    """Schedulers send SIGTERM to each of them; the trainer goes on to the end of its step."""
    pool = make(workers=1)
    [first] = pool.score(items("pid"))
    worker = psutil.Process(first.extra["pid"])
    for each in (worker, *worker.parents()[: EACH - 1]):
        each.send_signal(signal.SIGTERM)
    [second] = pool.score(items("pid"))
    assert (second.extra["pid"], second.error) == (first.extra["pid"], None)


def test_a_reward_function_can_end_the_processes_that_it_forks(make):
    """As `multiprocessing` does: its `terminate` sends SIGTERM, to which workers are deaf."""
    assert make().score(items("fork, terminate")) == [Score(-float(signal.SIGTERM), {}, None)]

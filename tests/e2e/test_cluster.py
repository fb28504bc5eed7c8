"""Runs on a Ray cluster of several nodes, each with CPU devices, all on this machine."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from jaxrl_llm.config.cli import PREEMPTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

EXACTLY = ("optim.optimizer=sgd", "optim.schedule.value=0.1")  # Adam's first steps amplify rounding
TOGETHER = ("cluster.nodes=2", "cluster.devices=4", "mesh.train={data: 2, fsdp: 4}")
APART = ("cluster.nodes=1", "cluster.devices=4", "rollout.nodes=1", "rollout.devices=4")
TWO_ENGINES = ("cluster.nodes=1", "cluster.devices=2", "rollout.nodes=2", "rollout.devices=2")
QUICKLY = ("cluster.backoff_s=0.1", "cluster.start_timeout_s=180")
EPOCH = ("steps=null", "rollout.dump_every=1")  # 64 prompts, 8 a step
ACTORS = ("ray::TrainProcess", "ray::EngineHost", "ray::_score")


class Launched:
    """A launcher at work, and what it has printed so far."""

    def __init__(self, process, run_dir):
        self.process, self.run_dir = process, run_dir
        self.lines = {"out": [], "err": []}
        streams = (("out", process.stdout), ("err", process.stderr))
        self.readers = [
            threading.Thread(target=self.read, args=(name, stream), daemon=True)
            for name, stream in streams
        ]
        for reader in self.readers:
            reader.start()

    def read(self, name, stream):
        with stream:
            self.lines[name].extend(stream)

    def steps(self):
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def until(self, condition, seconds=240):
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, self.text("err")
            assert time.monotonic() < end, self.text("err")
            time.sleep(0.02)
        return found

    def text(self, name):
        return "".join(self.lines[name])

    def end(self, seconds=600):
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for reader in self.readers:
            reader.join(10)
        return status

    def ok(self):
        assert self.end() == 0, self.text("err")
        return self

    @property
    def learned(self):
        return learned(self.run_dir)


@pytest.fixture
def launch(workshop, cluster):
    """Starts `train` on the cluster; ends what is left of it."""
    started = []

    def run(*overrides, run_dir=None):
        run_dir = run_dir or workshop.folder()
        words = (f"cluster.address={cluster}", *QUICKLY, *overrides)
        started.append(Launched(workshop.start(*words, run_dir=run_dir), run_dir))
        return started[-1]

    yield run
    for launched in started:
        launched.process.kill()
        launched.end()
    end = time.monotonic() + 60
    while titles(*ACTORS):
        assert time.monotonic() < end, titles(*ACTORS)
        time.sleep(0.2)


@pytest.fixture
def launchers(client_port):
    """Overrides for a launcher on a node of the cluster, and for one that is elsewhere."""
    return {"a node": (), "a client": (f"cluster.address=ray://127.0.0.1:{client_port}",)}


def titles(*wanted):
    """Return the processes whose titles begin so, by number."""
    rows = subprocess.run(
        ["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    split = [row.split(None, 2) for row in rows[1:]]
    return {int(p): args for p, stat, args in split if args.startswith(wanted) and stat[0] != "Z"}


def learned(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    apart = ("timing_s/", "perf/", "cluster/")
    return [{k: v for k, v in line.items() if not k.startswith(apart)} for line in lines]


def counted(run_dir, name):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[f"cluster/{name}"] for line in lines if f"cluster/{name}" in line]


def close(workshop, found, wanted, *, apart=("global_seqlen", "perf")):
    before = workshop.params(wanted.run_dir)
    for name, value in workshop.params(found.run_dir).items():
        np.testing.assert_allclose(value, before[name], atol=2e-6, err_msg=name)
    ours, theirs = learned(found.run_dir), learned(wanted.run_dir)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in (name for name in b if not name.startswith(apart)):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


def check_whole_epoch(run_dir, samples=4):
    """Assert that every prompt was answered exactly as often as an epoch does."""
    found = {}
    for path in (run_dir / "rollouts").glob("*.parquet"):
        for prompt in pq.read_table(path)["prompt"].to_pylist():
            found[prompt] = found.get(prompt, 0) + 1
    assert sum(found.values()) == 64 * samples
    return found


def check_same(launched, wanted):
    """Assert that nothing of a disturbed run differs from an undisturbed one's."""
    assert launched.learned == wanted.learned
    assert check_whole_epoch(launched.run_dir) == check_whole_epoch(wanted.run_dir)


@pytest.fixture(scope="module")
def undisturbed(workshop, cluster):
    """Returns the run of some overrides on the cluster, made once."""
    made = {}

    def run(*overrides):
        if overrides not in made:
            run_dir = workshop.folder()
            words = (f"cluster.address={cluster}", *QUICKLY, *overrides)
            made[overrides] = Launched(workshop.start(*words, run_dir=run_dir), run_dir).ok()
        return made[overrides]

    return run


def test_two_nodes_do_what_one_process_does(workshop, launch):
    found = launch(*EXACTLY, *TOGETHER).ok()
    wanted = workshop(*EXACTLY, "mesh.train={data: 2, fsdp: 4}", devices=8).ok()
    close(workshop, found, wanted)
    assert "step 2/2" in found.text("out")
    assert "before and after" in found.text("out")
    assert counted(found.run_dir, "restarts") == [0, 0]


def test_engines_on_nodes_of_their_own_do_what_one_process_does(workshop, launch):
    """Beside two nodes that train; other tests have one."""
    words = ("cluster.nodes=2", "cluster.devices=2", "rollout.nodes=1", "rollout.devices=4")
    found = launch(*EXACTLY, *words, "mesh.train={fsdp: 4}", "mesh.rollout={tensor: 2}").ok()
    wanted = workshop(*EXACTLY, "mesh.train={fsdp: 4}", devices=4).ok()
    close(workshop, found, wanted)
    assert counted(found.run_dir, "engine_restarts") == [0, 0]
    moved = json.loads((found.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert moved["perf/moved_gb"] > 0


def test_two_engines_share_the_requests_and_a_lost_one_is_replaced(launch, undisturbed):
    """Killed while it samples: its requests are answered by the next, each once."""
    words = (*EXACTLY, *TWO_ENGINES, *EPOCH)
    wanted = undisturbed(*words)
    found = launch(*words)
    found.until(lambda: found.steps() >= 3)
    victim = found.until(lambda: titles("ray::EngineHost.sample"))
    os.kill(next(iter(victim)), signal.SIGKILL)
    check_same(found.ok(), wanted)
    assert counted(found.run_dir, "engine_restarts")[-1] == 1
    assert counted(found.run_dir, "restarts")[-1] == 0


SLOW_SCORER = """
import time
from mine import digit_sum
def score(data_source, solution_str, ground_truth, extra_info=None, *, seconds):
    time.sleep(seconds)
    return digit_sum(data_source, solution_str, ground_truth)
"""


def slowly(workshop, seconds):
    """Return what scores as the undisturbed runs' scorer does, but takes time for each answer."""
    (workshop.root / "slow.py").write_text(SLOW_SCORER)
    scorer = f"{{fn: '{workshop.root}/slow.py:score', seconds: {seconds}}}"
    return f"reward.function={scorer}"


def test_answers_are_scored_by_tasks_and_again_if_one_is_lost(workshop, launch, undisturbed):
    words = (*EXACTLY, "cluster.devices=2", *EPOCH)
    wanted = undisturbed(*words)
    found = launch(*words, slowly(workshop, 0.05), "cluster.reward_tasks=3")
    found.until(lambda: found.steps() >= 2)
    os.kill(min(found.until(lambda: titles("ray::_score_chunk"))), signal.SIGKILL)
    check_same(found.ok(), wanted)
    assert counted(found.run_dir, "reward_retries")[-1] >= 1


@pytest.mark.parametrize(
    ("number", "launcher"),
    [(0, "a node"), (1, "a client")],
    ids=["the first", "the second, of a client's job"],
)
def test_a_training_process_killed_in_a_step_lets_the_job_go_on(
    launch, undisturbed, launchers, number, launcher
):
    words = (*EXACTLY, *TOGETHER, *EPOCH, "checkpoint.every=2")
    wanted = undisturbed(*words)
    found = launch(*words, *launchers[launcher])
    found.until(lambda: found.steps() >= 4)
    os.kill(sorted(titles("ray::TrainProcess"))[number], signal.SIGKILL)
    check_same(found.ok(), wanted)
    assert counted(found.run_dir, "restarts")[-1] == 1, found.text("err")
    assert "a training process was lost" in found.text("err")


def test_a_training_process_killed_in_a_save_lets_the_job_go_on(launch, undisturbed):
    words = (*EXACTLY, *TOGETHER, *EPOCH, "checkpoint.every=2")
    wanted = undisturbed(*words)
    found = launch(*words, "checkpoint.resume=never")  # which is about a new command
    folder = found.run_dir / "checkpoints"
    found.until(lambda: found.steps() >= 4)
    found.until(lambda: list(folder.glob("*tmp*")) if folder.exists() else [])
    os.kill(max(titles("ray::TrainProcess")), signal.SIGKILL)
    check_same(found.ok(), wanted)
    assert counted(found.run_dir, "restarts")[-1] == 1, found.text("err")


def test_a_job_that_hangs_prints_its_stacks_and_begins_again(launch, undisturbed):
    """An engine that stands still ends nothing, so that the training process waits for it."""
    words = (*EXACTLY, *TWO_ENGINES, *EPOCH)
    wanted = undisturbed(*words)
    found = launch(*words, "checkpoint.every=2", "stall_timeout_s=90")
    found.until(lambda: found.steps() >= 3)
    os.kill(max(titles("ray::EngineHost")), signal.SIGSTOP)
    check_same(found.ok(), wanted)
    assert counted(found.run_dir, "restarts")[-1] == 1, found.text("err")
    said = found.text("err") + found.text("out")
    assert "there was no step for 90 s" in said
    assert re.search(r"Thread 0x\w+ .*most recent call first", said)


def test_a_training_process_that_stands_still_is_lost_to_the_others(launch, undisturbed):
    """Jax's processes miss its heartbeats within 100 s."""
    words = (*EXACTLY, *TOGETHER, *EPOCH, "checkpoint.every=2")
    wanted = undisturbed(*words)
    found = launch(*words)
    found.until(lambda: found.steps() >= 3)
    os.kill(max(titles("ray::TrainProcess")), signal.SIGSTOP)
    check_same(found.ok(), wanted)
    assert counted(found.run_dir, "restarts")[-1] == 1, found.text("err")
    assert "a training process was lost" in found.text("err")


def test_a_job_that_is_lost_too_often_ends_with_the_reason(launch):
    found = launch(*TOGETHER, "cluster.restarts=0", "steps=100")
    found.until(lambda: found.steps() >= 2)
    os.kill(max(titles("ray::TrainProcess")), signal.SIGKILL)
    assert found.end() == 1
    assert re.search(
        r"^error: a training process was lost: .* \(the job was started 1 times\)$",
        found.text("err"),
        re.MULTILINE,
    )


def test_an_engine_that_is_lost_too_often_ends_the_run(launch):
    found = launch(*APART, "cluster.restarts=0", "steps=1000")
    found.until(lambda: found.steps() >= 2)
    os.kill(min(titles("ray::EngineHost")), signal.SIGKILL)
    assert found.end() == 1
    assert re.search(r"^error: an engine was lost too often", found.text("err"), re.MULTILINE)


def test_an_error_of_the_run_is_the_launchers(workshop, launch):
    found = launch(*TOGETHER, "model.path=nowhere")
    assert found.end() == 2
    assert re.search(r"^error: model.path: .*nowhere", found.text("err"), re.MULTILINE)
    found = launch(*APART, "mesh.rollout={tensor: 3}")
    assert found.end() == 2
    assert re.search(r"^error: mesh.rollout: ", found.text("err"), re.MULTILINE)
    found = launch(
        *TOGETHER, f"reward.function={workshop.mine('reward_raises')}", "reward.on_error=null"
    )
    assert found.end() == 1
    assert re.search(r"^error: reward .* failed on row", found.text("err"), re.MULTILINE)


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("a node", signal.SIGINT),
        ("a client", signal.SIGKILL),
        ("a client", signal.SIGTERM),
    ],
)
def test_the_end_of_the_launcher_is_the_end_of_everything(launch, launchers, launcher, how):
    found = launch(*TOGETHER, "steps=1000", *launchers[launcher])
    found.until(lambda: found.steps() >= 2)
    found.process.send_signal(how)
    status = found.end(60)
    if how == signal.SIGINT:
        assert status == 130
        assert "interrupted: the same command continues" in found.text("err")
    if how == signal.SIGTERM:
        assert status == PREEMPTED, found.text("err")
        [saved] = (path.name for path in (found.run_dir / "checkpoints").iterdir())
        assert f"preempted: saved after step {saved} of 1000; the same comm" in found.text("err")
        assert int(saved) == found.learned[-1]["step"]
    end = time.monotonic() + 60
    while titles(*ACTORS):
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cluster.nodes=5",), r"did not give 5 nodes with 1 CPU each in 5 s .* it has 3"),
        (("cluster.cpus=50",), r"did not give 1 nodes with 50 CPU each in 5 s"),
    ],
)
def test_nodes_that_do_not_come_are_an_error_in_time(launch, words, said):
    began = time.monotonic()
    found = launch(*words, "cluster.start_timeout_s=5")
    assert found.end() == 1
    assert re.search(f"^error: the cluster {said}", found.text("err"), re.MULTILINE)
    assert time.monotonic() - began < 60


def test_one_machine_needs_no_cluster(workshop, launch):
    """Ray is started for the run, and ends with it."""
    run_dir = workshop.folder()
    words = ("cluster.devices=2", "cluster.processes_per_node=2", *EXACTLY)
    done = workshop.finish(workshop.start(*words, run_dir=run_dir), run_dir)
    assert done.status == 0, done.err
    wanted = workshop(*EXACTLY, devices=4).ok()
    close(workshop, done, wanted)


def test_a_node_that_dies_lets_the_job_go_on(workshop, launch, undisturbed):
    """The last test: the cluster has a node less then."""
    words = (*EXACTLY, *TOGETHER, *EPOCH, "checkpoint.every=2")
    wanted = undisturbed(*words)
    found = launch(*words, slowly(workshop, 0.2))
    found.until(lambda: found.steps() >= 3)
    raylet = max(parent_of(pid) for pid in titles("ray::TrainProcess"))  # the head's was the first
    for pid in [raylet, *(pid for pid in titles("ray::") if parent_of(pid) == raylet)]:
        os.kill(pid, signal.SIGKILL)
    check_same(found.ok(), wanted)
    assert counted(found.run_dir, "restarts")[-1] >= 1  # more if Ray took long to miss the node


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

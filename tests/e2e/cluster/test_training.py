"""Training processes on a Ray cluster: a job that loses one begins again."""

import os
import signal

import pytest

from tests.e2e.cluster.conftest import EPOCH, TOGETHER, check_same, parent_of, slowly
from tests.e2e.comparing import EXACTLY, close
from tests.guarded import CLUSTER, RUN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.guards(*CLUSTER, *RUN)]

WORDS = (*EXACTLY, *TOGETHER, *EPOCH, "checkpoint.every=2")


def test_two_nodes_do_what_one_process_does(workshop, launch):
    job = launch(*EXACTLY, *TOGETHER).ok()
    expected = workshop(*EXACTLY, "mesh.train={data: 2, fsdp: 4}", devices=8).ok()
    close(workshop, job.result, expected, apart="global_seqlen")
    assert "step 2/2" in job.text("out") and "before and after" in job.text("out")
    assert job.counted("restarts") == [0, 0]


@pytest.mark.parametrize(
    ("number", "launcher", "sent"),
    [(0, "a node", signal.SIGKILL), (1, "a client", signal.SIGSTOP)],
    ids=["the first is killed", "the second, of a client's job, stands still"],
)
def test_a_training_process_that_is_lost_lets_the_job_go_on(
    launch, undisturbed, launchers, number, launcher, sent, processes
):
    """Jax's processes miss its heartbeats; `Workshop.start` says within how many seconds."""
    expected = undisturbed(*WORDS)
    job = launch(*WORDS, *launchers[launcher])
    job.until(lambda: job.steps() >= 4)
    os.kill(sorted(processes.titles("ray::TrainProcess"))[number], sent)
    check_same(job.ok(), expected)
    assert job.counted("restarts")[-1] == 1, job.text("err")
    assert "a training process was lost" in job.text("err")


def test_a_training_process_killed_in_a_save_lets_the_job_go_on(launch, undisturbed, processes):
    expected = undisturbed(*WORDS)
    job = launch(*WORDS, "checkpoint.resume=never")  # which is about a new command
    folder = job.run_dir / "checkpoints"
    job.until(lambda: job.steps() >= 4)
    job.until(lambda: list(folder.glob("*tmp*")) if folder.exists() else [])
    os.kill(max(processes.titles("ray::TrainProcess")), signal.SIGKILL)
    check_same(job.ok(), expected)
    assert job.counted("restarts")[-1] == 1, job.text("err")


def test_a_node_that_dies_lets_the_job_go_on(workshop, launch, undisturbed, processes):
    """The last test: the cluster has a node less then."""
    expected = undisturbed(*WORDS)
    job = launch(*WORDS, slowly(workshop, 0.2))
    job.until(lambda: job.steps() >= 3)
    trainers = processes.titles("ray::TrainProcess")
    raylet = max(parent_of(pid) for pid in trainers)  # the head's was the first
    for pid in [raylet, *(pid for pid in processes.titles("ray::") if parent_of(pid) == raylet)]:
        os.kill(pid, signal.SIGKILL)
    check_same(job.ok(), expected)
    assert job.counted("restarts")[-1] >= 1  # more if Ray took long to miss the node

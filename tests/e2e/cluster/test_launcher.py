"""The launcher of a job on a Ray cluster: its errors, and how it ends."""

import os
import re
import signal
import time

import pytest

from jaxrl_llm.cli import PREEMPTED
from tests.e2e.cluster.launching import APART, EXACTLY, TOGETHER, close
from tests.guarded import CLUSTER, RUN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.guards(*CLUSTER, *RUN)]


def test_a_job_that_is_lost_too_often_ends_with_the_reason(launch, processes):
    job = launch(*TOGETHER, "cluster.restarts=0", "steps=100")
    job.until(lambda: job.steps() >= 2)
    os.kill(max(processes.titles("ray::TrainProcess")), signal.SIGKILL)
    assert job.end() == 1
    assert re.search(
        r"^error: a training process was lost: .* \(the job was started 1 times\)$",
        job.text("err"),
        re.MULTILINE,
    )


def test_an_error_of_the_run_is_the_launchers(workshop, launch):
    job = launch(*TOGETHER, "model.path=nowhere")
    assert job.end() == 2
    assert re.search(r"^error: model.path: .*nowhere", job.text("err"), re.MULTILINE)
    job = launch(*APART, "mesh.rollout={tensor: 3}")
    assert job.end() == 2
    assert re.search(r"^error: mesh.rollout: ", job.text("err"), re.MULTILINE)
    job = launch(
        *TOGETHER, f"reward.function={workshop.mine('reward_raises')}", "reward.on_error=null"
    )
    assert job.end() == 1
    assert re.search(r"^error: reward .* failed on row", job.text("err"), re.MULTILINE)


@pytest.mark.parametrize(
    ("launcher", "signal_sent"),
    [("a node", signal.SIGINT), ("a client", signal.SIGKILL), ("a client", signal.SIGTERM)],
)
def test_the_end_of_the_launcher_is_the_end_of_everything(
    launch, launchers, launcher, signal_sent, processes
):
    job = launch(*TOGETHER, "steps=1000", *launchers[launcher])
    job.until(lambda: job.steps() >= 2)
    job.process.send_signal(signal_sent)
    status = job.end(60)
    if signal_sent == signal.SIGINT:
        assert status == 130
        assert "interrupted: the same command " in job.text("err")
    if signal_sent == signal.SIGTERM:
        assert status == PREEMPTED, job.text("err")
        [saved] = (path.name for path in (job.run_dir / "checkpoints").iterdir())
        assert f"preempted: saved after step {saved} of 1000; the same comm" in job.text("err")
        assert int(saved) == job.learned[-1]["step"]
    processes.await_end()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("cluster.nodes=5",), r"did not give 5 nodes with 1 CPU each in 5 s .* it has 3"),
        (("cluster.cpus=50",), r"did not give 1 nodes with 50 CPU each in 5 s"),
    ],
)
def test_nodes_that_do_not_come_are_an_error_in_time(launch, words, expected):
    began = time.monotonic()
    job = launch(*words, "cluster.start_timeout_s=5")
    assert job.end() == 1
    assert re.search(f"^error: the cluster {expected}", job.text("err"), re.MULTILINE)
    assert time.monotonic() - began < 60


def test_one_machine_needs_no_cluster(workshop, launch):
    """Ray is started for the run, and ends with it."""
    run_dir = workshop.folder()
    words = ("cluster.devices=2", "cluster.processes_per_node=2", *EXACTLY)
    done = workshop.finish(workshop.start(*words, run_dir=run_dir), run_dir)
    assert done.status == 0, done.err
    expected = workshop(*EXACTLY, devices=4).ok()
    close(workshop, done, expected)

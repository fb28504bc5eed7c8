"""The launcher of a job on a Ray cluster: its errors, and how it ends."""

import os
import signal

import pytest

from jaxrl_llm.cli import PREEMPTED
from tests.e2e.cluster.conftest import APART, TOGETHER
from tests.e2e.comparing import EXACTLY, close
from tests.guarded import CLUSTER, RUN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.guards(*CLUSTER, *RUN)]


@pytest.mark.parametrize(
    ("words", "title", "reason"),
    [
        (TOGETHER, "ray::TrainProcess", "a training process was lost"),
        (APART, "ray::EngineHost", "an engine was lost too often"),
    ],
)
def test_a_job_that_is_lost_too_often_ends_with_the_reason(launch, processes, words, title, reason):
    job = launch(*words, "cluster.restarts=0", "steps=1000")
    job.until(lambda: job.steps() >= 2)
    os.kill(max(processes.titles(title)), signal.SIGKILL)
    ended(job).refused(reason, status=1)


def ended(job):
    job.end()
    return job.result


def test_an_error_of_the_run_is_the_launchers(workshop, launch):
    ended(launch(*APART, "mesh.rollout={tensor: 3}")).refused("mesh.rollout: ")
    raising = f"reward.function={workshop.mine('reward_raises')}"
    result = ended(launch(*TOGETHER, raising, "reward.on_error=null"))
    result.refused("reward ", "row", status=1)


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
        assert int(saved) == job.result.steps[-1]
    processes.await_end()


def test_nodes_that_do_not_come_are_an_error_in_time(launch):
    result = ended(launch("cluster.nodes=5", "cluster.start_timeout_s=5"))
    result.refused("5 nodes", status=1)


def test_one_machine_needs_no_cluster(workshop, launch):
    """Ray is started for the run, and ends with it."""
    run_dir = workshop.folder()
    words = ("cluster.devices=2", "cluster.processes_per_node=2", *EXACTLY)
    done = workshop.finish(workshop.start(*words, run_dir=run_dir), run_dir)
    assert done.status == 0, done.err
    expected = workshop(*EXACTLY, devices=4).ok()
    close(workshop, done, expected)

"""The launcher of a job on a Ray cluster: its errors, and how it ends."""

import os
import re
import signal
import time

import pytest

from jaxrl_llm.config.cli import PREEMPTED
from tests.e2e.cluster.launching import APART, EXACTLY, TOGETHER, close
from tests.guarded import CLUSTER, RUN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.guards(*CLUSTER, *RUN)]


def test_a_job_that_is_lost_too_often_ends_with_the_reason(launch, processes):
    found = launch(*TOGETHER, "cluster.restarts=0", "steps=100")
    found.until(lambda: found.steps() >= 2)
    os.kill(max(processes.titles("ray::TrainProcess")), signal.SIGKILL)
    assert found.end() == 1
    assert re.search(
        r"^error: a training process was lost: .* \(the job was started 1 times\)$",
        found.text("err"),
        re.MULTILINE,
    )


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
def test_the_end_of_the_launcher_is_the_end_of_everything(
    launch, launchers, launcher, how, processes
):
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
    processes.await_end()


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

"""Engines and reward tasks on nodes of a Ray cluster: one that is lost is replaced."""

import os
import re
import signal

import pytest

from tests.e2e.cluster.conftest import EPOCH, check_same, slowly
from tests.e2e.comparing import EXACTLY, close
from tests.guarded import CLUSTER, RUN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.guards(*CLUSTER, *RUN, "jaxrl_llm/rewards/"),
]

TWO_ENGINES = ("cluster.nodes=1", "cluster.devices=2", "rollout.nodes=2", "rollout.devices=2")


def test_engines_on_nodes_of_their_own_do_what_one_process_does(workshop, launch):
    """Beside two nodes that train; other tests have one."""
    words = ("cluster.nodes=2", "cluster.devices=2", "rollout.nodes=1", "rollout.devices=4")
    job = launch(*EXACTLY, *words, "mesh.train={fsdp: 4}", "mesh.rollout={tensor: 2}").ok()
    expected = workshop(*EXACTLY, "mesh.train={fsdp: 4}", devices=4).ok()
    close(workshop, job.result, expected, apart="global_seqlen")
    assert job.counted("engine_restarts") == [0, 0]
    assert job.result.metrics[-1]["perf/moved_gb"] > 0


def test_two_engines_share_the_requests_and_a_lost_one_is_replaced(launch, undisturbed, processes):
    """Killed while it samples: its requests are answered by the next, each once."""
    words = (*EXACTLY, *TWO_ENGINES, *EPOCH)
    expected = undisturbed(*words)
    job = launch(*words)
    job.until(lambda: job.steps() >= 3)
    victim = job.until(lambda: processes.titles("ray::EngineHost.sample"))
    os.kill(next(iter(victim)), signal.SIGKILL)
    check_same(job.ok(), expected)
    assert job.counted("engine_restarts")[-1] == 1
    assert job.counted("restarts")[-1] == 0


def test_engines_sample_while_a_step_is_trained_and_a_lost_one_is_replaced(
    workshop, launch, processes
):
    """Its answers in flight are drawn by the next; the schedule gives the same tokens here."""
    words = (*EXACTLY, *TWO_ENGINES, *EPOCH, "rollout.staleness=2", "rollout.max_new_tokens=40")
    words += ("rollout.max_running_sequences=8", "model.random_init=true")
    words += (f"model.path={workshop.root}/random", "validation.before=false")
    job = launch(*words)
    job.until(lambda: job.steps() >= 3)
    os.kill(max(processes.titles("ray::EngineHost")), signal.SIGKILL)
    job.ok()
    assert job.counted("engine_restarts")[-1] == 1
    lines = job.result.metrics
    assert max(line.get("async/age/max", 0) for line in lines) == 2
    assert max(line["async/in_flight_tokens"] for line in lines) > 0
    recorded = f"rollout.schedule={job.run_dir}/schedule.jsonl"
    own = [word for word in words if word not in TWO_ENGINES]
    again = workshop(*own, recorded, "mesh.train={fsdp: 2}", devices=2).ok()
    same = ("async/age/mean", "response_length/mean", "prompt_length/mean")
    for line, other in zip(lines, again.metrics, strict=True):
        assert [line.get(name) for name in same] == [other.get(name) for name in same]


def test_a_job_that_hangs_prints_its_stacks_and_begins_again(launch, undisturbed, processes):
    """An engine that stands still ends nothing, so that the training process waits for it."""
    words = (*EXACTLY, *TWO_ENGINES, *EPOCH)
    expected = undisturbed(*words)
    job = launch(*words, "checkpoint.every=2", "stall_timeout_s=60")
    job.until(lambda: job.steps() >= 3)
    os.kill(max(processes.titles("ray::EngineHost")), signal.SIGSTOP)
    check_same(job.ok(), expected)
    assert job.counted("restarts")[-1] == 1, job.text("err")
    output = job.text("err") + job.text("out")
    assert "there was no step for 60 s" in output
    assert re.search(r"Thread 0x\w+ .*most recent call first", output)


def test_answers_are_scored_by_tasks_and_again_if_one_is_lost(
    workshop, launch, undisturbed, processes
):
    words = (*EXACTLY, "cluster.devices=2", *EPOCH)
    expected = undisturbed(*words)
    job = launch(*words, slowly(workshop, 0.05), "cluster.reward_tasks=3")
    job.until(lambda: job.steps() >= 2)
    os.kill(min(job.until(lambda: processes.titles("ray::_score_chunk"))), signal.SIGKILL)
    check_same(job.ok(), expected)
    assert job.counted("reward_retries")[-1] >= 1

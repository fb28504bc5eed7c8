"""Runs whose answers are begun before the step that trains on them (`rollout.staleness`)."""

import random
import time

import pytest

from jaxrl_llm.rollout.native.engine import ModelRunner
from tests.e2e.comparing import count_lines, same
from tests.guarded import NATIVE, RUN

pytestmark = pytest.mark.guards(*RUN, *NATIVE)

LONG_TAILED = (
    "rollout.max_new_tokens=40",  # a model from random weights stops by chance
    "rollout.max_running_sequences=24",
    "model.random_init=true",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "optim.schedule.value=3e-3",
    "steps=6",
)
OWN_DEVICES = (
    "mesh.train.devices=1",
    "mesh.rollout.first_device=1",
    "mesh.rollout.devices=1",
    "rollout.max_running_sequences=8",  # so that pushes come while answers are in flight
)
SEEN = ("training/rollout_logprobs_diff_mean", "async/canary_diff_mean")


def words(workshop, staleness, *more):
    model = f"model.path={workshop.root}/random"
    scorer = f"reward.function={workshop.mine('few_tokens')}"
    return (*LONG_TAILED, model, scorer, f"rollout.staleness={staleness}", *more)


def values(lines, name):
    return [line[name] for line in lines if name in line]


def killed_after(steps, given, workshop, until):
    """Run to the end, killed at a random moment after each of some steps."""
    dice, run_dir = random.Random(0), workshop.folder()
    given = [*given, f"reward.function={workshop.mine('few_tokens_slowly')}"]
    for step in steps:
        process = workshop.start(*given, run_dir=run_dir)
        path = run_dir / "metrics.jsonl"
        assert until(lambda step=step, path=path: count_lines(path) > step, process)
        time.sleep(dice.uniform(0, 0.2))
        process.kill()
        process.communicate()
    return workshop.finish(workshop.start(*given, run_dir=run_dir), run_dir).ok()


@pytest.fixture(scope="module")
def stale(run, workshop):
    return run(*words(workshop, 2, "validation.every=2")).ok()


def test_tokens_are_at_most_so_old_and_answers_span_pushes(stale):
    lines = stale.metrics[1:]
    assert max(values(lines, "async/age/max")) == 2
    assert max(values(lines, "async/policies_per_answer/mean")) > 1
    assert max(values(lines, "async/in_flight_tokens")) > 0
    assert lines[-1]["async/in_flight_answers"] == lines[-1]["async/ready_answers"] == 0


def test_log_probs_are_those_of_the_weights_that_drew_them_and_weigh_old_tokens(stale):
    """Also of answers that were left and read again under newer weights."""
    for line in stale.metrics[1:]:
        seen = [line[name] for name in SEEN if name in line]
        assert seen and max(seen) < 1e-5
    old, fresh = (values(stale.metrics, f"async/k3_kl/age/{age}") for age in (2, 0))
    assert old and min(old) > 1e-5, "the policy has moved further from older tokens"
    assert fresh and max(fresh) < 1e-9, "and hardly at all from those that it has drawn itself"
    assert max(line["rollout_corr/weight/max"] for line in stale.metrics[1:]) > 1.01


@pytest.mark.slow
def test_killed_at_random_moments_it_trains_each_answer_once(stale, workshop, until):
    result = killed_after((2, 3, 5), words(workshop, 2, "validation.every=2"), workshop, until)
    assert result.learned == stale.learned
    same(workshop.params(result.run_dir), workshop.params(stale.run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["pages of older weights", "older weights", "in a step of old"])
def test_an_engine_that_samples_from_older_weights_is_caught(run, workshop, monkeypatch, fault):
    """The checksum is right, so that only its log-probs tell."""
    if fault == "pages of older weights":
        monkeypatch.setattr(ModelRunner, "reset_prefix_cache", lambda *given, **keys: None)
        monkeypatch.setattr(ModelRunner, "free_cache", lambda self: None)
    else:
        step, first = ModelRunner.step, []

        def frozen(self, params, version):
            first.append(params) if not first else None
            return step(self, first[0], version)

        monkeypatch.setattr(ModelRunner, "step", frozen)
    room = ["rollout.max_running_sequences=160"] if fault == "in a step of old" else []
    given = ("optim.schedule.value=0.1", "rollout.logprob_tolerance=0.01")
    run(*words(workshop, 4), *room, *given).refused("rollout.logprob_tolerance", status=1)


@pytest.mark.slow
def test_the_schedule_of_a_run_that_was_killed_replays_it(run, workshop, until, monkeypatch):
    """Bit for bit; its engine has devices of its own and samples while the step is trained."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    given = [*words(workshop, 2, *OWN_DEVICES), "checkpoint.every=2"]
    killed = killed_after((2, 5), given, workshop, until)
    lines = killed.metrics[1:]
    assert sum(values(lines, "async/turns")) > 0 < max(values(lines, "async/in_flight_tokens"))
    assert max(values(lines, "async/age/max")) == 2
    assert max(max(values(lines, name)) for name in SEEN) < 1e-5
    replay = [*given, f"rollout.schedule={killed.run_dir}/schedule.jsonl"]
    again = run(*replay, devices=2).ok()
    assert again.learned == killed.learned
    same(workshop.params(again.run_dir), workshop.params(killed.run_dir))

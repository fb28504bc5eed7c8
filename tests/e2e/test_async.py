"""Runs whose answers are begun before the step that trains on them (`rollout.staleness`)."""

import random
import time

import pytest

from jaxrl_llm.rollout.native.model_runner import ModelRunner
from tests.guarded import NATIVE, RUN

pytestmark = pytest.mark.guards(*RUN, *NATIVE)

LONG_TAILED = (
    "rollout.max_new_tokens=40",  # a model from random weights stops by chance
    "rollout.max_running_sequences=24",
    "model.random_init=true",
    "reward.function=user:length",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "optim.schedule.value=3e-3",
)


def words(workshop, staleness, *more):
    given = [w.replace("user:length", workshop.mine("few_tokens")) for w in LONG_TAILED]
    model = f"model.path={workshop.root}/random"
    return (*given, model, "steps=6", f"rollout.staleness={staleness}", *more)


@pytest.fixture(scope="module")
def stale(run, workshop):
    return run(*words(workshop, 2, "validation.every=2")).ok()


def test_tokens_are_at_most_so_old_and_answers_span_pushes(stale):
    ages = [line["async/age/max"] for line in stale.metrics[1:] if "async/age/max" in line]
    assert max(ages) == 2
    assert max(line.get("async/policies_per_answer/mean", 0) for line in stale.metrics) > 1
    assert max(line["async/in_flight_tokens"] for line in stale.metrics[1:]) > 0
    assert stale.metrics[-1]["async/in_flight_answers"] == 0
    assert stale.metrics[-1]["async/ready_answers"] == 0


def test_the_engine_s_log_probs_are_those_of_the_weights_that_drew_them(stale):
    """Also of answers that were left and read again under newer weights."""
    for line in stale.metrics[1:]:
        seen = [
            line[name]
            for name in ("training/rollout_logprobs_diff_mean", "async/canary_diff_mean")
            if name in line
        ]
        assert seen and max(seen) < 1e-5


def test_a_step_without_a_fresh_token_is_checked_by_others(run, workshop):
    """With room for all answers of the window, two steps of three sample none of their own."""
    result = run(*words(workshop, 2), "steps=4", "rollout.max_running_sequences=96").ok()
    ages = [line.get("async/age/mean", 0) for line in result.metrics[1:]]
    assert ages == [0, 1, 2, 0]
    checked = [line.get("async/canary_diff_mean") for line in result.metrics[1:]]
    assert checked[0] is None and checked[3] is None
    assert max(checked[1:3]) < 1e-5


def test_old_tokens_are_weighed_by_the_default_correction(stale):
    assert max(line["rollout_corr/weight/max"] for line in stale.metrics[1:]) > 1.01


def test_the_answers_of_a_step_are_those_of_the_synchronous_run(stale, run, workshop):
    """The same prompts in the same steps; the first step's answers, drawn by the same weights."""
    plain = run(*words(workshop, 0), "steps=2", "rollout.dump_every=1").ok()
    same = ("prompt_length/mean", "response_length/mean", "critic/score/mean")
    assert all(plain.metrics[1][name] == stale.metrics[1][name] for name in same)
    for line, other in zip(plain.metrics, stale.metrics, strict=False):
        assert line.get("prompt_length/mean") == other.get("prompt_length/mean")
    assert not any(name.startswith("async/") for line in plain.metrics for name in line)


def test_validation_changes_nothing(stale, run, workshop):
    other = run(*words(workshop, 2, "validation.every=0", "validation.before=false")).ok()

    def trained(result):
        lines = [line for line in result.learned if line["step"]]
        return [{k: v for k, v in line.items() if not k.startswith("val-")} for line in lines]

    assert trained(other) == trained(stale)


def test_killed_at_random_moments_it_trains_each_answer_once(stale, workshop, same, until):
    dice, run_dir = random.Random(0), workshop.folder()
    given = [*words(workshop, 2, "validation.every=2")]
    slow = f"reward.function={workshop.mine('few_tokens_slowly')}"
    for step in (2, 3, 5):
        process = workshop.start(*given, slow, run_dir=run_dir)
        path = run_dir / "metrics.jsonl"
        assert until(
            lambda path=path, step=step: path.exists() and path.read_bytes().count(b"\n") > step,
            process,
        )
        time.sleep(dice.uniform(0, 0.2))
        process.kill()
        process.communicate()
    result = workshop.finish(workshop.start(*given, slow, run_dir=run_dir), run_dir).ok()
    assert result.learned == stale.learned
    same(workshop.params(run_dir), workshop.params(stale.run_dir))


@pytest.mark.parametrize("fault", ["pages of older weights", "older weights", "in a step of old"])
def test_an_engine_that_samples_from_older_weights_is_caught(run, workshop, monkeypatch, fault):
    """The checksum is right, so that only its log-probs tell."""
    if fault == "pages of older weights":
        monkeypatch.setattr(ModelRunner, "reset_prefix_cache", lambda self: None)
        monkeypatch.setattr(ModelRunner, "free_cache", lambda self: None)
    else:
        step = ModelRunner.step
        first = []

        def frozen(self, params, version):
            first.append(params) if not first else None
            return step(self, first[0], version)

        monkeypatch.setattr(ModelRunner, "step", frozen)
    room = ["rollout.max_running_sequences=160"] if fault == "in a step of old" else []
    result = run(
        *words(workshop, 4), *room, "optim.schedule.value=0.1", "rollout.logprob_tolerance=0.01"
    )
    assert result.status == 1
    assert "the engine's log-probs differ from the trainer's" in result.err


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["algorithm.correction=[]"], "takes tokens of older policies for the newest's"),
        (["rollout.engine=vllm"], "needs rollout.engine: native"),
        (["algorithm.advantage=remax"], "greedy answers of the newest policy are no baseline"),
    ],
)
def test_what_staleness_can_not_have_is_refused(run, overrides, text):
    result = run("rollout.staleness=1", *overrides)
    assert result.status == 2 and text in result.err


def test_a_trust_region_around_old_policies_is_warned_of(run, caplog):
    run("rollout.staleness=1", "algorithm.use_rollout_logprobs=true", "steps=1").ok()
    assert "the loss clips around policies that are up to 1 updates old" in caplog.text

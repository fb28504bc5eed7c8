"""Runs whose answers are begun before the step that trains on them (`rollout.staleness`)."""

import random
import time

import pytest

from jaxrl_llm.rollout.native.engine import ModelRunner
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


def killed_after(steps, given, workshop, until):
    """Run to the end, killed at a random moment after each of some steps."""
    dice, run_dir = random.Random(0), workshop.folder()
    given = [*given, f"reward.function={workshop.mine('few_tokens_slowly')}"]
    path = run_dir / "metrics.jsonl"
    for step in steps:
        process = workshop.start(*given, run_dir=run_dir)
        assert until(
            lambda step=step: path.exists() and path.read_bytes().count(b"\n") > step, process
        )
        time.sleep(dice.uniform(0, 0.2))
        process.kill()
        process.communicate()
    return workshop.finish(workshop.start(*given, run_dir=run_dir), run_dir).ok()


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


@pytest.mark.slow
def test_a_step_without_a_fresh_token_is_checked_by_others(run, workshop):
    """With room for all answers of the window, two steps of three sample none of their own."""
    result = run(*words(workshop, 2), "steps=4", "rollout.max_running_sequences=96").ok()
    ages = [line.get("async/age/mean", 0) for line in result.metrics[1:]]
    assert ages == [0, 1, 2, 0]
    checked = [line.get("async/canary_diff_mean") for line in result.metrics[1:]]
    assert checked[0] is None and checked[3] is None
    assert max(checked[1:3]) < 1e-5


def test_the_policy_has_moved_further_from_older_tokens(stale):
    """And hardly at all from those that it has drawn itself."""
    lines = [line for line in stale.metrics if "async/k3_kl/age/2" in line]
    assert lines and all(line["async/k3_kl/age/2"] > 1e-5 for line in lines)
    fresh = [line["async/k3_kl/age/0"] for line in stale.metrics if "async/k3_kl/age/0" in line]
    assert fresh and max(fresh) < 1e-9


def test_old_tokens_are_weighed_by_the_default_correction(stale):
    assert max(line["rollout_corr/weight/max"] for line in stale.metrics[1:]) > 1.01


@pytest.mark.slow
def test_the_answers_of_a_step_are_those_of_the_synchronous_run(stale, run, workshop):
    """The same prompts in the same steps; the first step's answers, drawn by the same weights."""
    plain = run(*words(workshop, 0), "steps=2", "rollout.dump_every=1").ok()
    same = ("prompt_length/mean", "response_length/mean", "critic/score/mean")
    assert all(plain.metrics[1][name] == stale.metrics[1][name] for name in same)
    for line, other in zip(plain.metrics, stale.metrics, strict=False):
        assert line.get("prompt_length/mean") == other.get("prompt_length/mean")
    assert not any(name.startswith("async/") for line in plain.metrics for name in line)


@pytest.mark.slow
def test_validation_changes_nothing(stale, run, workshop):
    other = run(*words(workshop, 2, "validation.every=0", "validation.before=false")).ok()

    def trained(result):
        lines = [line for line in result.learned if line["step"]]
        return [{k: v for k, v in line.items() if not k.startswith("val-")} for line in lines]

    assert trained(other) == trained(stale)


@pytest.mark.slow
def test_killed_at_random_moments_it_trains_each_answer_once(stale, workshop, same, until):
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
        (["algorithm.loss=a3po"], "algorithm.correction would weigh tokens a second time"),
        (["rollout.nodes=1", "cluster={nodes: 2}"], "needs one training process, got 2"),
        (["rollout.at_push=keep"], "is of an engine with devices of its own"),
        (["rollout.at_push=keep", "rollout.engine=vllm"], "at_push: keep needs rollout.engine: na"),
        (["rollout.turns=2"], "is of an engine with devices of its own"),
        (["rollout.turns=2", "rollout.at_push=finish"], "expected null with rollout.at_push"),
        (["rollout.turns=2", "rollout.engine=vllm"], "draws the same tokens again"),
        (["rollout.staleness=0", "rollout.schedule=x"], "rollout.schedule needs rollout.staleness"),
        (["rollout.schedule=nowhere.jsonl"], "nowhere.jsonl is no schedule of a run"),
        (["algorithm.advantage=remax"], "greedy answers of the newest policy are no baseline"),
    ],
)
def test_what_staleness_can_not_have_is_refused(run, overrides, text):
    result = run("rollout.staleness=1", *overrides)
    assert result.status == 2 and text in result.err


@pytest.mark.slow
def test_a_trust_region_around_old_policies_is_warned_of(run, caplog):
    given = ["rollout.staleness=1", "algorithm.use_rollout_logprobs=true", "steps=1"]
    run(*given).ok()
    assert "the loss clips around policies that are up to 1 updates old" in caplog.text


@pytest.mark.slow
def test_a3po_needs_no_pass_for_the_old_log_probs(run, workshop, caplog):
    given = ["algorithm.loss=a3po", "algorithm.use_rollout_logprobs=true", "steps=4"]
    lines = run(*words(workshop, 2, *given)).ok().metrics[1:]
    assert "the loss clips around" not in caplog.text
    assert lines[0]["actor/prox_weight"] == 1 and lines[-1]["async/age/max"] > 0
    assert lines[-1]["actor/prox_weight"] != 1


OWN_DEVICES = (
    "mesh.train.devices=1",
    "mesh.rollout.first_device=1",
    "mesh.rollout.devices=1",
    "rollout.max_running_sequences=8",  # so that pushes come while answers are in flight
)


@pytest.fixture(scope="module")
def overlapped(run, workshop):
    return run(*words(workshop, 2, *OWN_DEVICES, "validation.every=2"), devices=2).ok()


@pytest.mark.slow
def test_an_engine_with_devices_of_its_own_samples_while_the_step_is_trained(overlapped):
    lines = overlapped.metrics[1:]
    assert sum(line.get("async/turns", 0) for line in lines) > 0
    assert max(line["async/in_flight_tokens"] for line in lines) > 0
    assert max(line.get("async/age/max", 0) for line in lines) == 2
    seen = ("training/rollout_logprobs_diff_mean", "async/canary_diff_mean")
    assert max(line.get(name, 0) for line in lines for name in seen) < 1e-5


@pytest.mark.slow
def test_turns_of_the_engine_decide_what_is_drawn_and_not_time(run, workshop, same):
    given = [*words(workshop, 2, *OWN_DEVICES), "rollout.turns=3"]
    slow = f"reward.function={workshop.mine('few_tokens_slowly')}"
    plain, other = (run(*given, *more, devices=2).ok() for more in ([], [slow]))
    assert max(line["async/in_flight_tokens"] for line in plain.metrics[1:]) > 0
    assert other.learned == plain.learned
    same(workshop.params(other.run_dir), workshop.params(plain.run_dir))


@pytest.mark.slow
def test_the_schedule_of_a_run_that_was_killed_replays_it(run, workshop, same, until, monkeypatch):
    """Bit for bit; with other slots, the same tokens."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    given = [*words(workshop, 2, *OWN_DEVICES), "checkpoint.every=2"]
    killed = killed_after((2, 5), given, workshop, until)
    assert "goes on otherwise" not in killed.err
    replay = [*given, f"rollout.schedule={killed.run_dir}/schedule.jsonl"]
    again = run(*replay, devices=2).ok()
    assert again.learned == killed.learned
    same(workshop.params(again.run_dir), workshop.params(killed.run_dir))
    other = run(*replay, "rollout.max_running_sequences=6", devices=2).ok()
    ages = ("async/age/mean", "response_length/mean", "critic/score/mean")
    for line, expected in zip(other.metrics, killed.metrics, strict=True):
        assert [line.get(name) for name in ages] == [expected.get(name) for name in ages]


@pytest.mark.slow
def test_answers_may_keep_their_cache_over_a_push(run, workshop):
    """Their later tokens are not what the trainer computes; answers of one policy are."""
    given = [*words(workshop, 2, *OWN_DEVICES), "rollout.at_push=keep", "rollout.turns=2"]
    lines = run(*given, "rollout.logprob_tolerance=1e-5", devices=2).ok().metrics[1:]
    assert max(line["async/in_flight_tokens"] for line in lines) > 0
    assert max(line.get("async/policies_per_answer/mean", 0) for line in lines) > 1
    seen = ("training/rollout_logprobs_diff_mean", "async/canary_diff_mean")
    assert all(any(name in line for name in seen) for line in lines)
    fresh = [line["async/k3_kl/age/0"] for line in lines if "async/k3_kl/age/0" in line]
    assert max(fresh) > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_answers_may_end_before_the_push(run, workshop, devices):
    """With K = 1 this is one-step-off: each answer is of one policy, and at most an update old."""
    own = OWN_DEVICES if devices == 2 else ()
    given = [*words(workshop, 1), *own, "rollout.at_push=finish"]
    lines = run(*given, devices=devices).ok().metrics[1:]
    assert [line.get("async/age/mean", 0) for line in lines] == [0, 1, 1, 1, 1, 1]
    assert all(line["async/in_flight_answers"] == 0 for line in lines)
    assert max(line.get("async/canary_diff_mean", 0) for line in lines) < 1e-5

"""Runs with a fault that was planted: what is wrong is found in the files that they left.

Each is a real run of the tiny model. Faults that take longer are in tests/reporting/test_health.py.
"""

import pytest

from jaxrl_llm.reporting.health import check_run
from jaxrl_llm.training.run_files import read_run

REPORTING = pytest.mark.guards("jaxrl_llm/reporting/", "jaxrl_llm/training/trainer.py")
FLIPPED = "optim.schedule.value=0.02; algorithm.loss={{fn: '{mine}:loss', weight: -1.0}}; "
LONG = "reward.function={mine}:few_tokens; rollout.max_new_tokens=16; steps=8"
ENTROPY = "optim.schedule.value=0.02; steps=10; algorithm.entropy_coef="
UNTRAINED = "critic.optim.schedule={{fn: constant_schedule, value: 0.0}}; "
PLANTED = {
    "reward.function={mine}:same_for_all; steps=3": "no_signal",
    "reward.function={mine}:raises_on_odd; reward.max_error_share=1": "reward_errors",
    "rollout.max_new_tokens=1": "answers_cut",
    "algorithm.loss={mine}:loss_nan_for_group_0": "updates_skipped",
    FLIPPED + "algorithm.kl_loss=k3; steps=10": "score_fell validation_fell far_from_reference",
    FLIPPED + LONG: "answers_grew answers_cut",
    "algorithm.loss={{fn: '{mine}:loss', weight: 0.0}}; steps=3": "gradient_zero",
    ENTROPY + "-1.0": "entropy_collapsed",
    ENTROPY + "10.0": "entropy_exploded score_fell",
    "optim.schedule.value=0.0; steps=3": "learning_rate_zero",
    "optim.schedule.value=0.3; steps=3": "policy_jumps",
    UNTRAINED + "algorithm.advantage=gae; steps=20": "critic_explains_nothing learning_rate_zero",
}


def found(run_dir):
    """What looks wrong in a run, by name."""
    return {finding.name: finding for finding in check_run(read_run(run_dir))}


@pytest.mark.slow
@REPORTING
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(run, workshop, fault):
    findings = found(run(*workshop.words(fault)).ok().run_dir)
    assert {*PLANTED[fault].split()} <= findings.keys(), findings


def test_a_run_that_was_killed_while_it_wrote(finished, copy_of):
    """Its folder as a kill leaves it: the last line is torn, and later steps are missing."""
    assert found(finished.run_dir) == {}
    folder = copy_of(finished)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    assert found(folder).keys() == {"stopped_early"}

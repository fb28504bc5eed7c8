"""Runs with a fault that was planted: what is wrong is found in the files that they left.

Each is a real run of the tiny model. Faults that take longer are in tests/reporting/test_health.py.
"""

import pytest

from jaxrl_llm.reporting.health import check_run
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.training.run_files import read_run

FAST = "optim.schedule.value=0.02"
FLIPPED = "{{fn: '{mine}:loss', weight: -1.0}}"


def found(run_dir):
    """What looks wrong in a run, by name."""
    return {finding.name: finding for finding in check_run(read_run(run_dir))}


PLANTED = {
    "a reward function that scores all answers alike": (
        ["reward.function={mine}:same_for_all", "steps=3"],
        {"no_signal"},
    ),
    "a reward function that raises for half of the prompts": (
        ["reward.function={mine}:raises_on_odd", "reward.max_error_share=1"],
        {"reward_errors"},
    ),
    "no room for an answer": (["rollout.max_new_tokens=1"], {"answers_cut"}),
    "a loss that is NaN for one group": (
        ["algorithm.loss={mine}:loss_nan_for_group_0"],
        {"updates_skipped"},
    ),
    "a loss of the wrong sign": (
        [f"algorithm.loss={FLIPPED}", "algorithm.kl_loss=k3", "steps=10", FAST],
        {"score_fell", "validation_fell", "far_from_reference"},
    ),
    "a loss of the wrong sign, with room for long answers": (
        [
            *(f"algorithm.loss={FLIPPED}", "reward.function={mine}:few_tokens", "steps=8", FAST),
            "rollout.max_new_tokens=16",
        ],
        {"answers_grew", "answers_cut"},
    ),
    "a loss that does not depend on the policy": (
        ["algorithm.loss={{fn: '{mine}:loss', weight: 0.0}}", "steps=3"],
        {"gradient_zero"},
    ),
    "a penalty on entropy": (
        ["algorithm.entropy_coef=-1.0", "steps=10", FAST],
        {"entropy_collapsed"},
    ),
    "a bonus for entropy that outweighs the score": (
        ["algorithm.entropy_coef=10.0", "steps=10", FAST],
        {"entropy_exploded", "score_fell"},
    ),
    "a learning rate of zero": (["optim.schedule.value=0.0", "steps=3"], {"learning_rate_zero"}),
    "a learning rate that is far too high": (
        ["optim.schedule.value=0.3", "steps=3"],
        {"policy_jumps"},
    ),
    "a critic that is not trained": (
        [
            "algorithm.advantage=gae",
            "critic.optim.schedule={{fn: constant_schedule, value: 0.0}}",
            "steps=20",
        ],
        {"critic_explains_nothing", "learning_rate_zero"},
    ),
}


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/reporting/")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(run, workshop, fault):
    words, expected = PLANTED[fault]
    mine = f"{workshop.root}/mine.py"
    result = run(*(word.format(mine=mine) for word in words)).ok()
    findings = found(result.run_dir)
    assert expected <= findings.keys(), findings


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/reporting", "jaxrl_llm/training/trainer.py")
def test_a_run_that_crashed(run, workshop):
    result = run(f"algorithm.loss={workshop.mine('loss_nan')}", "steps=9")
    assert result.status == 1
    findings = found(result.run_dir)
    assert findings.keys() == {"stopped_early", "updates_skipped", "not_finite"}
    assert findings["stopped_early"].steps == (1,)
    assert "optim.max_skipped=3" in findings["updates_skipped"].detail


def test_a_run_that_was_killed_while_it_wrote(finished, copy_of):
    """Its folder as a kill leaves it: the last line is torn, and later steps are missing."""
    assert found(finished.run_dir) == {}
    folder = copy_of(finished)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    assert found(folder).keys() == {"stopped_early"}


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/reporting", "jaxrl_llm/training/trainer.py")
def test_runs_that_are_well(run, workshop):
    result = run("steps=8", "validation.every=4").ok()
    assert found(result.run_dir) == {}
    assert found(workshop.root / "base.sft") == {}


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/reporting", "jaxrl_llm/training/trainer.py")
def test_supervised_training_with_a_learning_rate_that_is_too_high(workshop):
    folder = workshop.folder()
    words = ("optim.schedule.value=3.0", f"export_to={folder}.base")
    workshop(*words, main=sft_main, config="sft.yaml", run_dir=folder).ok()
    assert found(folder).keys() == {"loss_does_not_fall"}

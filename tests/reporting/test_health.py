"""What looks wrong is found in metrics with a planted fault, and in no run that is well."""

import gzip
import itertools
import json
import math
import re
from pathlib import Path

import filelock
import numpy as np
import pytest

from jaxrl_llm import read_run
from jaxrl_llm.config.load import to_yaml
from jaxrl_llm.config.programs import load_config
from jaxrl_llm.reporting import health
from jaxrl_llm.reporting.health import (
    CHECKS,
    RunHistory,
    anchor,
    check_history,
    check_run,
    health_text,
)
from tests.refusals import refuses

ROOT = Path(__file__).resolve().parents[2]
WELL = Path(__file__).with_name("runs_that_are_well.json.gz")
STEPS = 60
CONFIG = {"steps": STEPS, "batch": {"prompts_per_step": 64}, "rollout": {"samples_per_prompt": 8}}


def curve(start, end, *, noise=0.01, begin=1):
    """(step) -> value: from `start` at step `begin` to `end`, with noise in proportion."""

    def at(step):
        progress = 1 - math.exp(-5 * max(step - begin, 0) / STEPS)
        dice = np.random.default_rng(step)
        return start + (end - start) * progress + noise * abs(end - start) * dice.normal()

    return at


ORDINARY = {
    "critic/score/mean": curve(0.3, 0.7),
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "critic/advantages/min": -2.5,
    "critic/advantages/max": 2.5,
    "critic/groups_without_spread": curve(0.4, 0.6),
    "response_length/mean": curve(200, 260),
    "response_length/clip_ratio": 0.02,
    "reward/errors": 0.0,
    "actor/entropy": curve(0.9, 0.4),
    "actor/loss": 0.01,
    "actor/grad_norm": curve(1.2, 0.5, noise=0.2),
    "actor/lr": 1e-6,
    "actor/skipped": 0.0,
    "actor/kl": curve(0.0, 0.08),
    "actor/ppo_kl": 0.001,
    "actor/pg_clipfrac": 0.01,
    "critic/vf_explained_var": curve(0.0, 0.5),
    "rollout_corr/rejected": 0.01,
    "training/rollout_logprobs_diff_mean": curve(0.002, 0.003),
    "perf/compile_wait_s": lambda step: 20.0 if step == 1 else 0.0,
    "timing_s/step": 5.0,
    "perf/dropped_log_records": 0.0,
    "val-core/math/acc/mean@1": lambda step: curve(0.3, 0.7)(step) if step % 10 == 0 else math.nan,
}


def simulated(changes=None, *, steps=STEPS):
    """The lines of metrics of an ordinary run, with some metrics changed; NaN is left out."""
    metrics = ORDINARY | (changes or {})
    rows = [{"step": 0, "val-core/math/acc/mean@1": 0.3}]
    for step in range(1, steps + 1):
        values = {name: m(step) if callable(m) else m for name, m in metrics.items()}
        known = {name: v for name, v in values.items() if v is None or not math.isnan(v)}
        rows.append({"step": step, **known})
    return rows


def found(rows, config=CONFIG, *, is_open=False):
    """The names of what looks wrong."""
    return {f.name for f in check_history(RunHistory(rows, config, lambda: is_open))}


WORSE = {"val-core/math/acc/mean@1": lambda step: 0.28 if step % 10 == 0 else math.nan}
NO_SIGNAL = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
FAULTS = {
    "no_signal": {**NO_SIGNAL, "critic/groups_without_spread": 1.0},
    "most_groups_equal": {
        "critic/groups_without_spread": 0.9,
        "critic/score/mean": curve(0.03, 0.06),
    },
    "score_fell": {"critic/score/mean": lambda s: 0.7 if 20 < s < 40 else 0.35 + 0.01 * (s % 3)},
    "validation_fell": {
        "val-core/math/acc/mean@1": lambda s: {10: 0.6, 20: 0.7, 40: 0.55, 60: 0.5}.get(s, math.nan)
    },
    "no_learning": {
        "critic/score/mean": curve(0.3, 0.301, noise=3.0),
        "val-core/math/acc/mean@1": lambda s: 0.3 if s % 10 == 0 else math.nan,
    },
    "answers_cut": {"response_length/clip_ratio": curve(0.05, 0.4)},
    "answers_shrank": {"response_length/mean": curve(200, 20), **WORSE},
    "answers_grew": {"response_length/mean": curve(200, 900), **WORSE},
    "entropy_collapsed": {
        "actor/entropy": curve(0.9, 0.001),
        "critic/groups_without_spread": curve(0.4, 0.97),
        "critic/score/mean": curve(0.3, 0.45),
    },
    "entropy_exploded": {"actor/entropy": curve(0.9, 6.0), **WORSE},
    "far_from_reference": {"actor/kl": curve(0.0, 4.0), **WORSE},
    "policy_jumps": {"actor/ppo_kl": lambda s: 2.0 if s in {20, 30} else 0.01},
    "much_clipping": {"actor/pg_clipfrac": curve(0.1, 0.7)},
    "updates_skipped": {"actor/skipped": lambda s: float(s == 30)},
    "gradient_zero": {"actor/grad_norm": lambda s: 1.0 if s < 50 else 0.0},
    "gradient_spikes": {"actor/grad_norm": lambda s: 30.0 if s == 42 else 1.0},
    "learning_rate_zero": {"actor/lr": lambda s: max(0.0, 1e-6 * (1 - s / 40))},
    "critic_explains_nothing": {"critic/vf_explained_var": curve(0.0, -0.2)},
    "experts_idle": {"actor/router_idle": curve(0.1, 0.8)},
    "reward_errors": {"reward/errors": 20.0},
    "episodes_broken": {"episode/broken": 60.0},
    "tools_fail": {"tools/search/calls": 700.0, "tools/search/timeout": 50.0},
    "template_drifts": {"rollout/template_drift": curve(0.0, 0.5)},
    "engine_drifts": {"training/rollout_logprobs_diff_mean": curve(0.002, 0.02)},
    "tokens_rejected": {"rollout_corr/rejected": curve(0.0, 0.7)},
    "answers_too_old": {"async/age/mean": 1.99},
    "not_finite": {"critic/score/mean": lambda s: None if s == 7 else curve(0.3, 0.7)(s)},
    "compiles_late": {"perf/compile_wait_s": lambda s: 2.0 if s % 2 else 0.0},
    "records_dropped": {"perf/dropped_log_records": lambda s: max(0.0, s - 50.0)},
    "restarted": {"cluster/restarts": lambda s: float(s > 30)},
}
"""Changed metrics, by the one check that is to find them."""


def test_an_ordinary_run_has_no_findings_at_any_step():
    rows = simulated()
    for n in range(len(rows) + 1):
        assert found(rows[:n], is_open=True) == set(), n


def test_every_check_is_tried():
    tried = {*FAULTS, "stopped_early", "loss_does_not_fall"}
    assert tried == {check.__name__ for check in CHECKS.values()}


def test_a_fault_is_found_in_the_steps_that_have_it_and_nothing_else(subtests):
    expected = {
        "policy_jumps": (20, 30),
        "gradient_spikes": (42,),
        "updates_skipped": (30,),
        "not_finite": (7,),
        "gradient_zero": tuple(range(50, 61)),
        "learning_rate_zero": tuple(range(40, 61)),
        "no_learning": (),
    }
    for name, fault in FAULTS.items():
        stale = {"staleness": 2} if name == "answers_too_old" else {}
        config = CONFIG | {"rollout": CONFIG["rollout"] | stale}
        with subtests.test(name):
            (finding,) = check_history(RunHistory(simulated(fault), config))
            assert finding.name == name and "nan" not in finding.detail
            assert set(finding.steps) <= set(range(1, STEPS + 1))
            assert finding.steps == expected.get(name, finding.steps)
            assert finding.steps or name == "no_learning"


@pytest.mark.parametrize("on_error", [0.0, "unscored"])
def test_unscored_answers_are_said_to_be_left_out(on_error):
    """Failures that are unscored, too, are said once."""
    failures = {"reward/errors": 20.0} if on_error == "unscored" else {}
    config = CONFIG | {"reward": CONFIG.get("reward", {}) | {"on_error": on_error}}
    rows = simulated({"reward/unscored": 20.0, **failures})
    (finding,) = check_history(RunHistory(rows, config))
    assert "are unscored and left out of their groups" in finding.detail


RIGHT = {
    "critic/score/mean": lambda s: min(1.0, 0.3 + s / 50),
    "critic/score/min": lambda s: float(s > 40),
    "critic/groups_without_spread": lambda s: min(1.0, 0.3 + s / 50),
    "critic/advantages/min": lambda s: -2.5 * (s <= 40),
    "critic/advantages/max": lambda s: 2.5 * (s <= 40),
    "actor/entropy": curve(0.9, 0.001),
    "actor/grad_norm": lambda s: 1.0 if s <= 40 else 0.0,
    "critic/vf_explained_var": lambda s: 0.5 if s <= 40 else -3.0,
}


NO_FAULTS = {
    "all answers have become right": RIGHT,
    "more entropy, and better": {"actor/entropy": curve(0.3, 2.0)},
    "longer, and better": {"response_length/mean": curve(200, 2000)},
    "shorter, and better": {"response_length/mean": curve(200, 20)},
    "far away, and better": {"actor/kl": curve(0.0, 4.0)},
    "noisy scores": {"critic/score/mean": curve(0.3, 0.7, noise=0.2)},
    "a warm-up": {"actor/lr": lambda s: 1e-6 * (s > 2)},
    "few errors": {"reward/errors": lambda s: 5.0 if s == 55 else 0.0},
    "calls that fail": {"tools/x/calls": 100.0, "tools/x/failed": 30.0},
    "a metric now and then": {"actor/skipped": 0.0, "reward/style/mean": math.nan},
    "one late shape": {"perf/compile_wait_s": lambda s: 300.0 if s == 30 else 0.0},
    "one low validation": {
        "val-core/math/acc/mean@1": lambda s: {10: 0.7, 60: 0.5}.get(s, math.nan)
    },
    "rewards of turns alone": {f"critic/score/{end}": 0.0 for end in ("mean", "min", "max")},
    "K = 1 with an engine of its own": {"async/age/mean": 0.99},
}


def test_what_is_no_fault(subtests):
    config = CONFIG | {"rollout": CONFIG["rollout"] | {"staleness": 1}}
    for name, changes in NO_FAULTS.items():
        with subtests.test(name):
            assert found(simulated(changes), config) == set()


def test_a_run_that_is_not_at_its_end():
    rows = simulated()[:30]
    assert found(rows) == {"stopped_early"} and found([]) == {"stopped_early"}
    assert found(rows, is_open=True) == set()
    assert found(rows, CONFIG | {"steps": None}) == set()  # epochs: the number is not known


def supervised(losses):
    return [{"step": s, "train/loss": v, "train/lr": 1e-3} for s, v in enumerate(losses, 1)]


def test_supervised_training_that_gets_no_better():
    falls, rises = np.linspace(2.0, 1.0, 40).tolist(), np.linspace(2.0, 3.0, 40).tolist()
    config = {"steps": 40}
    assert found(supervised(falls), config) == set()
    assert found(supervised(rises), config) == {"loss_does_not_fall"}
    assert found(supervised([2.0] * 40), config) == {"loss_does_not_fall"}
    assert found(supervised(rises[:10]), {"steps": 10}) == set()


def test_missing_metrics_and_nulls_stop_no_check():
    """A third of the metrics is missing and another null, in turn; constants are of one value."""
    for steps, left in itertools.product((1, 2, 3, 6), range(3)):
        rows = simulated(steps=steps)
        for row in rows[1:]:
            for at, name in enumerate(ORDINARY):
                if at % 3 == left:
                    row.pop(name, None)
                elif at % 3 == (left + 1) % 3:
                    row[name] = (None, math.nan, math.inf)[row["step"] % 3]
        assert found(rows, {}) <= {"not_finite"}, (steps, left)
        bare = [{"step": step} for step in range(steps)]
        assert found(bare, {"steps": steps - 1}) == set(), steps


def test_nan_and_infinity_are_seen_as_null_is():
    for value in (None, math.nan, -math.inf):
        rows = simulated()
        rows[7]["actor/loss"] = value
        (finding,) = check_history(RunHistory(rows, CONFIG))
        assert (finding.name, finding.severity, finding.steps) == ("not_finite", "error", (7,))


def test_answers_that_are_cut_may_be_whole():
    for score, severity in ((0.7, "warning"), (0.2, "error")):
        changes = {"response_length/clip_ratio": 0.9, "critic/score/mean": curve(0.25, score)}
        rows = simulated(changes | {"val-core/math/acc/mean@1": math.nan})
        (finding,) = check_history(RunHistory(rows, CONFIG))
        assert (finding.name, finding.severity) == ("answers_cut", severity)


def test_runs_that_are_well_have_no_findings_at_any_step():
    runs = json.loads(gzip.decompress(WELL.read_bytes()))
    recipes = {path.stem for path in (ROOT / "configs/recipes").glob("*.yaml")}
    assert runs.keys() == {*recipes, "quickstart", "quickstart_sft"}
    for name, kept in runs.items():
        rows = kept["rows"]
        for n in range(0, len(rows) + 1, 1 if len(rows) < 60 else 25):
            assert found(rows[:n], kept["config"], is_open=True) == set(), (name, n)
        assert found(rows, kept["config"]) == set(), name
    for row in runs["grpo"]["rows"][26:]:
        row["critic/score/mean"] *= 0.3
    assert found(runs["grpo"]["rows"], runs["grpo"]["config"]) == {"score_fell"}


def test_a_runs_folder(tmp_path):
    with refuses():
        read_run(tmp_path)
    config = load_config("quickstart", {"run_dir": str(tmp_path), "steps": STEPS})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    run = read_run(tmp_path)
    with filelock.FileLock(tmp_path / ".lock"):
        assert check_run(run) == []
    (finding,) = check_run(run)
    assert (finding.name, finding.steps, finding.severity) == ("stopped_early", (), "error")
    lines = [json.dumps(row) for row in simulated()]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 61, "crit']))
    assert check_run(run) == []
    changed = simulated(FAULTS["gradient_spikes"] | FAULTS["no_signal"])
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, changed)) + "\n")
    findings = check_run(run)
    assert [f.severity for f in findings] == ["error", "warning"]
    assert health.health_summary(findings) == (
        "1 error, 1 warning: Nothing to learn from; The gradient has spikes"
    )
    assert "warning: The gradient has spikes (step 42)\n" in health_text(findings)


def test_each_check_has_a_heading_with_its_rule():
    text = (ROOT / "docs/health.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    assert list(sections) == list(CHECKS)
    for title, check in CHECKS.items():
        rule = " ".join(check.__doc__.split()).removeprefix("Find ")
        assert rule[1:] in " ".join(sections[title].split()), title
        assert "**Why.**" in sections[title] and "**What to do.**" in sections[title]


def test_links_to_headings_lead_somewhere():
    text = (ROOT / "docs/health.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w.]*)#([\w-]+)\)", text)
    links += [("health.md", anchor(title)) for title in CHECKS]
    for page, heading in links:
        shown = (ROOT / "docs" / (page or "health.md")).read_text(encoding="utf-8")
        assert heading in map(anchor, re.findall(r"^#+ (.+)$", shown, re.MULTILINE)), page

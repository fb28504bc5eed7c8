"""Process reward models from labelled steps to the rewards of a run, against transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxrl_llm.models.hf.config import read_scoring, read_spec
from jaxrl_llm.prefer import main as prefer_main
from tests.e2e.comparing import encoded, exported, loaded
from tests.guarded import MODEL, UPDATE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/rewards/", "jaxrl_llm/runs/"),
]


@pytest.fixture(scope="module")
def prefer(workshop):
    """Run `prefer` on answers of two numbers, of which those that end below 5 are right."""
    rng, rows = np.random.default_rng(0), []
    for a, b, first, second in rng.integers(0, 10, (320, 4)):
        steps = [str(first), f"1{second}"][: 1 + (a + b) % 2]
        labels = [bool(int(step[-1]) < 5) for step in steps]
        rows.append({"prompt": f"{a}+{b}=", "completions": steps, "labels": labels})
    files = {"train": workshop.write_rows("steps", rows[:256])}
    files["validation"] = workshop.write_rows("held_steps", rows[256:])
    tree = {"run_dir": "", "export_to": "", "steps": 40, "model": {"path": str(workshop.base)}}
    tree |= {"loss": "step_cross_entropy", "log": {"trackers": []}, "checkpoint": {"every": 20}}
    tree |= {"data": {**files, "max_tokens": 16, "step_separator": ","}}
    tree |= {"batch": {"pairs_per_step": 32, "max_tokens_per_device": 256}}
    tree |= {"optim": {"schedule": {"fn": "constant_schedule", "value": 1e-2}}}
    workshop.write("process.yaml", tree)

    def run(*words, run_dir=None):
        folder = run_dir or workshop.folder()
        words = (f"export_to={folder}.out", *words)
        return workshop(*words, main=prefer_main, config="process.yaml", run_dir=folder)

    run.held = rows[256:]
    return run


@pytest.fixture(scope="module")
def finished(prefer):
    return prefer().ok()


@pytest.fixture(scope="module")
def scorer(finished):
    return Path(f"{finished.run_dir}.out")


def logits_of(folder, prompt, steps, separator=","):
    """Return the logit at each step's separator by transformers, from texts."""
    tokenizer, model = loaded(folder, "TokenClassification")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    ids, ends = encoded(folder, messages, kind="TokenClassification"), []
    for step in steps:
        ids += tokenizer(step + separator, add_special_tokens=False)["input_ids"]
        ends.append(len(ids) - 1)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, ends, 0].numpy()


def test_it_learns_which_steps_are_right_as_transformers_says(prefer, finished, scorer, tmp_path):
    first, *_, last = (line for line in finished.metrics if "val/loss" in line)
    assert first["step"] == 0 and first["val/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["val/accuracy/steps"] > 0.95 and last["val/accuracy/answers"] > 0.9
    assert read_spec(scorer).value_head and read_scoring(scorer) == {"step_separator": ","}
    right, losses = [], []
    for row in prefer.held:
        z, y = logits_of(scorer, row["prompt"], row["completions"]), np.array(row["labels"])
        right += ((z > 0) == y).tolist()
        losses += np.logaddexp(0, np.where(y, -z, z)).tolist()
    assert last["val/accuracy/steps"] == pytest.approx(np.mean(right), abs=1e-6)
    assert 0.2 > last["val/loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    again = exported(finished.run_dir, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (scorer / name).read_bytes()
    assert "AutoModelForTokenClassification.from_pretrained" in (again / "README.md").read_text()


def test_its_scores_of_steps_are_rewards(run, scorer):
    result = run(
        *(f"reward.classifier={scorer}", "reward.function=null", "rollout.dump_every=1"),
        *("reward.step_separator='1'", "reward.aggregate=product", "reward.step_rewards=true"),
        *("rollout.temperature=3.0", "reward.max_tokens=40"),  # answers with several digits 1
        *("algorithm.advantage=reinforce_plus_plus", "steps=2"),
    ).ok()
    counts = []
    for line in result.metrics[1:]:
        rows = result.rows(line["step"])
        for row in rows:
            steps = [part for part in row["answer"].split("1") if part.strip()] or [""]
            expected = 1 / (1 + np.exp(-logits_of(scorer, json.loads(row["prompt"]), steps)))
            extra = json.loads(row["extra"])
            np.testing.assert_allclose(extra["step_scores"], expected, atol=2e-4)
            assert row["score"] == pytest.approx(np.prod(expected), abs=1e-4)
            counts.append(len(steps))
        sums = [sum(json.loads(row["extra"])["step_scores"]) for row in rows]
        assert line["critic/rewards/mean"] == pytest.approx(np.mean(sums), abs=1e-3)
        assert line["reward/steps/mean"] == pytest.approx(np.mean(counts[-len(rows) :]))
        assert line["reward/errors"] == 0 and line["actor/grad_norm"] > 0
    assert {1, 2} <= {*counts}, counts

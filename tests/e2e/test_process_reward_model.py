"""Process reward models from labelled steps to the rewards of a run, against transformers."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm import export
from jaxrl_llm.models.hf.config import read_scoring, read_spec
from jaxrl_llm.prefer import main as prefer_main
from tests.e2e.test_reward_model import dumped
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/rewards/", "jaxrl_llm/runs/")


@pytest.fixture(scope="module")
def prefer(workshop):
    """Run `prefer` on answers of two numbers, of which those that end below 5 are right."""
    rng = np.random.default_rng(0)
    rows = []
    for a, b, first, second in rng.integers(0, 10, (320, 4)):
        steps = [str(first), f"1{second}"][: 1 + (a + b) % 2]
        labels = [bool(int(step[-1]) < 5) for step in steps]
        rows.append({"prompt": f"{a}+{b}=", "completions": steps, "labels": labels})
    for name, some in {"steps": rows[:256], "held_steps": rows[256:]}.items():
        (workshop.root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    workshop.write(
        "process.yaml",
        {
            "run_dir": "",
            "export_to": "",
            "steps": 40,
            "loss": "step_cross_entropy",
            "model": {"path": str(workshop.base)},
            "data": {
                "train": str(workshop.root / "steps.jsonl"),
                "validation": str(workshop.root / "held_steps.jsonl"),
                "max_tokens": 16,
                "step_separator": ",",
            },
            "optim": {"schedule": {"fn": "constant_schedule", "value": 1e-2}},
            "batch": {"pairs_per_step": 32, "max_tokens_per_device": 256},
            "checkpoint": {"every": 20},
            "log": {"trackers": []},
        },
    )

    def run(*words, run_dir=None):
        folder = run_dir or workshop.folder()
        words = (f"export_to={folder}.out", *words)
        return workshop(*words, main=prefer_main, config="process.yaml", run_dir=folder)

    return run


@pytest.fixture(scope="module")
def finished(prefer):
    return prefer().ok()


@pytest.fixture(scope="module")
def exported(finished):
    return Path(f"{finished.run_dir}.out")


@functools.cache
def loaded(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()


def logits_of(folder, prompt, steps, separator=","):
    """Return the logit at each step's separator by transformers, from texts."""
    tokenizer, model = loaded(folder)
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ends = []
    for step in steps:
        ids += tokenizer(step + separator, add_special_tokens=False)["input_ids"]
        ends.append(len(ids) - 1)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, ends, 0].numpy()


@pytest.mark.slow
def test_it_learns_which_steps_are_right(finished):
    first, *_, last = (line for line in finished.metrics if "val/loss" in line)
    assert first["step"] == 0 and first["val/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["val/accuracy/steps"] > 0.95 and last["val/accuracy/answers"] > 0.9
    assert last["val/loss"] < 0.2
    assert re.search(r"held-out loss \d\.\d+  of steps \d\.\d+  of answers", finished.out)
    assert "let it score answers: reward.classifier=" in finished.out


@pytest.mark.slow
def test_transformers_gives_its_logits(finished, exported, tmp_path):
    assert read_spec(exported).value_head and read_scoring(exported) == {"step_separator": ","}
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    lines = (finished.run_dir.parent / "held_steps.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    right, losses = [], []
    for row in rows:
        z, y = logits_of(exported, row["prompt"], row["completions"]), np.array(row["labels"])
        right += ((z > 0) == y).tolist()
        losses += np.logaddexp(0, np.where(y, -z, z)).tolist()
    last = finished.metrics[-1]
    assert last["val/accuracy/steps"] == pytest.approx(np.mean(right), abs=1e-6)
    assert last["val/loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    assert export.main([str(finished.run_dir), str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again/config.json").read_text())
    assert again == config
    card = (tmp_path / "again/README.md").read_text()
    assert "AutoModelForTokenClassification.from_pretrained" in card
    assert "text-generation" not in card


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(prefer, finished, workshop):
    stopped = prefer("steps=20").ok()
    more = f"export_to={stopped.run_dir}.more"
    again = prefer("steps=40", more, run_dir=stopped.run_dir).ok()
    assert again.learned[-1] == finished.learned[-1]


@pytest.mark.slow
def test_its_scores_of_steps_are_rewards(run, exported):
    words = (f"reward.classifier={exported}", "reward.function=null", "rollout.dump_every=1")
    keys = ("reward.step_separator='1'", "reward.aggregate=product", "reward.step_rewards=true")
    keys = (
        *keys,
        "rollout.temperature=3.0",
        "reward.max_tokens=40",
    )  # answers with several digits 1
    result = run(*words, *keys, "algorithm.advantage=reinforce_plus_plus", "steps=2").ok()
    counts = []
    for step, line in enumerate(result.metrics[1:], start=1):
        rows = dumped(result, step)
        for row in rows:
            steps = [part for part in row["answer"].split("1") if part.strip()] or [""]
            expected = 1 / (1 + np.exp(-logits_of(exported, json.loads(row["prompt"]), steps)))
            extra = json.loads(row["extra"])
            np.testing.assert_allclose(extra["step_scores"], expected, atol=2e-4)
            assert row["score"] == pytest.approx(np.prod(expected), abs=1e-4)
            counts.append(len(steps))
        sums = [sum(json.loads(row["extra"])["step_scores"]) for row in rows]
        assert line["critic/rewards/mean"] == pytest.approx(np.mean(sums), abs=1e-3)
        assert line["reward/steps/mean"] == pytest.approx(np.mean(counts[-len(rows) :]))
        assert line["reward/errors"] == 0 and line["actor/grad_norm"] > 0
    assert {1, 2} <= {*counts}, counts


@pytest.mark.slow
def test_packing_and_devices_make_no_difference(run, exported):
    words = (f"reward.classifier={exported}", "reward.function=null", "rollout.dump_every=1")
    words = (*words, "reward.aggregate=mean", "reward.max_tokens=20", "steps=1")
    scores = [
        [row["score"] for row in dumped(run(*words, most, devices=devices).ok(), 1)]
        for most, devices in (
            ("batch.max_tokens_per_device=20", 1),
            ("batch.max_tokens_per_device=256", 1),
            ("batch.max_tokens_per_device=256", 4),
        )
    ]
    assert np.std(scores[0]) > 0.1
    for others in scores[1:]:
        np.testing.assert_allclose(others, scores[0], atol=1e-5)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(run, prefer, exported, workshop, tmp_path):
    classifier = f"reward.classifier={exported}"
    critic = tmp_path / "critic"
    critic.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (critic / name).symlink_to(exported / name)
    config = json.loads((exported / "config.json").read_text())
    del config["jaxrl_llm_scoring"]
    (critic / "config.json").write_text(json.dumps(config))
    cases = {
        (f"reward.classifier={critic}",): "does not say what ends a step",
        (classifier, "reward.render=chat"): "leave reward.render=chat out",
        (classifier, "rollout.agent=one_answer"): "which scores plain answers",
        (
            "reward.step_rewards=true",
        ): "reward: step_rewards is set, but reward.classifier names no",
        (classifier, "reward.aggregate=max"): "reward.aggregate",
    }
    for words, text in cases.items():
        result = run(*words, "validation.before=false")
        assert result.status == 2 and text in result.err, result.err
    for words, text in {
        ("loss=dpo",): "is of pairs, but the rows are answers with labelled steps",
        ("model.lora={rank: 2}",): "whose head an adapter can't hold",
        ("data.step_separator='1'",): "holds data.step_separator='1'",
    }.items():
        result = prefer(*words)
        assert result.status == 2 and text in result.err, result.err

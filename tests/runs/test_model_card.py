"""The page of an exported model, from the folder of a run that is laid out by hand."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard

from jaxrl_llm.config.load import load, to_yaml
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.data.rows import write_rows
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.training.export import TrainedModel, make_card
from tests.specs import tiny_spec

LINES = [
    {"step": 0, "val-core/openai/gsm8k/acc/mean@1": 0.25},
    {"step": 1, "critic/score/mean": 0.5, "actor/entropy": 3.0},
    {"step": 2, "critic/score/mean": 0.75, "val-core/openai/gsm8k/acc/mean@1": 0.625},
    {"step": 3, "critic/score/mean": None},
    {"step": 4, "critic/score/mean": 0.0, "val-core/openai/gsm8k/acc/mean@1": 0.125},
]
VERSIONS = {"jaxrl_llm": "0.1.0", "git_commit": "abc", "git_changed_files": "M a", "seed": 3}
VERSIONS |= {"devices": ["NVIDIA H100", "NVIDIA H100"], "xla_flags": ""}
SOURCE = "Qwen/Qwen3-0.6B"


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run with a secret in its config, data files and a function of its own."""
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "openai/gsm8k"}
    write_rows(tmp_path / "train.parquet", [row] * 3)
    (tmp_path / "held-out.jsonl").write_text(json.dumps(row | {"data_source": "mine"}) + "\n")
    keys = {
        "run_dir": f"{Path.home()}/runs/a",
        "seed": 3,
        "model": {"path": SOURCE, "warm_start": None},
        "data.train": [str(tmp_path / "train.parquet")],
        "data.validation": [str(tmp_path / "held-out.jsonl"), "gone.parquet"],
        "data.prepare": None,
        "reward.function": {"fn": "mine.py:judge", "api_key": "sk-secret", "scale": 2},
        "rollout.engine": "vllm",
        "rollout.vllm.env": {"HF_TOKEN": "hf_secret"},
    }
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load(TrainConfig, "quickstart", keys)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "versions.json").write_text(json.dumps(VERSIONS))
    functions = {"reward.function": {"name": "mine.py:judge", "sha256": "f00d"}}
    (folder / "functions.json").write_text(json.dumps(functions))
    return folder


def make(run_dir, name, source, step, *, role="actor", model=None, **keywords):
    model = Decoder(tiny_spec()) if model is None else model
    return make_card(run_dir, name, TrainedModel(None, model, source, step, role), **keywords)


def card_of(files):
    return ModelCard(files["README.md"])


def test_the_hub_reads_what_the_model_is(run_dir):
    data = card_of(make(run_dir, "adder", SOURCE, 4, license="mit")).data.to_dict()
    assert data == {
        "base_model": SOURCE,
        "base_model_relation": "finetune",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["jaxrl_llm", "reinforcement-learning", "grpo"],
    }
    local = card_of(make(run_dir, "adder", "base/of/mine", 4)).data.to_dict()
    assert not {"base_model", "license"} & local.keys()
    adapter = card_of(make(run_dir, "adder", f"{SOURCE}@main", 4, adapter=True)).data
    assert (adapter.library_name, adapter.base_model) == ("peft", SOURCE)


def test_the_page_has_results_until_its_step_data_and_versions(run_dir):
    text, later = (card_of(make(run_dir, "adder", SOURCE, step)).text for step in (2, 4))
    assert "# adder\n" in text and "actor/entropy" not in text
    accuracy = "| `val-core/openai/gsm8k/acc/mean@1` | 0.250 (step 0) |"
    for row in (
        "| `critic/score/mean` | 0.500 (step 1) | 0.750 (step 2) | 0.750 |",
        f"{accuracy} 0.625 (step 2) | 0.625 |",
        "/train.parquet` | 3 | openai/gsm8k (3) |",
        "| `gone.parquet` | not there any more |  |",
        "| `reward.function` | `mine.py:judge` | `f00d` |",
        "| commit | abc, with changed files |",
    ):
        assert row in text, row
    assert f"{accuracy} 0.125 (step 4) | 0.625 |" in later


def test_the_config_beside_it_can_be_run_and_holds_no_secret(run_dir):
    files = make(run_dir, "adder", SOURCE, 4)
    assert "secret" not in "".join(files.values())
    assert files["training.yaml"] in files["README.md"]
    (run_dir / "training.yaml").write_text(files["training.yaml"])
    config = load(TrainConfig, run_dir / "training.yaml")
    original = load(TrainConfig, run_dir / "config.yaml")
    assert config.run_dir == "~/runs/a"
    assert dict(config.rollout.vllm.env) == {"HF_TOKEN": "(not published)"}
    assert config.reward.function.kwargs == {"api_key": "(not published)", "scale": 2}
    assert (config.algorithm, config.optim) == (original.algorithm, original.optim)
    assert "python -m jaxrl_llm.train --config training.yaml" in files["README.md"]
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    tree["model"]["function"] = {"fn": "mine.py:model", "api_key": "sk-secret", "width": 4}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree))
    page = make(run_dir, "adder", SOURCE, 4, model=SimpleNamespace())["README.md"]
    use = re.search(r"## Use.*?```yaml\n(.*?)```", page, re.DOTALL)[1]
    shown = {"fn": "mine.py:model", "api_key": "(not published)", "width": 4}
    assert yaml.safe_load(use) == {"model": {"path": ".", "function": shown}}


def test_a_page_of_sft_and_of_a_run_that_wrote_nothing_else(tmp_path):
    config = load(SftConfig, "quickstart_sft", {"run_dir": str(tmp_path)})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    page = make(tmp_path, "base", config.model.path, 9)["README.md"]
    assert "jaxrl_llm.sft --config training.yaml" in page and "## Results" not in page
    lines = ({"step": n, "train/loss": loss} for n, loss in enumerate([3.0, 1.0, 2.0], start=1))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = make(tmp_path, "base", config.model.path, 9)["README.md"]
    assert "| `train/loss` | 3.000 (step 1) | 2.000 (step 3) | 1.000 |" in page


def test_other_roles_and_what_the_policy_has_learned_by_are_named(run_dir):
    value = Decoder(tiny_spec(value_head=True))
    critic = make(run_dir, "v", SOURCE, 4, role="critic", model=value)["README.md"]
    assert "AutoModelForTokenClassification.from_pretrained" in critic
    assert "The critic after step 4" in critic and "pipeline_tag" not in critic
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    for algorithm, tag in (
        ({"pairs": {"fn": "all_pairs"}, "pair_loss": {"fn": "dpo"}}, "dpo"),
        ({"loss": None, "distillation": {"fn": "generalized_jsd"}}, "generalized_jsd"),
    ):
        other = tree | {"algorithm": tree["algorithm"] | algorithm}
        (run_dir / "config.yaml").write_text(yaml.safe_dump(other))
        card = card_of(make(run_dir, "adder", SOURCE, 2))
        assert card.data.to_dict()["tags"] == ["jaxrl_llm", "reinforcement-learning", tag]

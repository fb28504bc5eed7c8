"""A run whose prompts have images, continued from its checkpoint."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from jaxrl_llm import export
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.training.run import run_training
from tests.guarded import MODEL, UPDATE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "configs/vision/model"
REWARD = """\
def by_length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 3 / 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of random weights, and a reward that differs between its answers."""
    made = tmp_path_factory.mktemp("vision")
    spec, rng = read_spec(SOURCE, vision=True), np.random.default_rng(0)
    weights = jax.tree.map(
        lambda decl: jnp.asarray(rng.normal(scale=0.1, size=decl.shape), jnp.float32), declare(spec)
    )
    save_params(made / "model", weights, spec, source=SOURCE, dtype=jnp.float32)
    (made / "reward.py").write_text(REWARD)
    return made


def run(folder, name, *overrides):
    """Train, and return the metrics of each step and what is exported."""
    keys = f"""
        run_dir={folder}/{name} model.path={folder}/model model.warm_start=null
        data.train={folder}/train.parquet data.validation=[] data.prepare.out={folder}
        data.prepare.train_rows=16 data.prepare.validation_rows=3 data.prepare.sft_rows=0
        reward.function={folder}/reward.py:by_length reward.workers=0 checkpoint.every=1
        rollout.samples_per_prompt=2 rollout.max_new_tokens=4 rollout.max_running_sequences=8
        rollout.dump_every=1 batch.prompts_per_step=4 batch.prompts_per_minibatch=4
        batch.max_tokens_per_device=128 algorithm.kl_loss=k3 validation.every=0
    """
    with pytest.MonkeyPatch.context() as patch:  # one device compiles sooner than eight
        one = jax.devices()[:1]
        patch.setattr("jax.devices", lambda: one)
        config = load(
            TrainConfig, ROOT / "configs/vision/pictures.yaml", [*keys.split(), *overrides]
        )
        run_training(config)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    out = folder / f"{name}.step{len(lines)}"
    assert export.main([str(folder / name), str(out)]) == 0
    return [json.loads(line) for line in lines], load_file(out / "model.safetensors"), out


def changed(before, after):
    """Tell of the tower's arrays and of the decoder's which ones differ."""
    assert before.keys() == after.keys()
    return {
        part: {bool((before[name] != after[name]).any()) for name in before if part in name}
        for part in ("model.visual.", "model.language_model.")
    }


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *UPDATE, "models/vision/", "jaxrl_llm/runs/", "jaxrl_llm/rollout/")
def test_a_run_with_images_goes_on(folder, monkeypatch):
    """Bit for bit as one that was not stopped; engine and trainer agree, exports are whole."""
    monkeypatch.chdir(ROOT)
    base = load_file(folder / "model/model.safetensors")
    run(folder, "frozen", "model.vision=frozen", "steps=1")
    metrics, weights, out = run(folder, "frozen", "model.vision=frozen", "steps=2")
    assert changed(base, weights) == {"model.visual.": {False}, "model.language_model.": {True}}
    for line in metrics:
        assert line["training/rollout_logprobs_diff_mean"] < 1e-5
        assert line["actor/grad_norm"] > 0
        assert line["vision/tokens/min"] == 4 and line["vision/distinct"] > 1
    assert metrics[1]["actor/kl_loss"] > 0 and "timing_s/vision" in metrics[0]
    _, problems = transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True
    )
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    straight, whole, _ = run(folder, "straight", "model.vision=frozen", "steps=2")
    assert not any(changed(weights, whole)["model.language_model."])
    assert [comparable(line) for line in metrics] == [comparable(line) for line in straight]


def comparable(line):
    """Metrics that do not depend on the clock, the memory or where a run began."""
    names = ("actor/", "critic/", "training/rollout", "vision/", "response_length/")
    return {name: value for name, value in line.items() if name.startswith(names)}

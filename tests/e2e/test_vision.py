"""Runs whose prompts and environments have images."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
import transformers
from safetensors.numpy import load_file

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from tests.e2e.comparing import exported
from tests.guarded import MODEL, NATIVE, UPDATE
from tests.specs import draw

VISION = Path(__file__).parents[2] / "configs/vision"
GUARDED = (*MODEL, *UPDATE, *NATIVE, "models/vision/", "jaxrl_llm/data/", "configs/vision/")
pytestmark = pytest.mark.guards(*GUARDED, "jaxrl_llm/runs/", "jaxrl_llm/rollout/")

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}


@pytest.fixture(scope="module")
def model(workshop):
    """A small model of random weights that sees."""
    shape = Path(shutil.copytree(VISION / "model", workshop.root / "seeing_shape"))
    config = json.loads((shape / "config.json").read_text())
    config["text_config"] |= TEXT
    config["vision_config"] |= TOWER
    (shape / "config.json").write_text(json.dumps(config))
    spec, folder = read_spec(shape, vision=True), workshop.root / "seeing"
    weights = draw(spec, scale=0.1)
    save_params(folder, weights, spec, source=shape, dtype=jnp.float32)
    return folder


@pytest.fixture(scope="module")
def see(workshop, model):
    """(overrides) -> a run on pictures with the small model."""
    data = workshop.root / "pictures"
    words = (
        *("model.warm_start=null", f"model.path={model}", "data.validation=[]"),
        *(f"data.train={data}/train.parquet", f"data.prepare.out={data}", "log.trackers=[]"),
        *("data.prepare.train_rows=16", "data.prepare.validation_rows=3"),
        *("data.prepare.sft_rows=0", f"reward.function={workshop.mine('few_tokens')}"),
        *("reward.workers=0", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4"),
        *("rollout.max_running_sequences=8", "rollout.dump_every=1", "checkpoint.every=1"),
        *("batch.prompts_per_step=4", "batch.prompts_per_minibatch=4", "algorithm.kl_loss=k3"),
        *("batch.max_tokens_per_device=128", "model.vision=trained", "validation.every=0"),
    )
    return lambda *more, **how: workshop(*words, *more, config=VISION / "pictures.yaml", **how)


def moved(before, after):
    """Tell whether the tower's arrays and the decoder's differ: all, none or some (None)."""
    before, after = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert before.keys() == after.keys()
    for part in ("model.visual.", "model.language_model."):
        differ = {bool((before[name] != after[name]).any()) for name in before if part in name}
        yield differ.pop() if len(differ) == 1 else None


@pytest.fixture(scope="module")
def first(see):
    return see("steps=1").ok()


def test_a_run_with_images_trains_what_the_engine_has_read(first, model, tmp_path):
    (line,) = first.metrics
    assert line["training/rollout_logprobs_diff_mean"] < 1e-5
    assert line["actor/grad_norm"] > 0 and abs(line["actor/kl_loss"]) < 1e-6
    assert line["vision/tokens/min"] == 4 and line["vision/distinct"] > 1
    out = exported(first.run_dir, tmp_path / "out")
    assert [*moved(model, out)] == [True, True]
    _, problems = transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True
    )
    assert not problems["missing_keys"] and not problems["unexpected_keys"]


@pytest.mark.slow
def test_a_run_with_images_goes_on_bit_for_bit_and_a_tower_can_be_frozen(
    see, first, model, copy_of, tmp_path
):
    straight = see("steps=2").ok()
    again = see("steps=2", run_dir=copy_of(first)).ok()
    assert again.learned == straight.learned and again.metrics[1]["actor/kl_loss"] > 0
    out, other = (exported(r.run_dir, tmp_path / n) for r, n in ((again, "a"), (straight, "b")))
    assert [*moved(out, other)] == [False, False]
    frozen = see("steps=1", "model.vision=frozen").ok()
    assert "timing_s/vision" in frozen.metrics[0]
    out = exported(frozen.run_dir, tmp_path / "frozen")
    assert [*moved(model, out)] == [False, True]

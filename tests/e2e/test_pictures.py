"""Models that see: the configs of `configs/vision`, with few steps or a small model."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from jaxrl_llm.data.rows import write_rows
from jaxrl_llm.export import main as export_main
from jaxrl_llm.sft import main as sft_main
from tests.guarded import MODEL, NATIVE, UPDATE

VISION = Path(__file__).parents[2] / "configs/vision"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guards(*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/data/", "configs/vision/"),
]


FEW = (
    "data.prepare.train_rows=24",
    "data.prepare.validation_rows=6",
    "data.prepare.sft_rows=64",
    "log.trackers=[]",
)


@pytest.fixture(scope="module")
def base(workshop):
    """The base model of the pictures, after three steps of its warm-up."""
    root = workshop.root / "pictures"
    result = workshop(
        *FEW,
        "steps=3",
        f"export_to={root}/base",
        f"model.path={VISION}/model",
        f"data.prepare.out={root}/data",
        f"data.train={root}/data/sft.parquet",
        config=VISION / "pictures_sft.yaml",
        main=sft_main,
    ).ok()
    losses = [line["train/loss"] for line in result.metrics]
    assert losses[2] < losses[0]
    return root


@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_pictures_are_answered_and_learned_from(workshop, base, vision):
    result = workshop(
        *FEW,
        "steps=2",
        f"model.path={base}/base",
        "model.warm_start=null",
        f"model.vision={vision}",
        f"data.prepare.out={base}/data",
        f"data.train={base}/data/train.parquet",
        f"data.validation={base}/data/validation.parquet",
        f"reward.function={workshop.mine('few_tokens')}",
        "rollout.max_new_tokens=3",
        "batch.prompts_per_step=8",
        "batch.prompts_per_minibatch=4",
        config=VISION / "pictures.yaml",
    ).ok()
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    for kind in ("dots", "digits", "shapes"):
        assert f"val-core/pictures/{kind}/reward/mean@1" in result.metrics[0]
    assert result.metrics[1]["actor/grad_norm"] > 0
    assert result.metrics[1]["training/rollout_probs_diff_max"] < 1e-4
    out = workshop.folder()
    assert export_main([str(result.run_dir), str(out)]) in (0, None)
    before, after = (load_file(folder / "model.safetensors") for folder in (base / "base", out))
    assert before.keys() == after.keys()
    moved = {name for name in after if not np.array_equal(before[name], after[name])}
    tower = {name for name in after if "visual." in name}
    assert moved >= {name for name in after if "language_model.layers" in name}
    assert len(tower) > 30 and moved & tower == (tower if vision == "trained" else set())


def test_geo3k_runs_with_a_small_model(workshop, base, tmp_path):
    file = io.BytesIO()
    Image.fromarray(np.arange(90 * 60 * 3, dtype=np.uint8).reshape(60, 90, 3)).save(file, "PNG")
    problem = {"images": [{"bytes": file.getvalue()}], "problem": "<image>Find x.", "answer": "7"}
    for split, count in (("train", 16), ("test", 3)):
        write_rows(tmp_path / f"{split}.parquet", [problem] * count)
    result = workshop(
        "steps=1",
        f"model.path={base}/base",
        f"data.prepare={{fn: geo3k, out: {tmp_path}/out, source: {tmp_path}}}",
        f"data.train={tmp_path}/out/train.parquet",
        f"data.validation={tmp_path}/out/validation.parquet",
        "data.max_prompt_tokens=180",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=4",
        "rollout.max_running_sequences=16",
        "rollout.kv_cache_gb=0.1",
        "mesh={train: {fsdp: 1}, rollout: {data: 1}}",
        "batch={prompts_per_step: 8, prompts_per_minibatch: 4, max_tokens_per_device: 512}",
        "log.trackers=[]",
        config=VISION / "qwen3_vl_8b_geo3k.yaml",
    ).ok()
    assert "val-core/hiyouga/geometry3k/acc/mean@1" in result.metrics[0]
    assert {"actor/kl", "actor/pg_loss"} <= set(result.metrics[1])
    assert result.metrics[1]["reward/errors"] == 0

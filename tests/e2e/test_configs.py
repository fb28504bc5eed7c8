"""The configs that come with the library."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm.config import load
from jaxrl_llm.keys import TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
def test_the_quickstart_learns_to_add(tmp_path):
    """Three seeds, from one base model."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    for seed in range(3):
        begin = time.monotonic()
        words = ["--config", "configs/quickstart.yaml", f"seed={seed}", f"run_dir=runs/{seed}"]
        subprocess.run(
            [sys.executable, "-m", "jaxrl_llm.train", *words],
            cwd=tmp_path,
            env=env | {"JAX_PLATFORMS": "cpu"},
            check=True,
            timeout=1800,
        )
        seconds = time.monotonic() - begin
        lines = (tmp_path / f"runs/{seed}/metrics.jsonl").read_text().splitlines()
        name = "val-core/arithmetic/acc/mean@1"
        found = [line[name] for line in map(json.loads, lines) if name in line]
        print(f"seed {seed}: {found[0]:.3f} -> {found[-1]:.3f} in {seconds:.0f} s")
        assert found[0] <= 0.5
        assert found[-1] >= 0.9


def test_gsm8k_runs_with_a_small_model_and_small_numbers(run, workshop, tmp_path, monkeypatch):
    source = CONFIGS / "gsm8k_qwen3_1.7b_grpo.yaml"
    assert load(TrainConfig, source).batch.prompts_per_step == 1024
    for split, count in (("train", 16), ("test", 4)):
        rows = [
            {"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"}
            for i in range(count)
        ]
        rows.append({"question": "long " * 200, "answer": "#### 1"})
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shutil.copy(source, workshop.root / "gsm8k.yaml")
    monkeypatch.chdir(tmp_path)
    result = run(
        "steps=2",
        f"model.path={workshop.base}",
        f"data.prepare.source={tmp_path}",
        "data.max_prompt_tokens=120",
        "rollout.max_new_tokens=8",
        "rollout.slots=24",
        "batch.prompts_per_step=8",
        "batch.prompts_per_minibatch=4",
        "batch.tokens_per_microbatch=512",
        "rollout.dump_every=1",
        config="gsm8k.yaml",
    ).ok()
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    assert "val-core/openai/gsm8k/acc/mean@1" in result.metrics[0]
    assert {"actor/kl", "actor/kl_loss", "actor/pg_loss"} <= set(result.metrics[1])
    assert result.metrics[1]["reward/errors"] == 0

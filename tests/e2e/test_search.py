"""Search-R1 at full size, with a small model and small numbers."""

import json
import shutil

import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from tests.data.test_search_rows import write
from tests.e2e.conftest import SHRUNK
from tests.e2e.test_configs import CONFIGS

CONFIG = CONFIGS / "agents/search_qwen3_4b.yaml"


@pytest.mark.slow
@pytest.mark.guards(
    "jaxrl_llm/rollout/", "jaxrl_llm/data/", "jaxrl_llm/rewards/", "configs/agents/"
)
def test_search_r1_runs_with_a_small_model(run, tmp_path):
    assert load(TrainConfig, CONFIG).batch.prompts_per_step == 512
    model = shutil.copytree(CONFIGS / "agents/model", tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | SHRUNK))
    source = f"{write(tmp_path / 'a.jsonl', 32)},{write(tmp_path / 'b.jsonl', 6)}"
    prepare = (
        f"fn: search_r1, out: {tmp_path}, source: '{source}', instruction: '', validation_rows: 2"
    )
    result = run(
        "steps=2",
        f"model.path={model}",
        "model.random_init=true",
        f"data.prepare={{{prepare}}}",
        f"data.train={tmp_path}/train.parquet",
        f"data.validation={tmp_path}/validation.parquet",
        "data.max_prompt_tokens=24",
        "data.chat_template_kwargs={}",  # of Qwen3's template
        "rollout.max_new_tokens=16",
        "rollout.max_running_sequences=32",
        "rollout.kv_cache_gb=0.1",
        "rollout.limits.turn_tokens=8",
        "rollout.tool_process.workers=1",
        "mesh.rollout.data=1",
        "mesh.train.fsdp=1",
        "batch.prompts_per_step=8",
        "batch.prompts_per_minibatch=4",
        "batch.max_tokens_per_device=512",
        "log.trackers=[]",
        config=CONFIG,
    ).ok()
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    step = result.metrics[1]
    assert step["reward/errors"] == 0 and step["episode/broken"] == 0
    assert step["actor/kl_loss"] >= 0 and step["critic/score/mean"] == 0.0

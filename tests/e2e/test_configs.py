"""The configs that come with the library."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.rows import write_rows
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.training.bind import resolve_functions
from tests.data.test_competition_rows import TAUGHT
from tests.e2e.conftest import SHRUNK
from tests.guarded import MODEL, NATIVE, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/rewards/", "configs/")

CONFIGS = Path(__file__).parents[2] / "configs"


METRIC = "val-core/arithmetic/acc/mean@1"


@pytest.fixture(scope="module")
def train_config(tmp_path_factory):
    """Runs a config of the library as a newcomer would; returns the held-out accuracies."""
    root = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(CONFIGS, root / "configs")
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}

    def run(name, *overrides):
        run_dir = root / f"runs/{name}{'_'.join(overrides)}"
        begin = time.monotonic()
        words = ["--config", f"configs/{name}.yaml", f"run_dir={run_dir}", *overrides]
        subprocess.run(
            [sys.executable, "-m", "jaxrl_llm.train", *words],
            cwd=root,
            env=env | {"JAX_PLATFORMS": "cpu"},
            check=True,
            timeout=1800,
        )
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        values = [line[METRIC] for line in lines if METRIC in line]
        seconds = time.monotonic() - begin
        print(f"{name} {overrides}: {values[0]:.3f} -> {values[-1]:.3f} in {seconds:.0f} s")
        return values

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "override", "accuracy"),
    [
        ("quickstart", "seed=1", 0.9),
        ("quickstart_lora", "steps=40", 0.9),
        ("quickstart_online_dpo", "steps=20", 0.8),  # 0.98 on one processor, 0.88 on another
        ("quickstart_raft", "steps=20", 0.8),
    ],
)
def test_the_quickstart_learns_to_add(train_config, name, override, accuracy):
    """From one base model; `.ci/run` runs README's own command, with seed 0."""
    values = train_config(name, override)
    assert values[0] <= 0.5
    assert values[-1] >= accuracy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dapo", "prime"])
def test_recipes_with_more_than_a_policy_learn(train_config, name):
    """A critic, dynamic sampling, a reward model; benchmarks/learning trains all the others."""
    values = train_config(f"recipes/{name}")
    assert values[-1] >= values[0] + 0.2


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("recipes/*.yaml")), ids=lambda p: p.stem)
def test_recipes_are_short_and_whole(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert f"python -m jaxrl_llm.train --config configs/recipes/{path.name}" in text
    config = load(TrainConfig, path)
    assert resolve_functions(config).needs
    assert config.model.path == load(TrainConfig, CONFIGS / "quickstart.yaml").model.path


@pytest.mark.slow
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
        "rollout.max_running_sequences=24",
        "rollout.kv_cache_gb=0.1",
        "batch.prompts_per_step=8",
        "batch.prompts_per_minibatch=4",
        "batch.max_tokens_per_device=512",
        "rollout.dump_every=1",
        config="gsm8k.yaml",
    ).ok()
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    assert "val-core/openai/gsm8k/acc/mean@1" in result.metrics[0]
    assert {"actor/kl", "actor/kl_loss", "actor/pg_loss"} <= set(result.metrics[1])
    assert result.metrics[1]["reward/errors"] == 0


@pytest.fixture(scope="module")
def small_agent(workshop):
    """The model of configs/agents, shrunk; its tokenizer writes calls."""
    folder = workshop.root / "small_agent"
    shutil.copytree(CONFIGS / "agents/model", folder)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | SHRUNK))
    return folder


FEW_TOKENS = (
    "model.random_init=true",
    "data.chat_template_kwargs={}",  # of Qwen3's template
    "mesh.train={fsdp: 1, tensor: 1}",
    "batch.max_tokens_per_device=512",
    "log.trackers=[]",
)


@pytest.mark.parametrize(
    "name", [pytest.param("retool_qwen3_4b", marks=pytest.mark.slow), "dapo_tools_qwen3_8b"]
)
def test_agents_of_full_size_run_with_a_small_model(run, workshop, small_agent, tmp_path, name):
    config = CONFIGS / f"agents/{name}.yaml"
    assert load(TrainConfig, config).batch.prompts_per_step == 64
    problems = [
        {
            "prompt": [{"role": "user", "content": f"How much is {n} + {n}?"}],
            "reward_model": {"ground_truth": str(2 * n)},
        }
        for n in range(16)
    ]
    write_rows(tmp_path / "many.parquet", problems * 2)
    write_rows(tmp_path / "few.parquet", problems[:2])
    dynamic = name.startswith("dapo")
    scorer = [f"reward.function={workshop.mine('spread_if_even')}"] if dynamic else []
    result = run(
        *FEW_TOKENS,
        *scorer,  # no answer of random weights is right, so that no group has a spread
        "steps=2",
        f"model.path={small_agent}",
        "model.warm_start=null",
        f"data.prepare={{fn: dapo_math, out: {tmp_path}, source: {tmp_path}/many.parquet, "
        f"validation_source: {tmp_path}/few.parquet}}",
        f"data.train={tmp_path}/train.parquet",
        f"data.validation={tmp_path}/validation.parquet",
        "data.max_prompt_tokens=60",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=16",
        "rollout.max_running_sequences=32",
        "rollout.kv_cache_gb=0.1",
        "rollout.tools=[{fn: python, sandbox: expression}]",
        "rollout.tool_process.workers=1",
        "mesh.rollout.data=1",
        "batch.prompts_per_step=8",
        "batch.prompts_per_minibatch=4",
        "validation.samples=2",
        *(["algorithm.penalty.max_tokens=16", "algorithm.penalty.buffer=4"] if dynamic else []),
        config=config,
    ).ok()
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    step = result.metrics[1]
    assert step["episode/finish/length"] > 0.5 and step["reward/errors"] == 0
    if dynamic:
        assert step["batch/dropped_groups"] > 0
        assert step["critic/rewards/mean"] < step["critic/score/mean"]


def test_the_cold_start_of_retool_runs_with_a_small_model(workshop, small_agent, tmp_path):
    write_rows(tmp_path / "taught.parquet", [TAUGHT] * 4)
    result = workshop(
        *FEW_TOKENS,
        "steps=2",
        f"export_to={tmp_path}/base",
        f"model.path={small_agent}",
        f"data.prepare={{fn: retool_sft, out: {tmp_path}, source: {tmp_path}/taught.parquet}}",
        f"data.train={tmp_path}/sft.parquet",
        "data.max_tokens=512",
        "batch.examples_per_step=4",
        main=sft_main,
        config=CONFIGS / "agents/retool_qwen3_4b_sft.yaml",
    ).ok()
    assert [line["step"] for line in result.metrics][-1] == 2

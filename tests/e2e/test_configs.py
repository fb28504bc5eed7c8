"""The configs that come with the library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.rows import write_rows
from jaxrl_llm.training.bind import resolve_functions
from tests.guarded import MODEL, NATIVE, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/rewards/", "configs/")

CONFIGS = Path(__file__).parents[2] / "configs"
METRIC = "val-core/arithmetic/acc/mean@1"


def test_recipes_are_short_and_whole():
    base = load(TrainConfig, CONFIGS / "quickstart.yaml").model.path
    for path in CONFIGS.glob("recipes/*.yaml"):
        text = path.read_text()
        assert len(text.splitlines()) < 60, path
        assert f"python -m jaxrl_llm.train --config configs/recipes/{path.name}" in text
        config = load(TrainConfig, path)
        assert resolve_functions(config).needs and config.model.path == base, path


@pytest.fixture(scope="module")
def train_config(tmp_path_factory):
    """Runs a config of the library as a newcomer would; returns the held-out accuracies."""
    root = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(CONFIGS, root / "configs")
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}

    def run(name, *overrides):
        run_dir = root / f"runs/{name}{'_'.join(overrides)}"
        words = ["--config", f"configs/{name}.yaml", f"run_dir={run_dir}", *overrides]
        words = [sys.executable, "-m", "jaxrl_llm.train", *words]
        subprocess.run(words, cwd=root, env=env, check=True, timeout=1800)
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return [line[METRIC] for line in lines if METRIC in line]

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
    assert values[0] <= 0.5 and values[-1] >= accuracy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dapo", "prime"])
def test_recipes_with_more_than_a_policy_learn(train_config, name):
    """A critic, dynamic sampling, a reward model; benchmarks/learning trains all the others."""
    values = train_config(f"recipes/{name}")
    assert values[-1] >= values[0] + 0.2


SMALL = (
    "log.trackers=[]",
    "data.chat_template_kwargs={}",  # of Qwen3's template
    "mesh.train={fsdp: 1, tensor: 1}",
    "batch.max_tokens_per_device=512",
)
FEW = (
    "steps=2",
    "rollout.max_running_sequences=32",
    "rollout.kv_cache_gb=0.1",
    "mesh.rollout.data=1",
    "batch.prompts_per_step=8",
    "batch.prompts_per_minibatch=4",
)


@pytest.fixture(scope="module")
def small_agent(workshop):
    """The model of configs/agents, shrunk; its tokenizer writes calls."""
    folder = Path(shutil.copytree(CONFIGS / "agents/model", workshop.root / "small_agent"))
    workshop.shrink(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retool_qwen3_4b", "dapo_tools_qwen3_8b"])
def test_agents_with_tools_run_with_a_small_model(run, workshop, small_agent, tmp_path, name):
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
    own = [f"reward.function={workshop.mine('spread_if_even')}"]  # else no group has a spread
    own += ["algorithm.penalty.max_tokens=16", "algorithm.penalty.buffer=4"]
    result = run(
        *FEW,
        *SMALL,
        *(own if dynamic else ()),
        f"model.path={small_agent}",
        "model.random_init=true",
        "model.warm_start=null",
        f"data.prepare={{fn: dapo_math, out: {tmp_path}, source: {tmp_path}/many.parquet, "
        f"validation_source: {tmp_path}/few.parquet}}",
        f"data.train={tmp_path}/train.parquet",
        f"data.validation={tmp_path}/validation.parquet",
        "data.max_prompt_tokens=60",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=16",
        "rollout.tools=[{fn: python, sandbox: expression}]",
        "rollout.tool_process.workers=1",
        "validation.samples=2",
        config=CONFIGS / f"agents/{name}.yaml",
    ).ok()
    step = result.metrics[1]
    assert result.steps == [0, 1, 2] and step["reward/errors"] == 0
    assert step["episode/finish/length"] > 0.5
    if dynamic:
        assert step["batch/dropped_groups"] > 0
        assert step["critic/rewards/mean"] < step["critic/score/mean"]

"""The configs that come with the library, as a newcomer runs them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guarded import MODEL, NATIVE, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/rewards/", "configs/")

CONFIGS = Path(__file__).parents[2] / "configs"
METRIC = "val-core/arithmetic/acc/mean@1"


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

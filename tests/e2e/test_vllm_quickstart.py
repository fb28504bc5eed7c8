"""Runs with vLLM as the engine: the quickstart from its documented command, and on a cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guarded import CLUSTER, UPDATE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.guards(*CLUSTER, *UPDATE)]

ROOT = Path(__file__).resolve().parents[2]
METRIC = "val-core/arithmetic/acc/mean@1"
RANDOM = ("model.path=configs/quickstart", "model.random_init=true", "model.warm_start=null")
PROGRAM = (
    "import runpy, sys\n"
    "try: runpy.run_module('jaxrl_llm.train', run_name='__main__', alter_sys=True)\n"
    "finally: print('LOADED', 'vllm' in sys.modules)\n"
)
ASKS_TWICE = """
def asks_twice(ground_truth):
    yield ""
    answer = yield "1+1="
    return float(len(answer))
"""


@pytest.fixture
def quickstart(tmp_path):
    """(overrides) -> the metrics of the quickstart with vLLM, which the trainer never imports."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")

    def run(*overrides):
        words = ["--config", "configs/quickstart.yaml", "rollout.engine=vllm", *overrides]
        words = [sys.executable, "-c", PROGRAM, *words]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "LOADED False" in done.stdout
        lines = (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def test_the_quickstart_learns_from_vllms_answers(quickstart):
    """And logs the gap between the engines."""
    lines = quickstart("steps=30", "checkpoint.every=0")
    reached = [line[METRIC] for line in lines if METRIC in line]
    assert reached[0] < 0.5 and reached[-1] > reached[0] + 0.3
    assert all(line["rollout_corr/weight/max"] <= 2 for line in lines[1:])
    assert max(line["training/rollout_probs_diff_max"] for line in lines[1:]) < 1e-4


def test_vllm_samples_while_the_step_is_trained(quickstart, tmp_path):
    words = ("rollout.staleness=1", "steps=4", "log.trackers=[]", "rollout.max_new_tokens=40")
    words += ("rollout.max_running_sequences=64", "validation.before=false")
    lines = quickstart(
        *RANDOM, *words, "batch.prompts_per_step=16", "batch.prompts_per_minibatch=8"
    )
    assert max(line.get("async/age/max", 0) for line in lines) == 1
    seen = ("training/rollout_logprobs_diff_mean", "async/canary_diff_mean")
    assert all(min(line[name] for name in seen if name in line) < 1e-4 for line in lines)
    rows = (tmp_path / "runs/quickstart/schedule.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]


def test_vllm_samples_on_a_node_of_its_own(cluster, quickstart, tmp_path):
    """Episodes of two turns, with an environment in between."""
    (tmp_path / "mine.py").write_text(ASKS_TWICE)
    words = (f"cluster.address={cluster}", "cluster.devices=2", "rollout.nodes=1", "steps=3")
    words += ("rollout.environment=mine.py:asks_twice", "rollout.limits.turn_tokens=5")
    words += ("rollout.order=free", "rollout.max_new_tokens=24", "validation.before=false")
    lines = quickstart(*RANDOM, *words, "reward.function=environment_score")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["training/rollout_probs_diff_max"] < 1e-4 and line["perf/moved_gb"] > 0
        assert line["episode/finish/end"] == 1.0
        assert line["num_turns/min"] == line["num_turns/max"] == 4

"""The quickstart with vLLM as its engine, from the documented commands, and on a cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guarded import CLUSTER, UPDATE

pytestmark = pytest.mark.guards(*CLUSTER, *UPDATE)

ROOT = Path(__file__).resolve().parents[2]
ASKS_TWICE = """
def asks_twice(ground_truth):
    yield ""
    answer = yield "1+1="
    return float(len(answer))
"""
METRIC = "val-core/arithmetic/acc/mean@1"


@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_the_quickstart_learns_from_vllms_answers(tmp_path):
    """The trainer never imports vllm, and logs the gap between the engines."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    program = (
        "import runpy, sys\n"
        "try: runpy.run_module('jaxrl_llm.train', run_name='__main__', alter_sys=True)\n"
        "finally: print('LOADED', 'vllm' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, "--config", "configs/quickstart.yaml"]
    command += ["rollout.engine=vllm", "steps=30", "checkpoint.every=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LOADED False" in done.stdout
    with Path(tmp_path, "runs/quickstart/metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    reached = [line[METRIC] for line in lines if METRIC in line]
    assert reached[0] < 0.5
    assert reached[-1] > reached[0] + 0.3
    steps = lines[1:]
    assert all(line["rollout_corr/weight/max"] <= 2 for line in steps)
    assert max(line["training/rollout_probs_diff_max"] for line in steps) < 1e-4


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_samples_while_the_step_is_trained(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "configs/quickstart.yaml"]
    command += ["rollout.engine=vllm", "rollout.staleness=1", "steps=4", "log.trackers=[]"]
    command += ["model.path=configs/quickstart", "model.random_init=true", "model.warm_start=null"]
    command += ["rollout.max_new_tokens=40", "rollout.max_running_sequences=64"]
    command += ["validation.before=false", "batch.prompts_per_step=16"]
    command += ["batch.prompts_per_minibatch=8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Path(tmp_path, "runs/quickstart/metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    assert max(line.get("async/age/max", 0) for line in lines) == 1
    seen = ("training/rollout_logprobs_diff_mean", "async/canary_diff_mean")
    assert all(min(line[name] for name in seen if name in line) < 1e-4 for line in lines)
    rows = Path(tmp_path, "runs/quickstart/schedule.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_samples_on_a_node_of_its_own(cluster, tmp_path):
    """Episodes of two turns, with an environment in between."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "configs/quickstart.yaml"]
    command += [f"cluster.address={cluster}", "cluster.devices=2", "rollout.nodes=1", "steps=3"]
    command += ["rollout.engine=vllm", "model.path=configs/quickstart", "model.random_init=true"]
    command += ["model.warm_start=null", "validation.before=false"]
    (tmp_path / "mine.py").write_text(ASKS_TWICE)
    command += ["rollout.environment=mine.py:asks_twice", "rollout.limits.turn_tokens=5"]
    command += [
        "rollout.order=free",
        "rollout.max_new_tokens=24",
        "reward.function=environment_score",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Path(tmp_path, "runs/quickstart/metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["training/rollout_probs_diff_max"] for line in lines) < 1e-4
    assert all(line["perf/moved_gb"] > 0 for line in lines)
    assert all(line["episode/finish/end"] == 1.0 for line in lines)
    assert all(line["num_turns/min"] == line["num_turns/max"] == 4 for line in lines)

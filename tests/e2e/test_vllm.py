"""vLLM as the engine of runs, and as the server of a reward model."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.rewards.remote import classify
from jaxrl_llm.rollout.vllm.setup import environment, find_python
from tests.e2e.comparing import loaded, random_model
from tests.guarded import CLUSTER, UPDATE
from tests.waiting import wait_until

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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A random reward model, and the address of a server that holds it."""
    folder, kind = tmp_path_factory.mktemp("served") / "model", "Qwen3ForSequenceClassification"
    random_model(
        folder, ROOT / "configs/quickstart", kind=kind, num_labels=1, initializer_range=0.1
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", folder, "--served-model-name", "rm", "--runner", "pooling"]
    words += ["--dtype", "float32", "--max-model-len", "64", "--port", str(port), "--enforce-eager"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= environment(VllmConfig(), 0, cpu=True) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [find_python(None), "-m", "vllm.entrypoints.openai.api_server", *words]
    with (folder.parent / "log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def listens():
        assert server.poll() is None, (folder.parent / "log").read_text()[-3000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, 400)
        yield folder, f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.guards("jaxrl_llm/rewards/", "models/hf/")
@pytest.mark.parametrize("by_ids", [False, True])
def test_its_scores_are_those_of_transformers(served, by_ids):
    folder, url = served
    tokenizer, model = loaded(folder, "SequenceClassification")
    prompt, scores = [{"role": "user", "content": "12+34="}], []
    for answer in ("46", "046", "7"):
        chat = [*prompt, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        with torch.no_grad():
            scores.append(model(torch.tensor([ids])).logits.item())
        asked = {"url": url, "model": "rm", "tokenizer": str(folder) if by_ids else None}
        got = asyncio.run(classify("", answer, None, {"prompt": prompt}, **asked))
        assert got == pytest.approx(scores[-1], abs=1e-4)
    assert max(scores) - min(scores) > 0.01

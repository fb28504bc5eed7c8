"""GRPO of jaxrl_llm for `benchmarks.learning.against_trl`: `learn_ours.py JOB RESULT`.

With `device` cuda in the job, for `benchmarks.gpu.learn`, it runs on the GPU and computes in
bfloat16; with `seconds` it ends after the step in which they are over.
"""

from meter import peak_gb, read_job, since_begin  # isort: skip  (first: it starts the clock)

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cuda,cpu" if read_job().get("device") == "cuda" else "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import jax

from jaxrl_llm import TrainConfig, open_run
from jaxrl_llm.cli import take_huge_pages
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.monitoring.writer import quiet_libraries


def settings(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the recipe's keys that the two systems are to have alike."""
    rows = [
        {"prompt": prompt, "data_source": "task", "reward_model": {"ground_truth": answer}}
        for prompt, answer in job["rows"]
    ]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "run_dir": str(folder / "run"),
        "seed": job["seed"],
        "steps": job["steps"],
        "model": {"path": job["model"], **job["model_keys"]},
        "data": {
            "train": str(data),
            "shuffle": False,
            "max_prompt_tokens": job["max_prompt_tokens"],
        },
        "rollout": {
            "samples_per_prompt": job["samples"],
            "max_new_tokens": job["max_new_tokens"],
            "engine": job["engine"],
        },
        "reward": {"function": f"{Path(__file__).parent / 'meter.py'}:score_exact", "workers": 0},
        "algorithm": {
            "advantage": "grpo",
            "loss": "ppo_clip",
            "reduce": "sequence_mean_token_mean",
        },
        "optim": {
            "optimizer": {"fn": "adamw", "weight_decay": 0.0},
            "schedule": {"fn": "constant_schedule", "value": job["learning_rate"]},
            "grad_clip": job["grad_clip"],
        },
        "batch": {
            "prompts_per_step": job["prompts_per_step"],
            "max_tokens_per_device": job["max_tokens_per_device"],
        },
        "checkpoint": {"every": 0},
        "log": {"trackers": []},
    }


def main() -> None:
    """Take all steps; write the mean reward of each, and when it ended."""
    take_huge_pages()  # as the programs of jaxrl_llm do
    quiet_libraries()
    job = read_job()
    rewards, ends, lengths = [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_run(from_tree(TrainConfig, settings(job, Path(folder)))) as run,
    ):
        for step in run:
            rewards.append(step.metrics["critic/score/mean"])
            lengths.append(step.metrics["response_length/mean"])
            ends.append(since_begin())
            if ends[-1] > job.get("seconds", ends[-1]):
                break
    versions = {"Python": sys.version.split()[0], "jax": jax.__version__}
    result = {"rewards": rewards, "lengths": lengths, "ends": ends, "peak_gb": peak_gb()}
    Path(sys.argv[2]).write_text(json.dumps({**result, "versions": versions}))


if __name__ == "__main__":
    main()

"""Curves of this library and of TRL on the same model and task, over steps and over seconds.

    python -m benchmarks.training.grpo_step --setup peers     makes peers/trl with pip
    python -m benchmarks.learning.against_trl --trl-python peers/trl/bin/python

Both train the base model of a recipe on the same prompts in the same order, with
the same number of answers, limit of tokens, GRPO loss (clipped, averaged within each answer first,
advantages divided by their group's standard deviation, no KL), AdamW, constant rate, gradient clip
and reward (1 for the right answer and nothing else). What differs is the draws: each system samples
from its own generator. Each run is a process of its own, one after the other, the systems taking
turns; finished ones are kept in the work folder.

The mean rewards are compared over windows of 10 steps by Welch's t over the seeds. Picture and
numbers go to `--out`, the table to stdout. `--vllm 0` adds ours with vLLM as the engine, of seed 0.

Exit status 1: a run failed, or the curves differ with |t| > 4.6 (p < 0.01 for three seeds each) in
some window.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.measure import PEERS, check_python, measure
from benchmarks.tables import command_of, parser_of

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 10
MAX_T = 4.6
COLORS = {"ours": "C0", "ours with vLLM": "C2", "TRL": "C1"}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--trl-python", help="interpreter that has TRL; without it ours run alone")
    parser.add_argument("--recipe", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, help="a step; by default those of the recipe")
    parser.add_argument("--vllm", nargs="+", type=int, default=[], metavar="N", help="seeds")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/learning")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/against_trl")
    args = parser.parse_args(words)
    if args.steps < WINDOW or args.steps % WINDOW:
        parser.error(f"--steps {args.steps}: expected a multiple of {WINDOW}")
    if unknown := set(args.vllm) - set(args.seeds):
        parser.error(f"--vllm: expected some of --seeds {args.seeds}, got {sorted(unknown)}")
    return args


def prepare(recipe: str, work: Path) -> dict[str, Any]:
    """Make a recipe's data and base model, and return the resolved recipe."""
    base = work / "base"
    if not (base / "metrics.jsonl").exists():
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config", recipe]
        subprocess.run([*command, "steps=1", f"run_dir={base}"], cwd=ROOT, check=True)
    from jaxrl_llm.config.load import read_yaml

    return read_yaml(base / "config.yaml")


def rows_of(path: Path, count: int, seed: int) -> list[tuple[list[dict[str, str]], str]]:
    """Return prompts and answers in the order of a seed, repeated where there are too few."""
    import pyarrow.parquet as pq

    rows = [
        (row["prompt"], row["reward_model"]["ground_truth"])
        for row in pq.read_table(path).to_pylist()
    ]
    random.Random(seed).shuffle(rows)
    return (rows * -(-count // len(rows)))[:count]


def job_of(
    recipe: dict[str, Any], seed: int, steps: int, prompts: int | None, engine: str
) -> dict[str, Any]:
    """Return what a system is told."""
    prompts = prompts or recipe["batch"]["prompts_per_step"]
    samples = recipe["rollout"]["samples_per_prompt"]
    schedule = recipe["optim"]["schedule"]
    return {
        "model": str((ROOT / recipe["model"]["path"]).resolve()),
        "rows": rows_of(ROOT / recipe["data"]["train"][0], steps * prompts, seed),
        "seed": seed,
        "steps": steps,
        "prompts_per_step": prompts,
        "samples": samples,
        "max_new_tokens": recipe["rollout"]["max_new_tokens"],
        "max_prompt_tokens": recipe["data"]["max_prompt_tokens"],
        "max_tokens_per_device": recipe["batch"]["max_tokens_per_device"],
        "model_keys": {key: recipe["model"][key] for key in ("remat", "logprob_chunk")},
        "microbatch": prompts * samples,
        "learning_rate": schedule.get("value", schedule.get("init_value")),
        "grad_clip": recipe["optim"]["grad_clip"],
        "engine": engine,
    }


def windows(results: list[dict[str, Any]]) -> np.ndarray:
    """Return mean rewards [seeds, windows].

    >>> windows([{"rewards": [0.0] * 10 + [1.0] * 10}]).tolist()
    [[0.0, 1.0]]
    """
    rewards = np.array([result["rewards"] for result in results])
    return rewards.reshape(len(results), -1, WINDOW).mean(axis=2)


def welch(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return Welch's t of two systems by window, from values [seeds, windows].

    >>> welch(np.array([[1.0], [3.0]]), np.array([[1.0], [1.0]])).tolist()
    [1.0]
    """
    spread = left.var(axis=0, ddof=1) / len(left) + right.var(axis=0, ddof=1) / len(right)
    return (left.mean(axis=0) - right.mean(axis=0)) / np.sqrt(np.maximum(spread, 1e-12))


def seconds_per_step(results: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the lower quartile and the median of a step's seconds, the first of each run left out.

    Other work on the machine moves the median sooner than the quartile.
    """
    seconds = np.concatenate([np.diff(result["ends"]) for result in results])
    return float(np.quantile(seconds, 0.25)), float(np.median(seconds))


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the Markdown table: a row for each system."""
    rows = [
        "| system | first 10 steps | last 10 steps, by seed | s a step: quartile, median "
        "| to step 1, s | peak GB |"
    ]
    rows.append("|---" * 6 + "|")
    for system, results in runs.items():
        by_window = windows(results)
        last = ", ".join(f"{value:.3f}" for value in by_window[:, -1])
        peak = max(result["peak_gb"] for result in results)
        first = statistics.median(result["ends"][0] for result in results)
        quartile, median = seconds_per_step(results)
        rows.append(
            f"| {system} | {by_window[:, 0].mean():.3f} | {last} | {quartile:.1f}, {median:.1f} "
            f"| {first:.0f} | {peak:.1f} |"
        )
    return "\n".join(rows) + "\n"


def draw(runs: dict[str, list[dict[str, Any]]], picture: Path) -> None:
    """Draw the seeds' mean and their band over steps and over seconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    kernel = np.ones(5) / 5
    for system, results in runs.items():
        rewards = np.array([np.convolve(r["rewards"], kernel, "valid") for r in results])
        steps = np.arange(5, 5 + rewards.shape[1])
        seconds = np.mean([r["ends"] for r in results], axis=0)[4:]
        for axes, x in zip(panels, (steps, seconds), strict=True):
            axes.plot(x, rewards.mean(axis=0), label=system, color=COLORS[system])
            low, high = rewards.min(axis=0), rewards.max(axis=0)
            axes.fill_between(x, low, high, color=COLORS[system], alpha=0.2, linewidth=0)
    panels[0].set_ylabel("mean reward of a step (mean of 5)")
    for axes, label in zip(panels, ("step", "seconds since the start of the process"), strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing; report everything."""
    args = arguments(words)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if args.trl_python:
        check_python(args.trl_python, "trl")
    recipe = prepare(args.recipe, work)
    systems: dict[str, tuple[str, str, str]] = {"ours": (sys.executable, "learn_ours.py", "native")}
    if args.trl_python:
        systems["TRL"] = (args.trl_python, "learn_trl.py", "transformers")
    if args.vllm:
        systems["ours with vLLM"] = (sys.executable, "learn_ours.py", "vllm")
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for seed in args.seeds:
        for system, (python, script, engine) in systems.items():
            if engine == "vllm" and seed not in args.vllm:
                continue
            name = work / f"{system.replace(' ', '_')}-{seed}"
            job = job_of(recipe, seed, args.steps, args.prompts, engine)
            kept = name.with_suffix(".result.json")
            given = name.with_suffix(".job.json")
            same = given.exists() and json.loads(given.read_text()) == json.loads(json.dumps(job))
            print(f"{system} seed {seed}", flush=True)
            done = json.loads(kept.read_text()) if same and kept.exists() else None
            runs[system].append(done or measure(python, PEERS / script, job, name))
    args.out.mkdir(parents=True, exist_ok=True)
    command = command_of("learning.against_trl", words)
    about = {
        "command": command.replace(args.trl_python or "TRL/bin/python", "TRL/bin/python"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
        "recipe": args.recipe,
        "runs": runs,
    }
    (args.out / "against_trl.json").write_text(json.dumps(about, indent=1) + "\n")
    draw(runs, args.out / "against_trl.png")
    print("\n" + table(runs))
    if "TRL" not in runs:
        return 0
    seconds = zip(seconds_per_step(runs["TRL"]), seconds_per_step(runs["ours"]), strict=True)
    ratios = ", ".join(f"{theirs / ours:.2f}" for theirs, ours in seconds)
    difference = welch(windows(runs["ours"]), windows(runs["TRL"]))
    print(f"TRL's seconds over ours: {ratios}. Welch's t by window: {difference.round(1)}")
    return int(bool((np.abs(difference) > MAX_T).any()))


if __name__ == "__main__":
    sys.exit(main())

"""Train the quickstart's base model on pairs of its answers; then PPO by a reward model of them.

    python -m benchmarks.learning.preferences

The base model answers training prompts eight times at temperature 1; a right and a wrong answer to
the same prompt are a pair. The losses of `RUNS` train on them for the same steps, with seeds 0 and
1; `imitate` is supervised training on the chosen answers alone, a control. One reward model is
trained on right sums against wrong ones that are made up, for 8,000 pairs of numbers that are not
held out, and PPO by its scores, without the reward function. All accuracies are greedy, on the 512
sums that the quickstart holds out.

`--small` takes two steps of two losses, to see that all of it works. A table goes to stdout;
`--out` gets the curves (preferences.png) and the numbers behind them
(preferences.json). Finished runs are kept in the work folder and not repeated.
"""

import datetime
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import yaml

from benchmarks.learning.recipes import add_folders, place_folders
from benchmarks.tables import command_of, markdown_table, parser_of

FOLDERS = ("docs/learning", "runs/preferences")
RATE = 1e-4
RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "dpo": ({"fn": "dpo", "beta": 0.5}, 3e-5),
    "dpo_weak_pull": ({"fn": "dpo", "beta": 0.1}, RATE),
    "rpo": ({"fn": "rpo", "beta": 0.1}, RATE),
    "ipo": ({"fn": "ipo", "beta": 0.2}, RATE),
    "simpo": ({"fn": "simpo", "beta": 2.0, "gamma": 1.0}, RATE),
    "orpo": ({"fn": "orpo", "beta": 0.5}, RATE),
    "kto": ({"fn": "kto", "beta": 0.5}, RATE),
}
"""Losses and rates; `kto` takes each answer of a pair with a label."""


def run(module: str, *words: str, work: Path) -> float:
    """Run one of the library's programs in the work folder; return its seconds."""
    start = time.perf_counter()
    command = [sys.executable, "-m", f"jaxrl_llm.{module}", *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with (work / "log.txt").open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        subprocess.run(command, cwd=work, env=environment, check=True, stdout=log, stderr=log)
    return time.perf_counter() - start


def accuracy(model: str, name: str, work: Path, *words: str) -> float:
    """Return the greedy accuracy of a model, or of a run's `step=`, on the held-out sums."""
    out = work / f"evaluations/{name}"
    if not (out / "metrics.json").exists():
        data = "data=runs/quickstart/data/validation.parquet"
        words = (*words, data, f"out={out}", "max_new_tokens=4")
        run("evaluate", f"model={model}", *words, work=work)
    metrics = json.loads((out / "metrics.json").read_text())
    return metrics["all"]["metrics"]["mean@1"]["value"]


def make_pairs(work: Path, rows: int) -> dict[str, int]:
    """Let the base model answer, and write pairs, labelled answers and chosen ones."""
    out, data = work / "answers", "data=runs/quickstart/data/train.parquet"
    if not (out / "samples.parquet").exists():
        words = (f"rows={rows}", "samples=8", "temperature=1", "max_new_tokens=4", f"out={out}")
        run("evaluate", "model=runs/quickstart/base", data, *words, work=work)
    answers = pyarrow.parquet.read_table(out / "samples.parquet").to_pylist()
    by_prompt: dict[str, dict[bool, list[str]]] = {}
    for row in answers:
        sides = by_prompt.setdefault(row["prompt"], {True: [], False: []})
        sides[row["score"] > 0.5].append(row["answer"])
    pairs = [
        {"prompt": json.loads(prompt), "chosen": sides[True][0], "rejected": wrong}
        for prompt, sides in by_prompt.items()
        if sides[True]
        for wrong in dict.fromkeys(filter(None, sides[False]))
    ]
    if len(pairs) < 16:
        raise SystemExit(f"error: {len(pairs)} pairs, expected 16 or more: take more --rows")
    held = len(pairs) // 8
    files: dict[str, list[dict[str, Any]]] = {"held": pairs[:held], "pairs": pairs[held:]}
    files["labelled"] = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in files["pairs"]
        for side in ("chosen", "rejected")
    ]
    files["chosen"] = [
        {"prompt": pair["prompt"], "response": pair["chosen"]} for pair in files["pairs"]
    ]
    for name, some in files.items():
        (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    return {"prompts": len(by_prompt), **{name: len(some) for name, some in files.items()}}


class Steps(NamedTuple):
    """How many steps a loss, the reward model and PPO have."""

    loss: int = 60
    scorer: int = 800
    ppo: int = 60


def config(name: str, seed: int, rate: float, work: Path, **keys: Any) -> Path:
    """Write the config of a run of `prefer`, and return its path."""
    tree = {
        "run_dir": f"runs/{name}_{seed}",
        "export_to": f"models/{name}_{seed}",
        "seed": seed,
        "model": {"path": "runs/quickstart/base"},
        "data": {"train": "pairs.jsonl", "validation": "held.jsonl", "max_tokens": 16},
        "optim": {"schedule": {"fn": "constant_schedule", "value": rate}},
        "batch": {"pairs_per_step": 64, "max_tokens_per_device": 1024},
        "validation": {"every": 10},
    }
    path = work / f"{name}_{seed}.yaml"
    path.write_text(yaml.safe_dump(tree | keys))
    return path


def make_comparisons(work: Path) -> None:
    """Write right sums against wrong ones: without carries, with a wrong digit, and at random."""
    path = work / "runs/quickstart/data/validation.parquet"
    held = {row["prompt"][0]["content"] for row in pyarrow.parquet.read_table(path).to_pylist()}
    rng = random.Random(0)
    sums = [(a, b) for a in range(100) for b in range(100) if f"{a:02d}+{b:02d}=" not in held]
    rng.shuffle(sums)
    rows = []
    for a, b in sums[:8400]:
        right = f"{a + b:03d}"
        place = rng.randrange(3)
        digit = str((int(right[place]) + rng.randrange(1, 10)) % 10)
        wrong = {
            f"0{(a // 10 + b // 10) % 10}{(a + b) % 10}",
            right[:place] + digit + right[place + 1 :],
            f"{rng.randrange(1000):03d}",
            "".join(rng.choice("0123456789") for _ in range(rng.choice([1, 2, 4]))),
        }
        pair = {"prompt": f"{a:02d}+{b:02d}=", "chosen": right}
        rows.append([pair | {"rejected": text} for text in sorted(wrong - {right})])
    for name, some in {"comparisons": rows[:8000], "held_comparisons": rows[8000:]}.items():
        lines = [json.dumps(row) for pairs in some for row in pairs]
        (work / f"{name}.jsonl").write_text("\n".join(lines))


def train(name: str, seed: int, work: Path, steps: Steps) -> dict[str, Any]:
    """Train by one loss; return its accuracy and its metrics by step."""
    loss, rate = RUNS[name]
    keys: dict[str, Any] = {"loss": loss, "steps": steps.loss}
    if name == "kto":
        keys["data"] = {"train": "labelled.jsonl", "max_tokens": 16}
        keys["batch"] = {"pairs_per_step": 128, "max_tokens_per_device": 1024}
    path = config(name, seed, rate, work, **keys)
    if not (work / f"models/{name}_{seed}").exists():
        run("prefer", f"--config={path}", work=work)
    lines = read_lines(work / f"runs/{name}_{seed}/metrics.jsonl")
    kept = ("val/loss", "val/rewards/accuracies", "val/rewards/margins", "train/loss")
    return {
        "loss": loss,
        "rate": rate,
        "accuracy": accuracy(f"models/{name}_{seed}", f"{name}_{seed}", work),
        "curves": {
            key: [[line["step"], round(line[key], 4)] for line in lines if key in line]
            for key in kept
        },
    }


def imitate(seed: int, work: Path, steps: Steps) -> dict[str, Any]:
    """Train on the chosen answers alone; return the accuracy."""
    name = f"imitate_{seed}"
    tree = {
        "run_dir": f"runs/{name}",
        "export_to": f"models/{name}",
        "seed": seed,
        "steps": steps.loss,
        "model": {"path": "runs/quickstart/base"},
        "data": {"train": "chosen.jsonl", "max_tokens": 16},
        "optim": {"schedule": {"fn": "constant_schedule", "value": RATE}},
        "batch": {"examples_per_step": 64, "max_tokens_per_device": 1024},
    }
    (work / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    if not (work / f"models/{name}").exists():
        run("sft", f"--config={work / name}.yaml", work=work)
    return {"rate": RATE, "accuracy": accuracy(f"models/{name}", name, work)}


def reward_model(seed: int, work: Path, steps: Steps) -> dict[str, Any]:
    """Train a reward model on made-up comparisons, then PPO by its scores."""
    name = f"reward_model_{seed}"
    make_comparisons(work)
    schedule = {"fn": "warmup_cosine_decay_schedule", "init_value": 0.0, "peak_value": 1e-3}
    data = {"train": "comparisons.jsonl", "validation": "held_comparisons.jsonl", "max_tokens": 16}
    path = config(
        "reward_model",
        seed,
        RATE,
        work,
        steps=steps.scorer,
        loss={"fn": "bradley_terry", "center_coef": 0.01},
        data=data,
        optim={"schedule": schedule | {"warmup_steps": 20, "decay_steps": max(steps.scorer, 40)}},
        batch={"pairs_per_step": 128, "max_tokens_per_device": 2048},
        validation={"every": 100},
    )
    if not (work / f"models/{name}").exists():
        run("prefer", f"--config={path}", work=work)
    if not (work / f"runs/ppo_{seed}/checkpoints").exists():
        words = ("reward.function=null", f"reward.classifier=models/{name}", f"seed={seed}")
        words = (*words, f"run_dir=runs/ppo_{seed}", f"steps={steps.ppo}", "model.warm_start=null")
        run("train", "--config", "configs/recipes/ppo.yaml", *words, work=work)
    scorer = read_lines(work / f"runs/{name}/metrics.jsonl")
    ppo = read_lines(work / f"runs/ppo_{seed}/metrics.jsonl")
    accuracies = [line["val/rewards/accuracies"] for line in scorer if "val/loss" in line]
    return {
        "pair_accuracy": [round(accuracies[0], 4), round(accuracies[-1], 4)],
        "scores": [[x["step"], round(x["critic/score/mean"], 4)] for x in ppo if x["step"]],
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run by step."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the held-out accuracy of rewards by step, and PPO's scores."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for number, name in enumerate(n for n in results["runs"] if n not in ("kto", "imitate")):
        for seed, result in results["runs"][name].items():
            curve = result["curves"]["val/rewards/accuracies"]
            label = name if seed == min(results["runs"][name]) else None
            left.plot(*zip(*curve, strict=True), color=f"C{number}", label=label)
    left.set(xlabel="step", ylabel="rewards/accuracies, held out", ylim=(0, 1))
    left.legend(fontsize=8)
    names = list(results["runs"])
    for place, name in enumerate(names):
        for result in results["runs"][name].values():
            right.plot(result["accuracy"], place, "o", color="C0")
    right.axvline(results["base"], color="gray", linestyle=":")
    right.set_yticks(range(len(names)), names)
    right.set(xlabel="greedy accuracy on held-out sums (dotted: the base)", xlim=(0, 1))
    figure.savefig(path, dpi=110)


def table(results: dict[str, Any]) -> str:
    """Return the Markdown table: a row for each run."""
    base = f"{results['base']:.3f}"
    rows = [
        [f"`{name}`", seed, base, f"{result['accuracy']:.3f}"]
        for name, by_seed in results["runs"].items()
        for seed, result in by_seed.items()
    ]
    for seed, result in results["reward_model"].items():
        before, after = result["pair_accuracy"]
        name = f"PPO by the reward model ({before:.3f} to {after:.3f} of held-out pairs)"
        rows.append([name, seed, base, f"{result['ppo_accuracy']:.3f}"])
    return markdown_table(["run", "seed", "base", "after"], rows)


def main(words: Sequence[str] | None = None) -> None:
    """Run everything, print the table, and write picture and numbers."""
    parser = parser_of(__doc__)
    add_folders(parser, *FOLDERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rows", type=int, default=1024, help="prompts that the base answers")
    options = parser.parse_args(words)
    place_folders(options, *FOLDERS)
    work, steps = options.work, Steps(2, 2, 2) if options.small else Steps()
    if not (work / "runs/quickstart/base").exists():
        run("train", "--config", "configs/quickstart.yaml", "steps=1", work=work)
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}",
        "command": command_of("learning.preferences", words),
        "rows": make_pairs(work, options.rows),
        "base": accuracy("runs/quickstart/base", "base", work),
        "runs": {},
    }
    for name in ("dpo", "kto") if options.small else RUNS:
        results["runs"][name] = {str(s): train(name, s, work, steps) for s in options.seeds}
    results["runs"]["imitate"] = {str(s): imitate(s, work, steps) for s in options.seeds}
    results["reward_model"] = {str(s): reward_model(s, work, steps) for s in options.seeds}
    for seed, result in results["reward_model"].items():
        result["ppo_accuracy"] = accuracy(f"runs/ppo_{seed}", f"ppo_{seed}", work)
    print(table(results))
    (options.out / "preferences.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, options.out / "preferences.png")


if __name__ == "__main__":
    main()

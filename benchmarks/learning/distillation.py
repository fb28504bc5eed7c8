"""Distil the trained quickstart into its base model: on the student's answers, or the teacher's.

    python -m benchmarks.learning.distillation

The teacher is the quickstart after its 150 steps, the student the base that it began from. On the
student's answers: `reverse_kl` is a policy gradient (configs/distillation.yaml), and
`reverse_kl_divergence` compares the whole distributions of each token. `imitate` is supervised
training on the teacher's own answers, drawn at temperature 1. An update takes 64 answers, each to
another prompt. All run at several learning rates; a point of a curve is the greedy accuracy on the
512 held-out sums after so many answers.

With `FEW` prompts, both pass over these 40 times: the student answers them anew each time, and
`imitate` has one answer of the teacher to each.

`--small` takes two updates at one rate, to see that all of it works. A table goes to stdout;
`--out` gets the curves (distillation.png) and the numbers behind them
(distillation.json). Finished runs are kept in the work folder and not repeated.
"""

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml

from benchmarks.learning.preferences import accuracy, read_lines, run
from benchmarks.learning.recipes import SHORT, add_folders, place_folders
from benchmarks.tables import command_of, markdown_table, parser_of

RATES = (3e-4, 7e-4)
ANSWERS = 64
"""Of an update."""
EVALUATED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40)
"""Updates after which a checkpoint of `imitate` is evaluated; the others validate after each."""
OVER_THE_VOCABULARY = (
    "algorithm.loss=null",
    "algorithm.distillation=reverse_kl_divergence",
    "algorithm.advantage=grpo",
)
SHARES = (0.95, 0.98)
"""Of the teacher's accuracy, that are to be reached."""
FEW = 16
"""Prompts of the second comparison; each seed has others."""
FOLDERS = ("docs/learning", "runs/distillation")
Curve = list[list[float]]
Steps = Sequence[int]
"""Of `EVALUATED` those that the runs take; the last one ends them."""


def distil(name: str, rate: float, seed: int, work: Path, steps: Steps, *more: str) -> Curve:
    """Distil on the student's answers; return accuracy by answers."""
    folder = f"runs/{name}_{rate:g}_{seed}"
    if not (work / folder / "checkpoints" / str(steps[-1])).exists():
        words = (
            f"run_dir={folder}",
            f"seed={seed}",
            f"steps={steps[-1]}",
            f"optim.schedule={{fn: constant_schedule, value: {rate}}}",
            "rollout.samples_per_prompt=1",
            f"batch.prompts_per_step={ANSWERS}",
            f"batch.prompts_per_minibatch={ANSWERS}",
            "validation.every=1",
        )
        run("train", "--config", "configs/distillation.yaml", *words, *more, work=work)
    curve = []
    for line in read_lines(work / folder / "metrics.jsonl"):
        values = [value for key, value in line.items() if key.startswith("val-core/")]
        curve += [[line["step"] * ANSWERS, round(value, 4)] for value in values]
    return curve


def teacher_answers(work: Path, steps: Steps) -> None:
    """Let the teacher answer each training prompt once, or until there are enough answers."""
    out, data = work / "teacher_answers", "data=runs/quickstart/data/train.parquet"
    if (work / "teacher.jsonl").exists():
        return
    prompts = pyarrow.parquet.read_metadata(work / data.removeprefix("data=")).num_rows
    words = (f"samples={-(-steps[-1] * ANSWERS // prompts)}", "temperature=1", "max_new_tokens=5")
    if not out.exists():
        run("evaluate", "model=runs/quickstart/exported", data, *words, f"out={out}", work=work)
    answers = pyarrow.parquet.read_table(out / "samples.parquet").to_pylist()
    whole = [row for row in answers if row["answer"]]  # a few are empty
    rows = [{"prompt": json.loads(r["prompt"]), "response": r["answer"]} for r in whole]
    (work / "teacher.jsonl").write_text("\n".join(map(json.dumps, rows)))


def imitate(rate: float, seed: int, work: Path, steps: Steps) -> Curve:
    """Train on the teacher's answers; return accuracy by answers."""
    name = f"imitate_{rate:g}_{seed}"
    tree = sft_config(name, "teacher.jsonl", rate, seed, steps)
    (work / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    if not (work / f"runs/{name}/checkpoints/{steps[-1]}").exists():
        run("sft", f"--config={work / name}.yaml", work=work)
    curve: Curve = [[0, round(accuracy("runs/quickstart/base", "base", work), 4)]]
    for step in steps:
        right = accuracy(f"runs/{name}", f"{name}_{step}", work, f"step={step}")
        curve.append([step * ANSWERS, round(right, 4)])
    return curve


def few_prompts(seed: int, work: Path, steps: Steps) -> dict[str, float]:
    """Return accuracy after 40 passes over a few prompts: over the vocabulary, and imitating."""
    rows = pyarrow.parquet.read_table(work / "runs/quickstart/data/train.parquet")
    some = rows.slice(seed * FEW, FEW)
    pyarrow.parquet.write_table(some, work / f"few_{seed}.parquet")
    asked = {json.dumps(row["prompt"]) for row in some.to_pylist()}
    chosen: dict[str, str] = {}
    for line in (work / "teacher.jsonl").read_text().splitlines():
        prompt = json.dumps(json.loads(line)["prompt"])
        if prompt in asked:
            chosen.setdefault(prompt, line)
    (work / f"few_{seed}.jsonl").write_text("\n".join(chosen.values()))
    name, rate = f"few_{seed}", RATES[0]
    if not (work / f"runs/{name}/checkpoints/{steps[-1]}").exists():
        words = (f"run_dir=runs/{name}", f"data.train={name}.parquet", f"seed={seed}")
        schedule = f"optim.schedule={{fn: constant_schedule, value: {rate}}}"
        sizes = (f"batch.prompts_per_step={FEW}", f"batch.prompts_per_minibatch={FEW}")
        words = (
            *words,
            *sizes,
            schedule,
            f"steps={steps[-1]}",
            "rollout.samples_per_prompt=1",
            *OVER_THE_VOCABULARY,
        )
        run("train", "--config", "configs/distillation.yaml", *words, work=work)
    tree = sft_config(f"imitate_{name}", f"{name}.jsonl", rate, seed, steps)
    tree["batch"] = tree["batch"] | {"examples_per_step": FEW}
    (work / f"imitate_{name}.yaml").write_text(yaml.safe_dump(tree))
    if not (work / f"models/imitate_{name}").exists():
        run("sft", f"--config={work}/imitate_{name}.yaml", work=work)
    return {
        "reverse_kl_divergence": round(accuracy(f"runs/{name}", name, work), 4),
        "imitate": round(accuracy(f"models/imitate_{name}", f"imitate_{name}", work), 4),
    }


def sft_config(name: str, answers: str, rate: float, seed: int, steps: Steps) -> dict[str, Any]:
    """Return the config of a run of `sft` on a teacher's answers."""
    return {
        "run_dir": f"runs/{name}",
        "export_to": f"models/{name}",
        "seed": seed,
        "steps": steps[-1],
        "model": {"path": "runs/quickstart/base"},
        "data": {"train": answers, "max_tokens": 16},
        "optim": {
            "optimizer": {"fn": "adamw", "weight_decay": 0.01},
            "schedule": {"fn": "constant_schedule", "value": rate},
        },
        "batch": {"examples_per_step": ANSWERS, "max_tokens_per_device": 4096},
        "checkpoint": {"every": 1, "keep": steps[-1]},
    }


def answers_until(curve: Curve, goal: float) -> int | None:
    """Return after how many answers a curve has come to a goal, where all methods are looked at."""
    places = {updates * ANSWERS for updates in (0, *EVALUATED)}
    return next((int(n) for n, value in curve if n in places and value >= goal), None)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the curves of each method's best rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for number, (name, rates) in enumerate(results["runs"].items()):
        chosen = rates[results["best"][name]]
        for seed, curve in chosen.items():
            label = f"{name}, rate {results['best'][name]}" if seed == min(chosen) else None
            axes.plot(*zip(*curve, strict=True), color=f"C{number}", label=label)
    axes.axhline(results["teacher"], color="gray", linestyle=":")
    axes.set(xlabel="answers", ylabel="greedy accuracy on held-out sums", ylim=(0, 1))
    axes.set_title("dotted: the teacher", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def table(results: dict[str, Any]) -> str:
    """Return the Markdown table: a row for each run."""
    rows, base = [], f"{results['base']:.3f}"
    for name, rates in results["runs"].items():
        for rate, by_seed in rates.items():
            for seed, curve in by_seed.items():
                goals = results["goals"].values()
                reached = [answers_until(curve, goal) or "not reached" for goal in goals]
                rows.append([name, rate, seed, base, f"{curve[-1][1]:.3f}", *reached])
    ends = [f"answers until {share} of the teacher" for share in SHARES]
    return markdown_table(["method", "rate", "seed", "base", "after", *ends], rows)


def main(words: Sequence[str] | None = None) -> None:
    """Run everything, print the table, and write picture and numbers."""
    parser = parser_of(__doc__)
    add_folders(parser, *FOLDERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args(words)
    place_folders(options, *FOLDERS)
    work, steps, rates, keys = options.work, EVALUATED, RATES, ()
    if options.small:
        steps, rates, keys = (1, 2), RATES[:1], SHORT
    if not (work / "runs/quickstart/exported").exists():
        run("train", "--config", "configs/quickstart.yaml", *keys, work=work)
        run("export", "runs/quickstart", "runs/quickstart/exported", work=work)
    teacher_answers(work, steps)
    base, teacher = (
        accuracy(f"runs/quickstart/{which}", which, work) for which in ("base", "exported")
    )
    methods = {
        "reverse_kl": lambda rate, seed: distil("reverse_kl", rate, seed, work, steps),
        "reverse_kl_divergence": lambda rate, seed: distil(
            "reverse_kl_divergence", rate, seed, work, steps, *OVER_THE_VOCABULARY
        ),
        "imitate": lambda rate, seed: imitate(rate, seed, work, steps),
    }
    runs = {
        name: {f"{rate:g}": {str(s): method(rate, s) for s in options.seeds} for rate in rates}
        for name, method in methods.items()
    }
    goals = {share: round(share * teacher, 4) for share in SHARES}
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}",
        "command": command_of("learning.distillation", words),
        "base": base,
        "teacher": teacher,
        "goals": goals,
        "best": {name: best_rate(rates, goals[max(SHARES)]) for name, rates in runs.items()},
        "runs": runs,
        "few_prompts": {str(seed): few_prompts(seed, work, steps) for seed in options.seeds},
    }
    print(table(results))
    for seed, after in results["few_prompts"].items():
        shown = ", ".join(f"{name} {value:.3f}" for name, value in after.items())
        print(f"{FEW} prompts, seed {seed}: {shown}")
    (options.out / "distillation.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, options.out / "distillation.png")


def best_rate(rates: dict[str, dict[str, Curve]], goal: float) -> str:
    """Return the rate whose seeds come to the goal soonest, together."""

    def answers(rate: str) -> float:
        reached = [answers_until(curve, goal) for curve in rates[rate].values()]
        return sum(float("inf") if n is None else n for n in reached)

    return min(rates, key=answers)


if __name__ == "__main__":
    main()

"""Train every task of configs/agents, and controls of some; write table, curves and numbers.

    python -m benchmarks.learning.agents
    python -m benchmarks.learning.agents --tasks grid --seeds 0 --out curves

One run after the other, each its own process; finished ones are kept in the folder of `--runs` as
those of `benchmarks.learning.recipes` are, so that the same command once more only writes. The
seeds of a task and its control share the base model, whose making no run's minutes hold. A control
is seed 0 with a tool that answers `?`. `--out` gets the curves (agents.png) and the numbers behind
them (agents.json); the table goes to stdout.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learning.recipes import (
    ROOT,
    arguments,
    base_and_final,
    finished,
    make_base,
    metrics_of,
    run,
    write_numbers,
)
from benchmarks.tables import markdown_table
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig

CONFIGS = ROOT / "configs/agents"
SAMPLED = {  # the second has the rewards of turns in it
    "look_up": ("critic/score/mean", "right answers"),
    "calculator": ("critic/score/mean", "right answers"),
    "guess_number": ("critic/rewards/mean", "reward of an episode"),
    "grid": ("critic/rewards/mean", "reward of an episode"),
    "retool": ("critic/score/mean", "right answers"),
    "dapo_calculator": ("critic/score/mean", "right, kept groups"),
    "search": ("critic/score/mean", "right answers"),
}
CONTROLS = {
    task: f'rollout.tools=[{{fn: {tool}, answer: "?"}}]'
    for task, tool in (
        ("look_up", "look_up"),
        ("calculator", "calculator"),
        ("retool", "python, sandbox: process, keep_state: false"),
        ("search", "search, corpus: none"),
    )
}
HEADS = ["recipe", "seed", "sampled, first step", "last step", "greedy before", "after", "minutes"]

Job = tuple[str, int, str]  # task, seed, and the override of a control, or nothing


def jobs(tasks: list[str], seeds: list[int]) -> Iterator[Job]:
    """Yield the runs of these tasks, each task's control last."""
    for task in tasks:
        yield from ((task, seed, "") for seed in seeds)
        if task in CONTROLS:
            yield task, 0, CONTROLS[task]


def name_of(job: Job) -> str:
    """Return the name of a run's folder."""
    return job[0] + ("_control" if job[2] else "")


def numbers(job: Job, work: Path) -> dict[str, Any] | None:
    """Return the numbers of a run, or None where it is still to be done."""
    (task, seed, override), name = job, name_of(job)
    result = finished(CONFIGS / f"{task}.yaml", seed, work, name)
    if result is None:
        return None
    metric, _ = SAMPLED[task]
    lines = metrics_of(work / f"runs/{name}/{seed}")
    sampled = [round(line[metric], 4) for line in lines if metric in line]
    return {
        "task": task,
        "seed": seed,
        "control": override or None,
        "steps": len(sampled),
        "metric": metric,
        "sampled": sampled,
        **{key: result[key] for key in ("curve", "seconds", "date", "versions")},
    }


def train_missing(job: Job, work: Path, keys: Sequence[str]) -> None:
    """Train a run that is not finished, after its base model."""
    (task, seed, override), name = job, name_of(job)
    config = CONFIGS / f"{task}.yaml"
    if finished(config, seed, work, name) is None:
        print(f"{name} seed {seed}", flush=True)
        make_base(config, load(TrainConfig, config).model.path, work)
        run(config, seed, work, *filter(None, [override]), *keys, name=name)


def optimum(task: str) -> float | None:
    """Return the best mean reward of an episode, where it is known and no run reaches 1."""
    if task == "guess_number":  # bisection finds 2^k numbers after k guesses that cost 0.1
        game = yaml.safe_load((CONFIGS / f"{task}.yaml").read_text())["rollout"]["environment"]
        return 1 - 0.1 * sum(k * 2**k for k in range(game["guesses"])) / game["high"]
    return 0.805 if task == "grid" else None


def row(result: dict[str, Any]) -> list[str]:
    """Return a run's cells of the table."""
    sampled = result["sampled"]
    values = (sampled[0], sampled[-1], *base_and_final(result))
    return [
        f"`{result['control'] or result['task']}`, {result['steps']} steps",
        str(result["seed"]),
        *(f"{value:.3f}" for value in values),
        f"{result['seconds'] / 60:.1f}",
    ]


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw a panel for each task: its seeds, its control and its optimum."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(result["task"] for result in results))
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(3 * len(tasks), 2.8), layout="constrained", squeeze=False
    )
    for task, axes in zip(tasks, panels[0], strict=True):
        for result in (result for result in results if result["task"] == task):
            style = {"color": f"C{result['seed']}", "label": f"seed {result['seed']}"}
            if result["control"]:
                style = {"color": "0.4", "linestyle": "--", "label": "control"}
            axes.plot(range(1, result["steps"] + 1), result["sampled"], linewidth=1, **style)
        if best := optimum(task):
            axes.axhline(best, color="black", linestyle=":", label="optimum")
        axes.set(title=task, xlabel="GRPO step", ylabel=f"{SAMPLED[task][1]}, sampled")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    """Train what is missing, report everything that is there."""
    flags = ("--tasks", "--runs")
    folders = ("docs/learning", "runs/agents/learning")
    args = arguments(words, [*SAMPLED], __doc__, *folders, flags)
    work = args.work
    for job in jobs(args.recipes, args.seeds):
        train_missing(job, work, args.keys)
    results = [result for job in jobs([*SAMPLED], args.seeds) if (result := numbers(job, work))]
    write_numbers(args.out / "agents.json", "agents", words, results)
    draw(results, args.out / "agents.png")
    print("\n" + markdown_table(HEADS, [row(result) for result in results]))


if __name__ == "__main__":
    main()

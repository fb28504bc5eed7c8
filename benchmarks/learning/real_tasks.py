"""Train a pretrained chat model on every task of configs/real; write table, curves and numbers.

    python -m benchmarks.real_model runs/models/SmolLM2-135M-Instruct
    python -m benchmarks.learning.real_tasks
    python -m benchmarks.learning.real_tasks --recipes logic --seeds 0 --out curves

One run after the other, each its own process; finished ones are kept in the work folder as those of
`benchmarks.learning.recipes` are. A recipe's first run makes its data and the supervised warm-up,
which the others share. `--out` gets the curves (real_tasks.png) and the numbers behind them
(real_tasks.json); the table goes to stdout.

Exit status 1: a run gained less than 0.2 in held-out accuracy.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.recipes import (
    LEAST_GAIN,
    ROOT,
    arguments,
    base_and_final,
    finished,
    link,
    run,
    write_numbers,
)
from benchmarks.tables import markdown_table

RECIPES = ROOT / "configs/real"
HEADS = ["recipe", "seed", "before", "after", "gain", "minutes", "peak GiB"]


def row(result: dict[str, Any]) -> list[str]:
    """Return a run's cells of the table."""
    base, final = base_and_final(result)
    return [
        f"`{result['recipe']}`",
        str(result["seed"]),
        f"{base:.3f}",
        f"{final:.3f}",
        f"{final - base:+.3f}",
        f"{result['seconds'] / 60:.0f}",
        f"{result['peak_gb']:.1f}",
    ]


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw a panel for each task, with and without an adapter."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(r["recipe"].removesuffix("_lora") for r in results))
    size = (3 * len(tasks), 2.8)
    figure, panels = plt.subplots(
        1, len(tasks), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for task, axes in zip(tasks, panels[0], strict=True):
        for result in results:
            if result["recipe"].removesuffix("_lora") != task:
                continue
            kind = "LoRA" if result["recipe"] != task else "all weights"
            steps = [int(step) for step in result["curve"]]
            axes.plot(
                steps,
                list(result["curve"].values()),
                marker="o",
                markersize=3,
                linestyle="--" if kind == "LoRA" else "-",
                color=f"C{result['seed']}",
                label=f"{kind}, seed {result['seed']}",
            )
        axes.set(title=task, xlabel="GRPO step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")
    panels[0, 0].set_ylabel("greedy accuracy, held out")
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing, report everything that is there."""
    configs = {
        path.stem: path for path in sorted(RECIPES.glob("*.yaml")) if not path.stem.endswith("_sft")
    }
    args = arguments(words, list(configs), __doc__, "docs/learning", "runs/real_tasks")
    work = args.work
    if (ROOT / "runs/models").exists():
        link("runs/models", work)
    if not (work / "runs/models").exists():
        raise SystemExit("error: expected runs/models: python -m benchmarks.real_model makes one")
    for name in args.recipes:
        for seed in args.seeds:
            if finished(configs[name], seed, work) is None:
                print(f"{name} seed {seed}", flush=True)
                run(configs[name], seed, work, *args.keys)
    pairs = [(config, seed) for config in configs.values() for seed in args.seeds]
    results = [result for pair in pairs if (result := finished(*pair, work))]
    runs = [{k: v for k, v in r.items() if k != "config"} for r in results]
    write_numbers(args.out / "real_tasks.json", "real_tasks", words, runs)
    draw(results, args.out / "real_tasks.png")
    print("\n" + markdown_table(HEADS, [row(result) for result in results]))
    gains = [final - base for base, final in map(base_and_final, results)]
    return int(min(gains) < LEAST_GAIN and not args.small)


if __name__ == "__main__":
    sys.exit(main())

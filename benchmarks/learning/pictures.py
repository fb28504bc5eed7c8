"""Train the small model of configs/vision on its pictures, and on blank ones.

    python -m benchmarks.learning.pictures
    python -m benchmarks.learning.pictures --runs pictures blank --seeds 0

Each run is configs/vision/pictures.yaml with the keys of `RUNS` changed, one after the other, each
its own process; finished ones are kept in the folder of `--work` as those of
`benchmarks.learning.recipes` are. All share a base model, whose making no run's seconds hold.
Accuracies are greedy, on 510 held-out pictures. `--out` gets the curves (pictures.png) and the
numbers behind them (pictures.json); the table goes to stdout. Exit status 1: a run failed.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning.recipes import ROOT, Runs, compare, finished, metrics_of
from benchmarks.tables import markdown_table
from jaxrl_llm.configs.tasks import pictures

CONFIG = ROOT / "configs/vision/pictures.yaml"
KINDS = ("dots", "digits", "shapes")
BLANK = "runs/pictures/blank"
RUNS: Runs = {
    "pictures": (CONFIG, ()),
    "frozen": (CONFIG, ("model.vision=frozen",)),
    "blank": (
        CONFIG,
        (
            "data.prepare.blank=true",
            "data.prepare.sft_rows=0",
            f"data.prepare.out={BLANK}",
            f"data.train={BLANK}/train.parquet",
            f"data.validation={BLANK}/validation.parquet",
        ),
    ),
}
"""Configs, and what is changed in them; the control sees grey in place of each picture."""


def curves_of(lines: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the held-out accuracy by step, of each kind of picture.

    >>> curves_of([{"step": 0, "val-core/pictures/dots/acc/mean@1": 0.5}, {"step": 1}])["dots"]
    {0: 0.5}
    """
    return {
        kind: {
            line["step"]: line[f"val-core/pictures/{kind}/acc/mean@1"]
            for line in lines
            if f"val-core/pictures/{kind}/acc/mean@1" in line
        }
        for kind in KINDS
    }


def numbers(name: str, seed: int, work: Path) -> dict[str, Any] | None:
    """Return the numbers of a run, or None where it is still to be done."""
    result = finished(CONFIG, seed, work, name)
    if result is None:
        return None
    lines = metrics_of(work / f"runs/{name}/{seed}")
    return {
        "run": name,
        "seed": seed,
        "overrides": RUNS[name][1],
        "curves": curves_of(lines),
        "sampled": [line["critic/score/mean"] for line in lines if "critic/score/mean" in line],
        **{key: result[key] for key in ("seconds", "peak_gb", "date", "versions")},
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table: a row for each run."""
    rows = []
    for result in results:
        values = [[*result["curves"][kind].values()] for kind in KINDS]
        gains = [f"{curve[0]:.2f} → {curve[-1]:.2f}" for curve in values]
        means = [sum(curve[place] for curve in values) / len(KINDS) for place in (0, -1)]
        rows.append(
            [
                f"`{result['run']}`",
                result["seed"],
                *gains,
                f"{means[0]:.3f} → {means[1]:.3f}",
                f"{result['seconds']:.0f}",
            ]
        )
    return markdown_table(["run", "seed", *KINDS, "all", "seconds"], rows)


def examples(kind: str) -> np.ndarray:
    """Return five pictures of a kind side by side, as colours."""
    rng = random.Random(0)
    drawn = [pictures.colours(pictures.KINDS[kind](32, rng).ink, rng) for _ in range(5)]
    padded = [np.pad(one, ((0, 0), (1, 1), (0, 0)), constant_values=255) for one in drawn]
    return np.concatenate(padded, 1)


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw the curves of each kind below some pictures, with a colour for both seeds of a run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (tops, panels) = plt.subplots(
        2, 3, figsize=(9, 3.6), layout="constrained", sharey="row", height_ratios=(1, 3)
    )
    names = list(dict.fromkeys(result["run"] for result in results))
    for kind, top, axes in zip(KINDS, tops, panels, strict=True):
        top.imshow(examples(kind))
        top.axis("off")
        for result in results:
            number, curve = names.index(result["run"]), result["curves"][kind]
            is_first = result["seed"] == min(
                r["seed"] for r in results if r["run"] == result["run"]
            )
            axes.plot(
                [int(step) for step in curve],
                [*curve.values()],
                color=f"C{number}",
                label=result["run"] if is_first else None,
                linewidth=1,
            )
        axes.set(title=kind, xlabel="GRPO step", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("greedy accuracy, held out")
    panels[0].legend(fontsize=7, loc="center right")
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing, report everything that was asked for and is there."""
    return compare(words, "pictures", RUNS, CONFIG, __doc__, numbers, draw, table)


if __name__ == "__main__":
    sys.exit(main())

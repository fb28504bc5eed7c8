"""Train the quickstart's base on pairs of its own answers, and on the best of them.

    python -m benchmarks.learning.online
    python -m benchmarks.learning.online --runs online_dpo raft --seeds 0

Each run is one of the configs quickstart_online_dpo.yaml and quickstart_raft.yaml with the keys of
`RUNS` changed, one after the other, each its own process; finished ones are kept in the folder of
`--work` as those of `benchmarks.learning.recipes` are. Accuracies are greedy, on the 512 sums that
the quickstart holds out. `--out` gets the curves (online.png) and the numbers behind them
(online.json); the table goes to stdout. Exit status 1: a run failed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.recipes import ROOT, Runs, base_and_final, compare, finished, metrics_of
from benchmarks.tables import markdown_table

DPO, RAFT = (ROOT / f"configs/quickstart_{name}.yaml" for name in ("online_dpo", "raft"))
RUNS: Runs = {
    "online_dpo": (DPO, ()),
    "online_dpo_fixed": (DPO, ("reference.refresh_every=null",)),
    "online_dpo_all_pairs": (DPO, ("algorithm.pairs=all_pairs",)),
    "raft": (RAFT, ()),
    "raft_all_right": (RAFT, ("algorithm.answer_filter={fn: at_least, threshold: 1.0}",)),
}
"""Configs, and what is changed in them."""


def numbers(name: str, seed: int, work: Path) -> dict[str, Any] | None:
    """Return the numbers of a run, or None where it is still to be done."""
    result = finished(RUNS[name][0], seed, work, name)
    if result is None:
        return None
    lines = metrics_of(work / f"runs/{name}/{seed}")
    used = [
        line[key] for line in lines for key in ("pairs/count", "batch/kept_answers") if key in line
    ]
    return {
        "run": name,
        "seed": seed,
        "overrides": RUNS[name][1],
        "used": [used[0], used[-1]],
        **{key: result[key] for key in ("curve", "seconds", "date")},
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table: a row for each run."""
    rows = []
    for result in results:
        base, final = base_and_final(result)
        used = " to ".join(f"{count:.0f}" for count in result["used"])
        accuracies = f"{base:.3f}", f"{final:.3f}"
        rows.append(
            [f"`{result['run']}`", result["seed"], *accuracies, used, f"{result['seconds']:.0f}"]
        )
    head = ["run", "seed", "base", "final", "pairs or answers of a step", "seconds"]
    return markdown_table(head, rows)


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw the accuracy of each run over its steps, in a colour for both seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    names = list(dict.fromkeys(result["run"] for result in results))
    for result in results:
        number = names.index(result["run"])
        is_first = result["seed"] == min(r["seed"] for r in results if r["run"] == result["run"])
        steps = [int(step) for step in result["curve"]]
        label = result["run"] if is_first else None
        axes.plot(steps, [*result["curve"].values()], color=f"C{number}", label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0.3, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing, report everything that was asked for and is there."""
    base = ROOT / "configs/quickstart.yaml"
    return compare(words, "online", RUNS, base, __doc__, numbers, draw, table)


if __name__ == "__main__":
    sys.exit(main())

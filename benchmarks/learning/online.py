"""Train the quickstart's base on pairs of its own answers, and on the best of them.

    python -m benchmarks.learning.online
    python -m benchmarks.learning.online --runs online_dpo raft --seeds 0

Each run is one of the configs quickstart_online_dpo.yaml and quickstart_raft.yaml with the keys of
`RUNS` changed, one after the other, each its own process; finished ones are kept in the folder of
`--work` as those of `benchmarks.learning.recipes` are. Accuracies are greedy, on the 512 sums that
the quickstart holds out. `--out` gets the curves (online.png) and the numbers behind them
(online.json); the table goes to stdout. Exit status 1: a run failed.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.learning.recipes import (
    ROOT,
    arguments,
    base_and_final,
    finished,
    link,
    make_base,
    metrics_of,
    run,
    write_numbers,
)
from benchmarks.tables import markdown_table
from jaxrl_llm.config.load import read_yaml

DPO, RAFT = (ROOT / f"configs/quickstart_{name}.yaml" for name in ("online_dpo", "raft"))
RUNS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "online_dpo": (DPO, ()),
    "online_dpo_fixed": (DPO, ("reference.refresh_every=null",)),
    "online_dpo_all_pairs": (DPO, ("algorithm.pairs=all_pairs",)),
    "raft": (RAFT, ()),
    "raft_all_right": (RAFT, ("algorithm.answer_filter={fn: at_least, threshold: 1.0}",)),
}
"""Configs, and what is changed in them."""


def train_missing(names: list[str], seeds: list[int], work: Path) -> list[str]:
    """Run what is not finished; return a line for each run that failed."""
    failed = []
    for name, seed in ((name, seed) for name in names for seed in seeds):
        config, overrides = RUNS[name]
        if finished(config, seed, work, name):
            continue
        print(f"{name} seed {seed}", file=sys.stderr, flush=True)
        try:
            run(config, seed, work, *overrides, name=name)
        except subprocess.CalledProcessError:
            failed.append(f"{name} seed {seed} stopped: see {work}/runs/{name}/{seed}.log")
    return failed


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


def main() -> int:
    """Train what is missing, report everything that was asked for and is there."""
    args = arguments([*RUNS], __doc__, "docs/learning", "runs/online", ("--runs", "--work"))
    work = args.work.resolve()
    link("configs", work)
    base = read_yaml(ROOT / "configs/quickstart.yaml")["model"]["path"]
    make_base(ROOT / "configs/quickstart.yaml", base, work)
    failed = train_missing(args.recipes, args.seeds, work)
    pairs = [(name, seed) for name in args.recipes for seed in args.seeds]
    results = [result for pair in pairs if (result := numbers(*pair, work))]
    if results:
        write_numbers(args.out / "online.json", "online", results)
        draw(results, args.out / "online.png")
        print("\n" + table(results))
    if failed:
        print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

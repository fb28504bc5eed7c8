"""Run the quickstart from an empty folder for three seeds; print its curves, times and memory.

    python -m benchmarks.learning.quickstart docs/quickstart.png
    python -m benchmarks.learning.quickstart PICTURE --small

Each run makes its own data and base model. The table goes to stdout as Markdown, the curves to the
picture that is named.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.recipes import SHORT, place_configs
from benchmarks.tables import describe_run, markdown_table, parser_of

METRIC = "val-core/arithmetic/acc/mean@1"


def run(seed: int, *, small: bool) -> tuple[dict[int, float], float, float]:
    """Return (held-out accuracy by step, seconds, peak GiB) of one run in a fresh folder."""
    with tempfile.TemporaryDirectory() as folder:
        place_configs(Path(folder), small=small)
        keys = SHORT if small else ()
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "configs/quickstart.yaml"]
        start = time.perf_counter()
        subprocess.run(
            [*command, f"seed={seed}", *keys], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - start
        with (Path(folder) / "runs/quickstart/metrics.jsonl").open() as file:
            lines = [json.loads(line) for line in file]
    curve = {line["step"]: line[METRIC] for line in lines if METRIC in line}
    peak = max(line.get("perf/cpu_memory_used_gb", 0.0) for line in lines)
    return curve, seconds, peak


def main(words: Sequence[str] | None = None) -> None:
    """Run the seeds, print the table and draw the curves."""
    parser = parser_of(__doc__)
    parser.add_argument("picture", type=Path, help="where the curves are drawn")
    parser.add_argument("--small", action="store_true", help="two steps of one seed")
    options = parser.parse_args(words)
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    seeds = (0,) if options.small else (0, 1, 2)
    results = {seed: run(seed, small=options.small) for seed in seeds}
    steps = sorted(results[0][0])
    rows = []
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for seed, (curve, seconds, peak) in results.items():
        values = [f"{curve[s]:.3f}" for s in steps]
        rows.append([seed, *values, f"{seconds:.0f}", f"{peak:.1f}"])
        axes.plot(steps, [curve[s] for s in steps], marker="o", label=f"seed {seed}")
    axes.set(xlabel="GRPO step", ylabel="greedy accuracy, held out", ylim=(0, 1))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(options.picture, dpi=110)
    print(f"{describe_run('learning.quickstart', words)}, Python {sys.version.split()[0]}\n")
    names = ["seed", *(f"step {s}" for s in steps), "seconds", "peak GiB"]
    print(markdown_table(names, rows))


if __name__ == "__main__":
    main()

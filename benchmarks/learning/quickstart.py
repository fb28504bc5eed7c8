"""Run the quickstart from an empty folder for three seeds; print its curves, times and memory.

    python -m benchmarks.learning.quickstart docs/quickstart.png

Each run makes its own data and base model. The table goes to stdout as Markdown, the curves to the
picture that is named.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
METRIC = "val-core/arithmetic/acc/mean@1"


def run(seed: int) -> tuple[dict[int, float], float, float]:
    """Return (held-out accuracy by step, seconds, peak GiB) of one run in a fresh folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "configs").symlink_to(ROOT / "configs")
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "configs/quickstart.yaml"]
        start = time.perf_counter()
        subprocess.run(
            [*command, f"seed={seed}"], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - start
        with (Path(folder) / "runs/quickstart/metrics.jsonl").open() as file:
            lines = [json.loads(line) for line in file]
    curve = {line["step"]: line[METRIC] for line in lines if METRIC in line}
    peak = max(line.get("perf/cpu_memory_used_gb", 0.0) for line in lines)
    return curve, seconds, peak


def main(picture: str) -> None:
    """Run the seeds, print the table and draw the curves."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    results = {seed: run(seed) for seed in (0, 1, 2)}
    steps = sorted(results[0][0])
    print(f"| seed | {' | '.join(f'step {s}' for s in steps)} | seconds | peak GiB |")
    print("| --- " * (len(steps) + 3) + "|")
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for seed, (curve, seconds, peak) in results.items():
        values = " | ".join(f"{curve[s]:.3f}" for s in steps)
        print(f"| {seed} | {values} | {seconds:.0f} | {peak:.1f} |")
        axes.plot(steps, [curve[s] for s in steps], marker="o", label=f"seed {seed}")
    axes.set(xlabel="GRPO step", ylabel="greedy accuracy, held out", ylim=(0, 1))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
    print(f"\n{os.cpu_count()} cores, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main(sys.argv[1])

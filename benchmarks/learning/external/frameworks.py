"""Let agents of smolagents and of OpenAI's Agents SDK, unmodified, learn the calculator's task.

    python3 -m venv agents_env && agents_env/bin/pip install smolagents openai-agents openai
    python -m benchmarks.learning.external.frameworks --python agents_env/bin/python

One run after the other, each its own process; finished ones are kept in `runs/external`, so that
the same command once more only writes. Each run ends with the proof of
`benchmarks.learning.external.watched` that what was trained on is what the engine drew. `--out`
gets the curves (external.png) and the numbers behind them (external.json); the table goes to
stdout.
"""

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.recipes import ROOT, curve_of, metrics_of, write_numbers
from benchmarks.peers.measure import check_python
from benchmarks.tables import markdown_table, parser_of

HERE = Path(__file__).parent.relative_to(ROOT)
WORK = Path("runs/external")
TASKS = {
    "agents_sdk_responses": ("agents_sdk.yaml", "responses"),
    "agents_sdk_chat": ("agents_sdk.yaml", "chat_completions"),
    "smolagents": ("smolagents.yaml", "main"),
}
PACKAGES = ("openai", "openai-agents", "smolagents")
SAMPLED = "critic/score/mean"
HEADS = ["program", "seed", "sampled, first step", "last step", "held out before", "after"]
HEADS += ["requests", "chains", "turns compared", "minutes"]


def main(words: Sequence[str] | None = None) -> None:
    """Train what is missing, report everything that is there."""
    parser = parser_of(__doc__)
    parser.add_argument("--python", type=Path, required=True, help="has the frameworks")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/learning")
    args = parser.parse_args(words)
    check_python(args.python, "openai", "agents", "smolagents")
    for task in args.tasks:
        for seed in args.seeds:
            train_missing(task, seed, args.python.absolute())
    found = sorted(WORK.glob("*/*/result.json"))
    results = [json.loads(path.read_text()) for path in found]
    results.sort(key=lambda result: ([*TASKS].index(result["task"]), result["seed"]))
    write_numbers(args.out / "external.json", "external.frameworks", words, results)
    draw(results, args.out / "external.png")
    print("\n" + markdown_table(HEADS, [row(result) for result in results]))


def train_missing(task: str, seed: int, python: Path) -> None:
    """Train a run that is not finished."""
    config, function = TASKS[task]
    folder = WORK / task / str(seed)
    if (folder / "result.json").exists():
        return
    program = HERE / ("agents_sdk.py" if config == "agents_sdk.yaml" else "smolagents_agent.py")
    words = [sys.executable, "-m", "benchmarks.learning.external.watched"]
    words += ["--config", str(HERE / config), f"seed={seed}", f"run_dir={folder}"]
    words += [f"rollout.agent.python={python}", f"rollout.agent.run={program}:{function}"]
    print(f"{task} seed {seed}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (folder.parent / f"{seed}.log").open("w") as log:
        subprocess.run(words, check=True, stdout=log, stderr=subprocess.STDOUT)
    seconds = round(time.monotonic() - started, 1)
    result = {"task": task, "seed": seed, **numbers(folder), "seconds": seconds}
    (folder / "result.json").write_text(json.dumps(result | {"packages": versions(python)}))


def numbers(folder: Path) -> dict[str, Any]:
    """Return what a run has come to."""
    lines = metrics_of(folder)
    steps = [line for line in lines if SAMPLED in line]
    return {
        "steps": len(steps),
        "sampled": [round(line[SAMPLED], 4) for line in steps],
        "requests": sum(int(line["gateway/requests"]) for line in steps),
        "streams": sum(int(line["gateway/streams"]) for line in steps),
        "curve": curve_of(lines),
        "compared": json.loads((folder / "drawn.json").read_text()),
        "logprob_difference": max(line["training/rollout_logprobs_diff_mean"] for line in steps),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": json.loads((folder / "versions.json").read_text()),
    }


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the frameworks."""
    code = f"from importlib.metadata import version as v; print(*map(v, {PACKAGES}))"
    told = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(PACKAGES, told.stdout.split(), strict=True))


def row(result: dict[str, Any]) -> list[str]:
    """Return a run's cells of the table."""
    held_out = list(result["curve"].values())
    values = (*(result["sampled"][place] for place in (0, -1)), held_out[0], held_out[-1])
    return [
        f"`{result['task']}`, {result['steps']} steps",
        str(result["seed"]),
        *(f"{value:.3f}" for value in values),
        *(str(count) for count in (result["requests"], result["streams"])),
        str(result["compared"]["turns"]),
        f"{result['seconds'] / 60:.1f}",
    ]


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw a panel for each program, with its seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(result["task"] for result in results))
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(3 * len(tasks), 2.8), layout="constrained", squeeze=False
    )
    for task, axes in zip(tasks, panels[0], strict=True):
        for result in (result for result in results if result["task"] == task):
            steps = range(1, result["steps"] + 1)
            axes.plot(steps, result["sampled"], linewidth=1, label=f"seed {result['seed']}")
        axes.set(title=task, xlabel="GRPO step", ylabel="right answers, sampled", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(picture, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()

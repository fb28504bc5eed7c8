"""Train every recipe of configs/recipes from one base model; write table, curves and numbers.

    python -m benchmarks.learning.recipes
    python -m benchmarks.learning.recipes --recipes dapo ppo --seeds 0 --out curves
    python -m benchmarks.learning.recipes --keep-metrics tests/reporting/runs_that_are_well.json.gz

One run after the other, each its own process. A finished run is kept in the work folder and not
repeated while its recipe's file stays the same, so that an interrupted benchmark can go on; remove
the folder to measure other code.
`--keep-metrics` also trains the quickstart, and keeps what it, its base model and the first seed of
each recipe have logged, for the test of `jaxrl_llm/reporting/health.py`.
`--out` gets a curve for each recipe (NAME.png) and the numbers behind it (results.json). The table
goes to stdout and, once every recipe has its runs, between the two marks of docs/algorithms.md.

`--small` shows in a minute or two that all of it works: two steps of each run, from a base model
that has had 300, in folders of their own.

Exit status 1: a run failed, or gained less than 0.2 in held-out accuracy.
"""

import argparse
import datetime
import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import yaml

from benchmarks.tables import command_of, parser_of
from jaxrl_llm.config.load import read_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "configs/recipes"
PAGE = ROOT / "docs/algorithms.md"
MARKS = ("<!-- learning: begin -->\n", "<!-- learning: end -->\n")
LEAST_GAIN = 0.2
REFERENCE = "grpo"
SHORT = ("steps=2", "validation.every=2", "checkpoint.every=2")
"""Of each run, with `--small`."""
NOT_KEPT = r"timing_s/(?!step)|perf/(?!compile_wait|dropped)|global_seqlen/|prompt_length/"
"""Metrics that say nothing about a run's health."""

Runs: TypeAlias = Mapping[str, tuple[Path, tuple[str, ...]]]
"""Of each run its config, and what is changed in that."""


def arguments(
    words: Sequence[str] | None,
    everything: list[str],
    about: str | None,
    out: str,
    work: str,
    flags: tuple[str, str] = ("--recipes", "--work"),
    more: Mapping[str, type] = MappingProxyType({}),
) -> argparse.Namespace:
    """Read the command line of a benchmark that trains some of these recipes.

    Args:
        words: of the command line; None: those that the process was started with.
        everything: the names of the recipes.
        about: what the benchmark does.
        out: the folder of its results, below the repository's.
        work: the folder of its runs, likewise.
        flags: the options that name recipes and the folder of the runs.
        more: further options, with the types of their values.

    Returns:
        Also `keys` that each run gets besides its own.
    """
    parser = parser_of(about)
    parser.add_argument(
        flags[0], dest="recipes", nargs="+", choices=everything, default=everything, metavar="NAME"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N")
    add_folders(parser, out, work, flags[1])
    for flag, kind in more.items():
        parser.add_argument(flag, type=kind)
    args = parser.parse_args(words)
    place_folders(args, out, work)
    args.keys = SHORT if args.small else ()
    return args


def add_folders(parser: argparse.ArgumentParser, out: str, work: str, flag: str = "--work") -> None:
    """Let a command line say where results and runs go, and that these are to be small."""
    parser.add_argument("--out", type=Path, help=f"of the results; by default {out}")
    parser.add_argument(flag, dest="work", type=Path, help=f"of the runs; by default {work}")
    parser.add_argument(
        "--small", action="store_true", help=f"two steps a run, by default all in {work}_small"
    )


def place_folders(args: argparse.Namespace, out: str, work: str) -> None:
    """Make the folders of the results and the runs, with the configs that the runs find."""
    args.work = (args.work or ROOT / (f"{work}_small" if args.small else work)).resolve()
    args.out = args.out or (args.work if args.small else ROOT / out)
    args.out.mkdir(parents=True, exist_ok=True)
    place_configs(args.work, small=args.small)


def place_configs(work: Path, *, small: bool) -> None:
    """Let a folder have the configs; of small ones supervised runs have 300 steps at most.

    After these the quickstart's base model knows some sums, so that there are pairs to learn from.
    """
    if not small:
        link("configs", work)
    elif not (work / "configs").exists():
        shutil.copytree(ROOT / "configs", work / "configs")
        for path in (work / "configs").rglob("*_sft.yaml"):
            short = re.sub(r"^steps: \d{3,}", "steps: 300", path.read_text(), flags=re.MULTILINE)
            path.write_text(short)


def link(folder: str, work: Path) -> None:
    """Let the work folder have one of the repository's."""
    (work / folder).parent.mkdir(parents=True, exist_ok=True)
    if not (work / folder).exists():
        (work / folder).symlink_to(ROOT / folder)


def train(config: Path, *overrides: str, work: Path, log: Path) -> float:
    """Run one recipe in the work folder; return its seconds."""
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", str(config)]
    start = time.perf_counter()
    with log.open("w") as file:
        subprocess.run(
            [*command, "log.trackers=[]", *overrides],
            cwd=work,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            check=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return time.perf_counter() - start


def make_base(config: Path, base: str, work: Path) -> None:
    """Have a recipe's base model made, so that no run's seconds hold it."""
    if not (work / base).exists():
        log = work / f"{config.stem}_base.log"
        train(config, "steps=1", f"run_dir=runs/{config.stem}_base", work=work, log=log)


def finished(config: Path, seed: int, work: Path, name: str = "") -> dict[str, Any] | None:
    """Return the result of a run, or None where it is still to be done."""
    file = work / f"runs/{name or config.stem}/{seed}.json"
    if not file.exists():
        return None
    result = json.loads(file.read_text())
    return result if result["config"] == text_of(config) else None


def text_of(config: Path) -> str:
    """Return a recipe's file, and the one that it names as its base."""
    text = config.read_text()
    base = yaml.safe_load(text).get("base")
    return text + (config.parent / base).read_text() if base else text


def curve_of(lines: list[dict[str, Any]]) -> dict[int, float]:
    """Return the held-out accuracy by step of a run with one data source.

    >>> curve_of([{"step": 0, "val-core/sums/acc/mean@1": 0.5}, {"step": 1}])
    {0: 0.5}
    """
    return {
        line["step"]: value
        for line in lines
        for name, value in line.items()
        if name.startswith("val-core/") and name.endswith("/acc/mean@1")
    }


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return what a run has logged, a line for each step."""
    return [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def run(config: Path, seed: int, work: Path, *overrides: str, name: str = "") -> None:
    """Train a recipe from the start with one seed, and keep its result, under a name if given."""
    name = name or config.stem
    folder = f"runs/{name}/{seed}"
    shutil.rmtree(work / folder, ignore_errors=True)  # what an interruption left
    (work / folder).parent.mkdir(parents=True, exist_ok=True)
    keys, log = (f"seed={seed}", f"run_dir={folder}", *overrides), work / f"{folder}.log"
    seconds = train(config, *keys, work=work, log=log)
    lines = metrics_of(work / folder)
    result = {
        "recipe": name,
        "seed": seed,
        "curve": curve_of(lines),
        "peak_gb": max(line.get("perf/cpu_memory_used_gb", 0.0) for line in lines),
        "seconds": round(seconds, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": json.loads((work / folder / "versions.json").read_text()),
        "config": text_of(config),
    }
    (work / f"{folder}.json").write_text(json.dumps(result))


def base_and_final(result: dict[str, Any]) -> tuple[float, float]:
    """Return the accuracies before the first step and after the last."""
    values = list(result["curve"].values())
    return values[0], values[-1]


def mean_final(results: list[dict[str, Any]], name: str) -> float:
    """Return the mean over seeds of a recipe's final accuracy."""
    finals = [base_and_final(r)[1] for r in results if r["recipe"] == name]
    return sum(finals) / len(finals)


def table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table: one row per run."""
    rows = ["| recipe | seed | base | final | gain | seconds | mean final less GRPO's |"]
    rows.append("|---" * 7 + "|")
    compared = any(r["recipe"] == REFERENCE for r in results)
    first = {r["recipe"]: r["seed"] for r in reversed(results)}
    for result in results:
        name, seed = result["recipe"], result["seed"]
        base, final = base_and_final(result)
        verdict = ""
        if compared and seed == first[name] and name != REFERENCE:
            ahead = mean_final(results, name) - mean_final(results, REFERENCE)
            verdict = f"{ahead:+.3f}" + ("" if ahead > 0 else ", not better")
        numbers = f"{base:.3f} | {final:.3f} | {final - base:+.3f} | {result['seconds']:.0f}"
        rows.append(f"| `{name}` | {seed} | {numbers} | {verdict} |")
    return "\n".join(rows) + "\n"


def draw(name: str, results: list[dict[str, Any]], picture: Path) -> None:
    """Draw a recipe's curves over GRPO's in grey."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(figsize=(4, 2.5), layout="constrained")
    for result in results:
        steps = [int(step) for step in result["curve"]]
        if result["recipe"] == name:
            line, label = {"marker": "o", "markersize": 3}, f"seed {result['seed']}"
        elif result["recipe"] == REFERENCE:
            line = {"color": "0.75", "zorder": 1}
            label = "grpo" if result["seed"] == results[0]["seed"] else None
        else:
            continue
        axes.plot(steps, list(result["curve"].values()), label=label, **line)
    axes.set_title(name, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("held-out accuracy", fontsize=8)
    axes.set_ylim(0.3, 1.0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(picture, dpi=100)
    plt.close(figure)
    with Image.open(picture) as image:  # few colours make a small file
        image.convert("RGB").quantize(64).save(picture, optimize=True)


def write_numbers(
    file: Path,
    module: str,
    words: Sequence[str] | None,
    runs: Sequence[dict[str, Any]],
    **more: Any,
) -> None:
    """Write what the curves are drawn from, with the command line and the machine."""
    about = {
        "command": command_of(f"learning.{module}", words),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
    }
    file.write_text(json.dumps({**more, **about, "runs": runs}, indent=1) + "\n")


def write(results: list[dict[str, Any]], words: Sequence[str] | None, out: Path) -> None:
    """Write results.json and the pictures."""
    keys = ("recipe", "seed", "seconds", "curve", "date", "versions")
    runs = [{k: r[k] for k in keys} for r in results]
    metric = "val-core/arithmetic/acc/mean@1"
    write_numbers(out / "results.json", "recipes", words, runs, metric=metric)
    for name in dict.fromkeys(r["recipe"] for r in results):
        draw(name, results, out / f"{name}.png")


def write_page(text: str) -> None:
    """Put the table between the two marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    begin = page.index(MARKS[0]) + len(MARKS[0])
    PAGE.write_text(page[:begin] + text + page[page.index(MARKS[1]) :], encoding="utf-8")


def train_missing(runs: Runs, seeds: list[int], work: Path, keys: Sequence[str]) -> list[str]:
    """Run what is not finished; return a line for each run that failed."""
    failed = []
    for name, seed in ((n, s) for n in runs for s in seeds):
        config, overrides = runs[name]
        if finished(config, seed, work, name):
            continue
        print(f"{name} seed {seed}", file=sys.stderr, flush=True)
        try:
            run(config, seed, work, *overrides, *keys, name=name)
        except subprocess.CalledProcessError:
            failed.append(f"{name} seed {seed} stopped: see {work}/runs/{name}/{seed}.log")
    return failed


def compare(
    words: Sequence[str] | None,
    name: str,
    runs: Runs,
    base: Path,
    about: str | None,
    numbers: Callable[[str, int, Path], dict[str, Any] | None],
    draw: Callable[[list[dict[str, Any]], Path], None],
    table: Callable[[list[dict[str, Any]]], str],
) -> int:
    """Train what is missing of some runs from one base model, and report all that is there.

    Args:
        words: of the command line.
        name: of the files of results.
        runs: all of them.
        base: config whose model the runs begin with.
        about: what the benchmark does.
        numbers: (run, seed, folder of the runs) -> its results; None: it is still to be done.
        draw: (results, file) draws curves.
        table: (results) -> a table of them.

    Returns:
        The exit status: 1 if a run failed.
    """
    args = arguments(words, [*runs], about, "docs/learning", f"runs/{name}", ("--runs", "--work"))
    work = args.work
    make_base(base, read_yaml(base)["model"]["path"], work)
    failed = train_missing({run: runs[run] for run in args.recipes}, args.seeds, work, args.keys)
    pairs = [(run, seed) for run in args.recipes for seed in args.seeds]
    results = [result for pair in pairs if (result := numbers(*pair, work))]
    if results:
        write_numbers(args.out / f"{name}.json", name, words, results)
        draw(results, args.out / f"{name}.png")
        print("\n" + table(results))
    if failed:
        print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def kept(folder: Path) -> dict[str, Any]:
    """Return a run's config and its metrics, with four digits; null where a value is not finite."""
    rows = [
        {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in line.items()
            if not re.match(NOT_KEPT, name)
        }
        for line in metrics_of(folder)
    ]
    return {"config": yaml.safe_load((folder / "config.yaml").read_text()), "rows": rows}


def keep_metrics(file: Path, names: list[str], seed: int, work: Path) -> None:
    """Write what recipes, the quickstart and its base model have logged as one compressed file."""
    quickstart = ROOT / "configs/quickstart.yaml"
    if not finished(quickstart, seed, work):
        run(quickstart, seed, work)
    (supervised,) = (work / "runs/quickstart").glob("base.sft_*")
    runs = {name: kept(work / f"runs/{name}/{seed}") for name in [*names, quickstart.stem]}
    text = json.dumps(runs | {"quickstart_sft": kept(supervised)}, separators=(",", ":"))
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing, report everything that is there."""
    everything = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    options = {"--keep-metrics": Path}
    args = arguments(words, everything, __doc__, "docs/learning", "runs/learning", more=options)
    work = args.work
    make_base(RECIPES / f"{REFERENCE}.yaml", "runs/quickstart/base", work)
    recipes: Runs = {name: (RECIPES / f"{name}.yaml", ()) for name in args.recipes}
    failed = train_missing(recipes, args.seeds, work, args.keys)
    pairs = [(RECIPES / f"{name}.yaml", seed) for name in everything for seed in args.seeds]
    results = [result for pair in pairs if (result := finished(*pair, work))]
    if results:
        print("\n" + table(results))
        write(results, words, args.out)
    if len(results) == len(pairs) and not args.small:
        write_page(table(results))
    if args.keep_metrics and not failed:
        keep_metrics(args.keep_metrics, args.recipes, args.seeds[0], work)
    for result in results:
        base, final = base_and_final(result)
        if final - base < LEAST_GAIN and not args.small:
            failed.append(f"{result['recipe']} seed {result['seed']} gained {final - base:.3f}")
    if failed:
        print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

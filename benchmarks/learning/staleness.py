"""Train the quickstart with answers that are begun before their step; write table, curves, numbers.

    python -m benchmarks.learning.staleness
    python -m benchmarks.learning.staleness --staleness 0 4 --corrections none icepop --seeds 0

A run for each K of `rollout.staleness`, correction, seed, and factor of the learning rate
(`--rates`), one after the other, each its own process; finished ones are kept in the folder of
`--runs` as those of `benchmarks.learning.recipes` are, so that the same command once more only
writes. All share the base model, whose making no run's seconds hold. Corrections: token_tis is
`truncated_token`, the default; behaviour_as_old clips around the policies that drew the tokens
(`algorithm.use_rollout_logprobs`); none weighs all tokens alike by a function of its own, as the
config refuses to have no correction with K above 0.

The quickstart's answers are about equally long, so with its 256 sequences at once tokens are about
one update old at K = 8 as at K = 2. `--slots` is by default all answers of the window, K+1 steps'.
Then ages go from 0 to K in turn, but not above 3 with the quickstart's 64 prompts a step: the
engine reads 4,096 tokens of prompts before it decodes, and those answers all end together. With
`--prompts 16` (two updates a step, as always) ages go to 8.

`--out` gets validation accuracy against K (staleness.png) and the numbers behind it
(staleness.json); the table goes to stdout, with how old the trained tokens were. Exit status 1: a
run failed; the same command tries it again.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.learning.recipes import (
    ROOT,
    SHORT,
    add_folders,
    base_and_final,
    finished,
    make_base,
    metrics_of,
    place_folders,
    run,
    write_numbers,
)
from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.config.load import read_yaml

CONFIG = ROOT / "configs/quickstart.yaml"
METRIC = "val-core/arithmetic/acc/mean@1"
FOLDERS = ("docs/learning", "runs/staleness")
UNCORRECTED = "no_correction.py"
CORRECTIONS = {
    "none": [f"algorithm.correction=['{UNCORRECTED}:ones']"],
    "token_tis": ["algorithm.correction=[truncated_token]"],
    "icepop": ["algorithm.correction=[icepop]"],
    "behaviour_as_old": ["algorithm.use_rollout_logprobs=true", "algorithm.correction=[]"],
}
ONES = '''"""Weigh all tokens alike."""

import jax.numpy as jnp


def ones(mask):
    """Return ones."""
    return jnp.ones(mask.shape, jnp.float32)
'''


class Job(NamedTuple):
    """A run.

    Attributes:
        staleness: K.
        correction: its name here.
        rate: factor of the learning rate.
        prompts: of a step.
        slots: sequences at once.
        seed: of the run.
    """

    staleness: int
    correction: str
    rate: float
    prompts: int
    slots: int
    seed: int

    @property
    def name(self) -> str:
        """Return the name of its folder, which the seeds share."""
        run = f"k{self.staleness}_rate{self.rate:g}_prompts{self.prompts}_slots{self.slots}"
        return f"staleness/{self.correction}/{run}"

    @property
    def overrides(self) -> list[str]:
        """Return what it changes in the config."""
        return [
            f"rollout.staleness={self.staleness}",
            f"rollout.max_running_sequences={self.slots}",
            f"optim.schedule.init_value={learning_rate(self.rate):g}",
            f"batch.prompts_per_step={self.prompts}",
            f"batch.prompts_per_minibatch={self.prompts // 2}",
            *CORRECTIONS[self.correction],
        ]


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    corrections = {"choices": CORRECTIONS, "default": [*CORRECTIONS], "metavar": "NAME"}
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8], metavar="K")
    parser.add_argument("--corrections", nargs="+", **corrections)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 3], metavar="FACTOR")
    parser.add_argument("--slots", type=int, help="rollout.max_running_sequences")
    parser.add_argument("--prompts", type=int, help="batch.prompts_per_step, even")
    add_folders(parser, *FOLDERS, "--runs")
    args = parser.parse_args(words)
    place_folders(args, *FOLDERS)
    return args


def learning_rate(factor: float) -> float:
    """Return the first step's learning rate."""
    return factor * read_yaml(CONFIG)["optim"]["schedule"]["init_value"]


def jobs(args: argparse.Namespace) -> list[Job]:
    """Return all runs, those of a seed together."""
    config = read_yaml(CONFIG)
    prompts = args.prompts or config["batch"]["prompts_per_step"]
    answers = prompts * config["rollout"]["samples_per_prompt"]
    given = itertools.product(args.seeds, args.rates, args.corrections, args.staleness)
    return [
        Job(staleness, correction, rate, prompts, args.slots or (staleness + 1) * answers, seed)
        for seed, rate, correction, staleness in given
    ]


def train_missing(wanted: Sequence[Job], work: Path, keys: Sequence[str]) -> list[str]:
    """Run what is not finished; return a line for each run that failed."""
    failed = []
    for job in wanted:
        if finished(CONFIG, job.seed, work, job.name):
            continue
        print(f"{job.name} seed {job.seed}", file=sys.stderr, flush=True)
        try:
            run(CONFIG, job.seed, work, *job.overrides, *keys, name=job.name)
        except subprocess.CalledProcessError:
            failed.append(f"{job.name} seed {job.seed} stopped: {work}/runs/{job.name}/")
    return failed


def numbers(job: Job, work: Path) -> dict[str, Any] | None:
    """Return the numbers of a run, or None where it is still to be done."""
    result = finished(CONFIG, job.seed, work, job.name)
    if result is None:
        return None
    lines = metrics_of(work / f"runs/{job.name}/{job.seed}")
    ages = [line.get("async/age/mean", 0.0) for line in lines if line["step"]]
    return {
        **job._asdict(),
        "final": base_and_final(result)[1],
        "mean_age": round(statistics.mean(ages), 3),
        **{key: result[key] for key in ("curve", "seconds", "date", "versions")},
    }


def finals(results: Sequence[dict[str, Any]], **given: Any) -> list[float]:
    """Return the seeds' last accuracies, of the runs that these values describe.

    >>> finals([{"rate": 1, "final": 0.5}, {"rate": 3, "final": 0.25}], rate=3)
    [0.25]
    """
    return [r["final"] for r in results if all(r[key] == value for key, value in given.items())]


def values_of(results: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """Return the values that the runs have, in order."""
    return list(dict.fromkeys(result[key] for result in results))


def cell(values: Sequence[float], seeds: int) -> str:
    """Return mean and least of the seeds' accuracies, and how many there are where some lack.

    >>> cell([0.5, 0.25], 2), cell([0.5], 2), cell([], 2)
    ('0.375 (0.250)', '0.500 (0.500), 1 of 2', '–')
    """
    if not values:
        return "–"
    lacking = "" if len(values) == seeds else f", {len(values)} of {seeds}"
    return f"{statistics.mean(values):.3f} ({min(values):.3f}){lacking}"


def table(results: Sequence[dict[str, Any]], seeds: int) -> str:
    """Return the Markdown table: a row for each rate and correction, a column for each K."""
    columns, rows = sorted(values_of(results, "staleness")), []
    for rate in values_of(results, "rate"):
        for correction in values_of(results, "correction"):
            own = [finals(results, rate=rate, correction=correction, staleness=k) for k in columns]
            cells = [cell(values, seeds) for values in own]
            rows.append([f"{learning_rate(rate):.1e}", f"`{correction}`", *cells])
    ages = [[r["mean_age"] for r in results if r["staleness"] == k] for k in columns]
    rows.append(["", "mean age, updates", *(f"{statistics.mean(own):.2f}" for own in ages)])
    return markdown_table(["learning rate", "correction", *(f"K = {k}" for k in columns)], rows)


def draw(results: Sequence[dict[str, Any]], picture: Path) -> None:
    """Draw a panel for each rate: a line through the means of each correction, and its spread."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rates = values_of(results, "rate")
    figure, panels = plt.subplots(
        1, len(rates), figsize=(4 * len(rates), 3), layout="constrained", squeeze=False, sharey=True
    )
    for rate, axes in zip(rates, panels[0], strict=True):
        for correction in values_of(results, "correction"):
            given = {"rate": rate, "correction": correction}
            columns = sorted(values_of(results, "staleness"))
            own = {k: finals(results, staleness=k, **given) for k in columns}
            points = {k: values for k, values in own.items() if values}
            means = [statistics.mean(values) for values in points.values()]
            axes.plot([*points], means, marker="o", markersize=3, label=correction)
            lowest, highest = map(min, points.values()), map(max, points.values())
            axes.fill_between([*points], [*lowest], [*highest], alpha=0.15)
        axes.set(title=f"learning rate {learning_rate(rate):.1e}", xlabel="rollout.staleness K")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy after the last step, held out")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def write(results: Sequence[dict[str, Any]], words: Sequence[str] | None, out: Path) -> None:
    """Write the numbers and the picture; versions stand once, and not in every run."""
    versions: list[dict[str, Any]] = []
    for result in results:
        own = {name: value for name, value in result["versions"].items() if name != "seed"}
        if own not in versions:
            versions.append(own)
    runs = [{k: v for k, v in result.items() if k != "versions"} for result in results]
    about = {"metric": METRIC, "versions": versions}
    write_numbers(out / "staleness.json", "staleness", words, runs, **about)
    draw(results, out / "staleness.png")


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing, report everything that was asked for and is there."""
    args = arguments(words)
    work = args.work
    (work / UNCORRECTED).write_text(ONES)
    make_base(CONFIG, read_yaml(CONFIG)["model"]["path"], work)
    wanted = jobs(args)
    failed = train_missing(wanted, work, SHORT if args.small else ())
    results = [result for job in wanted if (result := numbers(job, work))]
    if results:
        write(results, words, args.out)
        print(describe_run("learning.staleness", words))
        print("\n" + table(results, len(args.seeds)))
    if failed:
        print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

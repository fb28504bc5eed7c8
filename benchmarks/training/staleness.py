"""Steps whose answers are begun before them (`rollout.staleness`), over answers of given lengths.

    python -m benchmarks.training.staleness
    python -m benchmarks.training.staleness --staleness 0 2 --slots 32 --prompts 16 --sigma 1.5
    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.training.staleness --own-devices --prompts 4
    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.training.staleness --own-devices --reward-s 2

Trains the small model of configs/quickstart from random weights, once for each K. Each answer has a
length of its own, which is drawn from its seed: log-normal with a mean of 40 tokens, cut at 240. A
step has the same prompts and seeds at every K, and so as many tokens to train on; the script fails
where that is not so. K = 0 is always run.

The runs take turns, a step each, so that what else the machine does slows all of them. Not
measured are the first steps, which compile and fill the window (`--warm`, or more until nothing
is compiled any more), and the last ones, which begin nothing new. The same steps are measured at
every K, but not the same tokens are drawn in them: over few steps a window may fill or empty, and
the seconds say little where drawn / trained is not near 1.

With `--own-devices` the engine has the second device where K is above 0, and samples while the
first one trains; at K = 0 one device does both. Devices of a CPU share its cores. With `--reward-s`
scoring a step's answers takes so many seconds, in which nothing is computed; then the runs do not
take turns.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.cli import take_huge_pages
from jaxrl_llm.config.programs import TrainConfig, load_config
from jaxrl_llm.rollout.engine import Completion, Engine, Listener, Request, Stop
from jaxrl_llm.training import run as run_module
from jaxrl_llm.training.run import open_run

MODEL = Path(__file__).parents[2] / "configs/quickstart"
MEAN, LONGEST = 40, 240
REWARD_WORKERS = 8
HEADS = ["K", "s a step: mean", "median", "generation: mean", "median", "tokens/s"]
HEADS += ["drawn / trained", "mean age", "step / K = 0", "generation / K = 0"]

Steps = list[dict[str, float]]  # the metrics of each step


@functools.cache
def length_of(seed: int, sigma: float) -> int:
    """Return the length of the answer with this seed.

    >>> length_of(0, 0.0)
    40
    """
    drawn = np.random.default_rng(seed).lognormal(math.log(MEAN) - sigma**2 / 2, sigma)
    return min(max(round(drawn), 1), LONGEST)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return how many characters an answer has: it varies, so that there is something to learn."""
    del data_source, ground_truth, extra_info
    return len(set(solution_str)) / 100


def slow_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, *, seconds: float
) -> float:
    """Return the same after so many seconds."""
    time.sleep(seconds)
    return score(data_source, solution_str, ground_truth, extra_info)


class PrescribedLengths(Engine):
    """An engine whose answers have the lengths that follow from their seeds, whatever they say.

    Attributes:
        drawn: how many tokens it has drawn.
    """

    def __init__(self, engine: Engine, sigma: float) -> None:
        """Pass on all calls that take no requests."""
        self._engine, self._sigma, self.drawn = engine, sigma, 0
        self.generate, self.stream = engine.generate, engine.stream
        self.load, self.close = engine.load, engine.close
        self.pause, self.resume = engine.pause, engine.resume
        self.sleep, self.wake = engine.sleep, engine.wake

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order."""
        answers = self._engine.sample([self._limited(request) for request in requests])
        return self._counted(requests, answers)

    def sample_until(
        self,
        requests: Sequence[Request],
        needed: int,
        stop: Stop | None = None,
        listener: Listener | None = None,
    ) -> list[Completion]:
        """Sample until the first requests have their answers."""
        limited = [self._limited(r) for r in requests]
        answers = self._engine.sample_until(limited, needed, stop, listener)
        return self._counted(requests, answers)

    def _limited(self, request: Request) -> Request:
        asked = request.sampling
        length = min(length_of(request.seed, self._sigma), asked.max_new_tokens)
        sampling = dataclasses.replace(asked, stop_ids=(), max_new_tokens=length)
        return dataclasses.replace(request, sampling=sampling)

    def _counted(self, requests: Sequence[Request], answers: list[Completion]) -> list[Completion]:
        before = sum(len(r.drawn.tokens) for r in requests if r.drawn is not None)
        self.drawn += sum(len(answer.tokens) for answer in answers) - before
        return answers


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2], metavar="K")
    parser.add_argument("--slots", type=int, default=64, help="rollout.max_running_sequences")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, 8 answers each; even")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the lengths")
    parser.add_argument("--steps", type=int, default=40, help="in all")
    parser.add_argument("--own-devices", action="store_true", help="for the engine where K > 0")
    parser.add_argument("--reward-s", type=float, help="seconds to score a step's answers")
    parser.add_argument("--warm", type=int, default=8, help="first steps that are left out")
    args = parser.parse_args(words)
    args.staleness = sorted({0, *args.staleness})
    if args.steps <= args.warm + args.staleness[-1]:
        parser.error(f"--steps {args.steps}: expected more than --warm and the largest K together")
    return args


def settings(staleness: int, args: argparse.Namespace, folder: Path) -> TrainConfig:
    """Return the config of a run: the quickstart's, with two updates a step as there."""
    reward: dict[str, Any] = {"function": score, "workers": 0}
    if args.reward_s:
        each = args.reward_s * REWARD_WORKERS / (args.prompts * 8)
        function = {"fn": f"{__file__}:slow_score", "seconds": each}
        reward = {"function": function, "workers": REWARD_WORKERS}
    own = {
        "mesh.train.devices": 1,
        "mesh.rollout.first_device": int(args.own_devices and staleness > 0),
        "mesh.rollout.devices": 1,
    }
    return load_config(
        "quickstart",
        {
            "run_dir": str(folder / f"k{staleness}"),
            "steps": args.steps,
            "model.path": str(MODEL),
            "model.random_init": True,
            "model.warm_start": None,
            "data.train": str(folder / "data/train.parquet"),
            "data.validation": [],
            "data.prepare.out": str(folder / "data"),
            "rollout.staleness": staleness,
            "rollout.max_new_tokens": LONGEST,
            "rollout.max_running_sequences": args.slots,
            "rollout.dump_every": 0,
            "reward": reward,
            **own,
            "batch.prompts_per_step": args.prompts,
            "batch.prompts_per_minibatch": args.prompts // 2,
            "batch.max_tokens_per_device": 2048,
            "validation.every": 0,
            "checkpoint.every": 0,
            "log.trackers": [],
        },
    )


def train(args: argparse.Namespace, folder: Path) -> dict[int, Steps]:
    """Run all steps at every K, in turns.

    Returns:
        The metrics of each step, and of tokens how many are `trained` and `drawn` in it.
    """
    make_engine, engines = run_module.make_engine, list[PrescribedLengths]()

    def make(*given: Any) -> PrescribedLengths:
        engines.append(PrescribedLengths(make_engine(*given), args.sigma))
        return engines[-1]

    lines: dict[int, Steps] = {staleness: [] for staleness in args.staleness}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # the table alone is there
        stack.enter_context(mock.patch.object(run_module, "make_engine", make))
        runs = {k: stack.enter_context(open_run(settings(k, args, folder))) for k in lines}
        turns = [[staleness] * args.steps for staleness in runs]
        for staleness in itertools.chain(*(turns if args.reward_s else zip(*turns, strict=True))):
            engine = engines[list(runs).index(staleness)]
            before, step = engine.drawn, runs[staleness].step()
            tokens = {"trained": step.batch["mask"].sum(), "drawn": engine.drawn - before}
            lines[staleness].append({**step.metrics, **tokens})
    return lines


def check_equal_work(lines: Mapping[int, Steps]) -> None:
    """Refuse runs that do not train on as many tokens in each step.

    Raises:
        RuntimeError: they do not.
    """
    trained = {staleness: [line["trained"] for line in steps] for staleness, steps in lines.items()}
    if any(tokens != trained[0] for tokens in trained.values()):
        totals = {staleness: sum(tokens) for staleness, tokens in trained.items()}
        raise RuntimeError(f"expected the same tokens in each step at every K, got {totals} in all")


def measured(lines: Mapping[int, Steps], warm: int) -> slice:
    """Return the steps after the last one that has compiled or loaded a program, with full windows.

    Raises:
        RuntimeError: there is none.
    """
    end, names = len(lines[0]) - max(lines), ("perf/compilations", "perf/compilation_cache_hits")
    compiling = [
        i for steps in lines.values() for i in range(end) if any(steps[i][name] for name in names)
    ]
    begin = max([warm, *(i + 1 for i in compiling)])
    if begin >= end:
        raise RuntimeError(
            f"step {begin} still compiled, expected some of the {end} with full windows after the "
            "last that does: raise --steps, or run the same command again"
        )
    return slice(begin, end)


def row(staleness: int, steps: Steps, base: Steps) -> list[str]:
    """Return a run's cells of the table; `base` has the steps of K = 0."""
    seconds, ratios = [], []
    for name in ("timing_s/step", "timing_s/gen"):
        own = [step[name] for step in steps]
        seconds += [f"{statistics.mean(own):.3f}", f"{statistics.median(own):.3f}"]
        ratios.append(f"{sum(own) / sum(step[name] for step in base):.2f}")
    trained, drawn, total = (
        sum(step[name] for step in steps) for name in ("trained", "drawn", "timing_s/step")
    )
    age = statistics.mean(step.get("async/age/mean", 0.0) for step in steps)
    return [
        str(staleness),
        *seconds,
        f"{trained / total:.0f}",
        f"{drawn / trained:.2f}",
        f"{age:.2f}",
        *ratios,
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Run all K, check that they did the same work, and print the table."""
    args = arguments(words)
    if words is None:
        take_huge_pages()
    with tempfile.TemporaryDirectory() as folder:
        lines = train(args, Path(folder))
    check_equal_work(lines)
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    print(f"\n{describe_run('training.staleness', words)}, {versions}")
    steps = measured(lines, args.warm)
    tokens = sum(line["trained"] for line in lines[0][steps])
    where = f"steps {steps.start + 1} to {steps.stop} of {args.steps}"
    print(f"{where}, {tokens:.0f} tokens trained in them at every K\n")
    rows = [row(k, own[steps], lines[0][steps]) for k, own in lines.items()]
    print(markdown_table(HEADS, rows))


if __name__ == "__main__":
    main()

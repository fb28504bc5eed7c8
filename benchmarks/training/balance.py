"""How evenly sequences are shared out over data ranks: the plan against best-fit-decreasing.

    python -m benchmarks.training.balance        the table, as Markdown

Sizes are lognormal with mean 512 before they are cut at 4,096 tokens, the length of a row. All
figures are means over several draws. A step is the time of the slowest ranks of all its
micro-batches; its bound is what ranks would take if the same sequences could be divided freely.
"""

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.tables import describe_run, markdown_head, markdown_row, parser_of
from jaxrl_llm.data.packing import (
    VERL_COST,
    RowShape,
    best_fit,
    imbalance,
    plan_microbatches,
    row_shape,
    sum_by_rank,
)

MEAN, LENGTH, DRAWS = 512, 4096, 10
Plan = list[list[list[int]]]


def lognormal(seed: int, sequences: int, sigma: float = 1.0) -> np.ndarray:
    """Draw sizes."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(MEAN) - sigma**2 / 2, sigma, sequences)
    return np.clip(drawn, 1, LENGTH).astype(np.int32)


def in_order(sizes: np.ndarray, shape: RowShape) -> Plan:
    """Cut the rows of best-fit-decreasing into micro-batches as they come."""
    rows = best_fit(sizes, shape)
    rows += [[]] * (-len(rows) % shape.rows)
    return [rows[at : at + shape.rows] for at in range(0, len(rows), shape.rows)]


def padded(sizes: np.ndarray, plan: Plan, shape: RowShape) -> float:
    """Return a step over its bound, where padding costs all but attention too."""
    squares = sum_by_rank(VERL_COST(sizes) - sizes, plan, shape.ranks)
    slowest = (squares + shape.tokens / shape.ranks).max(1).sum()
    return float(slowest * shape.ranks / VERL_COST(sizes).sum())


def measure(
    make: Callable[[np.ndarray, RowShape], Plan], sequences: int, shape: RowShape
) -> list[float]:
    """Return micro-batches, imbalance, the same with padding, and the seconds of a core to plan."""
    figures = []
    for seed in range(DRAWS):
        sizes = lognormal(seed, sequences)
        start = time.process_time()
        plan = make(sizes, shape)
        seconds = time.process_time() - start
        waiting = imbalance(sizes, plan, shape.ranks, VERL_COST)["perf/imbalance"]
        figures.append((len(plan), waiting, padded(sizes, plan, shape), seconds))
    return [statistics.mean(column) for column in zip(*figures, strict=True)]


def bound(sequences: int, shape: RowShape) -> float:
    """Return the mean of the fewest micro-batches that hold the tokens."""
    totals = [int(lognormal(seed, sequences).sum()) for seed in range(DRAWS)]
    return statistics.mean(-(-total // shape.tokens) for total in totals)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[512, 4096], metavar="N")
    sequences = parser.parse_args(words).sequences
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{describe_run('training.balance', words)}, {versions}; {DRAWS} draws\n")
    heads = ["sequences", "ranks", "rows each", "micro-batches: best fit", "ours", "bound"]
    heads += [
        "step / bound: best fit",
        "ours",
        "padding counted: best fit",
        "ours",
        "CPU ms to plan",
    ]
    print(markdown_head(heads))
    for count, ranks, rows in itertools.product(sequences, (1, 8, 32), (1, 2, 4)):
        tokens = ranks * rows * LENGTH
        shape = row_shape(tokens, LENGTH, sequences=count, multiple_of=ranks)
        old, new = (measure(make, count, shape) for make in (in_order, plan_microbatches))
        cells = [count, ranks, rows, f"{old[0]:.1f}", f"{new[0]:.1f}"]
        cells += [f"{bound(count, shape):.1f}"]
        cells += [f"{value:.3f}" for pair in zip(old[1:3], new[1:3], strict=True) for value in pair]
        print(markdown_row([*cells, f"{1000 * new[3]:.0f}"]), flush=True)


if __name__ == "__main__":
    main()

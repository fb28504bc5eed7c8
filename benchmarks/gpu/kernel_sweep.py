"""The kernel over pages alone: its stages, tokens at once and warps, and long tables.

    python -m benchmarks.gpu.kernel_sweep
    python -m benchmarks.gpu.kernel_sweep --small     interpreted, on any device: does it run?

16 query heads and 8 key/value heads of 128, as in Qwen3-1.7B, in bfloat16. Prints a JSON object a
line: microseconds of one call, the rate at which keys and values were read, and the relative
difference from the result of the first line. Tables are longer than the sequences in the last
lines: what a program costs that has nothing to read.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.cases import describe_error, emit
from jaxrl_llm.models import paged_triton
from jaxrl_llm.models.attention import LayerCache
from jaxrl_llm.models.paged_triton import Blocks

PAGE, HEADS, KEYS, WIDTH = 16, 16, 8, 128


class Given(NamedTuple):
    """What the kernel is called with.

    Attributes:
        arguments: queries, pages and positions.
        read: bytes of keys and values that it has to read.
    """

    arguments: tuple[Any, LayerCache, Any, Any]
    read: int


class Launch(NamedTuple):
    """How the kernel is cut and launched; None: as it does by itself."""

    blocks: Blocks | None = None
    stages: int | None = None
    warps: int | None = None


AS_IT_IS = Launch()


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--small", action="store_true", help="one tiny case, interpreted")
    parser.add_argument("--runs", type=int, default=50, help="calls that are timed together")
    return parser.parse_args(words)


def draw(rows: int, table: int, mean: int, spread: int) -> Given:
    """Draw sequences of normal lengths, and lay their pages out in a random order."""
    rng = np.random.default_rng(0)
    positions = np.clip(rng.normal(mean, spread, rows), 1, table * PAGE - 1).astype(np.int32)
    used = -(-(positions + 1) // PAGE)
    order, pages = rng.permutation(used.sum()), np.zeros((rows, table), np.int32)
    for row, ends in enumerate(np.cumsum(used)):
        pages[row, : used[row]] = order[ends - used[row] : ends]
    shapes = (len(order), KEYS, WIDTH, PAGE), (len(order), KEYS, PAGE, WIDTH), (rows, HEADS, WIDTH)
    keys, values, queries = (
        jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        for seed, shape in enumerate(shapes)
    )
    held = LayerCache(keys, values)
    read = int((positions + 1).sum()) * KEYS * 2 * 2 * WIDTH
    return Given((queries, held, jnp.asarray(pages), jnp.asarray(positions)), read)


def measure(given: Given, launch: Launch, runs: int, small: bool) -> tuple[float, np.ndarray]:
    """Return the seconds of one call of many, each with the result of the one before as queries."""
    kind = paged_triton.triton.CompilerParams

    def params(num_warps: int, num_stages: int) -> Any:
        return kind(num_warps=launch.warps or num_warps, num_stages=launch.stages or num_stages)

    def repeat(queries: Any, pages: LayerCache, table: Any, positions: Any) -> Any:
        def call(_: Any, q: Any) -> Any:
            mixed = paged_triton.attend_pages(
                q, pages, table, positions, blocks=launch.blocks, interpret=small
            )
            return mixed.astype(q.dtype)

        return jax.lax.fori_loop(0, runs, call, queries)

    with mock.patch.object(paged_triton.triton, "CompilerParams", params):
        run = jax.jit(repeat).lower(*given.arguments).compile()
    jax.block_until_ready(run(*given.arguments))
    begun = time.perf_counter()
    result = jax.block_until_ready(run(*given.arguments))
    return (time.perf_counter() - begun) / runs, np.asarray(result, np.float32)


class Sweep:
    """Measures variants and compares each with the first one of its arguments."""

    def __init__(self, runs: int, small: bool) -> None:
        """Measure nothing yet."""
        self._runs, self._small = runs, small
        self._first: dict[int, np.ndarray] = {}

    def row(self, what: str, given: Given, launch: Launch = AS_IT_IS, **labels: Any) -> None:
        """Print a variant's row."""
        try:
            seconds, result = measure(given, launch, self._runs, self._small)
        except Exception as error:  # too much shared memory, for one: the next may be smaller
            emit(what=what, **labels, error=describe_error(error))
            return
        first = self._first.setdefault(id(given), result)
        off = float(np.linalg.norm(result - first) / np.linalg.norm(first))
        rate = given.read / seconds
        emit(
            what=what, **labels, microseconds=1e6 * seconds, terabytes_a_second=rate / 1e12, off=off
        )


def main(words: Sequence[str] | None = None) -> None:
    """Print the rows, the most telling first."""
    options = arguments(words)
    sweep = Sweep(2 if options.small else options.runs, options.small)
    if options.small:
        sweep.row("as it is: 4 x 20 of 64 tokens", draw(4, 4, 20, 5), tokens=64)
        return
    even = draw(256, 24, 319, 0)
    sweep.row("as it is: 256 x 320 of 384 tokens", even)
    variants = [(stages, pages, 4) for stages in (3, 4, 2) for pages in (4, 8, 2)]
    variants += [(2, pages, 8) for pages in (4, 8)]
    for stages, pages, warps in variants:
        launch = Launch(Blocks(16, pages, 24, 1), stages, warps)
        labels = {"stages": stages, "tokens_at_once": PAGE * pages, "warps": warps}
        sweep.row("256 x 320 of 384 tokens", even, launch, **labels)
    for table in (128, 512, 2048):
        given = draw(256, table, 2000, 500)
        sweep.row("256 x 2000 +- 500 tokens", given, table_tokens=PAGE * table)


if __name__ == "__main__":
    main()

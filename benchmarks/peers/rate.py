"""Measure the rate of float32 matrix products in one library, in GFLOP/s: a JSON list is printed.

Each shape is run for about half a second, five times, and the best is taken.
"""

import argparse
import json
import time
from collections.abc import Callable


def product(library: str, m: int, k: int, n: int) -> Callable[[], object]:
    """Return a function that multiplies two matrices and waits for the result."""
    if library == "torch":
        import torch

        left, right = torch.randn(m, k), torch.randn(k, n)
        return lambda: left @ right
    import jax

    multiply = jax.jit(lambda left, right: left @ right)
    keys = jax.random.split(jax.random.key(0))
    left, right = jax.random.normal(keys[0], (m, k)), jax.random.normal(keys[1], (k, n))
    return lambda: multiply(left, right).block_until_ready()


def seconds(run: Callable[[], object], times: int) -> float:
    """Return the seconds of one run, as a mean over so many."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def main() -> None:
    """Print the rate of each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("jax", "torch"))
    parser.add_argument("shapes", type=json.loads, help="a JSON list of [rows, inner, columns]")
    options = parser.parse_args()
    rates = []
    for m, k, n in options.shapes:
        run = product(options.library, m, k, n)
        seconds(run, 2)
        times = max(1, int(0.5 / seconds(run, 3)))
        best = min(seconds(run, times) for _ in range(5))
        rates.append(2 * m * k * n / best / 1e9)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()

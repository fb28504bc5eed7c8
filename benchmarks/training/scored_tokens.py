"""Log-probs and their gradient, where only some of the tokens are responses.

    python -m benchmarks.training.scored_tokens

Hidden states of so many tokens meet the output projection of a model, by default that of
SmolLM2-135M; `token_stats` scores all of them, or those that are needed. Seconds are the median of
the repetitions after the first, which compiles. The script fails where the gradients of the two
ways differ. Compare only on a machine that does nothing else.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tables import describe_run, markdown_head, markdown_row, parser_of
from jaxrl_llm.algorithms.logprobs import token_stats

SHARES = (1.0, 0.5, 0.1)
CHUNKS = (256, 1024)
HEADS = ["needed", "chunk", "all scored, s", "needed ones scored, s", "faster by"]


def median_seconds(function: Any, *arguments: Any, repeats: int) -> float:
    """Return the median of the seconds that a compiled function takes."""
    jax.block_until_ready(function(*arguments))
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def row(arrays: tuple[Any, Any, Any], share: float, chunk: int, repeats: int) -> list[str]:
    """Time both ways where a share of the tokens is needed; return the cells of the table."""
    hidden, head, targets = arrays
    needed = jnp.asarray(np.random.default_rng(0).random(len(targets)) < share)

    def loss(hidden: Any, head: Any, *needed_only: Any) -> Any:
        stats = token_stats(hidden, head, targets, *needed_only, chunk=chunk)
        return jnp.where(needed, stats.logprobs, 0.0).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    both = zip(gradient(hidden, head, needed), gradient(hidden, head), strict=True)
    for some, every in both:
        np.testing.assert_allclose(some, every, rtol=1e-3, atol=1e-4)
    every_s = median_seconds(gradient, hidden, head, repeats=repeats)
    some_s = median_seconds(gradient, hidden, head, needed, repeats=repeats)
    return [
        f"{share:.0%}",
        f"{chunk}",
        f"{every_s:.2f}",
        f"{some_s:.2f}",
        f"{every_s / some_s:.2f}",
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(words)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (options.tokens, options.width))
    head = 0.05 * jax.random.normal(keys[1], (options.width, options.vocabulary))
    targets = jax.random.randint(keys[2], (options.tokens,), 0, options.vocabulary)
    print(f"{describe_run('training.scored_tokens', words)}, jax {jax.__version__}\n")
    print(markdown_head(HEADS))
    for share in SHARES:
        for chunk in CHUNKS:
            cells = row((hidden, head, targets), share, chunk, options.repeats)
            print(markdown_row(cells), flush=True)


if __name__ == "__main__":
    main()

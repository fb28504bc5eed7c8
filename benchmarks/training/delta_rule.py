"""The gated delta rule by chunks, against a scan over tokens and torch's chunks in transformers.

    python -m benchmarks.training.delta_rule

One sequence in float32 with heads as Qwen3.5-0.8B has them. Each function gives the reads, and the
gradients of the sum of their squares; the script fails where these differ. Seconds are the least of
the repetitions after the first, the functions in turn. Scratch is the memory that XLA plans for
the compiled gradient besides its inputs and results.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tables import describe_run, markdown_head, markdown_row, parser_of
from jaxrl_llm.models.delta import gated_delta_rule

HEADS = [
    "tokens",
    "function",
    "reads, s",
    "against chunks",
    "with gradients, s",
    "against chunks",
    "scratch, MiB",
]
CHUNKS = "chunks"
TOLERANCE = 1e-3  # of gradients, relative to the largest number


def scan_tokens(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
    """Return the reads, token by token as the equation has it."""

    def step(state: Any, token: Any) -> Any:
        q, k, v, log_decay, beta = token
        state = state * jnp.exp(log_decay)[..., None, None]
        change = (v - (state * k[..., None]).sum(axis=2)) * beta[..., None]
        state = state + k[..., None] * change[:, :, None]
        return state, (state * q[..., None]).sum(axis=2)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, log_decay, beta))
    start = jnp.zeros((*v.shape[::2], k.shape[-1], v.shape[-1]))
    return jax.lax.scan(step, start, tokens)[1].swapaxes(0, 1)


def draw(length: int, heads: int, width: int) -> list[np.ndarray]:
    """Return queries and keys of length 1, values, logarithms of decays, and rates of writing."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, length, heads, width))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay, beta = -0.1 * rng.exponential(size=v.shape[:3]), rng.uniform(size=v.shape[:3])
    return [x.astype(np.float32) for x in (q / width**0.5, k, v, log_decay, beta)]


Function = Callable[[], list[np.ndarray]]
Pair = tuple[Function, Function]
"""What gives the reads, and what gives the gradients."""


def jax_functions(function: Any, arrays: list[np.ndarray]) -> tuple[Pair, float]:
    """Return a function's pair, and the scratch of its gradients in MiB."""
    given = [jnp.asarray(x) for x in arrays]

    def total(*arrays: Any) -> Any:
        return (function(*arrays) ** 2).sum()

    reads = jax.jit(function).lower(*given).compile()
    gradients = jax.jit(jax.grad(total, argnums=range(5))).lower(*given).compile()
    sizes: Any = gradients.memory_analysis()
    pair = (lambda: [np.asarray(reads(*given))], lambda: [np.asarray(x) for x in gradients(*given)])
    return pair, sizes.temp_size_in_bytes / 2**20


def torch_functions(arrays: list[np.ndarray]) -> Pair:
    """Return the pair of the chunks of transformers, which scales the queries itself."""
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5

    given = [torch.tensor(x, requires_grad=True) for x in arrays]
    scale = arrays[0].shape[-1] ** 0.5

    def call() -> Any:
        q, k, v, log_decay, beta = given
        rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
        return rule(q * scale, k, v, g=log_decay, beta=beta)[0]

    def reads() -> list[np.ndarray]:
        with torch.no_grad():
            return [call().numpy()]

    return reads, lambda: [x.numpy() for x in torch.autograd.grad((call() ** 2).sum(), given)]


def check(name: str, ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Compare the results of two functions.

    Raises:
        SystemExit: they differ.
    """
    for one, other in zip(ours, theirs, strict=True):
        gap = np.abs(one - other).max() / np.abs(other).max()
        if not gap < TOLERANCE:
            raise SystemExit(f"{name}: got a difference of {gap:.2g}, expected < {TOLERANCE}")


def measure(length: int, heads: int, width: int, repeats: int) -> list[list[str]]:
    """Return the lines of the table for sequences of one length."""
    arrays = draw(length, heads, width)
    ids = jnp.ones((1, length), jnp.int32)

    def by_chunks(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
        return gated_delta_rule(q, k, v, log_decay, beta, ids)[0]

    chunks, scratch = jax_functions(by_chunks, arrays)
    tokens, token_scratch = jax_functions(scan_tokens, arrays)
    functions = {CHUNKS: chunks, "scan": tokens, "torch": torch_functions(arrays)}
    sizes = [f"{scratch:,.0f}", f"{token_scratch:,.0f}", "–"]
    took: dict[str, list[list[float]]] = {name: [[], []] for name in functions}
    for repeat in range(repeats + 1):
        for which in (0, 1):
            results = {}
            for name, pair in functions.items():
                start = time.perf_counter()
                results[name] = pair[which]()
                if repeat:
                    took[name][which].append(time.perf_counter() - start)
            for name, result in results.items():
                check(name, results[CHUNKS], result)
    least = {name: [min(seconds) for seconds in pair] for name, pair in took.items()}
    lines = []
    for (name, pair), size in zip(least.items(), sizes, strict=True):
        cells = [(f"{s:.3f}", f"{s / c:.1f}") for s, c in zip(pair, least[CHUNKS], strict=True)]
        lines.append([f"{length}", name, *cells[0], *cells[1], size])
    return lines


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(words)
    print(f"{describe_run('training.delta_rule', words)}, jax {jax.__version__}\n")
    print(markdown_head(HEADS))
    for length in options.lengths:
        for line in measure(length, options.heads, options.width, options.repeats):
            print(markdown_row(line), flush=True)


if __name__ == "__main__":
    main()

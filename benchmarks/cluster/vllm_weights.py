"""How long weights take to reach a vLLM sidecar, and how far its log-probs are from the trainer's.

    python -m benchmarks.cluster.vllm_weights --sizes 0.1 1       GB of weights in float32
    python -m benchmarks.cluster.vllm_weights --sizes 0.1 --dtype bfloat16

For each size it makes a random model of Qwen3's architecture and prints as Markdown

- a weight sync, from the trainer's arrays to weights in use, all checksums compared: the median of
  `--repeats` after the first;
- the same through the connection, as between hosts;
- the same weights through a checkpoint: saving it to the disk, and reading it back into arrays,
  which is less than what vLLM would have to do;
- the differences between vLLM's log-probs of sampled tokens and those of the trainer's forward
  pass over the same tokens, at temperature 1 and at 0.7 with top-p.

Needs the environment of `python -m jaxrl_llm.rollout.vllm.setup`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import compute_dtypes, init_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.vllm.engine import VllmEngine
from jaxrl_llm.rollout.vllm.setup import find_python
from jaxrl_llm.sharding.reshard import cast_tree

VOCABULARY = 4096
PROMPT, ANSWER, ANSWERS = 32, 64, 64
SAMPLING_OPTIONS = {
    "temperature 1": {},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
}


def spec_of(gb: float) -> ModelSpec:
    """Return a model with so many GB of float32 weights, about.

    >>> from jaxrl_llm.models.parameters import declare
    >>> leaves = jax.tree.leaves(declare(spec_of(0.1)))
    >>> round(float(4e-9 * sum(np.prod(leaf.shape) for leaf in leaves)), 1)
    0.1
    """
    width, layers = (512, 6) if gb < 0.5 else (1024, 16)
    spec: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "heads": width // 64,
        "kv_heads": width // 128,
        "head_dim": 64,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "qk_norm": True,
        "tied_embeddings": True,
        "max_positions": 4096,
        "layers": layers,
    }
    others = VOCABULARY * width + layers * 3 * width * width
    feed_forward = (gb * 1e9 / 4 - others) / (3 * width * layers)
    return ModelSpec(**spec, ff_width=round(feed_forward / 64) * 64)


def seconds_of(action: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of an action after its first run."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure_sync(
    engine: VllmEngine, params: Any, spec: ModelSpec, options: argparse.Namespace, folder: Path
) -> list[str]:
    """Return a line of the table of weight syncs."""
    versions = iter(range(1, 1000))
    load = lambda: engine.load(params, version=next(versions))  # noqa: E731
    moved = load().moved_bytes
    memory = seconds_of(load, options.repeats)
    for replica in engine._replicas:
        replica.sidecar.shared = False  # as if it were on another host
    connection = seconds_of(load, options.repeats)
    for replica in engine._replicas:
        replica.sidecar.shared = True
    saved = iter(range(1000))
    save = lambda: save_params(  # noqa: E731
        folder / f"saved_{next(saved)}", params, spec, source=None, dtype=options.dtype
    )
    write = seconds_of(save, options.repeats)
    read = seconds_of(
        lambda: jax.block_until_ready(load_params(folder / "saved_0", spec)), options.repeats
    )
    rate = moved / memory / 1e9
    return [
        f"{moved / 1e9:.3f}",
        f"{memory:.2f}",
        f"{rate:.2f}",
        f"{connection:.2f}",
        f"{write:.2f}",
        f"{read:.2f}",
        f"{(write + read) / memory:.1f}",
    ]


def differences(
    engine: VllmEngine, params: Any, spec: ModelSpec, dtype: str
) -> Iterator[list[str]]:
    """Yield a line of the table of log-probs for each way of sampling."""
    own = cast_tree(params, compute_dtypes(spec, dtype))

    @jax.jit
    def logprobs(tokens: Any, temperature: Any) -> Any:
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        decoder = Decoder(spec)
        hidden, _ = decoder.hidden_states(own, tokens, place, jnp.ones_like(tokens))
        scores = decoder.logits(own, hidden).astype(jnp.float32) / temperature
        chosen = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], 2)[..., 0]
        return chosen - jax.nn.logsumexp(scores[:, :-1], axis=-1)

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCABULARY, (ANSWERS, PROMPT))
    for name, options in SAMPLING_OPTIONS.items():
        sampling = SamplingParams(max_new_tokens=ANSWER, **options)
        asked = [Request(tuple(map(int, p)), sampling, i) for i, p in enumerate(prompts)]
        answers = engine.sample(asked)
        tokens = np.concatenate([prompts, [a.tokens for a in answers]], axis=1)
        trainers = np.asarray(logprobs(tokens, sampling.temperature))[:, PROMPT - 1 :]
        gap = np.abs(trainers - np.array([a.logprobs for a in answers]))
        quantiles = [f"{q:.1e}" for q in np.quantile(gap, (0.5, 0.9, 0.99, 1.0))]
        yield [dtype, name, f"{gap.mean():.1e}", *quantiles]


def report(lines: list[list[str]], heads: str) -> None:
    """Print a table."""
    print("\n" + markdown_table(heads.split(" | "), lines))


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 1.0], metavar="GB")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, metavar="DIR", help="where checkpoints are written")
    options = parser.parse_args(words)
    try:
        find_python(None)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    sync_times, gaps = [], []
    for size in options.sizes:
        spec = spec_of(size)
        params = init_params(spec, key=jax.random.key(0))
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            engine = VllmEngine(
                spec,
                EngineSettings(ANSWERS, PROMPT + ANSWER, dtype=options.dtype),
                source=None,
                config=VllmConfig(),
                folder=Path(folder) / "vllm",
            )
            try:
                sync_times.append(measure_sync(engine, params, spec, options, Path(folder)))
                gaps += differences(engine, params, spec, options.dtype)
            finally:
                engine.close()
    print(f"{describe_run('cluster.vllm_weights', words)}, jax {jax.__version__}")
    heads = "GB | weight sync, s | GB/s | through the connection, s | save a checkpoint, s"
    report(sync_times, f"{heads} | read, s | weight sync is faster by")
    report(gaps, "dtype | sampled at | mean | median | 90 % | 99 % | largest difference, nats")


if __name__ == "__main__":
    main()

"""How far the engine's log-probs are from the trainer's, by the dtype of keys and values.

    python -m benchmarks.generation.kv_cache_dtype MODEL [--dtype bfloat16] [--prompt-tokens 256]

MODEL is a Hugging Face directory. The prompts are the beginnings of this repository's pages,
`--prompt-tokens` of each. The engine samples an answer of `--new-tokens` to each at temperature 1;
the trainer's forward pass computes the same tokens' log-probs in float32. Both engines draw by the
same seeds. The table says how far they are off, and of how many answers all tokens are those that
the engine without int8 drew.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer

from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import Completion, EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh

PAGES = Path(__file__).resolve().parents[2] / "docs"


class Sampled(NamedTuple):
    """Answers, and how many tokens a GB holds."""

    answers: list[Completion]
    tokens_per_gb: float


def sample_answers(
    spec: ModelSpec, params: Any, requests: Sequence[Request], dtype: str, kv_cache_dtype: str
) -> Sampled:
    """Sample an answer to each request."""
    first = requests[0]
    longest = len(first.prompt) + first.sampling.max_new_tokens
    settings = EngineSettings(len(requests), longest, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    engine = NativeEngine(Decoder(spec), settings, layout=layout)
    try:
        engine.load(params, version=0)
        answers = engine.sample(requests)
        return Sampled(answers, 16e9 / engine.programs.page_bytes())
    finally:
        engine.close()


def differences(
    spec: ModelSpec, params: Any, requests: Sequence[Request], answers: Sequence[Completion]
) -> np.ndarray:
    """Return |engine's - trainer's log-prob| of every token drawn."""

    @jax.jit
    def run(params: Any, row: jax.Array) -> jax.Array:
        positions = jnp.arange(row.size)[None]
        ones = jnp.ones_like(positions)
        hidden = Decoder(spec).hidden_states(params, row[None], positions, ones)[0][0]
        start = len(requests[0].prompt) - 1
        after = jax.nn.log_softmax(Decoder(spec).logits(params, hidden[start:-1]))
        return jnp.take_along_axis(after, row[start + 1 :, None], axis=1)[:, 0]

    off = []
    for request, answer in zip(requests, answers, strict=True):
        row = jnp.array([*request.prompt, *answer.tokens])
        off.append(np.abs(np.asarray(run(params, row)) - answer.logprobs))
    return np.concatenate(off)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args(words)
    spec, tokenizer = read_spec(options.model), AutoTokenizer.from_pretrained(options.model)
    params = load_params(options.model, spec)
    texts = [tokenizer.encode(page.read_text()) for page in sorted(PAGES.glob("*.md"))]
    sampling = SamplingParams(options.new_tokens)
    requests = [
        Request(tuple(text[: options.prompt_tokens]), sampling, seed)
        for seed, text in enumerate(texts)
        if len(text) >= options.prompt_tokens
    ]
    rows, plain = [], None
    for kind in ("auto", "int8"):
        sampled = sample_answers(spec, params, requests, options.dtype, kind)
        plain = plain or sampled.answers
        off = differences(spec, params, requests, sampled.answers)
        pairs = zip(plain, sampled.answers, strict=True)
        same = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in pairs)
        quantiles = np.quantile(off, [0.5, 0.9, 0.99, 1])
        figures = [f"{figure:.2g}" for figure in (off.mean(), *quantiles)]
        rows.append([kind, *figures, f"{same} of {len(requests)}", f"{sampled.tokens_per_gb:,.0f}"])
    print(describe_run("generation.kv_cache_dtype", words))
    print(f"\n{len(requests)} answers of {options.new_tokens} tokens, {options.dtype}\n")
    header = ["kv_cache_dtype", "mean", "median", "90 %", "99 %", "largest, nats", "same", "per GB"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()

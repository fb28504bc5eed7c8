"""Models, prompts and answers' lengths of the comparisons with other libraries."""

import math
import random
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.flops import causal_pairs, forward_flops
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.models.spec import ModelSpec

PROMPTS, SAMPLES, NEW_TOKENS, VOCABULARY = 16, 8, 64, 512
ROPE_THETA, KL_COEF, LEARNING_RATE, GRAD_CLIP = 1e6, 0.01, 1e-5, 1.0
PROMPTS_AT_ONCE = 2
"""Prompts, with all their answers, in a micro-batch of TRL and Tunix. All 16 took as long or longer
where answers are equally long (benchmarks/README.md)."""
TOKENS_AT_ONCE = 2048
"""Tokens in a micro-batch of ours, likewise; a CPU's caches hold the activations of so many."""


class Shape(NamedTuple):
    """The numbers of a decoder that its FLOPs depend on."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff_width: int


class Workload(NamedTuple):
    """A model and its answers' lengths.

    Attributes:
        model: name of its shape.
        spread: whether lengths differ.
    """

    model: str
    spread: bool

    @property
    def max_new_tokens(self) -> int:
        """Return the longest answer."""
        return NEW_TOKENS * (4 if self.spread else 1)


MODELS = {
    "tiny": Shape(width=128, layers=4, heads=4, kv_heads=2, head_dim=32, ff_width=384),
    "small": Shape(width=512, layers=8, heads=8, kv_heads=4, head_dim=64, ff_width=1536),
}
WORKLOADS = {
    f"{model}{suffix}": Workload(model, spread)
    for suffix, spread in (("", False), ("-spread", True))
    for model in MODELS
}


def sums(steps: int, seed: int = 0) -> list[list[str]]:
    """Return the prompts of every step: sums to work out."""
    rng = random.Random(seed)

    def prompt() -> str:
        a, b, c = (rng.randrange(1000) for _ in range(3))
        return f"Question: what is {a} {rng.choice('+-*')} {b} {rng.choice('+-*')} {c}? Answer:"

    return [[prompt() for _ in range(PROMPTS)] for _ in range(steps)]


def lognormal_lengths(count: int, mean: int, most: int, sigma: float = 1.0) -> list[int]:
    """Return lengths at evenly spaced quantiles of a log-normal distribution, cut at `most`.

    The scale is such that their mean is `mean`, up to rounding.

    >>> lengths = lognormal_lengths(128, 64, 256)
    >>> round(sum(lengths) / 128), min(lengths), max(lengths)
    (64, 3, 256)
    """
    normal = statistics.NormalDist()
    drawn = [math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]

    def cut(scale: float) -> list[int]:
        return [max(1, min(most, round(scale * value))) for value in drawn]

    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) <= mean * count else (low, middle)
    return cut(low)


def lengths_of(workload: Workload, steps: int, seed: int = 0) -> list[list[int]]:
    """Return the length of each answer of every step; steps differ in their order."""
    count = PROMPTS * SAMPLES
    if not workload.spread:
        return [[NEW_TOKENS] * count] * steps
    rng = random.Random(seed)
    lengths = lognormal_lengths(count, NEW_TOKENS, workload.max_new_tokens)
    return [rng.sample(lengths, count) for _ in range(steps)]


def spec_of(shape: Shape) -> ModelSpec:
    """Return the spec of a shape.

    >>> from jaxrl_llm.models.flops import active_parameters
    >>> sum(active_parameters(spec_of(MODELS["tiny"]))[:2])
    851968
    """
    return ModelSpec(
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ff_width=shape.ff_width,
        rope_theta=ROPE_THETA,
        norm_eps=1e-6,
        tied_embeddings=True,
        max_positions=2048,
    )


def step_flops(spec: ModelSpec, prompts: Sequence[int], lengths: Sequence[int]) -> int | float:
    """Return the FLOPs that a step needs: see the top of `grpo_step`.

    Args:
        spec: the model.
        prompts: tokens of each distinct prompt.
        lengths: tokens of each answer, those of one prompt side by side.
    """

    def flops(start: int, end: int, scored: int) -> int | float:
        return forward_flops(spec, end - start, causal_pairs(start, end), scored=scored)

    samples = len(lengths) // len(prompts)
    total = sum(flops(0, prompt, 1) for prompt in prompts)
    for i, length in enumerate(lengths):
        prompt = prompts[i // samples]
        total += flops(prompt, prompt + length - 1, length - 1)
        total += 4 * flops(0, prompt + length, length)
    return total


def make_tokenizer() -> Any:
    """Train a byte-level tokenizer of 512 tokens on prompts like those of the benchmark."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p for step in sums(250, seed=1) for p in step), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def make_model(folder: Path, shape: Shape, tokenizer: Any) -> None:
    """Write a Qwen3 model with random weights, as transformers describes one, with a tokenizer."""
    from transformers import Qwen3Config

    source = folder.with_suffix(".config")
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ff_width,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    config.save_pretrained(source)
    tokenizer.save_pretrained(source)
    spec = read_spec(source)
    params = jax.jit(init_params, static_argnums=0)(spec, key=jax.random.key(0))
    shutil.rmtree(folder, ignore_errors=True)  # that of an earlier run
    save_params(folder, params, spec, source=source, dtype=jnp.float32)

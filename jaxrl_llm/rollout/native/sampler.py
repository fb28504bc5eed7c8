"""Choosing tokens from logits, one independent random stream per sequence."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32


class BatchSamplingParams(NamedTuple):
    """How each of B sequences is sampled; `SamplingParams` says what the numbers mean."""

    seeds: UInt32[Array, " B"]
    temperature: Float32[Array, " B"]
    top_p: Float32[Array, " B"]
    top_k: Int[Array, " B"]
    min_p: Float32[Array, " B"]


class LogitsProcessors(NamedTuple):
    """What changes the logits of B sequences before a token is drawn.

    Attributes:
        seen: whether prompt or answer of a sequence hold a token.
        penalty: the repetition penalty.
        bias_ids: tokens whose logits are shifted; a number past the vocabulary shifts none.
        bias: by how much.
    """

    seen: Bool[Array, "B V"]
    penalty: Float32[Array, " B"]
    bias_ids: Int[Array, "B biases"]
    bias: Float32[Array, "B biases"]


def choose_tokens(
    logits: Float[Array, "B V"],
    steps: Int[Array, " B"],
    sampling: BatchSamplingParams,
    processors: LogitsProcessors | None = None,
) -> tuple[Int[Array, " B"], Float32[Array, "B V"]]:
    """Draw one token per sequence by inverting its cumulative distribution.

    The random numbers of step t of a sequence are keyed by (its seed, t) alone, so a sequence does
    not depend on the batch in which it is decoded.

    Args:
        logits: of the next token.
        steps: tokens that each sequence has generated so far.
        sampling: temperature, and what is cut off the distribution.
        processors: what changes the logits first.

    Returns:
        The tokens, and log-probs under softmax(logits / temperature) of the whole vocabulary,
        before any processor; at temperature 0 under softmax(logits).
    """
    greedy = sampling.temperature == 0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    logits = logits.astype(jnp.float32)
    logprobs = processed = jax.nn.log_softmax(logits / temperature)
    if processors is not None:
        processed = jax.nn.log_softmax(process(logits, processors) / temperature)
    is_cut = (sampling.top_p < 1) | (sampling.top_k > 0) | (sampling.min_p > 0)
    kept = jax.lax.cond(jnp.any(is_cut), truncate, lambda x, *_: x, processed, *sampling[2:])
    drawn = draw(jnp.exp(kept), sampling.seeds, steps)
    best = jax.lax.cond(
        jnp.any(greedy), lambda x: jnp.argmax(x, axis=-1), lambda x: jnp.zeros_like(steps), kept
    )
    return jnp.where(greedy, best, drawn).astype(jnp.int32), logprobs


def process(logits: Float32[Array, "B V"], processors: LogitsProcessors) -> Float32[Array, "B V"]:
    """Penalize the tokens of prompt and answer, then add the biases.

    The repetition penalty (Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1) in
    the form of transformers: positive logits are divided by it, negative ones multiplied.

    >>> processors = LogitsProcessors(jnp.array([[True, True, False]]), jnp.array([2.0]),
    ...                         jnp.array([[2, 3]]), jnp.array([[1.5, 9.0]]))
    >>> process(jnp.array([[4.0, -1.0, 0.0]]), processors).tolist()
    [[2.0, -2.0, 1.5]]
    """
    penalty = processors.penalty[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(processors.seen, penalized, logits)
    rows = jnp.arange(len(logits))[:, None]
    return logits.at[rows, processors.bias_ids].add(processors.bias, mode="drop")


def draw(
    mass: Float32[Array, "B V"], seeds: UInt32[Array, " B"], steps: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Draw from distributions that need not sum to 1; what has no mass is never drawn.

    A block of about sqrt(V) neighbours is drawn first and then one of its tokens, so two random
    numbers do where noise for each token takes V, and no cumulative sum is long.

    >>> print(draw(jnp.array([[0.0, 0.2, 0.0, 0.0]]), jnp.array([7], jnp.uint32), jnp.array([0])))
    [1]
    """
    vocabulary = mass.shape[1]
    blocks = math.gcd(vocabulary, 1 << round(math.log2(vocabulary) / 2))
    if blocks**2 * 16 < vocabulary:  # too few: pad for more
        blocks = 1 << round(math.log2(vocabulary) / 2)
    mass = jnp.pad(mass, ((0, 0), (0, -vocabulary % blocks))).reshape(len(mass), blocks, -1)
    pairs = jnp.stack([seeds, steps.astype(jnp.uint32)], axis=1)
    keys = jax.random.wrap_key_data(pairs, impl="threefry2x32")
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = _invert(mass.sum(axis=2), uniform[:, 0])
    inside = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
    return block * mass.shape[2] + _invert(inside, uniform[:, 1])


def _invert(mass: Float32[Array, "B n"], uniform: Float32[Array, " B"]) -> Int[Array, " B"]:
    """Return where the cumulative sum first passes a uniform share of the total."""
    below = jnp.cumsum(mass, axis=1)
    passed = (below > uniform[:, None] * below[:, -1:]) & (mass > 0)
    # rounding may leave a share that nothing passes
    return jnp.where(passed.any(axis=1), passed.argmax(axis=1), mass.argmax(axis=1))


def truncate(
    logprobs: Float32[Array, "B V"],
    top_p: Float[Array, " B"],
    top_k: Int[Array, " B"],
    min_p: Float[Array, " B"],
) -> Float32[Array, "B V"]:
    """Set the log-probs outside top-k, then outside top-p, then outside min-p to -inf.

    The nucleus (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751) is taken of the
    distribution that top-k left, renormalised; min-p (https://arxiv.org/abs/2407.01082) asks for a
    share of the largest probability. The likeliest token always stays, and tokens as likely as the
    least likely one that stays do so too.

    Nothing is sorted: the least log-prob that stays is found bit by bit, by counting what is above.

    >>> kept = truncate(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([0.6]), jnp.array([0]),
    ...                 jnp.array([0.0]))
    >>> print(jnp.isfinite(kept))
    [[ True  True False]]
    """
    size = logprobs.shape[1]
    count = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    ones = jnp.ones_like(logprobs)
    kept = jnp.where(_until(logprobs, ones, count.astype(jnp.float32)), logprobs, -jnp.inf)
    mass = jax.nn.softmax(kept, axis=-1)
    inside = _until(kept, mass, jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny))
    kept = jnp.where(inside | (top_p >= 1)[:, None], kept, -jnp.inf)
    least = kept.max(axis=1) + jnp.log(min_p)
    return jnp.where(kept >= least[:, None], kept, -jnp.inf)


def _until(
    logprobs: Float32[Array, "B V"], weights: Float32[Array, "B V"], total: Float32[Array, " B"]
) -> Bool[Array, "B V"]:
    """Mark the likeliest tokens, as few as have this total weight together, and those like them.

    Bits of non-negative floats are ordered as the floats are, so a threshold for -log p is found
    from its highest bit down: a bit is set where less would not be enough.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(logprobs), jnp.uint32)

    def weight_until(threshold: Array) -> Array:
        return jnp.where(bits <= threshold[:, None], weights, 0.0).sum(axis=1)

    def set_bit(i: Array, threshold: Array) -> Array:
        bit = jnp.uint32(1) << (30 - i).astype(jnp.uint32)
        enough = weight_until(threshold | (bit - jnp.uint32(1))) >= total
        return jnp.where(enough, threshold, threshold | bit)

    threshold = jax.lax.fori_loop(0, 31, set_bit, jnp.zeros(len(bits), jnp.uint32))
    return bits <= threshold[:, None]

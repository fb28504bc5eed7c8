"""Choosing tokens from logits, one independent random stream per sequence."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class LimitsInUse(NamedTuple):
    """Whether any of B sequences takes the likeliest token or cuts off others; and by what."""

    any: Bool[Array, ""]
    top_k: Bool[Array, ""]
    top_p: Bool[Array, ""]


class Extras(NamedTuple):
    """What few requests ask for: changed logits, and the likeliest tokens of each step.

    Attributes:
        tokens: prompt and answer of each row, padded with a number past the vocabulary.
        penalty: the repetition penalty.
        bias_ids: tokens whose logits are shifted, padded likewise.
        bias: by how much.
    """

    tokens: Int[Array, "B S"]
    penalty: Float32[Array, " B"]
    bias_ids: Int[Array, "B biases"]
    bias: Float32[Array, "B biases"]


def limits_in_use(sampling: BatchSamplingParams) -> LimitsInUse:
    """Return what sequences ask for: the same at every step, and on a mesh a question to all.

    >>> ones = jnp.ones(2)
    >>> limits = limits_in_use(BatchSamplingParams(ones, ones, ones, jnp.array([0, 3]), 0 * ones))
    >>> [bool(limit) for limit in limits]
    [True, True, False]
    """
    top_k, top_p = jnp.any(sampling.top_k > 0), jnp.any(sampling.top_p < 1)
    others = jnp.any((sampling.temperature == 0) | (sampling.min_p > 0))
    return LimitsInUse(top_k | top_p | others, top_k, top_p)


def choose_tokens(
    logits: Float[Array, "B V"],
    steps: Int[Array, " B"],
    sampling: BatchSamplingParams,
    extras: tuple[Bool[Array, "B V"], Extras] | None = None,
    limits: LimitsInUse | None = None,
) -> tuple[Int[Array, " B"], Float32[Array, "B V"]]:
    """Draw one token per sequence by inverting its cumulative distribution.

    The random numbers of step t of a sequence are keyed by (its seed, t) alone, so a sequence does
    not depend on the batch in which it is decoded.

    Args:
        logits: of the next token.
        steps: tokens that each sequence has generated so far.
        sampling: temperature, and what is cut off the distribution.
        extras: which tokens each sequence holds, and what changes the logits first.
        limits: `limits_in_use(sampling)`, where it is known from before.

    Returns:
        The tokens, and log-probs under softmax(logits / temperature) of the whole vocabulary,
        before anything changes it; at temperature 0 under softmax(logits).
    """
    greedy = sampling.temperature == 0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    logits = logits.astype(jnp.float32)
    logprobs = processed = jax.nn.log_softmax(logits / temperature)
    if extras is not None:
        logits = process(logits, *extras)
        processed = jax.nn.log_softmax(logits / temperature)
    limits = limits_in_use(sampling) if limits is None else limits
    # in logits: log-probs may be rounded otherwise where they are computed for another use
    logits = jax.lax.optimization_barrier(logits)
    least = jax.lax.cond(
        limits.any, _least_drawn, _no_limit, logits, processed, greedy, limits, *sampling[2:]
    )
    mass = jnp.exp(jnp.where(logits >= least[:, None], processed, -jnp.inf))
    # of equally likely tokens that with the lowest number is the greedy one
    uniform = jnp.where(greedy[:, None], 0.0, uniforms(sampling.seeds, steps))
    return draw(mass, uniform), logprobs


def _least_drawn(
    logits: Float32[Array, "B V"],
    logprobs: Float32[Array, "B V"],
    greedy: Bool[Array, " B"],
    limits: LimitsInUse,
    *numbers: Array,
) -> Float32[Array, " B"]:
    """Return the least logit of what may be drawn: of the likeliest, or of what is not cut off."""
    kept = least_kept(logprobs, *numbers, limits=limits)
    least = jnp.where(greedy, logprobs.max(axis=1), kept)
    return jnp.where(logprobs >= least[:, None], logits, jnp.inf).min(axis=1)


def _no_limit(logprobs: Float32[Array, "B V"], *_: Any) -> Float32[Array, " B"]:
    return jnp.full(len(logprobs), -jnp.inf)


def process(
    logits: Float32[Array, "B V"], seen: Bool[Array, "B V"], extras: Extras
) -> Float32[Array, "B V"]:
    """Penalize the tokens of prompt and answer, then add the biases.

    The repetition penalty (Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1) in
    the form of transformers: positive logits are divided by it, negative ones multiplied.

    Args:
        logits: of the next token.
        seen: whether prompt or answer of a sequence hold a token.
        extras: the penalties and the biases.

    >>> extras = Extras(jnp.array([[0, 1]]), jnp.array([2.0]), jnp.array([[2, 3]]),
    ...                 jnp.array([[1.5, 9.0]]))
    >>> process(jnp.array([[4.0, -1.0, 0.0]]), jnp.array([[True, True, False]]), extras).tolist()
    [[2.0, -2.0, 1.5]]
    """
    penalty = extras.penalty[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen, penalized, logits)
    rows = jnp.arange(len(logits))[:, None]
    # ids are padded with the vocabulary's size; a request's own are below it (`check_request`)
    return logits.at[rows, extras.bias_ids].add(extras.bias, mode="drop")


def uniforms(seeds: UInt32[Array, " B"], steps: Int[Array, " B"]) -> Float32[Array, "B 2"]:
    """Return two random numbers in [0, 1) for each pair of a seed and a step."""
    pairs = jnp.stack([seeds, steps.astype(jnp.uint32)], axis=1)
    keys = jax.random.wrap_key_data(pairs, impl="threefry2x32")
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)


def draw(mass: Float32[Array, "B V"], uniform: Float32[Array, "B 2"]) -> Int[Array, " B"]:
    """Draw from distributions that need not sum to 1; what has no mass is never drawn.

    A block of about sqrt(V) neighbours is drawn first and then one of its tokens, so two random
    numbers do where noise for each token takes V, and no cumulative sum is long. For two zeros it
    is the first token that has mass.

    >>> print(draw(jnp.array([[0.0, 0.2, 0.0, 0.1]]), jnp.array([[0.3, 0.9]])))
    [1]
    """
    vocabulary = mass.shape[1]
    blocks = math.gcd(vocabulary, 1 << round(math.log2(vocabulary) / 2))
    if blocks**2 * 16 < vocabulary:  # too few: pad for more
        blocks = 1 << round(math.log2(vocabulary) / 2)
    mass = jnp.pad(mass, ((0, 0), (0, -vocabulary % blocks))).reshape(len(mass), blocks, -1)
    block = _invert(mass.sum(axis=2), uniform[:, 0])
    inside = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
    return (block * mass.shape[2] + _invert(inside, uniform[:, 1])).astype(jnp.int32)


def _invert(mass: Float32[Array, "B n"], uniform: Float32[Array, " B"]) -> Int[Array, " B"]:
    """Return where the cumulative sum first passes a uniform share of the total."""
    below = jnp.cumsum(mass, axis=1)
    passed = (below > uniform[:, None] * below[:, -1:]) & (mass > 0)
    # rounding may leave a share that nothing passes
    return jnp.where(passed.any(axis=1), passed.argmax(axis=1), mass.argmax(axis=1))


def least_kept(
    logprobs: Float32[Array, "B V"],
    top_p: Float[Array, " B"],
    top_k: Int[Array, " B"],
    min_p: Float[Array, " B"],
    *,
    limits: LimitsInUse | None = None,
    digit: int | None = None,
) -> Float32[Array, " B"]:
    """Find the least log-prob that stays: of those in top-k, then in top-p, then in min-p.

    The nucleus (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751) is taken of the
    distribution that top-k left, renormalised; min-p (https://arxiv.org/abs/2407.01082) asks for a
    share of the largest probability. The likeliest token always stays, and tokens as likely as the
    least likely one that stays do so too.

    Args:
        logprobs: of all tokens.
        top_p: probability that is kept; 1 keeps all.
        top_k: how many tokens are kept; 0 keeps all.
        min_p: the share of the largest probability below which none is kept.
        limits: whether any sequence has a top-k or a top-p, where that is known.
        digit: bits that one pass over the vocabulary finds, 1, 2 or 4; None: the platform's choice.

    Returns:
        The least log-prob that stays; what is below is cut off.

    >>> least = least_kept(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([0.6]), jnp.array([0]),
    ...                    jnp.array([0.0]))
    >>> print(jnp.exp(least).round(3))
    [0.3]
    """
    size = logprobs.shape[1]
    until = functools.partial(_until, digit=digit)

    def in_top_k(logprobs: Array) -> Array:
        count = jnp.where(top_k > 0, jnp.minimum(top_k, size), size).astype(jnp.float32)
        least = until(logprobs, jnp.ones_like(logprobs), count)
        return jnp.where(top_k > 0, least, -jnp.inf)

    def in_top_p(logprobs: Array, least: Array) -> Array:
        mass = jax.nn.softmax(jnp.where(logprobs >= least[:, None], logprobs, -jnp.inf), axis=-1)
        total = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        return jnp.where(top_p < 1, jnp.maximum(until(logprobs, mass, total), least), least)

    has_k = jnp.any(top_k > 0) if limits is None else limits.top_k
    has_p = jnp.any(top_p < 1) if limits is None else limits.top_p
    least = jax.lax.cond(has_k, in_top_k, _no_limit, logprobs)
    least = jax.lax.cond(has_p, in_top_p, lambda _, least: least, logprobs, least)
    return jnp.maximum(least, logprobs.max(axis=1) + jnp.log(min_p))


def _until(
    logprobs: Float32[Array, "B V"],
    weights: Float32[Array, "B V"],
    total: Float32[Array, " B"],
    *,
    digit: int | None,
) -> Float32[Array, " B"]:
    """Find the largest log-prob such that those from it on have this total weight; else -inf.

    Nothing is sorted. Bits of non-negative floats are ordered as the floats are, so the
    threshold of -log p is made of digits to the base 2^`digit`, the highest first and each as small
    as is enough.
    To try them, a pass over the vocabulary takes 2^`digit` - 1 sums. A GPU is bound by reading the
    vocabulary and takes 15 sums at a time, a CPU by the sums and takes one.
    """
    if digit is None:
        on = {
            "cpu": functools.partial(_until, digit=1),
            "default": functools.partial(_until, digit=4),
        }
        return jax.lax.platform_dependent(logprobs, weights, total, **on)
    bits = jax.lax.bitcast_convert_type(jnp.abs(logprobs), jnp.uint32)
    passes = math.ceil(31 / digit)

    def set_digit(i: Array, threshold: Array) -> Array:
        shift = (digit * (passes - 1 - i)).astype(jnp.uint32)
        below = (jnp.uint32(1) << shift) - jnp.uint32(1)
        tried = [threshold | (jnp.uint32(d) << shift) | below for d in range(2**digit - 1)]
        sums = _sums([jnp.where(bits <= t[:, None], weights, 0.0) for t in tried])
        return threshold | (sum((s < total).astype(jnp.uint32) for s in sums) << shift)

    threshold = jnp.zeros(len(bits), jnp.uint32)
    threshold = jax.lax.fori_loop(0, passes, set_digit, threshold, unroll=digit > 1)
    infinite = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.uint32)
    return -jax.lax.bitcast_convert_type(jnp.minimum(threshold, infinite), jnp.float32)


def _sums(arrays: Sequence[Array]) -> Sequence[Array]:
    """Return the sum of each array along its rows; a GPU takes all in one pass."""
    if len(arrays) == 1:
        return [arrays[0].sum(axis=1)]
    zeros = (jnp.zeros(()),) * len(arrays)
    return jax.lax.reduce(tuple(arrays), zeros, lambda a, b: jax.tree.map(jnp.add, a, b), (1,))

"""Choosing tokens from logits, one independent random stream per sequence."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt32


def choose_tokens(
    logits: Float[Array, "B V"],
    *,
    seeds: UInt32[Array, " B"],
    steps: Int[Array, " B"],
    temperature: Float[Array, " B"],
    top_p: Float[Array, " B"],
    top_k: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float32[Array, " B"]]:
    """Draw one token per sequence by inverting its cumulative distribution.

    The random numbers of step t of a sequence are keyed by (its seed, t) alone, so a sequence does
    not depend on the batch in which it is decoded.

    Args:
        logits: of the next token.
        seeds: one for each sequence.
        steps: tokens that each sequence has generated so far.
        temperature: 0 takes the likeliest token.
        top_p: keep the smallest set of tokens with this mass; 1 keeps all.
        top_k: keep the k likeliest; 0 keeps all.

    Returns:
        The tokens, and their log-probs under softmax(logits / temperature) over the whole
        vocabulary; at temperature 0 under softmax(logits).
    """
    greedy = temperature == 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]
    logprobs = jax.nn.log_softmax(scaled)
    kept = jax.lax.cond(
        jnp.any((top_p < 1) | (top_k > 0)), truncate, lambda x, *_: x, logprobs, top_p, top_k
    )
    drawn = draw(jnp.exp(kept), seeds, steps)
    best = jax.lax.cond(
        jnp.any(greedy), lambda x: jnp.argmax(x, axis=-1), lambda x: jnp.zeros_like(steps), kept
    )
    tokens = jnp.where(greedy, best, drawn).astype(jnp.int32)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]


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
    uniform = jax.vmap(
        lambda seed, step: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), step), (2,))
    )(seeds, steps)
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
    logprobs: Float32[Array, "B V"], top_p: Float[Array, " B"], top_k: Int[Array, " B"]
) -> Float32[Array, "B V"]:
    """Set the log-probs outside top-k and then outside top-p to -inf.

    The nucleus (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751) is taken of the
    distribution that top-k left, renormalised; the likeliest token always stays.

    >>> kept = truncate(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([0.6]), jnp.array([0]))
    >>> print(jnp.isfinite(kept))
    [[ True  True False]]
    """
    order = jnp.argsort(-logprobs, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logprobs, order, axis=-1)
    rank = jnp.arange(logprobs.shape[1])
    ranked = jnp.where((top_k[:, None] > 0) & (rank >= top_k[:, None]), -jnp.inf, ranked)
    mass = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    outside = (top_p[:, None] < 1) & (before >= top_p[:, None]) & (rank > 0)
    ranked = jnp.where(outside, -jnp.inf, ranked)
    return (
        jnp.full_like(logprobs, -jnp.inf)
        .at[jnp.arange(logprobs.shape[0])[:, None], order]
        .set(ranked)
    )

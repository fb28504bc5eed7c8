"""Reductions: from a mask to one weight per token, so that a scalar loss is sum(weights · loss).

The weights are taken once over the global mini-batch. A part of the mini-batch then adds
sum(weights · loss) of its own tokens, and the sum over the parts does not depend on the split.
Tokens off the mask weigh 0, and a sequence without any token on the mask counts for nothing, so
that rows that only fill a batch change no weight. A mask that is false everywhere gives zeros.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxrl_llm.algorithms.stats import Mask, PerToken32


def token_mean(mask: Mask) -> PerToken32:
    """Weigh all tokens alike: w = 1 / N.

    N is the number of tokens on the mask. DAPO (https://arxiv.org/abs/2503.14476, eq. 8).

    Args:
        mask: true on the tokens that count.

    Returns:
        Weights that sum to 1, or to 0 where the mask is empty.

    >>> token_mean(jnp.array([[True, True, True], [True, False, False]]))[0].tolist()
    [0.25, 0.25, 0.25]
    """
    on = mask.astype(jnp.float32)
    return on / jnp.maximum(on.sum(), 1.0)


def token_sum(mask: Mask) -> PerToken32:
    """Add up all tokens: w = 1.

    The scale of the loss then grows with the batch and with the length of the answers.

    Args:
        mask: true on the tokens that count.

    Returns:
        1 on the mask, 0 off it.

    >>> token_sum(jnp.array([[True, False]])).tolist()
    [[1.0, 0.0]]
    """
    return mask.astype(jnp.float32)


def sequence_mean_token_sum(mask: Mask) -> PerToken32:
    """Average over sequences the sum over tokens: w = 1 / B.

    B is the number of sequences with a token on the mask. This is the policy gradient of an
    average return. Dr. GRPO (https://arxiv.org/abs/2503.20783, section 3.2) up to its constant;
    see `sequence_mean_token_sum_norm`.

    Args:
        mask: true on the tokens that count.

    Returns:
        Weights that sum to the mean length.

    >>> sequence_mean_token_sum(jnp.array([[True, True], [True, False]])).tolist()
    [[0.5, 0.5], [0.5, 0.0]]
    """
    return mask.astype(jnp.float32) / _sequences(mask)


def sequence_mean_token_mean(mask: Mask) -> PerToken32:
    """Average over sequences the mean over tokens: w = 1 / (B · |o_i|).

    B is the number of sequences with a token on the mask, |o_i| the number of such tokens in
    sequence i. GRPO (https://arxiv.org/abs/2402.03300, eq. 3).

    Args:
        mask: true on the tokens that count.

    Returns:
        Weights that sum to 1, or to 0 where the mask is empty.

    >>> sequence_mean_token_mean(jnp.array([[True, True], [True, False]])).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    on = mask.astype(jnp.float32)
    return on / (jnp.maximum(on.sum(axis=1, keepdims=True), 1.0) * _sequences(mask))


def sequence_mean_token_sum_norm(mask: Mask, *, horizon: float) -> PerToken32:
    """Average over sequences the sum over tokens, in units of a horizon: w = 1 / (B · horizon).

    Dr. GRPO (https://arxiv.org/abs/2503.20783, listing 1) divides by the longest answer allowed.
    The horizon has no default: the longest answer of a batch would change from batch to batch. (In
    verl it defaults to the longest of each micro-batch.)

    Args:
        mask: true on the tokens that count.
        horizon: tokens; the longest answer that the policy may give.

    Returns:
        Weights that sum to the mean length over the horizon.

    Raises:
        ValueError: the horizon is not positive.

    >>> sequence_mean_token_sum_norm(jnp.array([[True, False]]), horizon=4.0).tolist()
    [[0.25, 0.0]]
    """
    if horizon <= 0:
        raise ValueError(f"horizon: got {horizon}, expected a positive number of tokens")
    return sequence_mean_token_sum(mask) / horizon


def _sequences(mask: Mask) -> Float32[Array, ""]:
    return jnp.maximum(mask.any(axis=1).sum().astype(jnp.float32), 1.0)

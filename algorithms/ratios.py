"""Differences of log-probs, kept finite, and means over the tokens of a sequence."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

LARGEST_LOGPROB = 1e9
"""Log-probs beyond this, infinite ones above all, are taken as this; its square fits in float32."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratios beyond this are taken as this before exp; exp(20) is 4.9e8."""


def finite(logprobs: Float[Array, "*S"]) -> Float32[Array, "*S"]:
    """Return log-probs in float32 with infinite ones replaced: clip(logprobs, ±1e9).

    An infinite log-prob off the mask would turn the gradient into NaN, since 0 · ∞ is NaN. NaN
    itself is kept: it says that the model has diverged, which must not be hidden.

    >>> finite(jnp.array([-1.5, -jnp.inf])).tolist()
    [-1.5, -1000000000.0]
    """
    return jnp.clip(logprobs.astype(jnp.float32), -LARGEST_LOGPROB, LARGEST_LOGPROB)


def log_ratio(
    logprobs: Float[Array, "*S"], other_logprobs: Float[Array, "*S"]
) -> Float32[Array, "*S"]:
    """Return log π − log π_other, which is finite also where a log-prob is infinite.

    >>> log_ratio(jnp.array([-1.0]), jnp.array([-1.5])).tolist()
    [0.5]
    """
    return finite(logprobs) - finite(other_logprobs)


def clipped_log_ratio(
    logprobs: Float[Array, "*S"], other_logprobs: Float[Array, "*S"]
) -> Float32[Array, "*S"]:
    """Return log π − log π_other clipped to ±20, so that its exponential is finite.

    >>> clipped_log_ratio(jnp.array([-1.0]), jnp.array([-jnp.inf])).tolist()
    [20.0]
    """
    return clip_log_ratio(log_ratio(logprobs, other_logprobs))


def clip_log_ratio(values: Float[Array, "*S"]) -> Float32[Array, "*S"]:
    """Clip log-ratios to ±20.

    >>> clip_log_ratio(jnp.array([-1e4, 3.0])).tolist()
    [-20.0, 3.0]
    """
    return jnp.clip(values, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_sum(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float32[Array, "B 1"]:
    """Return the sum over each sequence's tokens on the mask; what lies off it is not read.

    >>> sequence_sum(jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([[True, True, False]])).tolist()
    [[3.0]]
    """
    return jnp.where(mask, values.astype(jnp.float32), 0.0).sum(axis=1, keepdims=True)


def sequence_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float32[Array, "B 1"]:
    """Return the mean over each sequence's tokens on the mask, 0 where it has none.

    >>> sequence_mean(jnp.array([[1.0, 2.0, 9.0]]), jnp.array([[True, True, False]])).tolist()
    [[1.5]]
    """
    count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    return sequence_sum(values, mask) / count.astype(jnp.float32)


def masked_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float32[Array, ""]:
    """Return the mean over all tokens on the mask, 0 where there are none.

    >>> float(masked_mean(jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])))
    2.0
    """
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    return jnp.where(mask, values.astype(jnp.float32), 0.0).sum() / count

"""Corrections for tokens of older policies, by their age or by how far the policy has moved.

They are 1 for tokens that are kept and 0 for those that are not; `correction` multiplies them with
importance weights.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int


def reject_old(
    ages: Int[Array, "B T"], mask: Bool[Array, "B T"], *, most: int = 1
) -> Float32[Array, "B T"]:
    """Keep tokens that are at most so many updates old: w_t = 1 if age_t ≤ most.

    The later tokens of an answer may be kept where its first ones are not.

    Args:
        ages: updates since the weights that drew each token.
        mask: true on tokens that the policy generated.
        most: the largest age that is kept.

    Returns:
        1 on the tokens that are kept, else 0.

    Raises:
        ValueError: a negative age.

    >>> reject_old(jnp.array([[2, 1, 0]]), jnp.array([[True, True, False]])).tolist()
    [[0.0, 1.0, 0.0]]
    """
    if most < 0:
        raise ValueError(f"most: got {most}, expected 0 or more")
    return (mask & (ages <= most)).astype(jnp.float32)


def second_moment_mask(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    threshold: float = 0.04,
) -> Float32[Array, "B T"]:
    """Drop the tokens with the largest (log ρ_t)² until the mean of the others is ≤ threshold.

    M2PO (https://arxiv.org/abs/2510.01161): the second moment of the log-ratio bounds how far the
    policy has moved, and a few outliers make most of it. There the ratio is of the policy as it is
    updated; here of the policy at the start of the step, once for all of its updates. Tokens of
    equal moment are dropped in the order of the batch, the last ones first.

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        threshold: the largest mean of (log ρ_t)² over the tokens that are kept.

    Returns:
        1 on the tokens that are kept, else 0.

    Raises:
        ValueError: the threshold is negative.

    >>> old, rollout = jnp.array([[0.0, -1.0, -2.0]]), jnp.array([[-3.0, -1.1, -2.0]])
    >>> second_moment_mask(old, rollout, jnp.array([[True, True, True]])).tolist()
    [[0.0, 1.0, 1.0]]
    """
    if threshold < 0:
        raise ValueError(f"threshold: got {threshold}, expected 0 or more")
    log_ratio = jnp.where(mask, old_logprobs - rollout_logprobs, 0.0).astype(jnp.float32)
    moments = jnp.where(mask, log_ratio**2, jnp.inf).ravel()
    order = jnp.argsort(moments, stable=True)
    smallest = jnp.where(jnp.isinf(moments[order]), 0.0, moments[order])
    means = jnp.cumsum(smallest) / jnp.arange(1, len(smallest) + 1, dtype=jnp.float32)
    is_kept = jnp.zeros(len(order), bool).at[order].set(means <= threshold)
    return (mask & is_kept.reshape(mask.shape)).astype(jnp.float32)

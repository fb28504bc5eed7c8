"""Losses of the critic and of the implicit reward model, per token."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.losses_reward import implicit_reward_loss
from jaxrl_llm.algorithms.losses_token import TokenLoss

__all__ = ["clipped_value_loss", "implicit_reward_loss", "squared_value_loss"]


def squared_value_loss(values: Float[Array, "B T"], returns: Float[Array, "B T"]) -> TokenLoss:
    """Regress values on returns: L = (V − R)² / 2.

    Args:
        values: values under the critic that is being updated.
        returns: what they should be.

    Returns:
        The loss; no diagnostics.

    >>> squared_value_loss(jnp.array([[1.0]]), jnp.array([[3.0]])).loss.tolist()
    [[2.0]]
    """
    error = values.astype(jnp.float32) - returns.astype(jnp.float32)
    return TokenLoss(0.5 * jnp.square(error), {})


def clipped_value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float = 0.5,
) -> TokenLoss:
    """Regress values on returns, in small steps: L = max((V − R)², (V_c − R)²) / 2.

    V_c = clip(V, V_old ± ε). The clipping of PPO's reference implementation, for which see
    https://arxiv.org/abs/2005.12729, section 3; a value that has moved by more than ε towards its
    return gets no gradient.

    Args:
        values: values under the critic that is being updated.
        old_values: the same at the start of the step.
        returns: what they should be.
        clip: how far a value may move in one step, in units of the reward.

    Returns:
        The loss; vf_clipfrac (tokens that clipping holds back).

    Raises:
        ValueError: clip is negative.

    >>> values, old_values = jnp.array([[1.0, 0.25]]), jnp.array([[0.0, 0.0]])
    >>> loss, diagnostics = clipped_value_loss(values, old_values, jnp.array([[1.0, 1.25]]))
    >>> loss.tolist(), diagnostics["vf_clipfrac"].tolist()
    ([[0.125, 0.5]], [[1.0, 0.0]])
    """
    if clip < 0:
        raise ValueError(f"clip: got {clip}, expected at least 0")
    values, old = values.astype(jnp.float32), old_values.astype(jnp.float32)
    free = squared_value_loss(values, returns).loss
    held = squared_value_loss(jnp.clip(values, old - clip, old + clip), returns).loss
    return TokenLoss(jnp.maximum(free, held), {"vf_clipfrac": (held > free).astype(jnp.float32)})

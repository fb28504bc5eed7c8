"""Losses of process reward models, which say of each step of an answer whether it is right."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.losses_token import TokenLoss


def step_cross_entropy(
    step_logits: Float[Array, "P W"], step_labels: Float[Array, "P W"]
) -> TokenLoss:
    """Predict whether each step is right: L = −y log σ(z) − (1 − y) log(1 − σ(z)).

    The loss of a process reward model (https://arxiv.org/abs/2305.20050). A label between 0 and 1
    is the share of roll-outs from that step that end well, as Math-Shepherd estimates it
    (https://arxiv.org/abs/2312.08935, eq. 3 and 5). Of two classes whose logits differ by z it is
    the cross-entropy.

    Args:
        step_logits: z, logit of a step's being right, at its last token.
        step_labels: y, from 0 to 1.

    Returns:
        The loss of each step; rewards/steps, σ(z).

    >>> loss, _ = step_cross_entropy(jnp.array([[0.0, 2.0]]), jnp.array([[1.0, 0.0]]))
    >>> [f"{x:.4f}" for x in loss[0]]
    ['0.6931', '2.1269']
    """
    z, y = step_logits.astype(jnp.float32), step_labels.astype(jnp.float32)
    loss = y * jax.nn.softplus(-z) + (1.0 - y) * jax.nn.softplus(z)
    return TokenLoss(loss, {"rewards/steps": jax.nn.sigmoid(z)})

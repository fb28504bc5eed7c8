"""The loss of an implicit reward model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.losses_token import TokenLoss


def implicit_reward_loss(
    logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    raw_scores: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.05,
) -> TokenLoss:
    """Predict the score from the log-ratio: L = −y log σ(z) − (1 − y) log(1 − σ(z)).

    z = β Σ_t (log π_φ − log π_ref) over the tokens of an answer, y its score. The cross-entropy of
    PRIME (https://arxiv.org/abs/2502.01456, algorithm 1, line 8; β in section 4.1), after which
    each term of z is a reward for its token (https://arxiv.org/abs/2412.01981, section 3). Every
    token holds its answer's loss, so that `reduce.sequence_mean_token_mean` gives the mean over
    answers.

    Args:
        logprobs: log-probs under the reward model φ that is being updated.
        ref_logprobs: the same under the reference.
        raw_scores: score of each answer as its reward function gave it, a label or a share from 0
            to 1.
        mask: true on tokens that the policy generated.
        beta: scale of the reward, in reward per nat.

    Returns:
        The loss; accuracy (answers of which σ(z) and y lie on the same side of 1/2).

    Raises:
        ValueError: beta is not positive.

    >>> logprobs, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[True, True]])
    >>> loss, _ = implicit_reward_loss(logprobs, logprobs, jnp.array([1.0]), mask)
    >>> [f"{x:.3f}" for x in loss[0]]
    ['0.693', '0.693']
    """
    if beta <= 0:
        raise ValueError(f"beta: got {beta}, expected a positive number")
    z = beta * ratios.sequence_sum(ratios.log_ratio(logprobs, ref_logprobs), mask)
    label = raw_scores.astype(jnp.float32)[:, None]
    loss = label * jax.nn.softplus(-z) + (1.0 - label) * jax.nn.softplus(z)
    right = ((z > 0) == (label > 0.5)).astype(jnp.float32)
    shape = logprobs.shape
    return TokenLoss(jnp.broadcast_to(loss, shape), {"accuracy": jnp.broadcast_to(right, shape)})

"""Losses of the critic and of the implicit reward model, per token."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import stats
from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.algorithms.stats import Mask, PerAnswer, PerToken


def squared_value_loss(values: PerToken, returns: PerToken) -> TokenLoss:
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
    values: PerToken, old_values: PerToken, returns: PerToken, *, clip: float = 0.5
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


def implicit_reward_loss(
    logprobs: PerToken,
    ref_logprobs: PerToken,
    raw_scores: PerAnswer,
    mask: Mask,
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
    z = beta * stats.sequence_sum(stats.log_ratio(logprobs, ref_logprobs), mask)
    label = raw_scores.astype(jnp.float32)[:, None]
    loss = label * jax.nn.softplus(-z) + (1.0 - label) * jax.nn.softplus(z)
    right = ((z > 0) == (label > 0.5)).astype(jnp.float32)
    shape = logprobs.shape
    return TokenLoss(jnp.broadcast_to(loss, shape), {"accuracy": jnp.broadcast_to(right, shape)})

"""Policy losses whose ratio belongs to a whole answer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.losses_token import TokenLoss, check_bounds, clipped_surrogate


def gspo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Clip the answer's ratio: L = max(−A s, −A clip(s, 1 − ε_low, 1 + ε_high)).

    s = exp(mean_t log r_t), the geometric mean of the ratios of an answer. GSPO
    (https://arxiv.org/abs/2507.18071, eq. 5), in the form for tokens (eq. 13), in which token t
    holds s · π_t / sg(π_t): the same value, and the same gradient where the advantages of an
    answer are equal and `reduce.sequence_mean_token_mean` averages, as in the paper. log s is at
    most 10.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        clip_low: how far s may fall below 1.
        clip_high: how far s may rise above 1.

    Returns:
        The loss; pg_clipfrac (tokens of answers that are held back), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> logprobs, mask = jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([[True, True]])
    >>> old_logprobs = jnp.log(jnp.array([[1.0, 0.25]]))
    >>> gspo(logprobs, old_logprobs, jnp.ones((1, 2)), mask).loss.tolist()
    [[-1.0, -1.0]]
    """
    check_bounds(clip_low, clip_high)
    level = ratios.finite(logprobs)
    mean = ratios.sequence_mean(ratios.log_ratio(logprobs, old_logprobs), mask)
    log_s = level - jax.lax.stop_gradient(level) + jax.lax.stop_gradient(mean)
    ratio = jnp.exp(jnp.minimum(log_s, 10.0))
    loss, clipped = clipped_surrogate(ratio, advantages.astype(jnp.float32), clip_low, clip_high)
    return TokenLoss(
        loss,
        {
            "pg_clipfrac": clipped.astype(jnp.float32),
            "ppo_kl": -ratios.clipped_log_ratio(logprobs, old_logprobs),
        },
    )


def gmpo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """Clip each token, then take the geometric mean: L = −Ā exp(mean_t c_t).

    c_t = min(log r_t, ε_high) where Ā > 0 and max(log r_t, −ε_low) elsewhere; Ā is the mean
    advantage of the answer. GMPO (https://arxiv.org/abs/2507.20673, eq. 4), whose min leaves the
    other side unbounded too; its ε is e^0.4. Every token holds its answer's loss, so that
    `reduce.sequence_mean_token_mean` gives the paper's average over answers. (verl averages over
    the rows of each micro-batch, so that its loss depends on how a mini-batch is split.)

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        clip_low: how far the log-ratio may fall below 0.
        clip_high: how far the log-ratio may rise above 0.

    Returns:
        The loss; pg_clipfrac (tokens that are clipped), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> mask = jnp.array([[True, True]])
    >>> loss, _ = gmpo(jnp.array([[0.0, -0.4]]), jnp.array([[-9.0, 0.0]]), jnp.ones((1, 2)), mask)
    >>> loss.tolist()
    [[-1.0, -1.0]]
    """
    check_bounds(clip_low, clip_high)
    log_ratio = ratios.log_ratio(logprobs, old_logprobs)
    advantage = ratios.sequence_mean(advantages, mask)
    rising = advantage > 0
    held = jnp.where(rising, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low))
    ratio = jnp.exp(ratios.clip_log_ratio(ratios.sequence_mean(held, mask)))
    return TokenLoss(
        jnp.broadcast_to(-advantage * ratio, log_ratio.shape),
        {
            "pg_clipfrac": (held != log_ratio).astype(jnp.float32),
            "ppo_kl": ratios.clip_log_ratio(-log_ratio),
        },
    )

"""Policy losses that treat a few tokens apart: those that take the most entropy away.

The entropy of a policy falls with the covariance of log-probs and advantages
(https://arxiv.org/abs/2505.22617, section 4.2). Which tokens have the highest covariance is a
question to the whole mini-batch, while a loss sees a part of it. So a `select_…` function marks
them, once per mini-batch, in the field `high_covariance [B T]`, and the loss takes that field.

verl asks each micro-batch instead, so that its means, the tokens that it marks and how many they
are (at least one in each) depend on how the mini-batch is split. It also passes over tokens that
the ratio's clipping already holds back when it draws for Clip-Cov.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Key

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.losses_token import TokenLoss, ppo_clip


def covariance(
    logprobs: Float[Array, "B T"], advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float32[Array, "B T"]:
    """Return each token's part in the covariance: (log π − mean) · (A − mean).

    The paper's eq. 10, over the tokens on the mask.

    Args:
        logprobs: log-probs under the policy that is being updated.
        advantages: one per token.
        mask: true on tokens that the policy generated.

    Returns:
        Products, 0 off the mask.

    >>> logprobs, advantages = jnp.array([[-1.0, -3.0]]), jnp.array([[1.0, -1.0]])
    >>> covariance(logprobs, advantages, jnp.array([[True, True]])).tolist()
    [[1.0, 1.0]]
    """
    level, advantages = ratios.finite(logprobs), advantages.astype(jnp.float32)
    product = (level - ratios.masked_mean(level, mask)) * (
        advantages - ratios.masked_mean(advantages, mask)
    )
    return jnp.where(mask, product, 0.0)


def select_clip_cov(
    logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    key: Key[Array, ""],
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Bool[Array, "B T"]:
    """Draw tokens whose covariance lies between two bounds: `high_covariance` for `clip_cov`.

    The paper's eq. 11, with the numbers of its section 4.3. The number drawn is `ratio` of the
    tokens on the mask, at least 1; fewer where fewer lie between the bounds.

    Args:
        logprobs: log-probs under the policy that is being updated, of the whole mini-batch.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        key: random key.
        ratio: share of the tokens to draw.
        low: covariance above which a token may be drawn.
        high: covariance below which a token may be drawn.

    Returns:
        True on the tokens drawn.

    >>> logprobs, advantages = jnp.array([[0.0, -2.0, -2.0]]), jnp.array([[4.0, 1.0, 1.0]])
    >>> key, mask = jax.random.key(0), jnp.array([[True, True, True]])
    >>> select_clip_cov(logprobs, advantages, mask, key=key).tolist()
    [[True, False, False]]
    """
    products = covariance(logprobs, advantages, mask)
    eligible = mask & (products > low) & (products < high)
    order = jnp.where(eligible, jax.random.uniform(key, mask.shape), -1.0)
    return eligible & _largest(order, _share(mask, ratio))


def select_kl_cov(
    logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    ratio: float = 2e-4,
) -> Bool[Array, "B T"]:
    """Take the tokens of the highest covariance: `high_covariance` for `kl_cov`.

    The paper's eq. 13. The number taken is `ratio` of the tokens on the mask, at least 1. The paper
    takes 2e-4 for a model of 32B parameters and 2e-3 for one of 7B.

    Args:
        logprobs: log-probs under the policy that is being updated, of the whole mini-batch.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        ratio: share of the tokens to take.

    Returns:
        True on the tokens taken.

    >>> logprobs, advantages = jnp.array([[0.0, -2.0, -2.0]]), jnp.array([[4.0, 1.0, 1.0]])
    >>> select_kl_cov(logprobs, advantages, jnp.array([[True, True, True]])).tolist()
    [[True, False, False]]
    """
    products = jnp.where(mask, covariance(logprobs, advantages, mask), -jnp.inf)
    return mask & _largest(products, _share(mask, ratio))


def clip_cov(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    high_covariance: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Drop the marked tokens from `ppo_clip`: L = 0 where marked.

    Clip-Cov (https://arxiv.org/abs/2505.22617, eq. 12), over PPO's clipped surrogate as in its
    listing 1.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        high_covariance: the tokens that `select_clip_cov` drew.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.

    Returns:
        The loss; pg_clipfrac (tokens held back or dropped), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> zeros, marked = jnp.zeros((1, 2)), jnp.array([[True, False]])
    >>> clip_cov(zeros, zeros, jnp.ones((1, 2)), marked).loss.tolist()
    [[0.0, -1.0]]
    """
    loss, diagnostics = ppo_clip(
        logprobs,
        old_logprobs,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=float("inf"),
    )
    return TokenLoss(
        jnp.where(high_covariance, 0.0, loss),
        {
            "pg_clipfrac": jnp.where(high_covariance, 1.0, diagnostics["pg_clipfrac"]),
            "ppo_kl": diagnostics["ppo_kl"],
        },
    )


def kl_cov(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    high_covariance: Bool[Array, "B T"],
    *,
    kl_coef: float = 1.0,
) -> TokenLoss:
    """Hold the marked tokens near the old policy: L = −A r + β |log r| where marked, else −A r.

    KL-Cov (https://arxiv.org/abs/2505.22617, eq. 14), whose divergence is |log r| in its listing 1.
    Nothing is clipped. β = 1 is the paper's.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        high_covariance: the tokens that `select_kl_cov` took.
        kl_coef: strength β of the penalty, in units of the advantage.

    Returns:
        The loss; ppo_kl, and kl_cov_abs_kl, the penalty |log r| on marked tokens.

    Raises:
        ValueError: kl_coef is negative.

    >>> ones, marked = jnp.ones((1, 2)), jnp.array([[True, False]])
    >>> [f"{x:.3f}" for x in kl_cov(jnp.log(2 * ones), 0 * ones, ones, marked).loss[0]]
    ['-1.307', '-2.000']
    """
    if kl_coef < 0:
        raise ValueError(f"kl_coef: got {kl_coef}, expected at least 0")
    log_ratio = ratios.clipped_log_ratio(logprobs, old_logprobs)
    distance = jnp.where(high_covariance, jnp.abs(log_ratio), 0.0)
    return TokenLoss(
        kl_coef * distance - advantages.astype(jnp.float32) * jnp.exp(log_ratio),
        {"ppo_kl": -log_ratio, "kl_cov_abs_kl": distance},
    )


def _share(mask: Bool[Array, "B T"], ratio: float) -> Float32[Array, ""]:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio: got {ratio}, expected a share from 0 to 1")
    return jnp.maximum(jnp.floor(mask.sum().astype(jnp.float32) * ratio), 1.0)


def _largest(values: Float32[Array, "B T"], count: Float32[Array, ""]) -> Bool[Array, "B T"]:
    """Mark the `count` largest values; of equal ones the first come first."""
    order = jnp.argsort(-values.ravel(), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return (rank.astype(jnp.float32) < count).reshape(values.shape)

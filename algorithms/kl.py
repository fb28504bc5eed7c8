"""KL divergence to a reference policy, from the log-probs of sampled tokens, and its coefficient.

With d = log π − log π_ref on tokens that π sampled, every estimator here is a function of d alone
(J. Schulman, http://joschu.net/blog/kl-approx.html). Infinite log-probs are taken as huge finite
ones, so that garbage off the mask costs nothing once it is weighted by 0; NaN stays NaN.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.algorithms import stats
from jaxrl_llm.algorithms.stats import PerToken, PerToken32

Estimator = Callable[[PerToken, PerToken], PerToken32]


def k1(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    """Estimate the KL divergence by k1 = d.

    Unbiased with a high variance; can be negative. As a loss its expected gradient is zero, so it
    belongs in the reward (https://arxiv.org/abs/2510.01555) or in `k1_with_k2_gradient`.

    Args:
        logprobs: log-probs of the sampled tokens under the policy.
        ref_logprobs: the same under the reference.

    Returns:
        Estimates in nats.

    >>> k1(jnp.array([[-1.0]]), jnp.array([[-1.5]])).tolist()
    [[0.5]]
    """
    return stats.log_ratio(logprobs, ref_logprobs)


def absolute(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    """Measure the distance to the reference by |d|.

    Not an estimate of the KL divergence; a symmetric penalty that is zero only where d is.

    Args:
        logprobs: log-probs of the sampled tokens under the policy.
        ref_logprobs: the same under the reference.

    Returns:
        Distances in nats.

    >>> absolute(jnp.array([[-2.0]]), jnp.array([[-1.5]])).tolist()
    [[0.5]]
    """
    return jnp.abs(stats.log_ratio(logprobs, ref_logprobs))


def k2(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    """Estimate the KL divergence by k2 = d² / 2.

    Biased with a low variance. On-policy its gradient d · ∇log π is an unbiased estimate of the
    gradient of the KL divergence.

    Args:
        logprobs: log-probs of the sampled tokens under the policy.
        ref_logprobs: the same under the reference.

    Returns:
        Estimates in nats, at least 0.

    >>> k2(jnp.array([[-1.0]]), jnp.array([[-1.5]])).tolist()
    [[0.125]]
    """
    return 0.5 * jnp.square(stats.log_ratio(logprobs, ref_logprobs))


def k3(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    """Estimate the KL divergence by k3 = exp(−d) + d − 1.

    Unbiased with a low variance, and at least 0. GRPO (https://arxiv.org/abs/2402.03300, eq. 4).
    We clip d to ±20 and the result to 10, as exp(−d) is unbounded; beyond that the gradient is 0.

    Args:
        logprobs: log-probs of the sampled tokens under the policy.
        ref_logprobs: the same under the reference.

    Returns:
        Estimates in nats, from 0 to 10.

    >>> k3(jnp.array([[-1.0, -9.0]]), jnp.array([[-1.0, -1.0]])).tolist()
    [[0.0, 10.0]]
    """
    d = jnp.clip(stats.log_ratio(logprobs, ref_logprobs), -20.0, 20.0)
    # expm1 keeps the digits that exp(−d) − 1 + d would cancel near d = 0.
    return jnp.clip(jnp.expm1(-d) + d, 0.0, 10.0)


def k1_with_k2_gradient(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    """Report k1 and descend on k2: k2 + sg(k1 − k2).

    Args:
        logprobs: log-probs of the sampled tokens under the policy.
        ref_logprobs: the same under the reference.

    Returns:
        The value of k1 with the gradient of k2, which is unbiased on-policy.

    >>> k1_with_k2_gradient(jnp.array([[-1.0]]), jnp.array([[-1.5]])).tolist()
    [[0.5]]
    """
    return _with_k2_gradient(k1, logprobs, ref_logprobs)


def absolute_with_k2_gradient(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    """Report |d| and descend on k2: k2 + sg(|d| − k2).

    Args:
        logprobs: log-probs of the sampled tokens under the policy.
        ref_logprobs: the same under the reference.

    Returns:
        The value of `absolute` with the gradient of k2, which is unbiased on-policy.

    >>> absolute_with_k2_gradient(jnp.array([[-2.0]]), jnp.array([[-1.5]])).tolist()
    [[0.5]]
    """
    return _with_k2_gradient(absolute, logprobs, ref_logprobs)


def k3_with_k2_gradient(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    """Report k3 and descend on k2: k2 + sg(k3 − k2).

    Args:
        logprobs: log-probs of the sampled tokens under the policy.
        ref_logprobs: the same under the reference.

    Returns:
        The value of k3 with the gradient of k2, which is unbiased on-policy.

    >>> k3_with_k2_gradient(jnp.array([[-1.0]]), jnp.array([[-1.0]])).tolist()
    [[0.0]]
    """
    return _with_k2_gradient(k3, logprobs, ref_logprobs)


def _with_k2_gradient(value: Estimator, logprobs: PerToken, ref_logprobs: PerToken) -> PerToken32:
    gradient = k2(logprobs, ref_logprobs)
    # gradient − sg(gradient) is exactly 0 in value, however large k2 is.
    return jax.lax.stop_gradient(value(logprobs, ref_logprobs)) + (
        gradient - jax.lax.stop_gradient(gradient)
    )


def fixed(
    coef: Float[ArrayLike, ""], observed_kl: Float[ArrayLike, ""], batch_size: Int[ArrayLike, ""]
) -> Float[ArrayLike, ""]:
    """Keep the coefficient: β ← β.

    Args:
        coef: the coefficient β of the step that has just ended.
        observed_kl: mean KL estimate of that step, in nats.
        batch_size: sequences in that step.

    Returns:
        The coefficient of the next step.

    >>> fixed(0.001, 5.0, 64)
    0.001
    """
    del observed_kl, batch_size
    return coef


def adaptive(
    coef: Float[ArrayLike, ""],
    observed_kl: Float[ArrayLike, ""],
    batch_size: Int[ArrayLike, ""],
    *,
    target: float = 0.1,
    horizon: int = 10_000,
) -> Float32[Array, ""]:
    """Steer the KL divergence to a target: β ← β (1 + clip(KL / target − 1, ±0.2) K).

    Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593, section 2.2), whose K = 0.1 is
    min(B / horizon, 1) here. Without the minimum, as in TRL and verl, a step of more than five
    horizons makes β negative, which is a reward for leaving the reference.

    Args:
        coef: the coefficient β of the step that has just ended.
        observed_kl: mean KL estimate of that step, in nats.
        batch_size: sequences in that step.
        target: the KL divergence to hold, in nats.
        horizon: sequences over which a lasting error of 20 % or more moves β by about 20 %; a
            longer step moves it by no more.

    Returns:
        The coefficient of the next step.

    Raises:
        ValueError: the target or the horizon is not positive.

    >>> print(f"{adaptive(1.0, 9.0, 1000, target=0.1, horizon=10_000):.3f}")
    1.020
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"got target {target} and horizon {horizon}, expected positive numbers")
    error = jnp.clip(jnp.asarray(observed_kl, jnp.float32) / target - 1.0, -0.2, 0.2)
    return jnp.asarray(coef, jnp.float32) * (1.0 + error * jnp.minimum(batch_size / horizon, 1.0))

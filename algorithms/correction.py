"""Corrections for answers that were sampled by another policy than the trainer's.

The engine that generates and the trainer that learns give the same token different log-probs
(https://fengyao.notion.site/off-policy-rl): other kernels, other precision, older weights. With
ρ_t = exp(log π_old − log π_rollout), every function here gives a weight per token that multiplies
the policy loss: an importance weight, or 1 for tokens that are kept and 0 for those that are not.
A product of such weights applies both. Weights are 0 off the mask, where nothing is read, and
log-ratios are clipped to ±20 before exp.

They are taken once, before the mini-batches, from log-probs of the start of the step.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.correction_stale import reject_old, second_moment_mask
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean, token_mean

__all__ = [
    "icepop",
    "mismatch_metrics",
    "normalized",
    "reject_old",
    "reject_sequence",
    "reject_sequence_geometric",
    "reject_sequence_k3",
    "second_moment_mask",
    "truncated_sequence",
    "truncated_sequence_normalized",
    "truncated_token",
    "truncated_token_normalized",
]


def truncated_token(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 2.0,
) -> Float32[Array, "B T"]:
    """Weigh each token by its truncated ratio: w_t = min(ρ_t, cap).

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl).

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        cap: the largest weight.

    Returns:
        One weight per token.

    Raises:
        ValueError: cap is not positive.

    >>> old, rollout = jnp.array([[0.0, -2.0]]), jnp.array([[-1.0, -2.0]])
    >>> truncated_token(old, rollout, jnp.array([[True, True]])).tolist()
    [[2.0, 1.0]]
    """
    _check_cap(cap)
    return jnp.where(mask, jnp.minimum(_token_ratio(old_logprobs, rollout_logprobs), cap), 0.0)


def truncated_sequence(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 2.0,
) -> Float32[Array, "B T"]:
    """Weigh each answer by its truncated ratio: w = min(Π_t ρ_t, cap).

    Unbiased but for the cap, at the price of a variance that grows with the length
    (https://richardli.xyz/rl-collapse).

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        cap: the largest weight.

    Returns:
        The answer's weight, on each of its tokens.

    Raises:
        ValueError: cap is not positive.

    >>> old, rollout = jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -1.0]])
    >>> truncated_sequence(old, rollout, jnp.array([[True, True]])).tolist()
    [[1.0, 1.0]]
    """
    _check_cap(cap)
    ratio = _sequence_ratio(old_logprobs, rollout_logprobs, mask)
    return jnp.where(mask, jnp.minimum(ratio, cap), 0.0)


def truncated_token_normalized(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 2.0,
) -> Float32[Array, "B T"]:
    """Scale `truncated_token` to a mean of 1 over the tokens of the batch.

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        cap: the largest weight before scaling.

    Returns:
        One weight per token.

    Raises:
        ValueError: cap is not positive.

    >>> old, rollout = jnp.array([[0.0, 0.0]]), jnp.array([[-1.0, -2.0]])
    >>> truncated_token_normalized(old, rollout, jnp.array([[True, True]])).tolist()
    [[1.0, 1.0]]
    """
    weights = truncated_token(old_logprobs, rollout_logprobs, mask, cap=cap)
    return normalized(weights, token_mean(mask))


def truncated_sequence_normalized(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 2.0,
) -> Float32[Array, "B T"]:
    """Scale `truncated_sequence` to a mean of 1 over the answers of the batch.

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        cap: the largest weight before scaling.

    Returns:
        The answer's weight, on each of its tokens.

    Raises:
        ValueError: cap is not positive.

    >>> old, rollout = jnp.array([[0.0], [0.0]]), jnp.array([[-1.0], [-2.0]])
    >>> truncated_sequence_normalized(old, rollout, jnp.array([[True], [True]])).tolist()
    [[1.0], [1.0]]
    """
    weights = truncated_sequence(old_logprobs, rollout_logprobs, mask, cap=cap)
    return normalized(weights, sequence_mean_token_mean(mask))


def icepop(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Float32[Array, "B T"]:
    """Weigh tokens by their ratio inside a band and drop the others: w_t = ρ_t if low ≤ ρ_t ≤ high.

    IcePop (https://arxiv.org/abs/2510.18855, eqs. 1 and 2; the band of its section 2.3.4).

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        low: the smallest ratio that is kept.
        high: the largest ratio that is kept.

    Returns:
        One weight per token, 0 on those that are dropped.

    Raises:
        ValueError: an empty band.

    >>> old, rollout = jnp.array([[0.0, -2.0]]), jnp.array([[-9.0, -2.0]])
    >>> icepop(old, rollout, jnp.array([[True, True]])).tolist()
    [[0.0, 1.0]]
    """
    _check_band(low, high)
    ratio = _token_ratio(old_logprobs, rollout_logprobs)
    return jnp.where(mask & _within(ratio, low, high), ratio, 0.0)


def reject_sequence(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Float32[Array, "B T"]:
    """Keep answers whose ratio lies inside a band: w = 1 if low ≤ Π_t ρ_t ≤ high.

    Masked importance sampling (https://richardli.xyz/rl-collapse).

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        low: the smallest ratio that is kept.
        high: the largest ratio that is kept.

    Returns:
        1 on the tokens of answers that are kept, else 0.

    Raises:
        ValueError: an empty band.

    >>> old, rollout = jnp.array([[0.0, 0.0]]), jnp.array([[-1.0, -1.0]])
    >>> reject_sequence(old, rollout, jnp.array([[True, True]])).tolist()
    [[0.0, 0.0]]
    """
    _check_band(low, high)
    ratio = _sequence_ratio(old_logprobs, rollout_logprobs, mask)
    return (mask & _within(ratio, low, high)).astype(jnp.float32)


def reject_sequence_geometric(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> Float32[Array, "B T"]:
    """Keep answers whose mean ratio lies inside a band: w = 1 if low ≤ (Π_t ρ_t)^{1/T} ≤ high.

    The geometric mean does not drift with the length, unlike the product that `reject_sequence`
    looks at (https://richardli.xyz/rl-collapse).

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        low: the smallest mean ratio that is kept.
        high: the largest mean ratio that is kept.

    Returns:
        1 on the tokens of answers that are kept, else 0.

    Raises:
        ValueError: an empty band.

    >>> old, rollout = jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -1.0]])
    >>> reject_sequence_geometric(old, rollout, jnp.array([[True, True]])).tolist()
    [[1.0, 1.0]]
    """
    _check_band(low, high)
    mean = ratios.sequence_mean(ratios.log_ratio(old_logprobs, rollout_logprobs), mask)
    ratio = jnp.exp(ratios.clip_log_ratio(mean))
    return (mask & _within(ratio, low, high)).astype(jnp.float32)


def reject_sequence_k3(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 0.01,
) -> Float32[Array, "B T"]:
    """Keep answers with a small mean divergence: w = 1 if mean_t(ρ_t − 1 − log ρ_t) ≤ cap.

    Estimates KL(π_rollout ‖ π_old) by k3, whose parts can't cancel each other as those of
    `reject_sequence_geometric` can.

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.
        cap: the largest divergence that is kept, in nats.

    Returns:
        1 on the tokens of answers that are kept, else 0.

    Raises:
        ValueError: cap is not positive.

    >>> old, rollout = jnp.array([[-1.0], [-1.0]]), jnp.array([[-2.0], [-1.0]])
    >>> reject_sequence_k3(old, rollout, jnp.array([[True], [True]])).tolist()
    [[0.0], [1.0]]
    """
    _check_cap(cap)
    log_ratio = ratios.clipped_log_ratio(old_logprobs, rollout_logprobs)
    divergence = ratios.sequence_mean(jnp.expm1(log_ratio) - log_ratio, mask)
    return (mask & (divergence <= cap)).astype(jnp.float32)


def normalized(
    weights: Float[Array, "B T"], averaging: Float[Array, "B T"]
) -> Float32[Array, "B T"]:
    """Scale weights to a mean of 1, unless all are 0: w / Σ(averaging · w).

    Args:
        weights: weights of the tokens of a whole batch.
        averaging: how to average them, from `reduce`.

    Returns:
        The scaled weights.

    >>> normalized(jnp.array([[1.0, 3.0]]), jnp.array([[0.5, 0.5]])).tolist()
    [[0.5, 1.5]]
    """
    mean = (weights * averaging).sum()
    return weights.astype(jnp.float32) / jnp.where(mean > 0, mean, 1.0)


def mismatch_metrics(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> dict[str, Float32[Array, ""]]:
    """Measure how far the trainer's policy is from the one that sampled.

    Args:
        old_logprobs: log-probs under the trainer's policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        mask: true on tokens that the policy generated.

    Returns:
        Under `rollout_corr/`: kl = mean(−log ρ) and k3_kl = mean(ρ − 1 − log ρ), both of
        KL(π_rollout ‖ π_old) in nats; ppl_ratio, the mean over answers of the old policy's
        perplexity over the engine's; chi2_token = mean(ρ²) − 1 and chi2_seq, the same for whole
        answers. Under `training/`: rollout_probs_diff_{mean,max,std} of |π_old − π_rollout| and
        rollout_actor_probs_pearson_corr (0 where either does not vary).

    >>> logprobs = jnp.log(jnp.array([[0.25, 0.5]]))
    >>> metrics = mismatch_metrics(logprobs, logprobs, jnp.array([[True, True]]))
    >>> float(metrics["rollout_corr/kl"]), float(metrics["rollout_corr/ppl_ratio"])
    (0.0, 1.0)
    """
    log_ratio = ratios.clipped_log_ratio(old_logprobs, rollout_logprobs)
    mean_log_ratio = ratios.clip_log_ratio(ratios.sequence_mean(log_ratio, mask))
    sum_log_ratio = ratios.clip_log_ratio(ratios.sequence_sum(log_ratio, mask))
    answers = mask.any(axis=1, keepdims=True)
    old = jnp.where(mask, jnp.exp(ratios.finite(old_logprobs)), 0.0)
    rollout = jnp.where(mask, jnp.exp(ratios.finite(rollout_logprobs)), 0.0)
    gap = jnp.abs(old - rollout)
    return {
        "rollout_corr/kl": ratios.masked_mean(-log_ratio, mask),
        "rollout_corr/k3_kl": ratios.masked_mean(jnp.expm1(log_ratio) - log_ratio, mask),
        "rollout_corr/ppl_ratio": ratios.masked_mean(jnp.exp(-mean_log_ratio), answers),
        "rollout_corr/chi2_token": ratios.masked_mean(jnp.expm1(2.0 * log_ratio), mask),
        "rollout_corr/chi2_seq": ratios.masked_mean(jnp.expm1(2.0 * sum_log_ratio), answers),
        "training/rollout_probs_diff_mean": ratios.masked_mean(gap, mask),
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_std": jnp.sqrt(_covariance(gap, gap, mask)),
        "training/rollout_actor_probs_pearson_corr": _correlation(old, rollout, mask),
    }


def _token_ratio(
    old_logprobs: Float[Array, "B T"], rollout_logprobs: Float[Array, "B T"]
) -> Float32[Array, "B T"]:
    return jnp.exp(ratios.clipped_log_ratio(old_logprobs, rollout_logprobs))


def _sequence_ratio(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float32[Array, "B 1"]:
    total = ratios.sequence_sum(ratios.log_ratio(old_logprobs, rollout_logprobs), mask)
    return jnp.exp(ratios.clip_log_ratio(total))


def _within(ratio: Float32[Array, "B t"], low: float, high: float) -> Bool[Array, "B t"]:
    return (ratio >= low) & (ratio <= high)


def _covariance(
    x: Float32[Array, "B T"], y: Float32[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float32[Array, ""]:
    product = (x - ratios.masked_mean(x, mask)) * (y - ratios.masked_mean(y, mask))
    count = jnp.maximum(mask.sum() - 1, 1).astype(jnp.float32)
    return jnp.where(mask, product, 0.0).sum() / count


def _correlation(
    x: Float32[Array, "B T"], y: Float32[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float32[Array, ""]:
    scale = jnp.sqrt(_covariance(x, x, mask)) * jnp.sqrt(_covariance(y, y, mask))
    return jnp.where(scale > 0, _covariance(x, y, mask) / jnp.where(scale > 0, scale, 1.0), 0.0)


def _check_cap(cap: float) -> None:
    if cap <= 0:
        raise ValueError(f"cap: got {cap}, expected a positive number")


def _check_band(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"got low {low} and high {high}, expected 0 ≤ low < high")

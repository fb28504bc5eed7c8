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
from jaxtyping import Array, Bool, Float32

from jaxrl_llm.algorithms import reduce, stats
from jaxrl_llm.algorithms.stats import Mask, PerToken, PerToken32, TokenInts


def truncated_token(
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask, *, cap: float = 2.0
) -> PerToken32:
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
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask, *, cap: float = 2.0
) -> PerToken32:
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
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask, *, cap: float = 2.0
) -> PerToken32:
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
    return normalized(weights, reduce.token_mean(mask))


def truncated_sequence_normalized(
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask, *, cap: float = 2.0
) -> PerToken32:
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
    return normalized(weights, reduce.sequence_mean_token_mean(mask))


def icepop(
    old_logprobs: PerToken,
    rollout_logprobs: PerToken,
    mask: Mask,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> PerToken32:
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
    old_logprobs: PerToken,
    rollout_logprobs: PerToken,
    mask: Mask,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> PerToken32:
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
    old_logprobs: PerToken,
    rollout_logprobs: PerToken,
    mask: Mask,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> PerToken32:
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
    mean = stats.sequence_mean(stats.log_ratio(old_logprobs, rollout_logprobs), mask)
    ratio = jnp.exp(stats.clip_log_ratio(mean))
    return (mask & _within(ratio, low, high)).astype(jnp.float32)


def reject_sequence_k3(
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask, *, cap: float = 0.01
) -> PerToken32:
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
    log_ratio = stats.clipped_log_ratio(old_logprobs, rollout_logprobs)
    divergence = stats.sequence_mean(jnp.expm1(log_ratio) - log_ratio, mask)
    return (mask & (divergence <= cap)).astype(jnp.float32)


def normalized(weights: PerToken, averaging: PerToken) -> PerToken32:
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
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask
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
    log_ratio = stats.clipped_log_ratio(old_logprobs, rollout_logprobs)
    mean_log_ratio = stats.clip_log_ratio(stats.sequence_mean(log_ratio, mask))
    sum_log_ratio = stats.clip_log_ratio(stats.sequence_sum(log_ratio, mask))
    answers = mask.any(axis=1, keepdims=True)
    old = jnp.where(mask, jnp.exp(stats.finite(old_logprobs)), 0.0)
    rollout = jnp.where(mask, jnp.exp(stats.finite(rollout_logprobs)), 0.0)
    gap = jnp.abs(old - rollout)
    return {
        "rollout_corr/kl": stats.masked_mean(-log_ratio, mask),
        "rollout_corr/k3_kl": stats.masked_mean(jnp.expm1(log_ratio) - log_ratio, mask),
        "rollout_corr/ppl_ratio": stats.masked_mean(jnp.exp(-mean_log_ratio), answers),
        "rollout_corr/chi2_token": stats.masked_mean(jnp.expm1(2.0 * log_ratio), mask),
        "rollout_corr/chi2_seq": stats.masked_mean(jnp.expm1(2.0 * sum_log_ratio), answers),
        "training/rollout_probs_diff_mean": stats.masked_mean(gap, mask),
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_std": jnp.sqrt(_covariance(gap, gap, mask)),
        "training/rollout_actor_probs_pearson_corr": _correlation(old, rollout, mask),
    }


def _token_ratio(old_logprobs: PerToken, rollout_logprobs: PerToken) -> PerToken32:
    return jnp.exp(stats.clipped_log_ratio(old_logprobs, rollout_logprobs))


def _sequence_ratio(
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask
) -> Float32[Array, "B 1"]:
    total = stats.sequence_sum(stats.log_ratio(old_logprobs, rollout_logprobs), mask)
    return jnp.exp(stats.clip_log_ratio(total))


def _within(ratio: Float32[Array, "B t"], low: float, high: float) -> Bool[Array, "B t"]:
    return (ratio >= low) & (ratio <= high)


def _covariance(x: PerToken32, y: PerToken32, mask: Mask) -> Float32[Array, ""]:
    product = (x - stats.masked_mean(x, mask)) * (y - stats.masked_mean(y, mask))
    count = jnp.maximum(mask.sum() - 1, 1).astype(jnp.float32)
    return jnp.where(mask, product, 0.0).sum() / count


def _correlation(x: PerToken32, y: PerToken32, mask: Mask) -> Float32[Array, ""]:
    scale = jnp.sqrt(_covariance(x, x, mask)) * jnp.sqrt(_covariance(y, y, mask))
    return jnp.where(scale > 0, _covariance(x, y, mask) / jnp.where(scale > 0, scale, 1.0), 0.0)


def _check_cap(cap: float) -> None:
    if cap <= 0:
        raise ValueError(f"cap: got {cap}, expected a positive number")


def _check_band(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"got low {low} and high {high}, expected 0 ≤ low < high")


# Tokens of older policies, by their age or by how far the policy has moved: 1 for those that are
# kept and 0 for those that are not.


def reject_old(ages: TokenInts, mask: Mask, *, most: int = 1) -> PerToken32:
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
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask, *, threshold: float = 0.04
) -> PerToken32:
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
    log_ratio = stats.log_ratio(old_logprobs, rollout_logprobs)
    moments = jnp.where(mask, log_ratio**2, jnp.inf).ravel()
    order = jnp.argsort(moments, stable=True)
    smallest = jnp.where(mask.ravel()[order], moments[order], 0.0)
    means = jnp.cumsum(smallest) / jnp.arange(1, len(smallest) + 1, dtype=jnp.float32)
    is_kept = jnp.zeros(len(order), bool).at[order].set(means <= threshold)
    return (mask & is_kept.reshape(mask.shape)).astype(jnp.float32)

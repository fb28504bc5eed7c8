"""Advantages from one score per answer, compared with the other answers to the same prompt."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.algorithms.advantages_token import to_tokens, whiten
from jaxrl_llm.algorithms.groups import centred, deviation, grouped, over_group


def grpo(
    scores: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Float32[Array, " B"]:
    """Standardise scores within their group: A = (R − mean) / (std + eps).

    GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2). The standard deviation divides by
    G − 1, which the paper leaves open. A group of one has no mean to compare with: A = R. A group
    of equal scores gives exactly 0.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        scale_by_std: divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the score.

    Returns:
        One advantage per answer.

    >>> scores, groups = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0]), jnp.array([7, 7, 7, 9, 9])
    >>> [f"{a:.3f}" for a in grpo(scores, groups)]
    ['1.155', '-0.577', '-0.577', '0.000', '0.000']
    """
    groups = grouped(group_ids)
    advantages = centred(scores, groups)
    if scale_by_std:
        advantages /= deviation(advantages, groups) + eps
    return jnp.where(groups.size == 1, scores.astype(jnp.float32), advantages)


def dr_grpo(scores: Float[Array, " B"], group_ids: Int[Array, " B"]) -> Float32[Array, " B"]:
    """Compare scores with their group's mean: A = R − mean.

    Dr. GRPO (https://arxiv.org/abs/2503.20783, section 3.2): GRPO without the division by the
    standard deviation, which favours prompts that are nearly always or nearly never solved. Its
    aggregation is `reduce.sequence_mean_token_sum_norm`. A group of one: A = R.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        One advantage per answer.

    >>> dr_grpo(jnp.array([1.0, 0.0]), jnp.array([0, 0])).tolist()
    [0.5, -0.5]
    """
    return grpo(scores, group_ids, scale_by_std=False)


def rloo(scores: Float[Array, " B"], group_ids: Int[Array, " B"]) -> Float32[Array, " B"]:
    """Compare scores with the mean of the others in the group: A = R − Σ_{j≠i} R_j / (G − 1).

    RLOO (https://arxiv.org/abs/2402.14740, section 2.3), computed as G / (G − 1) · (R − mean). A
    group of one has no others: A = 0.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        One advantage per answer.

    >>> rloo(jnp.array([1.0, 0.0, 5.0]), jnp.array([0, 0, 1])).tolist()
    [1.0, -1.0, 0.0]
    """
    groups = grouped(group_ids)
    size = groups.size.astype(jnp.float32)
    return centred(scores, groups) * size / jnp.maximum(groups.size - 1, 1).astype(jnp.float32)


def opo(
    scores: Float[Array, " B"], response_lengths: Int[Array, " B"], group_ids: Int[Array, " B"]
) -> Float32[Array, " B"]:
    """Compare scores with the group's mean weighted by length: A = R − Σ_j l_j R_j / Σ_j l_j.

    OPO (https://arxiv.org/abs/2505.23585): the baseline of least variance where the squared norm of
    an answer's gradient is proportional to its length. A group of one: A = R, as in `grpo`.

    Args:
        scores: score of each answer.
        response_lengths: tokens that the policy generated in each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        One advantage per answer.

    >>> opo(jnp.array([1.0, 0.0]), jnp.array([1, 3]), jnp.array([0, 0])).tolist()
    [0.75, -0.25]
    """
    scores = scores.astype(jnp.float32)
    groups = grouped(group_ids)
    shifted = scores - over_group(jax.ops.segment_min, scores, groups)
    tokens = response_lengths.astype(jnp.float32)
    weighted = over_group(jax.ops.segment_sum, tokens * shifted, groups)
    baseline = weighted / jnp.maximum(over_group(jax.ops.segment_sum, tokens, groups), 1.0)
    return jnp.where(groups.size == 1, scores, shifted - baseline)


def grpo_pass_at_k(
    scores: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Float32[Array, " B"]:
    """Reward only the best of a group, by its lead: A = (R_best − R_second) / (std + eps).

    The gradient of the expected maximum of a group, with the leave-one-out baseline
    (https://arxiv.org/abs/2503.19595); the division is GRPO's. All others get 0, and so does
    everyone where two share the best score and in a group of one.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        scale_by_std: divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the score.

    Returns:
        One advantage per answer.

    >>> scores, groups = jnp.array([3.0, 1.0, 0.0]), jnp.array([0, 0, 0])
    >>> grpo_pass_at_k(scores, groups, scale_by_std=False).tolist()
    [2.0, 0.0, 0.0]
    """
    scores = scores.astype(jnp.float32)
    groups = grouped(group_ids)
    best = scores == over_group(jax.ops.segment_max, scores, groups)
    second = over_group(jax.ops.segment_max, jnp.where(best, -jnp.inf, scores), groups)
    alone = best & (over_group(jax.ops.segment_sum, best.astype(jnp.int32), groups) == 1)
    lead = jnp.where(alone & (groups.size > 1), scores - second, 0.0)
    if not scale_by_std:
        return lead
    return lead / (deviation(centred(scores, groups), groups) + eps)


def gpg(
    scores: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    f_norm: float = 1.0,
) -> Float32[Array, " B"]:
    """Compare with the group's mean and make up for idle groups: A = α (R − mean) / f_norm.

    GPG (https://arxiv.org/abs/2504.02546) with its "accurate gradient estimation": α = B / B_used,
    where B_used counts the answers of groups whose scores are not all equal. The others add nothing
    to the gradient, yet count in its mean. (verl counts the answers whose score is not 0.) Its loss
    is `losses.reinforce`. A group of one: A = α R / f_norm, idle where R = 0. As in `reduce`, an
    answer without any token on the mask counts for nothing, neither in B nor in B_used.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.
        f_norm: a constant divisor, in units of the score.

    Returns:
        One advantage per answer.

    >>> scores, groups = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])
    >>> gpg(scores, groups, jnp.ones((4, 1), bool)).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    groups = grouped(group_ids)
    advantages = dr_grpo(scores, group_ids)
    counted = mask.any(axis=1)
    used = counted & (over_group(jax.ops.segment_max, jnp.abs(advantages), groups) > 0)
    total, learning = (x.sum().astype(jnp.float32) for x in (counted, used))
    return advantages * (total / jnp.maximum(learning, 1.0)) / f_norm


def gdpo(
    score_components: Float[Array, "B C"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
) -> Float32[Array, " B"]:
    """Standardise each score component by itself, add them up, whiten: A = whiten(Σ_c w_c A_c).

    A_c is GRPO's advantage of component c. GDPO (https://arxiv.org/abs/2601.05242): sums of
    different components that happen to be equal keep different advantages. We whiten over the
    answers with a token on the mask, as the paper does; verl does over their tokens.

    Args:
        score_components: the scores that an answer got, by component.
        group_ids: which answers share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.
        weights: one per component; all 1 where None.
        eps: what is added to the standard deviation of a group, in units of the score.

    Returns:
        One advantage per answer, 0 where it has no token on the mask.

    Raises:
        ValueError: not as many weights as components.

    >>> scores, groups = jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.array([0, 0])
    >>> [f"{a:.3f}" for a in gdpo(scores, groups, jnp.ones((2, 1), bool))]
    ['0.707', '-0.707']
    """
    components = score_components.shape[1]
    weights = [1.0] * components if weights is None else weights
    if len(weights) != components:
        raise ValueError(
            f"got {len(weights)} weights, expected one for each of {components} scores"
        )
    per_component = jax.vmap(lambda s: grpo(s, group_ids, eps=eps), in_axes=1, out_axes=1)
    total = per_component(score_components) @ jnp.asarray(weights, jnp.float32)
    return whiten(total, mask.any(axis=1))


def reinforce_plus_plus_baseline(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], mask: Bool[Array, "B T"]
) -> Float32[Array, "B T"]:
    """Compare with the group's mean, then whiten over the batch: A = whiten(R − mean).

    REINFORCE++ with a baseline (https://arxiv.org/abs/2501.03262): the standard deviation is the
    batch's, over tokens, instead of the group's. A group of one has no baseline.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.

    Returns:
        One advantage per token, 0 off the mask.

    >>> mask = jnp.array([[True], [True]])
    >>> scores, groups = jnp.array([1.0, 0.0]), jnp.array([3, 3])
    >>> [f"{a:.3f}" for a in reinforce_plus_plus_baseline(scores, groups, mask)[:, 0]]
    ['0.707', '-0.707']
    """
    return whiten(to_tokens(dr_grpo(scores, group_ids), mask), mask)

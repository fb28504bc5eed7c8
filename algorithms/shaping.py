"""Penalties, added to scores before they become advantages, and which answers are trained on.

A penalty takes fields of a batch and gives [B], which is added to the scores. A filter gives true
for the answers to keep: one of groups the same for a whole group, one of answers for each alone.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import stats
from jaxrl_llm.algorithms.stats import AnswerInts, AnswerMask, PerAnswer, PerAnswer32


def overlong_penalty(
    response_lengths: AnswerInts, *, max_tokens: int, buffer: int, factor: float = 1.0
) -> PerAnswer32:
    """Charge for answers that come near the longest one: f · clip((L − c − l) / c, −1, 0).

    L is `max_tokens`, c the `buffer`: nothing up to L − c, then a straight line to −f at L and −f
    beyond. DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13), where f is
    1, L 20480 and c 4096. A buffer of 0 charges −f beyond L only.

    Args:
        response_lengths: tokens that the policy generated in each answer.
        max_tokens: the length L at which the whole penalty is due.
        buffer: tokens c before it over which the penalty grows.
        factor: the largest penalty f, in units of the score.

    Returns:
        One number from −f to 0 per answer, to be added to its score.

    Raises:
        ValueError: a buffer that is negative or longer than max_tokens, or a negative factor.

    >>> overlong_penalty(jnp.array([6, 8, 9, 11]), max_tokens=10, buffer=4).tolist()
    [0.0, -0.5, -0.75, -1.0]
    """
    if not 0 <= buffer <= max_tokens:
        raise ValueError(
            f"got buffer {buffer} and max_tokens {max_tokens}, expected 0 ≤ buffer ≤ max_tokens"
        )
    if factor < 0:
        raise ValueError(f"factor: got {factor}, expected at least 0")
    left = (max_tokens - buffer - response_lengths).astype(jnp.float32)
    # Lengths are whole numbers, so that a ramp of one token is the step of an empty buffer.
    return factor * jnp.clip(left / max(buffer, 1), -1.0, 0.0)


def with_spread(scores: PerAnswer, group_ids: AnswerInts) -> AnswerMask:
    """Keep the groups whose scores are not all equal: max_j R_j > min_j R_j.

    Elsewhere every group-relative advantage is 0. DAPO's dynamic sampling
    (https://arxiv.org/abs/2503.14476, eq. 11, which counts correct answers: more than none and
    fewer than all). A group of one is not kept.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        True on the answers of groups to keep.

    >>> with_spread(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])).tolist()
    [True, True, False, False]
    """
    groups = stats.grouped(group_ids)
    highest = stats.over_group(jax.ops.segment_max, scores, groups)
    return highest > stats.over_group(jax.ops.segment_min, scores, groups)


def mean_between(
    scores: PerAnswer, group_ids: AnswerInts, *, low: float = 0.2, high: float = 0.8
) -> AnswerMask:
    """Keep the groups of medium difficulty: low ≤ mean_j R_j ≤ high.

    PRIME's online prompt filtering (https://arxiv.org/abs/2502.01456, section 3.3); the bounds are
    those its authors trained with. A score is the share that is right, from 0 to 1, in that paper.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        low: the smallest mean that is kept, in units of the score.
        high: the largest mean that is kept.

    Returns:
        True on the answers of groups to keep.

    Raises:
        ValueError: low is above high.

    >>> mean_between(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])).tolist()
    [True, True, False, False]
    """
    if not low <= high:
        raise ValueError(f"got low {low} and high {high}, expected low ≤ high")
    groups = stats.grouped(group_ids)
    total = stats.over_group(jax.ops.segment_sum, scores.astype(jnp.float32), groups)
    mean = total / groups.size.astype(jnp.float32)
    return (mean >= low) & (mean <= high)


def best_of_group(
    scores: PerAnswer, group_ids: AnswerInts, *, threshold: float | None = None
) -> AnswerMask:
    """Keep the best answer to each prompt; of equal ones the first.

    The filter of RAFT (https://arxiv.org/abs/2304.06767), which imitates the best of G answers. A
    group without a better and a worse answer is dropped whole, or, with a threshold, one whose best
    is below it.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        threshold: the least score that is kept; None: more than the worst of the group.

    Returns:
        True on the answers to keep, one in a group or none.

    >>> scores, groups = jnp.array([0.0, 1.0, 1.0, 1.0, 1.0]), jnp.array([0, 0, 0, 1, 1])
    >>> best_of_group(scores, groups).tolist()
    [False, True, False, False, False]
    >>> best_of_group(scores, groups, threshold=1.0).tolist()
    [False, True, False, True, False]
    """
    groups = stats.grouped(group_ids)
    best = stats.over_group(jax.ops.segment_max, scores, groups)
    least = stats.over_group(jax.ops.segment_min, scores, groups)
    is_good = best > least if threshold is None else best >= threshold
    place = jnp.arange(scores.size)
    first = jnp.where(scores == best, place, scores.size)
    return is_good & (place == stats.over_group(jax.ops.segment_min, first, groups))


def at_least(scores: PerAnswer, *, threshold: float) -> AnswerMask:
    """Keep the answers with a score of at least a threshold: rejection sampling.

    RAFT++ (https://arxiv.org/abs/2504.11343) keeps all right answers so.

    Args:
        scores: score of each answer.
        threshold: the least score that is kept.

    Returns:
        True on the answers to keep.

    >>> at_least(jnp.array([0.2, 1.0]), threshold=0.5).tolist()
    [False, True]
    """
    return scores >= threshold

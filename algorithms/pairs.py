"""Pairs of a better and a worse answer, made of the scored answers to each prompt.

A function takes fields of a batch and gives `Pairs`: indices of answers, and which of the pairs
count, so that the arrays have the same shape in every step. The answers of a pair are to the same
prompt. Answers with the same score make no pair.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms import stats


class Pairs(NamedTuple):
    """What a function that makes pairs returns.

    Attributes:
        chosen: index of the better answer.
        rejected: index of the worse answer.
        valid: which of the pairs count.
    """

    chosen: Int[Array, " P"]
    rejected: Int[Array, " P"]
    valid: Bool[Array, " P"]


def best_and_worst(scores: Float[Array, " B"], group_ids: Int[Array, " B"]) -> Pairs:
    """Pair the best answer to each prompt with the worst; of equal ones the first.

    Online DPO (https://arxiv.org/abs/2402.04792) with two answers to a prompt, and iterative DPO
    with more (https://arxiv.org/abs/2405.07863). A group whose scores are all equal makes no pair.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        A pair for each group, at the place of its best answer; the other places do not count.

    >>> pairs = best_and_worst(jnp.array([0.0, 1.0, 2.0, 5.0, 5.0]), jnp.array([7, 7, 7, 9, 9]))
    >>> pairs.chosen[pairs.valid].tolist(), pairs.rejected[pairs.valid].tolist()
    ([2], [0])
    """
    groups = stats.grouped(group_ids)
    best = stats.over_group(jax.ops.segment_max, scores, groups)
    worst = stats.over_group(jax.ops.segment_min, scores, groups)
    place = jnp.arange(scores.size)

    def first(mark: Array) -> Array:
        return stats.over_group(jax.ops.segment_min, jnp.where(mark, place, scores.size), groups)

    valid = (best > worst) & (place == first(scores == best))
    return Pairs(place, jnp.minimum(first(scores == worst), scores.size - 1), valid)


def all_pairs(scores: Float[Array, " B"], group_ids: Int[Array, " B"]) -> Pairs:
    """Pair each answer with every worse one to the same prompt.

    A group of G answers makes up to G (G − 1) / 2 pairs, all of equal weight, as those of a reward
    model in InstructGPT (https://arxiv.org/abs/2203.02155, section 3.4). The arrays have B² places.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        All ordered pairs of answers; those of one group that differ in score count.

    >>> pairs = all_pairs(jnp.array([0.0, 1.0, 2.0]), jnp.array([0, 0, 0]))
    >>> pairs.chosen[pairs.valid].tolist(), pairs.rejected[pairs.valid].tolist()
    ([1, 2, 2], [0, 0, 1])
    """
    place = jnp.arange(scores.size)
    chosen, rejected = jnp.repeat(place, scores.size), jnp.tile(place, scores.size)
    same = group_ids[chosen] == group_ids[rejected]
    return Pairs(chosen, rejected, same & (scores[chosen] > scores[rejected]))

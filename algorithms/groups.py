"""Statistics over the answers that share a prompt, whatever integers name the groups."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped


class Groups(NamedTuple):
    """Which answers belong together.

    Attributes:
        number: each answer's group, numbered from 0.
        size: answers in the group of each answer.
    """

    number: Int[Array, " B"]
    size: Int[Array, " B"]


def grouped(group_ids: Int[Array, " B"]) -> Groups:
    """Number the groups from 0 and count their answers.

    >>> groups = grouped(jnp.array([40, -2, 40]))
    >>> groups.number.tolist(), groups.size.tolist()
    ([1, 0, 1], [2, 1, 2])
    """
    _, number = jnp.unique(group_ids, return_inverse=True, size=group_ids.size)
    count = jax.ops.segment_sum(jnp.ones_like(number), number, num_segments=number.size)
    return Groups(number, count[number])


def over_group(
    reduction: Callable[..., Array], values: Shaped[Array, " B *rest"], groups: Groups
) -> Shaped[Array, " B *rest"]:
    """Return for each answer the reduction over its group: one of `jax.ops.segment_*`.

    >>> groups = grouped(jnp.array([0, 0, 1]))
    >>> over_group(jax.ops.segment_max, jnp.array([1.0, 2.0, 0.0]), groups).tolist()
    [2.0, 2.0, 0.0]
    """
    return reduction(values, groups.number, num_segments=groups.number.size)[groups.number]


def centred(scores: Float[Array, " B"], groups: Groups) -> Float32[Array, " B"]:
    """Return scores less their group's mean.

    >>> centred(jnp.array([1.0, 2.0, 5.0]), grouped(jnp.array([0, 0, 1]))).tolist()
    [-0.5, 0.5, 0.0]
    """
    scores = scores.astype(jnp.float32)
    # Less the minimum first: then equal scores give exactly 0 and a large offset costs no digits.
    shifted = scores - over_group(jax.ops.segment_min, scores, groups)
    return shifted - over_group(jax.ops.segment_sum, shifted, groups) / groups.size.astype(
        jnp.float32
    )


def deviation(
    centred_scores: Float[Array, " B *rest"],
    groups: Groups,
    count: Shaped[Array, " B *rest"] | None = None,
) -> Float32[Array, " B *rest"]:
    """Return the standard deviation of each answer's group (divisor G − 1; 0 in a group of one).

    Args:
        centred_scores: scores less their group's mean.
        groups: which answers belong together.
        count: answers of the group that have a score, if not all do; the others' are 0.

    >>> deviation(jnp.array([-4.0, 0.0, 4.0, 0.0]), grouped(jnp.array([0, 0, 0, 1]))).tolist()
    [4.0, 4.0, 4.0, 0.0]
    """
    # In units of the largest one, if that is above 1: float32 can't hold the square of 1e20.
    unit = jnp.maximum(over_group(jax.ops.segment_max, jnp.abs(centred_scores), groups), 1.0)
    squares = over_group(jax.ops.segment_sum, jnp.square(centred_scores / unit), groups)
    count = groups.size if count is None else count
    return unit * jnp.sqrt(squares / jnp.maximum(count - 1, 1).astype(jnp.float32))

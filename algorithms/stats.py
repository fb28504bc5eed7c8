"""Log-ratios kept finite, means over masks, and statistics over answers that share a prompt."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

# Arrays of B answers of T tokens each, or of P pairs. Inputs may be of any floating-point dtype.

PerToken = Float[Array, "B T"]
PerToken32 = Float32[Array, "B T"]
Mask = Bool[Array, "B T"]
TokenInts = Int[Array, "B T"]
PerAnswer = Float[Array, " B"]
PerAnswer32 = Float32[Array, " B"]
AnswerInts = Int[Array, " B"]
AnswerMask = Bool[Array, " B"]
PerPair = Float[Array, " P"]
PerPair32 = Float32[Array, " P"]


# Log-probs kept finite, and means over the tokens of a sequence.


LARGEST_LOGPROB = 1e9
"""Log-probs beyond this, infinite ones above all, are taken as this; its square fits in float32."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratios beyond this are taken as this before exp; exp(20) is 4.9e8."""


def finite(logprobs: Float[Array, "*S"]) -> Float32[Array, "*S"]:
    """Return log-probs in float32 with infinite ones replaced: clip(logprobs, ±1e9).

    An infinite log-prob off the mask would turn the gradient into NaN, since 0 · ∞ is NaN. NaN
    itself is kept: it says that the model has diverged, which must not be hidden.

    >>> finite(jnp.array([-1.5, -jnp.inf])).tolist()
    [-1.5, -1000000000.0]
    """
    return jnp.clip(logprobs.astype(jnp.float32), -LARGEST_LOGPROB, LARGEST_LOGPROB)


def log_ratio(
    logprobs: Float[Array, "*S"], other_logprobs: Float[Array, "*S"]
) -> Float32[Array, "*S"]:
    """Return log π − log π_other, which is finite also where a log-prob is infinite.

    >>> log_ratio(jnp.array([-1.0]), jnp.array([-1.5])).tolist()
    [0.5]
    """
    return finite(logprobs) - finite(other_logprobs)


def clipped_log_ratio(
    logprobs: Float[Array, "*S"], other_logprobs: Float[Array, "*S"]
) -> Float32[Array, "*S"]:
    """Return log π − log π_other clipped to ±20, so that its exponential is finite.

    >>> clipped_log_ratio(jnp.array([-1.0]), jnp.array([-jnp.inf])).tolist()
    [20.0]
    """
    return clip_log_ratio(log_ratio(logprobs, other_logprobs))


def clip_log_ratio(values: Float[Array, "*S"]) -> Float32[Array, "*S"]:
    """Clip log-ratios to ±20.

    >>> clip_log_ratio(jnp.array([-1e4, 3.0])).tolist()
    [-20.0, 3.0]
    """
    return jnp.clip(values, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_sum(values: PerToken, mask: Mask) -> Float32[Array, "B 1"]:
    """Return the sum over each sequence's tokens on the mask; what lies off it is not read.

    >>> sequence_sum(jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([[True, True, False]])).tolist()
    [[3.0]]
    """
    return jnp.where(mask, values.astype(jnp.float32), 0.0).sum(axis=1, keepdims=True)


def sequence_mean(values: PerToken, mask: Mask) -> Float32[Array, "B 1"]:
    """Return the mean over each sequence's tokens on the mask, 0 where it has none.

    >>> sequence_mean(jnp.array([[1.0, 2.0, 9.0]]), jnp.array([[True, True, False]])).tolist()
    [[1.5]]
    """
    count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    return sequence_sum(values, mask) / count.astype(jnp.float32)


def masked_mean(values: PerToken, mask: Mask) -> Float32[Array, ""]:
    """Return the mean over all tokens on the mask, 0 where there are none.

    >>> float(masked_mean(jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])))
    2.0
    """
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    return jnp.where(mask, values.astype(jnp.float32), 0.0).sum() / count


# Statistics over the answers that share a prompt, whatever integers name the groups.


class Groups(NamedTuple):
    """Which answers belong together.

    Attributes:
        number: each answer's group, numbered from 0.
        size: answers in the group of each answer.
    """

    number: AnswerInts
    size: AnswerInts


def grouped(group_ids: AnswerInts) -> Groups:
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


def centred(scores: PerAnswer, groups: Groups) -> PerAnswer32:
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

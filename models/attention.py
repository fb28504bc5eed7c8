"""Attention over packed rows and over a decoding cache.

These two functions are all that a model knows about attention, so a faster kernel is chosen here.
Both describe the allowed pairs by segments, lengths and a window, never by a dense mask, because
that is what block-skipping kernels take.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Attending(NamedTuple):
    """How a layer attends.

    Attributes:
        scale: What products of queries and keys are multiplied by; None means 1/√H.
        window: How many tokens, itself included, a token attends to; None means all. A number where
            the layers of a model are alike, else an array, the largest int32 standing for all.
        softcap: Scaled scores s become c·tanh(s/c); None leaves them.
    """

    scale: float | None = None
    window: int | Int[Array, ""] | None = None
    softcap: float | None = None


PLAIN = Attending()


def attend(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R L K H"],
    v: Float[Array, "R L K H"],
    segment_ids: Int[Array, "R L"],
    how: Attending = PLAIN,
) -> Float[Array, "R L N H"]:
    r"""Attend causally within the segments of packed rows.

    $o_i = \sum_{j \in A_i} \mathrm{softmax}_j(q_i \cdot k_j / \sqrt{H})\, v_j$ over
    $A_i = \{j : i - w < j \le i,\, s_j = s_i\}$ with window w (https://arxiv.org/abs/2004.05150),
    where query head n reads key/value head $\lfloor nK/N \rfloor$
    (https://arxiv.org/abs/2305.13245). The softmax is in float32.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        segment_ids: 1, 2, … for the sequences of a row, each contiguous; 0 for padding. A padding
            position gets a finite value that means nothing, and nothing attends to it.
        how: Scale, window and soft-cap of the scores.

    Returns:
        The mixed values, in the dtype of `q`.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend(x, x, x, jnp.array([[1, 1, 0]])).shape
    (1, 3, 2, 4)
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    index = jnp.arange(segment_ids.shape[1])
    distance = index[:, None] - index[None, :]
    allowed = same & (segment_ids != 0)[:, None, :] & (distance >= 0)
    if how.window is not None:
        allowed &= distance < how.window
    return _mix(q, k, v, allowed[:, None], how)


def attend_cache(
    q: Float[Array, "B N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    how: Attending = PLAIN,
) -> Float[Array, "B N H"]:
    """Attend with one query per row over the first `lengths[b]` slots of row b of a cache.

    The equation is that of `attend`; the query stands in the last of these slots.

    Args:
        q: One query per row.
        k: Cached keys.
        v: Cached values.
        lengths: Number of leading slots that hold the row's tokens.
        how: Scale, window and soft-cap of the scores.

    Returns:
        The mixed values, in the dtype of `q`.

    >>> cache = jnp.ones((2, 5, 1, 4))
    >>> attend_cache(jnp.ones((2, 3, 4)), cache, cache, jnp.array([1, 4])).shape
    (2, 3, 4)
    """
    distance = lengths[:, None] - 1 - jnp.arange(k.shape[1])
    allowed = distance >= 0
    if how.window is not None:
        allowed &= distance < how.window
    return _mix(q[:, None], k, v, allowed[:, None, None], how)[:, 0]


def _mix(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R S K H"],
    v: Float[Array, "R S K H"],
    allowed: Bool[Array, "R 1 L S"],
    how: Attending,
) -> Float[Array, "R L N H"]:
    if how.softcap is None:
        return jax.nn.dot_product_attention(
            q, k, v, mask=allowed, scale=how.scale, implementation="xla"
        )
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("rlkgh,rskh->rkgls", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (q.shape[3] ** -0.5 if how.scale is None else how.scale)
    scores = how.softcap * jnp.tanh(scores / how.softcap)
    lowest = jnp.finfo(jnp.float32).min  # not -inf: a padding position allows nothing
    weights = jax.nn.softmax(jnp.where(allowed[:, :, None], scores, lowest), axis=-1)
    return jnp.einsum("rkgls,rskh->rlkgh", weights.astype(v.dtype), v).reshape(q.shape)

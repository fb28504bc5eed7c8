"""Attention over packed rows and over a decoding cache.

These two functions are all that a model knows about attention, so a faster kernel is chosen here.
Both describe the allowed pairs by segments or lengths, never by a dense mask, because that is what
block-skipping kernels take.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attend(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R L K H"],
    v: Float[Array, "R L K H"],
    segment_ids: Int[Array, "R L"],
) -> Float[Array, "R L N H"]:
    r"""Attend causally within the segments of packed rows.

    $o_i = \sum_{j \le i,\, s_j = s_i} \mathrm{softmax}_j(q_i \cdot k_j / \sqrt{H})\, v_j$, where
    query head n reads key/value head $\lfloor nK/N \rfloor$ (https://arxiv.org/abs/2305.13245).
    The softmax is in float32.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        segment_ids: 1, 2, … for the sequences of a row, each contiguous; 0 for padding. A padding
            position gets a finite value that means nothing, and nothing attends to it.

    Returns:
        The mixed values, in the dtype of `q`.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend(x, x, x, jnp.array([[1, 1, 0]])).shape
    (1, 3, 2, 4)
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    index = jnp.arange(segment_ids.shape[1])
    allowed = same & (segment_ids != 0)[:, None, :] & (index[:, None] >= index[None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=allowed[:, None], implementation="xla")


def attend_cache(
    q: Float[Array, "B N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B N H"]:
    """Attend with one query per row over the first `lengths[b]` slots of row b of a cache.

    The equation is that of `attend`.

    Args:
        q: One query per row.
        k: Cached keys.
        v: Cached values.
        lengths: Number of leading slots that hold the row's tokens.

    Returns:
        The mixed values, in the dtype of `q`.

    >>> cache = jnp.ones((2, 5, 1, 4))
    >>> attend_cache(jnp.ones((2, 3, 4)), cache, cache, jnp.array([1, 4])).shape
    (2, 3, 4)
    """
    mixed = jax.nn.dot_product_attention(
        q[:, None], k, v, key_value_seq_lengths=lengths, implementation="xla"
    )
    return mixed[:, 0]

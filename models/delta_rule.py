"""The gated delta rule and the short convolution before it, over packed rows.

A layer of Gated DeltaNet (https://arxiv.org/abs/2412.06464) reads and writes one matrix a head, its
memory, instead of the keys and values of all tokens before.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

_einsum = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


@jax.named_scope("delta_rule")
def gated_delta_rule(
    q: Float[Array, "R L N K"],
    k: Float[Array, "R L N K"],
    v: Float[Array, "R L M V"],
    log_decay: Float32[Array, "R L M"],
    beta: Float32[Array, "R L M"],
    segment_ids: Int[Array, "R L"],
    memory: Float32[Array, "R M K V"] | None = None,
) -> tuple[Float32[Array, "R L M V"], Float32[Array, "R M K V"]]:
    r"""Write each token into its sequence's memory and read it, by the gated delta rule.

    $S_t = e^{g_t} S_{t-1} + k_t \otimes \beta_t (v_t - e^{g_t} S_{t-1}^\top k_t)$ and
    $o_t = S_t^\top q_t$ (equation 10 of https://arxiv.org/abs/2412.06464), where value head m reads
    key head $\lfloor mN/M \rfloor$ and a sequence starts from $S = 0$.

    Args:
        q: Queries, already normed and scaled.
        k: Keys of length 1 or less.
        v: Values.
        log_decay: g of each value head, at most 0.
        beta: How much of a key's old value is replaced, 0 to 1.
        segment_ids: 1, 2, … for the sequences of a row, each contiguous; 0 for padding, which
            changes no memory.
        memory: S before the row, of the sequence that the row's first token belongs to; None: 0.

    Returns:
        What was read, finite and without meaning at padding, and the memory after the last token
        that is not padding, which is `memory` where there is none.

    >>> ones = jnp.ones((1, 2, 1))
    >>> key = jnp.array([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    >>> read, _ = gated_delta_rule(key, key, key, 0 * ones, ones, jnp.array([[1, 1]]))
    >>> read[0, :, 0].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    rows, _, heads, values = v.shape
    shared = heads // k.shape[2]
    if memory is None:
        memory = jnp.zeros((rows, heads, k.shape[3], values), jnp.float32)
    real = segment_ids != 0
    first = jnp.take_along_axis(segment_ids, real.argmax(axis=1)[:, None], axis=1)[:, 0]

    def step(carry: tuple[Array, Array], token: tuple[Array, ...]) -> tuple[tuple, Array]:
        state, segment = carry
        q, k, v, log_decay, beta, ids = token
        is_real = ids != 0
        goes_on = (ids == segment) | ~is_real
        decay = jnp.exp(jnp.where(is_real[:, None], log_decay, 0))
        decay = jnp.where(goes_on[:, None], decay, 0)
        state = state * decay[:, :, None, None]
        beta = jnp.where(is_real[:, None], beta, 0)
        change = (v - _einsum("rmkv,rmk->rmv", state, k)) * beta[..., None]
        state = state + k[..., None] * change[:, :, None]
        read = _einsum("rmkv,rmk->rmv", state, q)
        return (state, jnp.where(is_real, ids, segment)), read

    q, k = (jnp.repeat(x.astype(jnp.float32), shared, axis=2) for x in (q, k))
    tokens = (q, k, v.astype(jnp.float32), log_decay, beta, segment_ids)
    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), tokens)
    (memory, _), read = jax.lax.scan(step, (memory, first), tokens)
    return read.swapaxes(0, 1), memory


def causal_conv(
    x: Float[Array, "R L *C"],
    taps: Float[Array, "*C W"],
    segment_ids: Int[Array, "R L"],
    tail: Float[Array, "R *C W-1"] | None = None,
) -> tuple[Float[Array, "R L *C"], Float[Array, "R *C W-1"]]:
    """Convolve each channel with its last W inputs of the same sequence.

    Args:
        x: Inputs, all the channels of a token.
        taps: What a channel's inputs are multiplied by, the oldest first.
        segment_ids: 1, 2, … for the sequences of a row, each contiguous; 0 for padding.
        tail: The W - 1 inputs before the row, of the sequence that the row's first token belongs
            to, the oldest first; None: zeros.

    Returns:
        The sums in the dtype of `x`, finite and without meaning at padding, and the last W - 1
        inputs of the sequence of the last token that is not padding: zeros before its first, and
        `tail` where all is padding.

    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> sums, tail = causal_conv(x, jnp.array([[10.0, 1.0]]), jnp.array([[1, 1, 2]]))
    >>> sums[0, :, 0].tolist(), tail[0, 0].tolist()
    ([1.0, 12.0, 3.0], [3.0])
    """
    rows, length = segment_ids.shape
    width = taps.shape[-1]
    real = segment_ids != 0
    before = jnp.zeros((rows, width - 1, *x.shape[2:]), x.dtype)
    inputs = jnp.concatenate([before, x], axis=1)
    ids = jnp.pad(segment_ids, ((0, 0), (width - 1, 0)))
    if tail is not None:
        # right before the first token, over padding where the row starts with it
        first = jnp.where(real.any(axis=1), real.argmax(axis=1), length)
        segment = jnp.take_along_axis(segment_ids, first[:, None], axis=1, mode="clip")
        segment = jnp.broadcast_to(jnp.maximum(segment, 1), (rows, width - 1))
        put = jax.vmap(
            lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, 0)
        )
        inputs = put(inputs, jnp.moveaxis(tail, -1, 1).astype(x.dtype), first)
        ids = put(ids, segment, first)

    def masked(part: Array, same: Array) -> Array:
        return jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), part, 0)

    sums = jnp.zeros(x.shape, jnp.float32)
    for i in range(width):
        part = masked(inputs[:, i : i + length], ids[:, i : i + length] == segment_ids)
        sums += part.astype(jnp.float32) * taps[..., i].astype(jnp.float32)

    places = jnp.arange(width - 1 + length)
    last = jnp.where(ids != 0, places, 0).max(axis=1, keepdims=True)
    ends = jnp.maximum(last - jnp.arange(width - 2, -1, -1), 0)
    kept = jnp.take_along_axis(ids, ends, axis=1) == jnp.take_along_axis(ids, last, axis=1)
    index = ends.reshape(*ends.shape, *(1,) * (x.ndim - 2))
    kept &= (ids != 0).any(axis=1, keepdims=True)
    new_tail = masked(jnp.take_along_axis(inputs, index, axis=1), kept)
    return sums.astype(x.dtype), jnp.moveaxis(new_tail, 1, -1)

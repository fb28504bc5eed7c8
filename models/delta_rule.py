"""The gated delta rule and the short convolution before it, over packed rows.

A layer of Gated DeltaNet (https://arxiv.org/abs/2412.06464) reads and writes one matrix a head, its
memory, instead of the keys and values of all tokens before.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

CHUNK = 64
"""Tokens whose changes to the memory are found together, by products of matrices."""
GROUP = 8
"""Chunks that are prepared together; the backward pass keeps the memory at the start of each group
and computes the group again."""
SMALL = 16
"""Rows of a triangle that is inverted by products of its whole width."""

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
    rows, length, heads, values = v.shape
    by_key = (rows, k.shape[2], heads // k.shape[2])
    if memory is None:
        memory = jnp.zeros((rows, heads, k.shape[3], values), jnp.float32)
    state = memory.reshape(*by_key, *memory.shape[2:])
    real = (segment_ids != 0)[:, :, None]
    log_decay, beta = jnp.where(real, log_decay, 0), jnp.where(real, beta, 0)
    if length == 1:
        read, state = _step(q, k, v, log_decay, beta, state)
    else:
        read, state = _in_groups(q, k, v, log_decay, beta, _carried_on(segment_ids), state)
    return read, state.reshape(memory.shape)


def _step(
    q: Float[Array, "R 1 N K"],
    k: Float[Array, "R 1 N K"],
    v: Float[Array, "R 1 M V"],
    log_decay: Float32[Array, "R 1 M"],
    beta: Float32[Array, "R 1 M"],
    state: Float32[Array, "R N G K V"],
) -> tuple[Float32[Array, "R 1 M V"], Float32[Array, "R N G K V"]]:
    """Take one token, as the equation has it."""
    q, k = (x.astype(jnp.float32)[:, 0, :, None, :, None] for x in (q, k))
    decay, rate = (x.reshape(state.shape[:3])[..., None] for x in (jnp.exp(log_decay), beta))
    state = state * decay[..., None]
    old = (state * k).sum(axis=3)
    change = rate * (v.astype(jnp.float32).reshape(old.shape) - old)
    state = state + k * change[..., None, :]
    return (state * q).sum(axis=3).reshape(v.shape), state


def _carried_on(segment_ids: Int[Array, "R L"]) -> Int[Array, "R L"]:
    """Give padding the segment of the last token before it, or else of the first after it.

    >>> _carried_on(jnp.array([[0, 2, 0, 3], [0, 0, 0, 0]])).tolist()
    [[2, 2, 2, 3], [0, 0, 0, 0]]
    """
    real = segment_ids != 0
    last = jax.lax.cummax(jnp.where(real, jnp.arange(segment_ids.shape[1]), -1), axis=1)
    at = jnp.where(last < 0, real.argmax(axis=1)[:, None], last)
    return jnp.take_along_axis(segment_ids, at, axis=1)


def _in_groups(
    q: Float[Array, "R L N K"],
    k: Float[Array, "R L N K"],
    v: Float[Array, "R L M V"],
    log_decay: Float32[Array, "R L M"],
    beta: Float32[Array, "R L M"],
    segments: Int[Array, "R L"],
    state: Float32[Array, "R N G K V"],
) -> tuple[Float32[Array, "R L M V"], Float32[Array, "R N G K V"]]:
    """Take rows a group of chunks after the other; what is filled up has neither decay nor beta."""
    rows, length = segments.shape
    size = min(CHUNK, 1 << (length - 1).bit_length())
    chunks = -(-length // size)
    groups = -(-chunks // GROUP)
    chunks = -(-chunks // groups)
    fill = groups * chunks * size - length

    def cut(x: Shaped[Array, "R L *_"], mode: str = "constant") -> Shaped[Array, "g c R S *_"]:
        x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(rows, groups, chunks, size, *x.shape[2:]), 0, 2)

    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    tokens = *map(cut, (q, k, v, log_decay, beta)), cut(segments, "edge"), cut(before, "edge")
    group = jax.checkpoint(_take_group, prevent_cse=False)
    state, read = jax.lax.scan(group, state, tokens)
    read = jnp.moveaxis(read, 2, 0).reshape(rows, length + fill, *v.shape[2:])
    return read[:, :length], state


class _Chunk(NamedTuple):
    """Chunks of C tokens, and what their tokens do to each other whatever the memory holds.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        solve: from how far values are from what the memory holds to the changes that tokens make.
        mix: how much each query reads of each change.
        enter: what is left, at each token, of the memory before the chunk.
        leave: what is left of each change after the chunk.
    """

    q: Float32[Array, "*c R N C K"]
    k: Float32[Array, "*c R N C K"]
    v: Float32[Array, "*c R N G C V"]
    solve: Float32[Array, "*c R N G C C"]
    mix: Float32[Array, "*c R N G C C"]
    enter: Float32[Array, "*c R N G C"]
    leave: Float32[Array, "*c R N G C"]


def _take_group(
    state: Float32[Array, "R N G K V"], tokens: tuple[Array, ...]
) -> tuple[Float32[Array, "R N G K V"], Float32[Array, "c R C M V"]]:
    """Prepare the chunks of a group together, then take one after the other."""
    q, k, v, log_decay, beta, segments, before = tokens
    by_key = state.shape[1:3]
    q, k = (x.astype(jnp.float32).swapaxes(2, 3) for x in (q, k))
    v, log_decay, beta = (
        jnp.moveaxis(x.reshape(*x.shape[:3], *by_key, *x.shape[4:]), 2, 4)
        for x in (v.astype(jnp.float32), log_decay, beta)
    )
    state, read = jax.lax.scan(
        _take_chunk, state, _prepare(q, k, v, log_decay, beta, segments, before[..., :1])
    )
    return state, jnp.moveaxis(read, 4, 2).reshape(*segments.shape, -1, v.shape[-1])


def _prepare(
    q: Float32[Array, "c R N C K"],
    k: Float32[Array, "c R N C K"],
    v: Float32[Array, "c R N G C V"],
    log_decay: Float32[Array, "c R N G C"],
    beta: Float32[Array, "c R N G C"],
    segments: Int[Array, "c R C"],
    entering: Int[Array, "c R 1"],
) -> _Chunk:
    r"""Find what tokens of a chunk do to each other, for chunks of which none needs another.

    With $D_{ij} = \exp(\sum_{j<l\le i} g_l)$ for $j \le i$ of one segment and else 0, the changes
    $\beta_i(v_i - \ldots)$ of a chunk solve a triangular system with
    $A_{ij} = \beta_i D_{ij}\, k_i \cdot k_j$ for $j < i$ (section 3.3 of the paper). Each sum of D
    is taken by itself: as the difference of two sums from the chunk's start it would lose, behind a
    token that forgets nearly all, the decays of later tokens.
    """
    up_to = jnp.tri(q.shape[-2])
    after = jnp.tri(q.shape[-2], k=-1)
    sums = _einsum("il,crnglj->crngij", up_to, log_decay[..., None] * after)
    same = (segments[:, :, :, None] == segments[:, :, None, :]) & (up_to > 0)
    decay = jnp.where(same[:, :, None, None], jnp.exp(sums), 0)
    between_keys = _einsum("crnik,crnjk->crnij", k, k)[:, :, :, None]
    strict = after * decay * between_keys * beta[..., None]
    from_start = jnp.exp(_einsum("il,crngl->crngi", up_to, log_decay))
    return _Chunk(
        q,
        k,
        v,
        solve=_invert(strict) * beta[..., None, :],
        mix=_einsum("crnik,crnjk->crnij", q, k)[:, :, :, None] * decay,
        enter=jnp.where((segments == entering)[:, :, None, None], from_start, 0),
        leave=decay[..., -1, :],
    )


def _take_chunk(
    state: Float32[Array, "R N G K V"], chunk: _Chunk
) -> tuple[Float32[Array, "R N G K V"], Float32[Array, "R N G C V"]]:
    """Read the memory before a chunk and the changes in it, and apply these."""
    enter = chunk.enter[..., None]
    old = _einsum("rnck,rngkv->rngcv", chunk.k, state) * enter
    change = _einsum("rngij,rngjv->rngiv", chunk.solve, chunk.v - old)
    read = _einsum("rnck,rngkv->rngcv", chunk.q, state) * enter
    read += _einsum("rngij,rngjv->rngiv", chunk.mix, change)
    kept = _einsum("rnck,rngcv->rngkv", chunk.k, change * chunk.leave[..., None])
    return state * enter[..., -1:, :] + kept, read


@jax.custom_vjp
def _invert(strict: Float32[Array, "*B C C"]) -> Float32[Array, "*B C C"]:
    """Invert 1 + A, for A with nothing on the diagonal and above it.

    By halves: inverses of the blocks on the diagonal give that of the whole. No number becomes
    larger on the way than it is in an inverse, unlike in the product of the powers of A, which for
    equal keys are of the order of 2^C.

    >>> _invert(jnp.array([[0.0, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 1, 3, 0]])).tolist()
    [[1.0, 0.0, 0.0, 0.0], [-2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [2.0, -1.0, -3.0, 1.0]]
    """
    size = strict.shape[-1]
    if size <= SMALL:
        return _invert_small(strict)
    half = size // 2
    upper, lower = _invert(jnp.stack([strict[..., :half, :half], strict[..., half:, half:]]))
    corner = -_product(lower, _product(strict[..., half:, :half], upper))
    top = jnp.concatenate([upper, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)


def _invert_small(strict: Float32[Array, "*B C C"]) -> Float32[Array, "*B C C"]:
    """Invert by halves, the blocks of one size all in one product."""
    size = strict.shape[-1]
    place = jnp.arange(size)
    inverse = jnp.eye(size) - jnp.zeros_like(strict)
    for width in (1 << i for i in range((size - 1).bit_length())):
        block = place // width
        corners = (block[:, None] == block + 1) & (block % 2 == 0)
        corner = jnp.where(corners, strict, 0)
        inverse -= _product(inverse, _product(corner, inverse)) if width > 1 else corner
    return inverse


def _product(a: Float32[Array, "*B C C"], b: Float32[Array, "*B C C"]) -> Float32[Array, "*B C C"]:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _invert_forward(strict: Float32[Array, "*B C C"]) -> tuple[Array, Array]:
    inverse = _invert(strict)
    return inverse, inverse


def _invert_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    turned = inverse.swapaxes(-1, -2)
    return (-_product(turned, _product(cotangent, turned)),)


_invert.defvjp(_invert_forward, _invert_backward)


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
        # of a row without tokens `first` is its length: the last id stands for it, which is 0
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

"""Gated DeltaNet: a layer that keeps a matrix per head in place of keys and values.

Yang et al. 2024 (https://arxiv.org/abs/2412.06464), as Qwen3-Next and Qwen3.5 have it. Key heads
are the axis that devices share; the value heads that belong to a key head are next to each other.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.sharding.layout import BATCH, Layout

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


# The gated delta rule and the short convolution before it, over packed rows.
#
# A layer of Gated DeltaNet (https://arxiv.org/abs/2412.06464) reads and writes one matrix a head,
# its memory, instead of the keys and values of all tokens before.


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
    >>> read, _ = jax.jit(gated_delta_rule)(key, key, key, 0 * ones, ones, jnp.array([[1, 1]]))
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
    >>> sums, tail = jax.jit(causal_conv)(x, jnp.array([[10.0, 1.0]]), jnp.array([[1, 1, 2]]))
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


L2_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by the length."""


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """Describe the gated DeltaNet of a model's layers.

    Args:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple; each has a memory of its own.
        key_width: Width of a query and of a key.
        value_width: Width of a value.
        conv_width: Tokens, itself included, that the convolution of a token sees.
        joined_by_head: Whether a checkpoint joins the projections head by head (Qwen3-Next), and
            not queries, keys and values after each other.

    Raises:
        ValueError: A size is not positive, or `key_heads` does not divide `value_heads`.

    >>> DeltaSpec(key_heads=2, value_heads=4, key_width=8, value_width=8).values_per_key
    2
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    conv_width: int = 4
    joined_by_head: bool = False

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in vars(self).items() if type(v) is int}
        if min(sizes.values()) <= 0 or self.value_heads % self.key_heads:
            raise ValueError(
                f"sizes of a DeltaNet must be positive and key_heads must divide value_heads, got "
                f"{sizes}"
            )

    @property
    def values_per_key(self) -> int:
        """Return how many value heads belong to a key head."""
        return self.value_heads // self.key_heads

    @property
    def joined_value_width(self) -> int:
        """Return the width of the values that belong to a key head, together."""
        return self.values_per_key * self.value_width


class DeltaState(NamedTuple):
    """What a layer keeps of the sequence so far, for each row.

    Attributes:
        tail: the last inputs of the convolution: queries, keys and values of each key head.
        memory: the matrix of each value head.
    """

    tail: Float[Array, "*B N C taps"]
    memory: Float32[Array, "*B M K V"]


def empty_state(spec: DeltaSpec, batch: int, dtype: jax.typing.DTypeLike) -> DeltaState:
    """Return the state before the first token.

    >>> spec = DeltaSpec(key_heads=1, value_heads=2, key_width=4, value_width=3)
    >>> state = empty_state(spec, 5, "float32")
    >>> state.tail.shape, state.memory.shape
    ((5, 1, 14, 3), (5, 2, 4, 3))
    """
    channels = 2 * spec.key_width + spec.joined_value_width
    return DeltaState(
        jnp.zeros((batch, spec.key_heads, channels, spec.conv_width - 1), dtype),
        jnp.zeros((batch, spec.value_heads, spec.key_width, spec.value_width), jnp.float32),
    )


class LayerFunctions(NamedTuple):
    """What a layer takes from its model.

    Attributes:
        apply: `(name, input) -> output` of a projection.
        norm: `(x, scale) -> x` normed over the last axis.
        activation: Of what the convolution gives; the model's, SiLU in the published ones.
    """

    apply: Callable[[str, Array], Array]
    norm: Callable[[Array, Array], Array]
    activation: Callable[[Array], Array]


def delta_mix(
    spec: DeltaSpec,
    weights: Params,
    functions: LayerFunctions,
    h: Float[Array, "R L D"],
    segment_ids: Int[Array, "R L"],
    state: DeltaState | None = None,
    layout: Layout | None = None,
) -> tuple[Float[Array, "R L N W"], DeltaState]:
    r"""Mix the tokens of each sequence by the gated delta rule.

    With $x$ the activation of a causal convolution of the projections, $q, k$ of length 1,
    $\beta = \sigma(h W_\beta)$ and
    $\alpha = \exp(-e^A\,\mathrm{softplus}(h W_\alpha + b))$, the memory is
    $S_t = \alpha_t S_{t-1} + k_t\,(\beta_t (v_t - \alpha_t S_{t-1}^\top k_t))^\top$ and the
    output $\mathrm{norm}(S_t^\top q_t / \sqrt{K}) \odot \mathrm{silu}(h W_z)$ (section 3.1 and
    figure 1 of the paper).

    Args:
        spec: Of the DeltaNet.
        weights: One layer's arrays.
        functions: Of the model.
        h: Normed residual stream.
        segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
        state: Of the sequence that the first token of each row continues; None: it begins there.
        layout: How rows are split over a mesh.

    Returns:
        For each key head what its value heads give, in the dtype of h; and the state after the last
        token that is not padding.

    Raises:
        ValueError: Devices share rows, and can't share the key heads.
    """
    apply, names = functions.apply, ("delta_query", "delta_key", "delta_value")
    joined = jnp.concatenate([apply(name, h) for name in names], axis=-1)
    taps = jnp.concatenate([weights[f"{name}_taps"] for name in names], axis=1)
    rate = jax.nn.softplus(apply("delta_decay", h).astype(jnp.float32) + weights["delta_step_bias"])
    log_decay = -jnp.exp(weights["delta_decay_log"].astype(jnp.float32)) * rate
    beta = jax.nn.sigmoid(apply("delta_beta", h).astype(jnp.float32))
    inputs: _Inputs = joined, log_decay, beta
    taps = taps[:, :, 0].astype(h.dtype)
    if layout is not None and layout.pieces > 1:
        inputs, segment_ids = _whole_rows(spec, inputs, segment_ids, layout)
    mixed, state = _along_rows(spec, functions.activation, inputs, taps, segment_ids, state)
    if layout is not None and layout.pieces > 1:
        own = layout.sharding(BATCH, "context", "tensor", None)
        mixed = layout.split_context(jax.lax.with_sharding_constraint(mixed, own))
    normed = functions.norm(mixed, weights["delta_norm"])
    normed = normed.reshape(*h.shape[:2], spec.key_heads, -1)
    gate = apply("delta_gate", h).astype(jnp.float32)
    out = normed * jax.nn.silu(gate)
    return out.astype(h.dtype), state


_Inputs = tuple[Array, Array, Array]
"""Of each key head queries, keys and values, joined, [R L N C], and of its value heads log-decays
and beta, [R L N values]; of R whole rows, or of a device's pieces."""


def _along_rows(
    spec: DeltaSpec,
    activation: Callable[[Array], Array],
    inputs: _Inputs,
    taps: Float[Array, "N C W"],
    segment_ids: Int[Array, "R L"],
    state: DeltaState | None,
) -> tuple[Float32[Array, "R L M V"], DeltaState]:
    """Do what needs whole rows: the convolution and the rule."""
    tail, memory = (None, None) if state is None else state
    joined, log_decay, beta = inputs
    x, tail = causal_conv(joined, taps, segment_ids, tail)
    q, k, v = jnp.split(activation(x), (spec.key_width, 2 * spec.key_width), axis=-1)
    by_value_head = (*segment_ids.shape, spec.value_heads)
    mixed, memory = gated_delta_rule(
        _unit(q) * spec.key_width**-0.5,
        _unit(k),
        v.reshape(*by_value_head, spec.value_width),
        log_decay.reshape(by_value_head),
        beta.reshape(by_value_head),
        segment_ids,
        memory,
    )
    return mixed, DeltaState(tail, memory)


def _whole_rows(
    spec: DeltaSpec, inputs: _Inputs, segment_ids: Int[Array, "P l"], layout: Layout
) -> tuple[_Inputs, Int[Array, "R L"]]:
    """Give every device whole rows for some of the key heads, whose pieces devices hold.

    It is the all-to-all of `models.context` for attention by heads, whatever attention does here:
    a head's memory goes through the whole row.
    """
    tensor = layout.mesh.shape["tensor"]
    if spec.key_heads % (tensor * layout.pieces):
        raise ValueError(
            f"{spec.key_heads} key heads of a DeltaNet can't be split over tensor={tensor} times "
            f"context={layout.pieces} devices; expected a divisor of {spec.key_heads} as their "
            "product"
        )
    heads = layout.sharding(BATCH, None, ("tensor", "context"), None)
    joined, log_decay, beta = (
        jax.lax.with_sharding_constraint(layout.merge_context(x), heads) for x in inputs
    )
    inputs, rows = (joined, log_decay, beta), layout.sharding(BATCH, None)
    return inputs, jax.lax.with_sharding_constraint(layout.merge_context(segment_ids), rows)


def _unit(x: Float[Array, "R L N K"]) -> Float[Array, "R L N K"]:
    """Divide vectors by their length, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + L2_EPS)).astype(x.dtype)

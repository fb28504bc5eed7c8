"""Attention over packed rows and over a decoding cache.

These two functions are all that a model knows about attention, so a faster kernel is chosen here.
Both describe the allowed pairs by segments, lengths and a window, never by a dense mask, because
that is what block-skipping kernels take.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int8, Real, Shaped

LARGEST = 127
"""Of the numbers kept; -128 is not used, so that the grid is symmetric."""


# Keys and values in int8: how they are quantized, and how they are multiplied.
#
# A scale stands for one token of one head (per-token quantization, as in KIVI's study,
# https://arxiv.org/abs/2402.02750), so that none has to be calibrated and a token's numbers never
# change once they are written. No array is dequantized: scales multiply scores and weights.


class LayerCache(NamedTuple):
    """Keys and values of one layer, in the slots of rows or in pages of S slots.

    Attributes:
        keys: in the dtype of the computation, or int8.
        values: likewise; of width 0, or None in pages: they are the first numbers of the keys, as
            of an absorbed latent.
        key_scales: what int8 keys are multiplied by; where there are two, G = 2, the first is of
            the numbers that are values, too, and the second of the others. None: they are no int8.
        value_scales: likewise; None: they are those of the keys, or there are none.
    """

    keys: Real[Array, "*B K H S"]
    values: Real[Array, "*B K S value"] | None
    key_scales: Float[Array, "*B K G S"] | None = None
    value_scales: Float[Array, "*B K S scale"] | None = None


def quantize(
    x: Float[Array, "*B H"], widths: tuple[int, ...], dtype: DTypeLike
) -> tuple[Int8[Array, "*B H"], Float[Array, "*B G"]]:
    r"""Round vectors to int8: $x_8 = \mathrm{round}(x / s)$ with $s = \max_h |x_h| / 127$.

    A scale is rounded to its dtype before it divides, so that $s x_8$ is off by half a step at most
    in bfloat16, too.

    Args:
        x: Vectors.
        widths: H cut into G parts, each with a scale of its own.
        dtype: Of the scales.

    Returns:
        The rounded vectors and their scales; 0 of a vector of zeros.

    >>> numbers, scales = quantize(jnp.array([[1.0, -2.0, 30.0]]), (2, 1), jnp.float32)
    >>> numbers.tolist()
    [[64, -127, 127]]
    """
    numbers, scales = [], []
    start = 0
    for width in widths:
        part = x[..., start : start + width].astype(jnp.float32)
        start += width
        scale = (jnp.abs(part).max(axis=-1, keepdims=True) / LARGEST).astype(dtype)
        step = jnp.where(scale == 0, 1, scale).astype(jnp.float32)
        rounded = jnp.clip(jnp.round(part / step), -LARGEST, LARGEST)
        numbers.append(rounded.astype(jnp.int8))
        scales.append(scale)
    return jnp.concatenate(numbers, axis=-1), jnp.concatenate(scales, axis=-1)


def scaled_scores(
    q: Float[Array, "B K Q H"],
    k: Int8[Array, "B K H S"],
    scales: Float[Array, "B K G S"],
    first: int,
) -> Float32[Array, "B K Q S"]:
    r"""Multiply queries and int8 keys: $\sum_g (q_g \cdot k_g)\, s_g$.

    Args:
        q: Queries.
        k: Keys.
        scales: Of the keys.
        first: Width of the first part, where there are two.
    """
    cuts = [0, first, q.shape[3]] if scales.shape[2] == 2 else [0, q.shape[3]]
    total = jnp.zeros((), jnp.float32)
    for part, (start, end) in enumerate(itertools.pairwise(cuts)):
        keys = k[:, :, start:end].astype(q.dtype)
        product = jnp.matmul(q[..., start:end], keys, preferred_element_type=jnp.float32)
        total = total + product * scales[:, :, part, None].astype(jnp.float32)
    return total


def mix_scaled(
    weights: Float32[Array, "B K Q S"],
    v: Int8[Array, "B K S V"],
    scales: Float[Array, "B K S 1"],
    dtype: DTypeLike,
) -> Float32[Array, "B K Q V"]:
    r"""Mix int8 values: $\sum_j (p_j s_j)\, v_j$, multiplied in a dtype."""
    weights = weights * scales.swapaxes(2, 3).astype(jnp.float32)
    return jnp.matmul(weights.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32)


class Attending(NamedTuple):
    """How a layer attends.

    Attributes:
        scale: What products of queries and keys are multiplied by; None means 1/√H.
        window: How many tokens, itself included, a token attends to; None means all. A number where
            the layers of a model are alike, else an array, the largest int32 standing for all.
        softcap: Scaled scores s become c·tanh(s/c); None leaves them.
        sinks: One learned score per query head that joins the softmax and has no value, so that a
            token need not attend to any (gpt-oss, https://arxiv.org/abs/2508.10925). None: there
            are none.
        causal: Whether a token attends to none that come after it; else to all of its segment, and
            there is no window. Vision towers do.
        ahead: How many of the tokens after it each token attends to, besides those before it, as
            within an image; None: to none.
    """

    scale: float | None = None
    window: int | Int[Array, ""] | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    causal: bool = True
    ahead: Int[Array, "R L"] | None = None

    @property
    def sides(self) -> int:
        """Return on how many sides of a token there may be some that it attends to."""
        return 1 if self.causal and self.ahead is None else 2


PLAIN = Attending()

NO_WINDOW = jnp.iinfo(jnp.int32).max
BLOCKS = (16, 8, 4, 2, 1)
LEAST_BLOCK = 256  # queries; below it a block saves less than it costs


def attend(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R L K H"],
    v: Float[Array, "R L K H"],
    segment_ids: Int[Array, "R L"],
    options: Attending = PLAIN,
    *,
    longest: int | None = None,
    in_blocks: bool = True,
) -> Float[Array, "R L N H"]:
    r"""Attend within the segments of packed rows, causally unless the options say otherwise.

    $o_i = \sum_{j \in A_i} \mathrm{softmax}_j(q_i \cdot k_j / \sqrt{H})\, v_j$ over
    $A_i = \{j : i - w < j \le i,\, s_j = s_i\}$ with window w (https://arxiv.org/abs/2004.05150),
    where query head n reads key/value head $\lfloor nK/N \rfloor$
    (https://arxiv.org/abs/2305.13245). Tokens with some `ahead` attend to these, too. A sink $a_n$
    adds $e^{a_n}$ to the softmax's denominator. The softmax is in float32. The backward pass
    computes scores again. Long rows are taken a block of queries at a time, with the keys that it
    may reach: those up to its end, or all where some attend to what comes after them. A token costs
    at most 2 · `longest` keys, or 3 · `longest`.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        segment_ids: 1, 2, … for the sequences of a row, each contiguous; 0 for padding. A padding
            position gets a finite value that means nothing, and nothing attends to it.
        options: Scale, window, soft-cap and sinks of the scores, and whether they are causal.
        longest: Most tokens of a segment; None: a segment may fill the row.
        in_blocks: Whether queries may be cut into blocks; not where devices share a row's queries.

    Returns:
        The mixed values, in the dtype of `q`.

    Raises:
        ValueError: A window is asked for that is not causal.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> jax.eval_shape(attend, x, x, x, jnp.array([[1, 1, 0]])).shape
    (1, 3, 2, 4)
    """
    if not options.causal and options.window is not None:
        raise ValueError(f"attention that is not causal has no window, got {options.window}")
    rows, length, heads, _ = q.shape
    around, sides = None, options.sides
    if longest is not None and (1 + sides) * longest < length and in_blocks:
        q, k, v, segment_ids = (_padded(x, longest) for x in (q, k, v, segment_ids))
        k, v, segment_ids = (_with_parts_around(x, longest, sides) for x in (k, v, segment_ids))
        q, around = q.reshape(-1, longest, *q.shape[2:]), longest
        if options.ahead is not None:
            ahead = _padded(options.ahead, longest).reshape(-1, longest)
            options = options._replace(ahead=ahead)
    mixed = _attend_parts(q, k, v, segment_ids, options, around, in_blocks=in_blocks)
    return mixed.reshape(rows, -1, heads, v.shape[3])[:, :length]


def keys_per_query(length: int, longest: int | None = None) -> float:
    """Return with how many keys `attend` computes a query's scores, on average over causal rows.

    Args:
        length: Tokens of a row.
        longest: Most tokens of a segment; None: a segment may fill the row.

    >>> keys_per_query(100), keys_per_query(400, longest=100), keys_per_query(1024)
    (100.0, 200.0, 640.0)
    """
    if longest is None or 2 * longest >= length:
        return (length + _block_size(length)) / 2
    return float(longest + _block_size(longest))


def _attend_parts(
    q: Float[Array, "P L N H"],
    k: Float[Array, "P S K H"],
    v: Float[Array, "P S K V"],
    segment_ids: Int[Array, "P S"],
    options: Attending,
    around: int | None,
    *,
    in_blocks: bool,
) -> Float[Array, "P L N V"]:
    """Attend with all queries of rows, or of parts that have so many keys around them."""
    parts, length, heads, width = q.shape
    shared = heads // k.shape[2]
    # batched products want their batch axes first
    q = q.reshape(parts, length, heads // shared, shared, width).swapaxes(1, 2)
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    window = jnp.asarray(NO_WINDOW if options.window is None else options.window, jnp.int32)
    scale = width**-0.5 if options.scale is None else options.scale
    size = _block_size(length) if in_blocks else length
    sinks, outputs = _sinks_by_key_head(options.sinks, k.shape[1], size), []
    for start in range(0, length, size):
        block = q[:, :, start : start + size].reshape(parts, -1, size * shared, width)
        keys = _reached(start, start + size, around, length, options.sides)
        first = (around or 0) + start - keys.start
        scoring = _Scoring(scale, options.softcap, first, size, options.causal)
        ahead = None if options.ahead is None else options.ahead[:, start : start + size]
        mixed: Any = _attend(
            scoring, block, k[..., keys], v[:, :, keys], segment_ids[:, keys], window, ahead, sinks
        )
        outputs.append(mixed.reshape(parts, -1, size, shared, v.shape[3]))
    joined = jnp.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]
    return joined.swapaxes(1, 2).reshape(parts, length, heads, v.shape[3])


def _reached(start: int, end: int, around: int | None, length: int, sides: int) -> slice:
    """Return which keys the queries of a block may reach, of a row or of a part with others."""
    if around is None:
        return slice(0, end if sides == 1 else length)
    return slice(start, around + end + (0 if sides == 1 else around))


def _block_size(length: int) -> int:
    """Return how many queries of a row are taken at a time."""
    fits = (n for n in BLOCKS if length % n == 0 and (length >= n * LEAST_BLOCK or n == 1))
    return length // next(fits)


def _sinks_by_key_head(
    sinks: Float[Array, " N"] | None, kv_heads: int, length: int
) -> Float32[Array, "1 K Q 1"] | None:
    """Return the sink of each query, those of all heads that share keys as one axis Q."""
    if sinks is None:
        return None
    own = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
    return jnp.tile(own, (1, 1, length, 1))


def _padded(x: Shaped[Array, "R L *_"], unit: int) -> Shaped[Array, "R M *_"]:
    """Lengthen rows to a multiple of a unit, with zeros."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % unit)) + ((0, 0),) * (x.ndim - 2))


def _with_parts_around(
    x: Shaped[Array, "R L *_"], size: int, sides: int
) -> Shaped[Array, "P S *_"]:
    """Cut rows into parts of so many tokens, each with the part before it, and after it if asked.

    >>> _with_parts_around(jnp.array([[1, 2, 3, 4]]), 2, 1).tolist()
    [[0, 0, 1, 2], [1, 2, 3, 4]]
    >>> _with_parts_around(jnp.array([[1, 2, 3, 4]]), 2, 2).tolist()
    [[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 0, 0]]
    """
    parts = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    rest = ((0, 0),) * (parts.ndim - 2)
    joined = [jnp.pad(parts[:, :-1], ((0, 0), (1, 0), *rest)), parts]
    if sides == 2:
        joined.append(jnp.pad(parts[:, 1:], ((0, 0), (0, 1), *rest)))
    return jnp.concatenate(joined, axis=2).reshape(-1, (1 + sides) * size, *x.shape[2:])


def segment_mask(segment_ids: Int[Array, "R L"]) -> Bool[Array, "R 1 L L"]:
    r"""Return which tokens each token of packed rows attends to, $j \le i$ with $s_j = s_i$.

    It is the `mask` of `nnx.dot_product_attention` and `nnx.MultiHeadAttention`, whose memory grows
    with the square of L; `attend` needs none. Padding, of segment 0, attends to padding, so that no
    softmax is over nothing.

    Args:
        segment_ids: 1, 2, … for the sequences of a row, 0 for padding.

    >>> segment_mask(jnp.array([[1, 1, 2]]))[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    index = jnp.arange(segment_ids.shape[1])
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & (index[:, None] >= index[None, :]))[:, None]


class _Scoring(NamedTuple):
    """How products of queries and keys become scores, and which of the keys' tokens ask."""

    scale: float
    softcap: float | None
    first: int
    queries: int
    causal: bool = True


def _scores(
    scoring: _Scoring, q: Float[Array, "R K Q H"], k: Float[Array, "R K H S"]
) -> Float32[Array, "R K Q S"]:
    return _capped(scoring, jnp.matmul(q, k, preferred_element_type=jnp.float32))


def _capped(scoring: _Scoring, products: Float32[Array, "R K Q S"]) -> Float32[Array, "R K Q S"]:
    raw = products * scoring.scale
    return raw if scoring.softcap is None else scoring.softcap * jnp.tanh(raw / scoring.softcap)


def _allowed(
    scoring: _Scoring,
    q: Array,
    segment_ids: Int[Array, "R S"],
    window: Int[Array, ""],
    ahead: Int[Array, "R tokens"] | None,
) -> Bool[Array, "R 1 Q S"]:
    own = slice(scoring.first, scoring.first + scoring.queries)
    allowed = segment_ids[:, own, None] == segment_ids[:, None, :]
    allowed &= (segment_ids != 0)[:, None, :]
    if scoring.causal:
        index = jnp.arange(segment_ids.shape[1])
        distance = index[own, None] - index[None, :]
        nearest = 0 if ahead is None else -ahead[:, :, None]
        allowed &= (distance >= nearest) & (distance < window)
    return jnp.repeat(allowed, q.shape[2] // scoring.queries, axis=1)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scoring: _Scoring,
    q: Float[Array, "R K Q H"],
    k: Float[Array, "R K H S"],
    v: Float[Array, "R K S V"],
    segment_ids: Int[Array, "R S"],
    window: Int[Array, ""],
    ahead: Int[Array, "R tokens"] | None,
    sinks: Float32[Array, "1 K Q 1"] | None,
) -> Float[Array, "R K Q V"]:
    """Attend with some queries of a row, those of all heads that share keys as one axis Q.

    A token sees so far: within a window that ends with it, and some tokens ahead.
    """
    return _attend_forward(scoring, q, k, v, segment_ids, window, ahead, sinks)[0]


@jax.named_scope("attention")
def _attend_forward(
    scoring: _Scoring,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array,
    ahead: Array | None,
    sinks: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    allowed = _allowed(scoring, q, segment_ids, window, ahead)
    # not -inf: a padding position allows nothing
    scores = jnp.where(allowed, _scores(scoring, q, k), jnp.finfo(jnp.float32).min)
    weights, largest, total = _exponentials(scores, sinks)
    mixed = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    mixed = mixed.astype(v.dtype)
    saved = (q, k, v, segment_ids, window, ahead, sinks, mixed, largest + jnp.log(total))
    return mixed, saved


def _exponentials(
    scores: Float32[Array, "R K Q S"], sinks: Float32[Array, "1 K Q 1"] | None
) -> tuple[Float32[Array, "R K Q S"], Float32[Array, "R K Q 1"], Float32[Array, "R K Q 1"]]:
    """Return the weights of a softmax times their sum, the largest score, and that sum."""
    largest = scores.max(axis=-1, keepdims=True)
    largest = largest if sinks is None else jnp.maximum(largest, sinks)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return weights, largest, total if sinks is None else total + jnp.exp(sinks - largest)


@jax.named_scope("attention")
def _attend_backward(
    scoring: _Scoring, saved: tuple[Any, ...], cotangent: Float[Array, "R K Q V"]
) -> tuple[Array | None, ...]:
    r"""Compute the scores again; with $P$ and $o = P v$, $dS = P \odot (do\, v^T - do \cdot o)$.

    FlashAttention (https://arxiv.org/abs/2205.14135, appendix B.2). A sink is a score whose value
    is 0, so its gradient is $-\sum p\,(do \cdot o)$ over tokens, with its own weight p.
    """
    q, k, v, segment_ids, window, ahead, sinks, mixed, log_total = saved
    # under remat a window is numpy's
    window, ahead = jax.tree.map(jnp.asarray, (window, ahead))
    allowed = _allowed(scoring, q, segment_ids, window, ahead)
    scores = _scores(scoring, q, k)
    weights = jnp.where(allowed, jnp.exp(scores - log_total), 0.0)
    wide = cotangent.astype(jnp.float32)
    mean = (wide * mixed.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    to_scores = weights * (product(cotangent, v.swapaxes(2, 3)) - mean) * scoring.scale
    if scoring.softcap is not None:
        to_scores = to_scores * (1.0 - jnp.square(scores / scoring.softcap))
    to_scores, weights = to_scores.astype(q.dtype), weights.astype(v.dtype)
    to_q = product(to_scores, k.swapaxes(2, 3)).astype(q.dtype)
    to_k = product(q.swapaxes(2, 3), to_scores).astype(k.dtype)
    to_v = product(weights.swapaxes(2, 3), cotangent).astype(v.dtype)
    to_sinks = None
    if sinks is not None:
        to_sinks = -(jnp.exp(sinks - log_total) * mean).sum(axis=0, keepdims=True)
    return to_q, to_k, to_v, None, None, None, to_sinks


_attend.defvjp(_attend_forward, _attend_backward)


@jax.named_scope("attention")
def attend_cache(
    q: Float[Array, "B T N H"],
    k: Real[Array, "B K H S"],
    v: Real[Array, "B K S V"],
    positions: Int[Array, "B T"],
    options: Attending = PLAIN,
    key_scales: Float[Array, "B K G S"] | None = None,
    value_scales: Float[Array, "B K S 1"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attend with queries at given positions over the slots of a cache up to each of them.

    The equation is that of `attend`.

    Args:
        q: The queries of T tokens per row.
        k: Cached keys; slot s holds position s.
        v: Cached values.
        positions: Of the queries; their own keys and values are in the cache.
        options: Scale, window, soft-cap and sinks of the scores.
        key_scales: Of keys in int8, as in `LayerCache`; keys of two scales are cut at the width of
            a value.
        value_scales: Of values in int8.

    Returns:
        The mixed values, in the dtype of `v`; in that of `q` where there are scales.

    >>> k, v = jnp.ones((2, 1, 4, 5)), jnp.ones((2, 1, 5, 4))
    >>> attend_cache(jnp.ones((2, 1, 3, 4)), k, v, jnp.array([[0], [3]])).shape
    (2, 1, 3, 4)
    """
    batch, length, heads, width = q.shape
    shared = heads // k.shape[1]
    distance = positions[:, :, None] - jnp.arange(k.shape[3])
    allowed = distance >= (0 if options.ahead is None else -options.ahead[:, :, None])
    if options.window is not None:
        allowed &= distance < options.window
    grouped = q.reshape(batch, length, -1, shared, width).swapaxes(1, 2)
    grouped = grouped.reshape(batch, -1, length * shared, width)
    scale = width**-0.5 if options.scale is None else options.scale
    scoring = _Scoring(scale, options.softcap, 0, length)
    if key_scales is None:
        scores = _scores(scoring, grouped, k)
    else:
        scores = _capped(scoring, scaled_scores(grouped, k, key_scales, v.shape[3]))
    allowed = jnp.repeat(allowed, shared, axis=1)[:, None]
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    sinks = _sinks_by_key_head(options.sinks, k.shape[1], length)
    weights, _, total = _exponentials(scores, sinks)
    weights = weights / total
    dtype = v.dtype if value_scales is None else q.dtype
    if value_scales is None:
        mixed = jnp.matmul(weights.astype(dtype), v, preferred_element_type=jnp.float32)
    else:
        mixed = mix_scaled(weights, v, value_scales, dtype)
    mixed = mixed.astype(dtype).reshape(batch, -1, length, shared, v.shape[3])
    return mixed.swapaxes(1, 2).reshape(batch, length, heads, v.shape[3])

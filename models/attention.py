"""Attention over packed rows and over a decoding cache.

These two functions are all that a model knows about attention, so a faster kernel is chosen here.
Both describe the allowed pairs by segments, lengths and a window, never by a dense mask, because
that is what block-skipping kernels take.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Real, Shaped

from jaxrl_llm.models.int8 import Scales, mix_scaled, scaled_scores


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
    """

    scale: float | None = None
    window: int | Int[Array, ""] | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None


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
    r"""Attend causally within the segments of packed rows.

    $o_i = \sum_{j \in A_i} \mathrm{softmax}_j(q_i \cdot k_j / \sqrt{H})\, v_j$ over
    $A_i = \{j : i - w < j \le i,\, s_j = s_i\}$ with window w (https://arxiv.org/abs/2004.05150),
    where query head n reads key/value head $\lfloor nK/N \rfloor$
    (https://arxiv.org/abs/2305.13245). A sink $a_n$ adds $e^{a_n}$ to the softmax's denominator.
    The softmax is in float32. The backward pass computes scores again. Long rows are taken a block
    of queries at a time, with the keys up to its end; a token costs at most 2 · `longest` keys.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        segment_ids: 1, 2, … for the sequences of a row, each contiguous; 0 for padding. A padding
            position gets a finite value that means nothing, and nothing attends to it.
        options: Scale, window, soft-cap and sinks of the scores.
        longest: Most tokens of a segment; None: a segment may fill the row.
        in_blocks: Whether queries may be cut into blocks; not where devices share a row's queries.

    Returns:
        The mixed values, in the dtype of `q`.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend(x, x, x, jnp.array([[1, 1, 0]])).shape
    (1, 3, 2, 4)
    """
    rows, row, heads, width = q.shape
    shared = heads // k.shape[2]
    before, length = 0, row
    if longest is not None and 2 * longest < length and in_blocks:
        q, k, v, segment_ids = (_padded(x, longest) for x in (q, k, v, segment_ids))
        k, v, segment_ids = (_with_part_before(x, longest) for x in (k, v, segment_ids))
        before, length = longest, longest
    # batched products want their batch axes first
    q = q.reshape(-1, length, heads // shared, shared, width).swapaxes(1, 2)
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    window = jnp.asarray(NO_WINDOW if options.window is None else options.window, jnp.int32)
    scale = width**-0.5 if options.scale is None else options.scale
    size = _block_size(length) if in_blocks else length
    sinks, outputs = _sinks_by_key_head(options.sinks, k.shape[1], size), []
    for end in range(size, length + 1, size):
        block = q[:, :, end - size : end].reshape(len(q), -1, size * shared, width)
        keys = slice(end - size if before else 0, before + end)
        scoring = _Scoring(scale, options.softcap, before + end - size - keys.start)
        mixed: Any = _attend(
            scoring, block, k[..., keys], v[:, :, keys], segment_ids[:, keys], window, sinks
        )
        outputs.append(mixed.reshape(len(q), -1, size, shared, v.shape[3]))
    joined = jnp.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]
    return joined.swapaxes(1, 2).reshape(rows, -1, heads, v.shape[3])[:, :row]


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


def _with_part_before(x: Shaped[Array, "R L *_"], size: int) -> Shaped[Array, "P S *_"]:
    """Cut rows into parts of so many tokens, each with the part of its row before it.

    >>> _with_part_before(jnp.array([[1, 2, 3, 4]]), 2).tolist()
    [[0, 0, 1, 2], [1, 2, 3, 4]]
    """
    parts = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    before = jnp.pad(parts[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (parts.ndim - 2))
    return jnp.concatenate([before, parts], axis=2).reshape(-1, 2 * size, *x.shape[2:])


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
    """How products of queries and keys become scores, and the place of the first query."""

    scale: float
    softcap: float | None
    first: int


def _scores(
    scoring: _Scoring, q: Float[Array, "R K Q H"], k: Float[Array, "R K H S"]
) -> Float32[Array, "R K Q S"]:
    return _capped(scoring, jnp.matmul(q, k, preferred_element_type=jnp.float32))


def _capped(scoring: _Scoring, products: Float32[Array, "R K Q S"]) -> Float32[Array, "R K Q S"]:
    raw = products * scoring.scale
    return raw if scoring.softcap is None else scoring.softcap * jnp.tanh(raw / scoring.softcap)


def _allowed(
    scoring: _Scoring, q: Array, segment_ids: Int[Array, "R S"], window: Int[Array, ""]
) -> Bool[Array, "R 1 Q S"]:
    queries = segment_ids.shape[1] - scoring.first
    index = jnp.arange(segment_ids.shape[1])
    distance = index[scoring.first :, None] - index[None, :]
    same = segment_ids[:, scoring.first :, None] == segment_ids[:, None, :]
    allowed = same & (segment_ids != 0)[:, None, :] & (distance >= 0) & (distance < window)
    return jnp.repeat(allowed, q.shape[2] // queries, axis=1)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scoring: _Scoring,
    q: Float[Array, "R K Q H"],
    k: Float[Array, "R K H S"],
    v: Float[Array, "R K S V"],
    segment_ids: Int[Array, "R S"],
    window: Int[Array, ""],
    sinks: Float32[Array, "1 K Q 1"] | None,
) -> Float[Array, "R K Q V"]:
    """Attend with the last queries of a row, those of all heads that share keys as one axis Q."""
    return _attend_forward(scoring, q, k, v, segment_ids, window, sinks)[0]


@jax.named_scope("attention")
def _attend_forward(
    scoring: _Scoring,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array,
    sinks: Array | None,
) -> tuple[Array, tuple[Array | None, ...]]:
    allowed = _allowed(scoring, q, segment_ids, window)
    # not -inf: a padding position allows nothing
    scores = jnp.where(allowed, _scores(scoring, q, k), jnp.finfo(jnp.float32).min)
    weights, largest, total = _exponentials(scores, sinks)
    mixed = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    mixed = mixed.astype(v.dtype)
    saved = (q, k, v, segment_ids, window, sinks, mixed, largest + jnp.log(total))
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
    q, k, v, segment_ids, window, sinks, mixed, log_total = saved
    allowed = _allowed(scoring, q, segment_ids, jnp.asarray(window))  # under remat it is numpy's
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
    return to_q, to_k, to_v, None, None, to_sinks


_attend.defvjp(_attend_forward, _attend_backward)


@jax.named_scope("attention")
def attend_cache(
    q: Float[Array, "B T N H"],
    k: Real[Array, "B K H S"],
    v: Real[Array, "B K S V"],
    positions: Int[Array, "B T"],
    options: Attending = PLAIN,
    scales: Scales | None = None,
) -> Float[Array, "B T N V"]:
    """Attend with queries at given positions over the slots of a cache up to each of them.

    The equation is that of `attend`.

    Args:
        q: The queries of T tokens per row.
        k: Cached keys; slot s holds position s.
        v: Cached values.
        positions: Of the queries; their own keys and values are in the cache.
        options: Scale, window, soft-cap and sinks of the scores.
        scales: Of keys and values in int8; keys of two scales are cut at the width of a value.

    Returns:
        The mixed values, in the dtype of `v`; in that of `q` where there are scales.

    >>> k, v = jnp.ones((2, 1, 4, 5)), jnp.ones((2, 1, 5, 4))
    >>> attend_cache(jnp.ones((2, 1, 3, 4)), k, v, jnp.array([[0], [3]])).shape
    (2, 1, 3, 4)
    """
    batch, length, heads, width = q.shape
    shared = heads // k.shape[1]
    distance = positions[:, :, None] - jnp.arange(k.shape[3])
    allowed = distance >= 0
    if options.window is not None:
        allowed &= distance < options.window
    grouped = q.reshape(batch, length, -1, shared, width).swapaxes(1, 2)
    grouped = grouped.reshape(batch, -1, length * shared, width)
    scale = width**-0.5 if options.scale is None else options.scale
    scoring = _Scoring(scale, options.softcap, 0)
    if scales is None:
        scores = _scores(scoring, grouped, k)
    else:
        scores = _capped(scoring, scaled_scores(grouped, k, scales.keys, v.shape[3]))
    allowed = jnp.repeat(allowed, shared, axis=1)[:, None]
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    sinks = _sinks_by_key_head(options.sinks, k.shape[1], length)
    weights, _, total = _exponentials(scores, sinks)
    weights = weights / total
    dtype = v.dtype if scales is None else q.dtype
    if scales is None:
        mixed = jnp.matmul(weights.astype(dtype), v, preferred_element_type=jnp.float32)
    else:
        mixed = mix_scaled(weights, v, scales.values, dtype)
    mixed = mixed.astype(dtype).reshape(batch, -1, length, shared, v.shape[3])
    return mixed.swapaxes(1, 2).reshape(batch, length, heads, v.shape[3])

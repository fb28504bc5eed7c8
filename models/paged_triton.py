"""Attention of decoding over the pages of a key/value cache, read where they lie.

`attend_cache` reads rows, so that pages have first to be gathered into rows, which takes the memory
of the cache once more. The kernel here follows the tables of pages itself (PagedAttention, Kwon et
al. 2023, section 4.3, https://arxiv.org/abs/2309.06180). It is written in Pallas for Triton, which
compiles it for GPUs. jax has deprecated Pallas for Triton (0.11), so only what needs the kernel
imports this module.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.attention import PLAIN, Attending, LayerCache

LEAST_QUERIES = 16  # rows of a tensor core's product
MOST_QUERIES = 32  # heads that share keys and are computed at once
LEAST_WIDTH = 16  # dimensions of a tensor core's product
BLOCK = 64  # tokens of keys and values on the chip at once; fewer of wide ones
BLOCK_BYTES = 65536  # of a block's keys and values at most
PROGRAMS = 528  # wanted at least: four for each of 132 multiprocessors
LEAST_SPLIT = 128  # tokens
MOST_SPLIT = 1024


class Blocks(NamedTuple):
    """How the work of the kernel is cut.

    Attributes:
        queries: heads that one program computes, of those that share keys; the rest is padding.
        pages: that are read at once; a power of two.
        per_split: pages that one program reads; a multiple of `pages`.
        splits: parts into which a sequence's pages are cut.
    """

    queries: int
    pages: int
    per_split: int
    splits: int


def choose_blocks(programs: int, shared: int, token: int, page: int, pages: int) -> Blocks:
    """Choose how the work is cut.

    Sequences are split so far that there are `PROGRAMS` programs, and so far that none reads more
    than `MOST_SPLIT` tokens: else the longest sequence would be waited for.

    Args:
        programs: sequences times heads of keys.
        shared: query heads that share a head of keys.
        token: bytes of a token's key and value.
        page: tokens of a page.
        pages: the most pages of a sequence.

    >>> choose_blocks(512, 2, 512, 16, 128)
    Blocks(queries=16, pages=4, per_split=64, splits=2)
    >>> choose_blocks(8, 5, 512, 16, 128)
    Blocks(queries=16, pages=4, per_split=8, splits=16)
    """
    queries = min(max(LEAST_QUERIES, power_of_two(shared)), MOST_QUERIES)
    at_once = max(1, min(BLOCK, BLOCK_BYTES // token) // page)
    at_once = min(power_of_two(at_once + 1) // 2, power_of_two(pages))
    programs *= -(-shared // queries)
    fewest = -(-pages * page // MOST_SPLIT)
    most = max(fewest, pages * page // LEAST_SPLIT)
    splits = min(max(fewest, -(-PROGRAMS // programs)), most)
    per_split = -(-pages // (splits * at_once)) * at_once
    return Blocks(queries, at_once, per_split, -(-pages // per_split))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller.

    >>> power_of_two(5), power_of_two(8)
    (8, 8)
    """
    return 1 << max(0, number - 1).bit_length()


def width_parts(width: int) -> tuple[tuple[int, int], ...]:
    """Cut a width into powers of two: start and size of each, as Triton takes no others.

    Raises:
        ValueError: it is not a multiple of `LEAST_WIDTH`.

    >>> width_parts(576), width_parts(80)
    (((0, 512), (512, 64)), ((0, 64), (64, 16)))
    """
    if width % LEAST_WIDTH or width <= 0:
        raise ValueError(f"expected a width that is a multiple of {LEAST_WIDTH}, got {width}")
    sizes = [1 << bit for bit in range(width.bit_length()) if width >> bit & 1][::-1]
    return tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))


FLOAT32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""How float32 is multiplied: in three products of tensor cores, nearly to its own precision."""
MASKED = float(jnp.finfo(jnp.float32).min)
LOG2_E = math.log2(math.e)


@jax.named_scope("attention")
def attend_pages(
    q: Float[Array, "B N H"],
    pages: LayerCache,
    table: Int[Array, "B n"],
    positions: Int[Array, " B"],
    options: Attending = PLAIN,
    *,
    value_width: int | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B N V"]:
    r"""Attend with the newest token of each sequence over its pages, without gathering them.

    The equation is that of `models.attention.attend` for one query: $o = \sum_j p_j v_j / l$ with
    $p_j = e^{s_j - m}$, $l = \sum_j p_j$. A program computes it for the heads that share keys over
    a part c of the pages, by the online softmax of FlashAttention
    (https://arxiv.org/abs/2205.14135, algorithm 1). Where there are several parts,
    $o = \sum_c w_c o_c / \sum_c w_c$ with $w_c = e^{m_c} l_c$ joins them (Flash-Decoding,
    https://pytorch.org/blog/flash-decoding/). Pages out of the window are not read. Keys and values
    in int8 are converted on the chip, and their scales multiply scores and weights. The sums of the
    first part begin with the head's sink, which is a score without a value.

    Args:
        q: Queries, rotated.
        pages: Keys and values.
        table: The pages of each sequence, in order: token j is in page j // S of them. What stands
            past the sequence's end is not read.
        positions: Of the queries, whose own keys and values are in their pages. Negative: the row
            is empty, its result is 0.
        options: Scale, window, soft-cap and sinks of the scores.
        value_width: V where there are no values.
        blocks: How the work is cut; None: `choose_blocks`.
        interpret: Whether to compute it on any device, slowly, as tests do.

    Returns:
        The mixed values, in the dtype of the keys; in that of the queries where there are scales.

    Raises:
        ValueError: A width is not a multiple of 16, or S is not a power of two.

    >>> k, v = jnp.ones((3, 1, 16, 4)), jnp.ones((3, 1, 4, 16))
    >>> table, positions = jnp.array([[1, 0], [2, 9]]), jnp.array([5, 3])
    >>> q, pages = jnp.ones((2, 3, 16)), LayerCache(k, v)
    >>> attend_pages(q, pages, table, positions, interpret=True).shape
    (2, 3, 16)
    """
    batch, heads, width = q.shape
    keys, values = pages.keys, pages.values
    page, shared = keys.shape[3], heads // keys.shape[1]
    mixed = values.shape[3] if values is not None else (value_width or width)
    q = q if pages.key_scales is not None else q.astype(keys.dtype)
    sizes = _sizes_of(q, pages, options, mixed, interpret)
    if blocks is None:
        blocks = _blocks_for(q, pages, table.shape[1], options.window, mixed)
    window = table.shape[1] * page if options.window is None else options.window
    ends = positions.astype(jnp.int32) + 1
    starts = jnp.maximum(ends - jnp.asarray(window, jnp.int32), 0)
    run, sinks = _call(sizes, blocks, q, pages, interpret), options.sinks
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32).reshape(-1, shared)
    rows = table.astype(jnp.int32), starts, ends
    results = run((q.reshape(batch, -1, shared, width), sinks), rows, pages)
    joined = results[0][:, :, 0] if len(results) == 1 else _join(*results).astype(q.dtype)
    return joined.reshape(batch, heads, mixed)


def _sizes_of(
    q: Array, pages: LayerCache, options: Attending, mixed: int, interpret: bool
) -> "_Sizes":
    width, page = q.shape[2], pages.keys.shape[3]
    if page != power_of_two(page):
        raise ValueError(f"expected pages of a power of two of tokens, got {page}")
    return _Sizes(
        q.shape[1] // pages.keys.shape[1],
        page,
        width**-0.5 if options.scale is None else options.scale,
        options.softcap,
        _key_parts(width, width if pages.values is not None else mixed),
        width_parts(mixed),
        jax.lax.Precision.HIGHEST if interpret or q.dtype != jnp.float32 else FLOAT32,
    )


def _key_parts(width: int, first: int) -> tuple[tuple[int, int, int], ...]:
    """Cut a key as `width_parts`: start, size and number of the scale.

    Where its first numbers are the value, these are cut as the value is, and have the first scale.
    """
    parts = [(start, size, 0) for start, size in width_parts(first)]
    if first < width:
        parts += [(first + start, size, 1) for start, size in width_parts(width - first)]
    return tuple(parts)


def _blocks_for(q: Array, pages: LayerCache, span: int, window: Any, mixed: int) -> Blocks:
    """Return the blocks of `choose_blocks` for arrays."""
    _, kv_heads, width, page = pages.keys.shape
    if isinstance(window, int):  # it touches one page more than it fills
        span = min(span, -(-window // page) + 1)
    numbers = width + (0 if pages.values is None else mixed)
    shared = q.shape[1] // kv_heads
    token = numbers * pages.keys.dtype.itemsize
    return choose_blocks(q.shape[0] * kv_heads, shared, token, page, span)


def _call(sizes: "_Sizes", blocks: Blocks, q: Array, pages: LayerCache, interpret: bool) -> Any:
    """Return the kernel for arrays: one result where pages are not split, else those of `_join`."""
    kv_heads, dtype = pages.keys.shape[1], q.dtype
    mixed = sum(size for _, size in sizes.value_parts)
    whole = blocks.splits == 1
    shape = (q.shape[0], kv_heads, blocks.splits, sizes.shared)
    out = jax.ShapeDtypeStruct((*shape, mixed), dtype if whole else jnp.float32)
    warps = _warps(mixed * dtype.itemsize)
    return pl.pallas_call(
        functools.partial(_kernel, sizes, blocks),
        grid=(q.shape[0], kv_heads * -(-sizes.shared // blocks.queries), blocks.splits),
        out_shape=(out,) if whole else (out, jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="attend_pages",
    )


def _warps(value: int) -> int:
    """Return by how many groups of 32 threads values of so many bytes are mixed."""
    return 8 if value >= 512 else 4


class _Sizes(NamedTuple):
    """What a program knows of the problem."""

    shared: int
    page: int
    scale: float
    softcap: float | None
    key_parts: tuple[tuple[int, int, int], ...]
    value_parts: tuple[tuple[int, int], ...]
    precision: Any


class _Sums(NamedTuple):
    """The online softmax of some heads: mixed values by parts, largest score and sum of weights."""

    mixed: tuple[Float32[Array, "Q part"], ...]
    largest: Float32[Array, " Q"]
    total: Float32[Array, " Q"]


def _kernel(
    sizes: _Sizes,
    blocks: Blocks,
    of_heads: tuple[Any, Any],
    rows: tuple[Any, Any, Any],
    held: LayerCache,
    *out_refs: Any,
) -> None:
    """Attend over one part of the pages of a sequence, with some of the heads that share keys.

    `rows` are the pages of each sequence, and the first token and the end of those attended to.
    """
    row, split = pl.program_id(0), pl.program_id(2)
    groups = -(-sizes.shared // blocks.queries)
    head, group = pl.program_id(1) // groups, pl.program_id(1) % groups
    heads = group * blocks.queries + jnp.arange(blocks.queries)
    is_head = heads < sizes.shared
    q_ref, sinks_ref = of_heads
    q = [
        triton.load(_at(q_ref, row, head, heads, _numbers(part)), mask=is_head[:, None], other=0)
        for part in sizes.key_parts
    ]
    table, starts, ends = rows
    start, end = starts[row], ends[row]
    first = start // sizes.page + split * blocks.per_split
    last = jnp.minimum(first + blocks.per_split, pl.cdiv(end, sizes.page))
    slots = jnp.arange(sizes.page)

    def body(i: Array, sums: _Sums) -> _Sums:
        at = first + i * blocks.pages + jnp.arange(blocks.pages)
        is_page = at < last
        pages = triton.load(_at(table, row, at), mask=is_page, other=0)
        block = _load(sizes, held, pages, is_page, head, q_ref.dtype)
        place = ((at * sizes.page)[:, None] + slots[None, :]).reshape(-1)
        allowed = (place >= start) & (place < end) & (place < last * sizes.page)
        scores = sizes.scale * _products(sizes, q, block)
        if sizes.softcap is not None:
            scores = sizes.softcap * jnp.tanh(scores / sizes.softcap)
        return _add(sizes, sums, jnp.where(allowed[None, :], scores, MASKED), block)

    trips = pl.cdiv(jnp.maximum(last - first, 0), blocks.pages)
    none = jnp.full(blocks.queries, MASKED)
    if sinks_ref is not None:
        sinks = triton.load(_at(sinks_ref, head, heads), mask=is_head, other=MASKED)
        none = jnp.where(split == 0, sinks, none)
    sums = jax.lax.fori_loop(0, trips, body, _first_sums(sizes, none))
    _store(sizes, sums, is_head, (row, head, split, heads), *out_refs)


def _first_sums(sizes: _Sizes, scores: Float32[Array, " Q"]) -> _Sums:
    """Return the online softmax of a score per head that has no value; `MASKED` is none."""
    mixed = tuple(jnp.zeros((len(scores), size), jnp.float32) for _, size in sizes.value_parts)
    return _Sums(mixed, scores, jnp.where(scores > MASKED, 1.0, 0.0))


class _Block(NamedTuple):
    """Keys and values on the chip, by parts of their widths, and the scales of int8."""

    keys: list[Float[Array, "part T"]]
    values: list[Float[Array, "T part"]]
    key_scales: list[Float32[Array, " T"]]
    value_scales: Float32[Array, " T"] | None


def _load(
    sizes: _Sizes, held: LayerCache, pages: Array, is_page: Array, head: Array, dtype: Any
) -> _Block:
    """Load the keys and values of a head from some pages."""
    slots = jnp.arange(sizes.page)
    of_pages = functools.partial(triton.load, mask=is_page[:, None, None], other=0)
    keys = [
        of_pages(_at(held.keys, pages, head, _numbers(part), slots)).transpose(1, 0, 2)
        for part in sizes.key_parts
    ]
    keys = [part.astype(dtype).reshape(part.shape[0], -1) for part in keys]
    if held.values is None:
        values = [keys[i].T for i, _ in enumerate(sizes.value_parts)]
    else:
        values = [
            of_pages(_at(held.values, pages, head, slots, _numbers(part)))
            for part in sizes.value_parts
        ]
        values = [part.astype(dtype).reshape(-1, part.shape[2]) for part in values]
    if held.key_scales is None:
        return _Block(keys, values, [], None)

    def scales(ref: Any, *index: Any) -> Array:
        loaded = triton.load(_at(ref, pages, head, *index), mask=is_page[:, None], other=0)
        return loaded.astype(jnp.float32).reshape(-1)

    of_keys = [scales(held.key_scales, g, slots) for g in range(1 + sizes.key_parts[-1][2])]
    if held.value_scales is None:
        return _Block(keys, values, of_keys, of_keys[0])
    return _Block(keys, values, of_keys, scales(held.value_scales, slots, 0))


def _products(sizes: _Sizes, q: list[Array], block: _Block) -> Float32[Array, "Q T"]:
    """Multiply queries and keys, those of each scale apart."""
    products: dict[int, Any] = {}
    for (_, _, scale), *pair in zip(sizes.key_parts, q, block.keys, strict=True):
        products[scale] = products.get(scale, 0) + _product(sizes, *pair)
    if block.key_scales:
        products = {g: x * block.key_scales[g][None, :] for g, x in products.items()}
    total: Any = sum(products.values())
    return total


def _numbers(part: tuple[int, ...]) -> Int[Array, " part"]:
    """Return the numbers of a part of a width."""
    return part[0] + jnp.arange(part[1])


def _at(ref: Any, *index: Any) -> Any:
    """Refer to the product of numbers along each axis of an array; a scalar takes its axis away."""
    axes = [i for i, numbers in enumerate(index) if jnp.ndim(numbers)]
    shape = tuple(index[i].size for i in axes)

    def spread(i: int) -> Any:
        if i not in axes:
            return index[i]
        return jax.lax.broadcast_in_dim(index[i], shape, (axes.index(i),))

    return ref.at[tuple(map(spread, range(len(index))))]


def _add(sizes: _Sizes, sums: _Sums, scores: Float32[Array, "Q T"], block: _Block) -> _Sums:
    """Add tokens to the online softmax; at least one of them is allowed."""
    largest = jnp.maximum(sums.largest, scores.max(axis=1))
    kept = jnp.exp2((sums.largest - largest) * LOG2_E)
    weights = jnp.exp2((scores - largest[:, None]) * LOG2_E)
    scales = block.value_scales
    scaled = weights if scales is None else weights * scales[None, :]
    mixed = tuple(
        old * kept[:, None] + _product(sizes, scaled.astype(part.dtype), part)
        for old, part in zip(sums.mixed, block.values, strict=True)
    )
    return _Sums(mixed, largest, sums.total * kept + weights.sum(axis=1))


def _store(
    sizes: _Sizes,
    sums: _Sums,
    is_head: Array,
    where: tuple[Array, Array, Array, Array],
    out_ref: Any,
    total_ref: Any = None,
) -> None:
    """Write the mixed values of some heads, and for `_join` the logarithm of their sum."""
    divisor = jnp.where(sums.total > 0, sums.total, 1.0)
    for (start, size), mixed in zip(sizes.value_parts, sums.mixed, strict=True):
        to = _at(out_ref, *where, _numbers((start, size)))
        triton.store(to, (mixed / divisor[:, None]).astype(out_ref.dtype), mask=is_head[:, None])
    if total_ref is not None:
        total = jnp.where(sums.total > 0, sums.largest + jnp.log(divisor), MASKED)
        triton.store(_at(total_ref, *where), total, mask=is_head)


def _product(sizes: _Sizes, a: Array, b: Array) -> Array:
    return jax.lax.dot(a, b, precision=sizes.precision, preferred_element_type=jnp.float32)


def _join(
    mixed: Float32[Array, "B K splits G V"], total: Float32[Array, "B K splits G"]
) -> Float32[Array, "B K G V"]:
    """Join the parts of each sequence by the logarithms of their sums."""
    weights = jax.nn.softmax(total, axis=2)
    return (mixed * weights[..., None]).sum(axis=2)

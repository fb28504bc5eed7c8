"""Attention over rows that several devices share."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from jaxrl_llm.models.attention import NO_WINDOW, PLAIN, Attending, attend
from jaxrl_llm.sharding.layout import BATCH, Layout

LARGEST_BLOCK = 1024
"""Most queries, and most keys, of which scores are held at a time."""

AXIS = "context"
TOKENWISE = PartitionSpec(BATCH, AXIS)
BY_HEAD = PartitionSpec(BATCH, AXIS, "tensor")
HEADS = PartitionSpec("tensor")
BLOCKWISE = PartitionSpec(AXIS, BATCH, "tensor")
GIVEN = (BY_HEAD, BY_HEAD, BY_HEAD, TOKENWISE, (PartitionSpec(), HEADS))
LEAST = jnp.finfo(jnp.float32).min  # not -inf: a padding token attends to nothing


# Ring attention: queries stay on their devices, and keys and values pass by.
#
# Liu et al. 2023 (https://arxiv.org/abs/2310.01889). No device ever holds more than two pieces of
# a row's keys, its own and those of one other device, which it hands on while it attends to them.
#
# A causal token attends to what is before it, so the first piece of a row has least to do and the
# last one most. In the ring the pieces are therefore cut in halves, 2c of them for c devices, and
# device i works on halves i and 2c - 1 - i (Llama 3, https://arxiv.org/abs/2407.21783, section
# 3.3.2). Halves of another device are wholly in the past of own ones or wholly in their future:
# at each hop every device attends with halves to halves twice.


def attend_in_ring(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R L K H"],
    v: Float[Array, "R L K V"],
    segment_ids: Int[Array, "R L"],
    options: Attending = PLAIN,
    *,
    layout: Layout,
) -> Float[Array, "R L N V"]:
    """Attend within rows that are split over the `context` axis; `attend` says the equation.

    The softmax is added up piece by piece, with the largest score so far taken off. The backward
    pass goes round the ring again: gradients of keys and values travel with them, in float32.

    Args:
        q: Queries.
        k: Keys, whose heads the `tensor` axis divides.
        v: Values.
        segment_ids: As for `attend`.
        options: Scale, window, soft-cap and sinks of the scores.
        layout: How rows are split.

    Returns:
        The mixed values, split as the queries are; 0 at padding.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> x, mesh = jnp.ones((1, 4, 2, 4)), make_mesh({"context": 2}, jax.devices()[:2])
    >>> ring = functools.partial(attend_in_ring, layout=Layout(mesh, "ring"))
    >>> jax.eval_shape(ring, x, x, x, jnp.ones((1, 4), jnp.int32)).shape
    (1, 4, 2, 4)
    """
    scale = q.shape[3] ** -0.5 if options.scale is None else options.scale
    window = jnp.asarray(NO_WINDOW if options.window is None else options.window, jnp.int32)
    ring = _Ring(layout.mesh, layout.pieces, q.shape[1] // layout.pieces, scale, options.softcap)
    mixed: Array = _attend(ring, q, k, v, segment_ids, (window, options.sinks))
    return mixed


class _Ring(NamedTuple):
    """The devices of a ring, the tokens of a piece, and how products become scores."""

    mesh: Mesh
    devices: int
    tokens: int
    scale: float
    softcap: float | None

    @property
    def blocks(self) -> int:
        """Return into how many blocks a half of a piece is cut."""
        return -(-self.tokens // (2 * LARGEST_BLOCK))

    @property
    def block(self) -> int:
        """Return the tokens of a block; the last ones of a piece may be padding."""
        return -(-self.tokens // (2 * self.blocks))

    def on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            functools.partial(function, self),
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


_Layer = tuple[Int[Array, ""], Float[Array, " N"] | None]
"""A layer's window and its sinks."""


class _Tokens(NamedTuple):
    """Blocks of queries, or of keys and values, and the segments that they are in.

    Keys and values travel. They are one array, and so are their gradients: a GPU's compiler sends
    only one on its way at a time.
    """

    x: Float[Array, "M R K b G H"] | Float[Array, "M R K b H+V"]
    segment_ids: Int[Array, "M R b"]


class _Softmax(NamedTuple):
    """A softmax over the keys seen so far, of blocks of queries."""

    mixed: Float32[Array, "*M R K b G V"]
    largest: Float32[Array, "*M R K b G"]
    total: Float32[Array, "*M R K b G"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: _Ring, q: Array, k: Array, v: Array, segment_ids: Array, layer: _Layer
) -> Float[Array, "R L N V"]:
    return _attend_forward(ring, q, k, v, segment_ids, layer)[0]


@jax.named_scope("attention")
def _attend_forward(
    ring: _Ring, q: Array, k: Array, v: Array, segment_ids: Array, layer: _Layer
) -> tuple[Array, tuple[Any, ...]]:
    run = ring.on_devices(_forward, GIVEN, (BY_HEAD, BLOCKWISE))
    mixed, log_total = run(q, k, v, segment_ids, layer)
    return mixed, (q, k, v, segment_ids, layer, mixed, log_total)


@jax.named_scope("attention")
def _attend_backward(
    ring: _Ring, saved: tuple[Any, ...], cotangent: Float[Array, "R L N V"]
) -> tuple[Any, ...]:
    *rows, (window, sinks), mixed, log_total = saved
    mean = (cotangent.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(axis=-1)
    given = (*GIVEN, BY_HEAD, BY_HEAD, BLOCKWISE)
    run = ring.on_devices(_backward, given, (BY_HEAD, BY_HEAD, BY_HEAD, HEADS))
    layer = jnp.asarray(window), sinks
    *gradients, to_sinks = run(*rows, layer, cotangent, mean, log_total)
    return *gradients, None, (None, to_sinks)


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(
    ring: _Ring, q: Array, k: Array, v: Array, segment_ids: Array, layer: _Layer
) -> tuple[Array, Array]:
    """Attend with the queries of one device; the logarithms of the totals stay in blocks."""
    (queries, keys), (window, sinks) = _cut(ring, q, k, v, segment_ids), layer
    none = jnp.zeros(queries.x.shape[:-1], jnp.float32)
    softmax = _Softmax(jnp.zeros((*none.shape, v.shape[3]), jnp.float32), none + LEAST, none)
    if sinks is not None:  # scores without values
        softmax = softmax._replace(largest=none + _grouped_sinks(sinks, k), total=none + 1.0)

    def visit(softmax: _Softmax, keys: _Tokens, hops: Any) -> _Softmax:
        def attend_to(softmax: _Softmax, at: Array) -> tuple[_Softmax, None]:
            allowed = _allowed(ring, queries, keys, at, hops, window)
            so_far, q = _block((softmax, queries.x), at[0])
            more = _add_keys(ring, so_far, q, _block(keys.x, at[1]), allowed)
            return _with_block(softmax, more, at[0]), None

        return jax.lax.scan(attend_to, softmax, _block_pairs(ring, hops))[0]

    softmax = _around(ring, visit, keys, softmax)
    total = jnp.maximum(softmax.total, jnp.finfo(jnp.float32).tiny)  # of padding it is 0
    mixed = _ungrouped((softmax.mixed / total[..., None]).astype(v.dtype))
    return _to_row(ring, mixed), softmax.largest + jnp.log(total)


def _add_keys(ring: _Ring, softmax: _Softmax, q: Array, kv: Array, allowed: Array) -> _Softmax:
    """Take a block of keys into the softmax of a block of queries."""
    k, v = jnp.split(kv, [q.shape[-1]], axis=-1)
    scores = jnp.where(allowed, _scores(ring, q, k), LEAST)
    largest = jnp.maximum(softmax.largest, scores.max(axis=-1))
    weights = jnp.where(allowed, jnp.exp(scores - largest[..., None]), 0.0)
    kept = jnp.exp(softmax.largest - largest)
    mixed = _product("rkqgs,rksv->rkqgv", weights.astype(v.dtype), v)
    return _Softmax(
        softmax.mixed * kept[..., None] + mixed, largest, softmax.total * kept + weights.sum(-1)
    )


def _backward(
    ring: _Ring, q: Array, k: Array, v: Array, segment_ids: Array, layer: _Layer, *of_output: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of one device's queries, and of its keys and values come home."""
    (window, sinks), (cotangent, mean, log_total) = layer, of_output
    queries, keys = _cut(ring, q, k, v, segment_ids)
    cotangent, mean = (_grouped(_to_ring(ring, x), k.shape[2]) for x in (cotangent, mean))
    none = [jnp.zeros(x.shape, jnp.float32) for x in (queries.x, keys.x)]

    def visit(sums: list[Array], keys: _Tokens, hops: Any) -> list[Array]:
        def differentiate(sums: list[Array], at: Array) -> tuple[list[Array], None]:
            allowed = _allowed(ring, queries, keys, at, hops, window)
            of_query = _block((queries.x, cotangent, mean, log_total), at[0])
            parts = _gradients(ring, of_query, _block(keys.x, at[1]), allowed)
            return [
                _with_block(x, _block(x, i) + part, i)
                for x, part, i in zip(sums, parts, at, strict=True)
            ], None

        to_q, to_kv = sums
        arrived = to_kv if isinstance(hops, int) and hops == 0 else _hop(ring, to_kv)
        to_q, own = jax.lax.scan(differentiate, [to_q, none[1]], _block_pairs(ring, hops))[0]
        return [to_q, arrived + own]

    to_q, to_kv = _around(ring, visit, keys, none)
    to_q = _to_row(ring, _ungrouped(to_q).astype(q.dtype))
    to_kv = _to_row(ring, _hop(ring, to_kv).swapaxes(2, 3).astype(k.dtype))
    to_k, to_v = jnp.split(to_kv, [k.shape[3]], axis=-1)
    if sinks is None:
        return to_q, to_k, to_v, None
    lost = (jnp.exp(_grouped_sinks(sinks, k) - log_total) * mean).sum((0, 1, 3)).reshape(-1)
    return to_q, to_k, to_v, -jax.lax.psum(lost, (*BATCH, AXIS)).astype(sinks.dtype)


def _grouped_sinks(sinks: Float[Array, " N"], k: Array) -> Float32[Array, "1 1 K 1 G"]:
    return _grouped(sinks.astype(jnp.float32)[None, None, None], k.shape[2])


def _gradients(
    ring: _Ring, of_query: tuple[Array, ...], kv: Array, allowed: Array
) -> tuple[Array, Array]:
    """Return what a block of queries and one of keys and values add to their gradients.

    The equations are those of the backward pass of `attend`.
    """
    q, cotangent, mean, log_total = of_query
    k, v = jnp.split(kv, [q.shape[-1]], axis=-1)
    scores = _scores(ring, q, k)
    weights = jnp.where(allowed, jnp.exp(scores - log_total[..., None]), 0.0)
    to_weights = _product("rkqgv,rksv->rkqgs", cotangent, v)
    to_scores = weights * (to_weights - mean[..., None]) * ring.scale
    if ring.softcap is not None:
        to_scores = to_scores * (1.0 - jnp.square(scores / ring.softcap))
    to_scores, weights = to_scores.astype(q.dtype), weights.astype(v.dtype)
    to_k = _product("rkqgs,rkqgh->rksh", to_scores, q)
    to_v = _product("rkqgs,rkqgv->rksv", weights, cotangent)
    return _product("rkqgs,rksh->rkqgh", to_scores, k), jnp.concatenate([to_k, to_v], axis=-1)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(ring: _Ring, q: Array, k: Array) -> Float32[Array, "R K b G s"]:
    raw = _product("rkqgh,rksh->rkqgs", q, k) * ring.scale
    return raw if ring.softcap is None else ring.softcap * jnp.tanh(raw / ring.softcap)


def _around(ring: _Ring, visit: Callable[..., Any], keys: _Tokens, carry: Any) -> Any:
    """Visit the keys of every device, own ones first: `visit(carry, keys, hops)`.

    What is next is on its way meanwhile.
    """
    arriving = _hop(ring, keys)
    held = arriving, visit(carry, keys, 0)

    def step(held: tuple[_Tokens, Any], hops: Array) -> tuple[tuple[_Tokens, Any], None]:
        keys, carry = held
        arriving = _hop(ring, keys)
        return (arriving, visit(carry, keys, hops)), None

    if ring.devices > 2:
        held, _ = jax.lax.scan(step, held, jnp.arange(1, ring.devices - 1))
    return visit(held[1], held[0], ring.devices - 1)


def _hop(ring: _Ring, tree: Any) -> Any:
    """Hand arrays to the next device."""
    return jax.lax.ppermute(tree, AXIS, [(i, (i + 1) % ring.devices) for i in range(ring.devices)])


def _block_pairs(ring: _Ring, hops: Any) -> Int[Array, "n 2"]:
    """Return the blocks of queries, and of keys that came so many hops, with past among them.

    Of a device's halves the first one is 0.
    """
    own, source = _places(ring, hops)
    if isinstance(hops, int) and hops == 0:
        halves = jnp.array([[0, 0], [1, 1], [1, 0]])
    else:
        halves = jnp.array([[0, 0], [1, 0]]).at[0].set(jnp.where(source > own, 1, 0))
    index = jnp.arange(ring.blocks)
    blocks = [halves[:, i, None] * ring.blocks + index for i in range(2)]
    pairs = jnp.broadcast_arrays(blocks[0][:, :, None], blocks[1][:, None, :])
    return jnp.stack(pairs, axis=-1).reshape(-1, 2)


def _allowed(
    ring: _Ring, queries: _Tokens, keys: _Tokens, at: Array, hops: Any, window: Array
) -> Bool[Array, "R 1 b 1 s"]:
    """Return which queries of a block attend to which keys of another."""
    own, source = _places(ring, hops)
    place = _first_token(ring, own, at[0]) - _first_token(ring, source, at[1])
    index = jnp.arange(ring.block)
    distance = place + index[:, None] - index[None, :]
    of_queries, of_keys = _block(queries.segment_ids, at[0]), _block(keys.segment_ids, at[1])
    same = (of_queries[:, :, None] == of_keys[:, None, :]) & (of_keys != 0)[:, None, :]
    return (same & (distance >= 0) & (distance < window))[:, None, :, None, :]


def _places(ring: _Ring, hops: Any) -> tuple[Array, Array]:
    """Return the places in the row of a device, and of that whose keys came so many hops."""
    own = jax.lax.axis_index(AXIS)
    return own, (own - hops) % ring.devices


def _first_token(ring: _Ring, device: Array, block: Array) -> Array:
    """Return the index in the row of the first token of a device's block."""
    later, block = block // ring.blocks, block % ring.blocks
    half = jnp.where(later == 0, device, 2 * ring.devices - 1 - device)
    in_piece = half % 2 * ring.blocks + block
    return half // 2 * ring.tokens + in_piece * ring.block


def _cut(ring: _Ring, q: Array, k: Array, v: Array, segment_ids: Array) -> tuple[_Tokens, _Tokens]:
    """Cut the halves of rows that a device works on into blocks."""
    kv = jnp.concatenate([k, v], axis=-1)
    segments, q, kv = (_to_ring(ring, x) for x in (segment_ids, q, kv))
    return _Tokens(_grouped(q, k.shape[2]), segments), _Tokens(kv.swapaxes(2, 3), segments)


def _block(tree: Any, index: Array) -> Any:
    """Return a block of each array of blocks."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _with_block(tree: Any, block: Any, index: Array) -> Any:
    """Put a block into each array of blocks."""
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda x, new: put(x, new, index, 0), tree, block)


def _grouped(x: Shaped[Array, "M R b N *_"], keys: int) -> Shaped[Array, "M R K b G *_"]:
    """Put the heads that share keys next to each other, and the keys' heads first."""
    return x.reshape(*x.shape[:3], keys, -1, *x.shape[4:]).swapaxes(2, 3)


def _ungrouped(x: Shaped[Array, "M R K b G H"]) -> Shaped[Array, "M R b N H"]:
    x = x.swapaxes(2, 3)
    return x.reshape(*x.shape[:3], -1, x.shape[5])


def _exchange(devices: int, odd: int) -> list[tuple[int, int]]:
    """Return which devices work on the even, or the odd, halves of the pieces of which devices.

    >>> _exchange(4, 0), _exchange(4, 1)
    ([(0, 0), (1, 2), (2, 3), (3, 1)], [(0, 1), (1, 3), (2, 2), (3, 0)])
    """
    halves = range(odd, 2 * devices, 2)
    return [(h // 2, min(h, 2 * devices - 1 - h)) for h in halves]


def _to_ring(ring: _Ring, x: Shaped[Array, "R l *_"]) -> Shaped[Array, "M R b *_"]:
    """Send the halves of a piece to the devices that work on them, in M blocks."""
    padding = 2 * ring.blocks * ring.block - ring.tokens
    x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(len(x), 2, ring.blocks, ring.block, *x.shape[2:])
    even, odd = (
        jax.lax.ppermute(x[:, i], AXIS, _exchange(ring.devices, i)).swapaxes(0, 1) for i in range(2)
    )
    first_is_even = jax.lax.axis_index(AXIS) % 2 == 0
    halves = jnp.where(first_is_even, even, odd), jnp.where(first_is_even, odd, even)
    return jnp.concatenate(halves)


def _to_row(ring: _Ring, x: Shaped[Array, "M R b *_"]) -> Shaped[Array, "R l *_"]:
    """Send halves back to where their pieces are; the inverse of `_to_ring`."""
    first, second = jnp.split(x, 2)
    first_is_even = jax.lax.axis_index(AXIS) % 2 == 0
    halves = jnp.where(first_is_even, first, second), jnp.where(first_is_even, second, first)
    parts = [
        jax.lax.ppermute(half, AXIS, [(to, of) for of, to in _exchange(ring.devices, i)])
        for i, half in enumerate(halves)
    ]
    x = jnp.concatenate(parts).swapaxes(0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])[:, : ring.tokens]


def attend_pieces(
    q: Float[Array, "P l N H"],
    k: Float[Array, "P l K H"],
    v: Float[Array, "P l K H"],
    segment_ids: Int[Array, "P l"],
    options: Attending = PLAIN,
    *,
    layout: Layout,
) -> Float[Array, "P l N H"]:
    """Attend within rows of which every device holds a piece; `attend` says the equation.

    The collectives follow from where queries, keys and values have to be: see `Layout`.

    Args:
        q: Queries of pieces, c after each other from one row.
        k: Keys.
        v: Values.
        segment_ids: As for `attend`, unique in a row.
        options: Scale, window, soft-cap and sinks of the scores.
        layout: How rows are split, and the kernel that attends on each device, if any.

    Returns:
        The mixed values of the pieces.

    Raises:
        ValueError: The heads can't be split over the `tensor` and `context` axes, or a kernel, or
            what is not causal, is to attend in a ring; or devices share rows, or have a kernel,
            where tokens attend to some ahead of them.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> x, one = jnp.ones((1, 3, 2, 4)), make_mesh({}, jax.devices()[:1])
    >>> attend_pieces(x, x, x, jnp.ones((1, 3), jnp.int32), layout=Layout(one)).shape
    (1, 3, 2, 4)
    """
    _check_ahead(options, layout)
    if layout.pieces == 1:
        if layout.kernel is not None:
            return _on_each(layout, "tensor", options)(q, k, v, segment_ids, options.sinks)
        return attend(q, k, v, segment_ids, options, longest=layout.longest)
    q, k, v, segment_ids = map(layout.merge_context, (q, k, v, segment_ids))
    if layout.context == "ring":
        return _in_ring(q, k, v, segment_ids, options, layout)
    if layout.context == "heads":
        k, v = _repeated(q, k, v, layout)
        heads = layout.sharding(BATCH, None, ("tensor", "context"), None)
        q, k, v = (jax.lax.with_sharding_constraint(x, heads) for x in (q, k, v))
    else:
        whole = layout.sharding(BATCH, None, "tensor", None)
        k, v = (jax.lax.with_sharding_constraint(x, whole) for x in (k, v))
        q = jax.lax.with_sharding_constraint(q, layout.sharding(BATCH, "context", "tensor", None))
    segment_ids = jax.lax.with_sharding_constraint(segment_ids, layout.sharding(BATCH, None))
    if layout.kernel is not None:
        by = _on_each(layout, ("tensor", "context"), options)
        mixed = by(q, k, v, segment_ids, options.sinks)
    else:
        in_blocks = layout.context == "heads"
        longest = layout.longest if in_blocks else None
        mixed = attend(q, k, v, segment_ids, options, longest=longest, in_blocks=in_blocks)
    own = layout.sharding(BATCH, "context", "tensor", None)
    return layout.split_context(jax.lax.with_sharding_constraint(mixed, own))


def _in_ring(
    q: Array, k: Array, v: Array, segment_ids: Array, options: Attending, layout: Layout
) -> Array:
    if layout.kernel is not None:
        raise ValueError("a kernel can't attend in a ring; expected none, or context by heads")
    if not options.causal:
        raise ValueError("attention in a ring is causal; expected context by heads or keys")
    k, v = _repeated(q, k, v, layout)
    mixed = attend_in_ring(q, k, v, segment_ids, options, layout=layout)
    return layout.split_context(mixed)


def _check_ahead(options: Attending, layout: Layout) -> None:
    if options.ahead is not None and (layout.pieces > 1 or layout.kernel is not None):
        raise ValueError(
            "tokens of an image attend to those after them: expected rows that no devices share "
            f"and no kernel, got context={layout.pieces} and {layout.kernel}"
        )


def _on_each(layout: Layout, heads: Any, options: Attending) -> Any:
    """Let each device attend to its rows with its heads; XLA can't divide a kernel itself."""
    kernel, rows = layout.kernel, PartitionSpec(BATCH)
    assert kernel is not None, "attend_pieces asked"
    mixed = PartitionSpec(BATCH, None, heads)

    def attend_part(q: Array, k: Array, v: Array, segment_ids: Array, sinks: Any) -> Array:
        return kernel(q, k, v, segment_ids, options._replace(sinks=sinks))

    return jax.shard_map(
        attend_part,
        mesh=layout.mesh,
        in_specs=(mixed, mixed, mixed, rows, PartitionSpec(heads)),
        out_specs=mixed,
        check_vma=False,  # a kernel does not say along which axes its results vary
    )


def _repeated(q: Array, k: Array, v: Array, layout: Layout) -> tuple[Array, Array]:
    """Repeat keys and values until every device has as many of their heads."""
    axes = ("tensor",) if layout.context == "ring" else ("tensor", "context")
    parts = math.prod(layout.mesh.shape[axis] for axis in axes)
    queries, held = q.shape[2], k.shape[2]
    for times in range(1, queries // held + 1):
        if held * times % parts == 0 and queries % (held * times) == 0:
            return jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2)
    raise ValueError(
        f"{queries} heads can't be split over "
        f"{' times '.join(f'{axis}={layout.mesh.shape[axis]}' for axis in axes)} devices; expected "
        f"a divisor of {queries}{' as their product' * (len(axes) - 1)}, or context by keys"
    )

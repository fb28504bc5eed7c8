"""Decoding with a key/value cache: read prompts in pieces, and go on token by token.

Every layer has arrays of its own here, of the cache and, for those who decode, of the weights:
taking a layer out of stacked arrays would copy it at every step.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.attention import Attending, attend_cache
from jaxrl_llm.models.layers import Layer, attending, decoder_layer, rotations
from jaxrl_llm.models.paged_attention import Pages
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import embed, final_norm
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import BATCH


class Cache(NamedTuple):
    """Keys (after rotation) and values of each layer; slot s of row b holds position s of row b.

    The slots of keys come last: scores are then a product without a transposed factor, which on a
    CPU is several times as fast. Latent attention in its absorbed form has the keys as values too;
    `values` then has width 0.
    """

    keys: tuple[Float[Array, "B K H S"], ...]
    values: tuple[Float[Array, "B K S value"], ...]


def init_cache(
    spec: ModelSpec, batch: int, length: int, *, dtype: DTypeLike = jnp.float32
) -> Cache:
    """Make an empty cache.

    Args:
        spec: The model.
        batch: Rows B.
        length: Slots S per row, in tokens.
        dtype: Of keys and values.

    Returns:
        Zeros.

    >>> spec = tiny_spec()
    >>> init_cache(spec, 3, 5).keys[0].shape
    (3, 1, 2, 5)
    """

    def zeros(*shape: int) -> tuple[Array, ...]:
        whole = (batch, spec.kv_heads, *shape)
        return tuple(jnp.zeros(whole, dtype) for _ in range(spec.layers))

    values = 0 if _keys_are_values(spec) else spec.head_dim
    return Cache(zeros(spec.head_dim, length), zeros(length, values))


def _keys_are_values(spec: ModelSpec) -> bool:
    return spec.latent is not None and spec.latent.absorbed


def _layers(params: Params, spec: ModelSpec) -> Iterator[tuple[Params, Layer]]:
    """Yield each layer's weights, from stacked arrays or from those of `by_layer`."""
    for name, numbers in spec.stacks.items():
        for index, number in enumerate(numbers):
            windowed = spec.windowed_layers[number] if spec.windowed_layers else None
            weights = {key: arrays[index] for key, arrays in params[name].items()}
            yield weights, Layer(windowed)


def extend(
    params: Params,
    spec: ModelSpec,
    cache: Cache,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Run the next T tokens of each row, writing their slots and attending up to them.

    With T = 1 it is a step of decoding, with more it reads a piece of a prompt.

    Args:
        params: Parameters nested as `declare(spec)`, stacked or `by_layer`.
        spec: The model.
        cache: Filled below `positions`; donate it under `jax.jit`, it is updated in place.
        tokens: The rows' next tokens.
        positions: Their positions, in order and without a gap, each below S. Of a token at S or
            more nothing is written, and its result means nothing: so rows are padded.
        dtype: Of the computation.
        layout: How rows are split over a mesh; None leaves it to the compiler.

    Returns:
        Hidden states after the final norm, and the cache with the tokens' keys and values.

    >>> import jax
    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec()
    >>> params = init_params(spec, key=jax.random.key(0))
    >>> prompt, positions = jnp.array([[3, 5, 2]]), jnp.array([[0, 1, 2]])
    >>> hidden, cache = extend(params, spec, init_cache(spec, 1, 8), prompt, positions)
    >>> hidden.shape
    (1, 3, 4)
    """
    rows = jnp.arange(tokens.shape[0])[:, None]

    def attention(
        number: int, options: Attending, q: Array, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        keys = cache.keys[number].at[rows, :, :, positions].set(k.astype(cache.keys[0].dtype))
        values = cache.values[number]
        if not _keys_are_values(spec):
            values = values.at[rows, :, positions].set(v.astype(values.dtype))
        mixed_in = keys.swapaxes(2, 3) if _keys_are_values(spec) else values
        return attend_cache(q, keys, mixed_in, positions, options), (keys, values)

    return _run(params, spec, attention, tokens, positions, dtype=dtype, layout=layout)


def _run(
    params: Params,
    spec: ModelSpec,
    attention: Callable[..., tuple[Array, tuple[Array, Array]]],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    dtype: DTypeLike,
    layout: Layout | None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Run all layers, each of which attends by (number, options, q, k, v) -> (mixed, its cache)."""
    by = rotations(spec, positions)
    constrain = layout.constrain if layout else lambda x: x
    x, kept = constrain(embed(params, spec, tokens, dtype=dtype)), []
    for number, (weights, layer) in enumerate(_layers(params, spec)):
        attend_slots = functools.partial(attention, number, attending(spec, layer))
        x, of_layer, _ = decoder_layer(weights, spec, x, by.of(layer), attend_slots, layout=layout)
        x = constrain(x)
        kept.append(of_layer)
    keys, values = zip(*kept, strict=True)
    return final_norm(params, spec, x), Cache(keys, values)


class PageTables(NamedTuple):
    """Which pages of a pool each row has, and what attends over them.

    Attributes:
        table: as in `models.paged_attention.Pages`.
        kernel: with the arguments of `models.paged_attention.attend_gathered`.
    """

    table: Int[Array, "B n"]
    kernel: Callable[..., Array]


def extend_pages(
    params: Params,
    spec: ModelSpec,
    pool: Cache,
    tables: PageTables,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
) -> tuple[Float[Array, "B D"], Cache]:
    """Run the next token of each row as `extend` does, but over the pages of a pool in place.

    A token's keys and values are written into its page, which nobody else may read or write.

    Args:
        params: As `extend`.
        spec: The model.
        pool: A cache of pages [parts, pages, …] for each layer; donate it under `jax.jit`. Rows
            belong to the parts in order, as many to each.
        tables: The pages of each row, within its part.
        tokens: The rows' next tokens.
        positions: Their positions; negative in an empty row, of which nothing is written.
        dtype: Of the computation.
        layout: How rows, and parts of the pool, are split over a mesh; None: there is one part.

    Returns:
        Hidden states after the final norm, and the pool with the tokens' keys and values.

    Raises:
        ValueError: There is no layout for several parts.
    """
    if layout is None and pool.keys[0].shape[0] != 1:
        raise ValueError(f"expected a pool of one part without a layout, got {len(pool.keys[0])}")
    latent = spec.latent if _keys_are_values(spec) else None

    def attention(
        number: int, options: Attending, q: Array, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        on_device = functools.partial(
            _attend_part, tables.kernel, options, latent.kv_rank if latent else None
        )
        arrays = (pool.keys[number], pool.values[number], tables.table, positions)
        mixed, keys, values = _on_each(layout, on_device, (q[:, 0], k[:, 0], v[:, 0]), arrays)
        return mixed[:, None], (keys, values)

    hidden, pool = _run(
        params, spec, attention, tokens[:, None], positions[:, None], dtype=dtype, layout=layout
    )
    return hidden[:, 0], pool


def _on_each(
    layout: Layout | None,
    function: Callable[..., tuple[Array, Array, Array]],
    heads: tuple[Float[Array, "B N H"], Float[Array, "B K H"], Float[Array, "B K V"]],
    arrays: tuple[Array, ...],
) -> tuple[Array, Array, Array]:
    """Call a function on the part of each device: rows by part, heads as they are split."""
    if layout is None:
        return function(*heads, *arrays)
    rows = PartitionSpec(BATCH)
    split = "tensor" if heads[1].shape[1] % layout.mesh.shape["tensor"] == 0 else None
    queries, keys = PartitionSpec(BATCH, "tensor"), PartitionSpec(BATCH, split)
    pages = PartitionSpec(BATCH, None, split)
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=(queries, keys, keys, pages, pages, rows, rows),
        out_specs=(queries, pages, pages),
        check_vma=False,  # a kernel does not say along which axes its results vary
    )(*heads, *arrays)


def _attend_part(
    kernel: Callable[..., Array],
    options: Attending,
    latent_width: int | None,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K V"],
    *arrays: Array,
) -> tuple[Float[Array, "B N W"], Array, Array]:
    """Write one token of each row into the pages of one part, and attend over them."""
    keys, values, table, positions = arrays
    size, count = keys.shape[4], keys.shape[1]
    own = jnp.take_along_axis(table, jnp.maximum(positions, 0)[:, None] // size, axis=1)[:, 0]
    page, slot = jnp.where(positions < 0, count, own), positions % size
    keys = keys.at[0, page, :, :, slot].set(k.astype(keys.dtype), mode="drop")
    if latent_width is None:
        values = values.at[0, page, :, slot].set(v.astype(values.dtype), mode="drop")
    pages = Pages(keys[0], values[0] if latent_width is None else None, table)
    mixed = kernel(q, pages, positions, options, value_width=latent_width)
    return mixed, keys, values

"""Decode with a cache: read prompts in pieces, and go on token by token, over rows or over pages.

Those who decode give the weights, as `models.cache` holds the cache, with arrays for each layer.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.attention import Attending, attend_cache
from jaxrl_llm.models.cache import (
    Cache,
    LayerCache,
    PageTables,
    keys_are_values,
    scaled_widths,
    write_kept,
)
from jaxrl_llm.models.delta import DeltaState
from jaxrl_llm.models.inputs import NO_INPUTS, RowInputs
from jaxrl_llm.models.int8 import make_scales
from jaxrl_llm.models.layers import Layer, Mixers, attending, decoder_layer, rotations
from jaxrl_llm.models.moe.record import record_in_pages, record_in_rows
from jaxrl_llm.models.paged_attention import Pages, place_of_token
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import embed, final_norm
from jaxrl_llm.models.vision.features import deepened, rest_of_image, with_features
from jaxrl_llm.models.vision.inputs import VisualTokens
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import BATCH


def _layers(params: Params, spec: ModelSpec) -> Iterator[tuple[Params, Layer]]:
    """Yield each layer's weights, from stacked arrays or from those of `by_layer`."""
    places = {
        number: (name, index)
        for name, layers in spec.stacks.items()
        for index, number in enumerate(layers)
    }
    for number in range(spec.layers):
        name, index = places[number]
        weights = {key: arrays[index] for key, arrays in params[name].items()}
        kinds = (spec.windowed_layers, spec.rotary_layers)
        windowed, rotary = (flags[number] if flags else None for flags in kinds)
        yield weights, Layer(windowed, rotary)


def extend(
    params: Params,
    spec: ModelSpec,
    cache: Cache,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
    inputs: RowInputs = NO_INPUTS,
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
        inputs: What else the rows have; routes are not replayed here.

    Returns:
        Hidden states after the final norm, and the cache with the tokens' keys and values.

    >>> from jaxrl_llm.models.cache import init_cache
    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec()
    >>> params = init_params(spec, key=jax.random.key(0))
    >>> prompt, positions = jnp.array([[3, 5, 2]]), jnp.array([[0, 1, 2]])
    >>> hidden, cache = extend(params, spec, init_cache(spec, 1, 8), prompt, positions)
    >>> hidden.shape
    (1, 3, 4)
    """
    rows, every = jnp.arange(tokens.shape[0])[:, None], slice(None)
    at = (rows, every, every, positions), (rows, every, positions)
    real = positions < cache.keys[0].shape[3]

    def attention(
        number: int, options: Attending, q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        layer = write_kept(spec, cache.layer(number), k, v, at)
        mixed_in, of_values = layer.values, layer.value_scales
        if keys_are_values(spec):
            mixed_in, of_values = layer.keys.swapaxes(2, 3), None
        if layer.key_scales is None:
            return attend_cache(q, layer.keys, mixed_in, positions, options), layer
        scales = make_scales(layer.key_scales, of_values)
        mixed_in = mixed_in[..., : scaled_widths(spec)[0]]
        return attend_cache(q, layer.keys, mixed_in, positions, options, scales), layer

    rows_before = _Rows(tokens, positions, real, cache.states, inputs.visual, inputs.rotary)
    hidden, kept, experts = _run(params, spec, attention, rows_before, dtype=dtype, layout=layout)
    return hidden, kept._replace(routes=record_in_rows(cache.routes, experts, positions))


class _Rows(NamedTuple):
    """The next tokens of each row, which of them are not padding, and states before them.

    Rotary positions may be three of each token, as in `RowInputs`, or one.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    states: tuple[DeltaState, ...]
    visual: VisualTokens | None = None
    rotary: Int[Array, "B T"] | Int[Array, "B T 3"] | None = None

    def state(self, number: int) -> DeltaState:
        """Return the state of a layer; a row that begins has none yet, whatever it held."""
        begins = self.positions[:, 0] == 0

        def kept(x: Array) -> Array:
            return jnp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0, x)

        return jax.tree.map(kept, self.states[number])


def _run(
    params: Params,
    spec: ModelSpec,
    attention: Callable[..., tuple[Array, LayerCache]],
    rows: _Rows,
    *,
    dtype: DTypeLike,
    layout: Layout | None,
) -> tuple[Float[Array, "B T D"], Cache, list[Int[Array, "B T top"]]]:
    """Run all layers.

    Those with attention attend by `(number, options, q, k, v) -> (mixed, its cache)`. The last that
    is returned is where tokens went in each layer with experts.
    """
    by = rotations(spec, rows.positions if rows.rotary is None else rows.rotary)
    segment_ids = rows.real.astype(jnp.int32)
    constrain = layout.constrain if layout else lambda x: x
    x = embed(params, spec, rows.tokens, dtype=dtype)
    ahead = None
    if rows.visual is not None:
        x = with_features(x, rows.visual)
        ahead = rest_of_image(rows.visual.feature) if spec.attends_within_images else None
    x = constrain(x)
    kept, states = list[LayerCache](), list[DeltaState]()
    experts: list[Array] = []
    for number, (weights, layer) in enumerate(_layers(params, spec)):
        options = attending(spec, layer, weights)._replace(ahead=ahead)
        mixers = Mixers(
            functools.partial(attention, len(kept), options),
            lambda mix: mix(segment_ids, rows.state(len(states))),
        )
        x, after, router = decoder_layer(weights, spec, x, by.of(layer), mixers, layout=layout)
        x = constrain(x if rows.visual is None else deepened(x, rows.visual, number))
        if isinstance(after, DeltaState):
            states.append(after)
        else:
            kept.append(after)
        experts += [router["experts"]] if router else []
    fields = zip(LayerCache._fields, zip(*kept, strict=True), strict=True)
    held: dict[str, Any] = {name: () if arrays[0] is None else arrays for name, arrays in fields}
    return final_norm(params, spec, x), Cache(**held, states=tuple(states)), experts


class NextTokens(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: Their ids.
        positions: Their positions; negative in an empty row, of which nothing is written.
        rotary: By which queries and keys are rotated, where that is not the position: after
            images, for a model with `mrope_sections`.
    """

    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    rotary: Int[Array, " B"] | None = None


def extend_pages(
    params: Params,
    spec: ModelSpec,
    pool: Cache,
    tables: PageTables,
    following: NextTokens,
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
            belong to the parts in order, as many to each. Its `states` are those of the rows.
        tables: The pages of each row, within its part.
        following: The rows' next tokens.
        dtype: Of the computation.
        layout: How rows, and parts of the pool, are split over a mesh; None: there is one part.

    Returns:
        Hidden states after the final norm, and the pool with the tokens' keys and values.

    Raises:
        ValueError: There is no layout for several parts.
    """
    if layout is None and pool.keys[0].shape[0] != 1:
        raise ValueError(f"expected a pool of one part without a layout, got {len(pool.keys[0])}")

    def attention(
        number: int, options: Attending, q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        def on_device(sinks: Any, *arrays: Any) -> tuple[Array, LayerCache]:
            own = options._replace(sinks=sinks)
            return _attend_part(spec, tables.kernel, own, *arrays)

        heads = options.sinks, q[:, 0], k[:, 0], v[:, 0]
        where = (pool.layer(number), tables.table, following.positions)
        mixed, layer = _on_each(layout, on_device, heads, *where)
        return mixed[:, None], layer

    tokens, positions = following.tokens[:, None], following.positions
    rotary = None if following.rotary is None else following.rotary[:, None]
    real = positions[:, None] >= 0
    rows = _Rows(tokens, positions[:, None], real, pool.states, rotary=rotary)
    hidden, kept, experts = _run(params, spec, attention, rows, dtype=dtype, layout=layout)
    routes = record_in_pages(pool.routes, experts, tables.table, positions)
    return hidden[:, 0], kept._replace(routes=routes)


def _on_each(
    layout: Layout | None,
    function: Callable[..., tuple[Array, LayerCache]],
    heads: tuple[Array | None, Float[Array, "B N H"], Float[Array, "B K H"], Float[Array, "B K V"]],
    layer: LayerCache,
    table: Int[Array, "B n"],
    positions: Int[Array, " B"],
) -> tuple[Array, LayerCache]:
    """Call a function on the part of each device: rows by part, heads as they are split.

    The heads' arrays are sinks, which have no rows, queries, keys and values.
    """
    arrays = (*heads, layer, table, positions)
    if layout is None:
        return function(*arrays)
    rows = PartitionSpec(BATCH)
    split = "tensor" if heads[2].shape[1] % layout.mesh.shape["tensor"] == 0 else None
    queries, keys = PartitionSpec(BATCH, "tensor"), PartitionSpec(BATCH, split)
    pages = PartitionSpec(BATCH, None, split)
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=(PartitionSpec("tensor"), queries, keys, keys, pages, rows, rows),
        out_specs=(queries, pages),
        check_vma=False,  # a kernel does not say along which axes its results vary
    )(*arrays)


def _attend_part(
    spec: ModelSpec,
    kernel: Callable[..., Array],
    options: Attending,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K V"],
    *held: Any,
) -> tuple[Float[Array, "B N W"], LayerCache]:
    """Write one token of each row into the pages of one part, and attend over them."""
    layer, table, positions = held
    size, count = layer.keys.shape[4], layer.keys.shape[1]
    (page, slot), every = place_of_token(table, positions, count, size), slice(None)
    layer = write_kept(spec, layer, k, v, ((0, page, every, every, slot), (0, page, every, slot)))
    arrays: list[Any] = [None if x is None else x[0] for x in layer]
    keys, values, *scales = arrays
    if keys_are_values(spec) and spec.latent is not None:
        pages = Pages(keys, None, table, scales[0])
        return kernel(q, pages, positions, options, value_width=spec.latent.kv_rank), layer
    return kernel(q, Pages(keys, values, table, *scales), positions, options), layer

"""What is kept of sequences while they are decoded: keys, values, states, and how they are written.

Every layer has arrays of its own: taking a layer out of stacked arrays would copy it at every step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Real

from jaxrl_llm.models.attention import LayerCache, quantize
from jaxrl_llm.models.delta import DeltaState, empty_state
from jaxrl_llm.models.moe.routing import NO_ROUTE
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.paged_attention import place_of_token
from jaxrl_llm.models.spec import ModelSpec

Record = tuple[Int[Array, "*B 1 S choices"], ...]
"""Nothing, or one array: for each slot the experts of all layers that have some, in order."""


def empty_record(shape: RouteShape, rows: int, length: int) -> Record:
    """Make a record of no choices.

    Args:
        shape: What is recorded of each token.
        rows: Of the cache.
        length: Slots of each.

    >>> empty_record(RouteShape(layers=2, top=4, dtype=jnp.int8), 3, 5)[0].shape
    (3, 1, 5, 8)
    """
    return (jnp.full((rows, 1, length, shape.layers * shape.top), NO_ROUTE, shape.dtype),)


def record_in_rows(
    record: Record, experts: Sequence[Int[Array, "B T top"]], positions: Int[Array, "B T"]
) -> Record:
    """Write where the next tokens of each row went; not of those at a position past the slots.

    Args:
        record: Before; nothing is written where it is empty.
        experts: Of each layer that has some.
        positions: Of the tokens.

    >>> record = empty_record(RouteShape(layers=2, top=1, dtype=jnp.int8), 1, 3)
    >>> experts = [jnp.array([[[4], [5]]]), jnp.array([[[6], [7]]])]
    >>> record_in_rows(record, experts, jnp.array([[1, 3]]))[0].tolist()
    [[[[-1, -1], [4, 6], [-1, -1]]]]
    """
    rows = jnp.arange(positions.shape[0])[:, None]
    return tuple(
        held.at[rows, 0, positions].set(_joined(experts, held), mode="drop") for held in record
    )


def record_in_pages(
    record: Record,
    experts: Sequence[Int[Array, "B 1 top"]],
    table: Int[Array, "B n"],
    positions: Int[Array, " B"],
) -> Record:
    """Write where the new token of each row went into its page, as `Decoder.extend_pages`.

    Args:
        record: Before, of pages [parts, pages, …]; nothing is written where it is empty.
        experts: Of each layer that has some.
        table: The pages of each row, within its part.
        positions: Of the tokens; negative in an empty row, of which nothing is written.
    """

    def write(pages: Array, page: Array, slot: Array, new: Array) -> Array:
        return pages.at[page, 0, slot].set(new, mode="drop")

    def written(held: Array) -> Array:
        parts, count, _, size, _ = held.shape
        new = _joined(experts, held)[:, 0]
        arrays = (*place_of_token(table, positions, count, size), new)
        by_part = (x.reshape(parts, -1, *x.shape[1:]) for x in arrays)
        return jax.vmap(write)(held, *by_part)

    return tuple(map(written, record))


def _joined(experts: Sequence[Int[Array, "B T top"]], held: Array) -> Int[Array, "B T choices"]:
    return jnp.concatenate(experts, axis=-1).astype(held.dtype)


class Cache(NamedTuple):
    """Keys (after rotation) and values of each layer; slot s of row b holds position s of row b.

    Layers with a DeltaNet have no slots but one state per row.

    The slots of keys come last: scores are then a product without a transposed factor, which on a
    CPU is several times as fast. Latent attention in its absorbed form has the keys as values too;
    `values` then has width 0.

    Attributes:
        keys: in the dtype of the computation, or int8.
        values: likewise.
        key_scales: of int8, as in `models.attention.LayerCache`, in the dtype of the computation;
            else none.
        value_scales: likewise, of width 0 where values are.
        states: of each layer with a DeltaNet; the other fields have the layers with attention.
        routes: the experts that each token went to, where they are recorded.
    """

    keys: tuple[Real[Array, "B K H S"], ...]
    values: tuple[Real[Array, "B K S value"], ...]
    key_scales: tuple[Float[Array, "B K G S"], ...] = ()
    value_scales: tuple[Float[Array, "B K S scale"], ...] = ()
    states: tuple[DeltaState, ...] = ()
    routes: Record = ()

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Return the dtype of the computation."""
        return (self.key_scales or self.keys)[0].dtype

    def layer(self, number: int) -> LayerCache:
        """Return what is held of a layer, by its number among those with attention."""
        return LayerCache(*(arrays[number] for arrays in self[:4] if arrays))


def write_slots(
    cache: Cache,
    layer: int,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    positions: Int[Array, "B T"],
) -> Cache:
    """Write a layer's keys and values of the next tokens of each row, for a model of one's own.

    Attention over them is `models.attention.attend_cache(q, cache.keys[layer], cache.values[layer],
    positions)`.

    Args:
        cache: Not in int8.
        layer: Its number.
        k: Keys of T tokens per row.
        v: Their values.
        positions: Of the tokens. Nothing is written of one at a position past the slots.

    >>> cache = Cache((jnp.zeros((1, 1, 2, 4)),), (jnp.zeros((1, 1, 4, 2)),))
    >>> k = jnp.ones((1, 1, 1, 2))
    >>> write_slots(cache, 0, k, k, jnp.array([[2]])).values[0][0, 0, :, 0].tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    rows, every = jnp.arange(k.shape[0])[:, None], slice(None)
    keys, values = list(cache.keys), list(cache.values)
    at = (rows, every, every, positions), (rows, every, positions)
    keys[layer] = keys[layer].at[at[0]].set(k.astype(keys[layer].dtype), mode="drop")
    values[layer] = values[layer].at[at[1]].set(v.astype(values[layer].dtype), mode="drop")
    return cache._replace(keys=tuple(keys), values=tuple(values))


def init_cache(
    spec: ModelSpec,
    batch: int,
    length: int,
    *,
    dtype: DTypeLike = jnp.float32,
    kv_cache_dtype: str = "auto",
) -> Cache:
    """Make an empty cache.

    Args:
        spec: The model.
        batch: Rows B.
        length: Slots S per row, in tokens.
        dtype: Of the computation.
        kv_cache_dtype: Of keys and values: auto, that of the computation, or int8.

    Returns:
        Zeros.

    Raises:
        ValueError: Keys and values can't be kept so.

    >>> spec = tiny_spec()
    >>> init_cache(spec, 3, 5).keys[0].shape
    (3, 1, 2, 5)
    >>> init_cache(spec, 3, 5, kv_cache_dtype="int8").key_scales[0].shape
    (3, 1, 1, 5)
    """
    if kv_cache_dtype not in ("auto", "int8"):
        raise ValueError(f"kv_cache_dtype: expected auto or int8, got {kv_cache_dtype!r}")

    def zeros(*shape: int, dtype: DTypeLike) -> tuple[Array, ...]:
        whole = (batch, spec.kv_heads, *shape)
        return tuple(jnp.zeros(whole, dtype) for _ in range(spec.layers - sum(spec.delta_layers)))

    is_int8 = kv_cache_dtype == "int8"
    of_cache = jnp.int8 if is_int8 else dtype
    has_values = not keys_are_values(spec)
    keys = zeros(spec.head_dim, length, dtype=of_cache)
    values = zeros(length, spec.head_dim * has_values, dtype=of_cache)
    states = ()
    if spec.delta is not None:
        states = tuple(empty_state(spec.delta, batch, dtype) for _ in range(sum(spec.delta_layers)))
    if not is_int8:
        return Cache(keys, values, states=states)
    key_scales = zeros(len(scaled_widths(spec)), length, dtype=dtype)
    value_scales = zeros(length, int(has_values), dtype=dtype)
    return Cache(keys, values, key_scales, value_scales, states)


def scaled_widths(spec: ModelSpec) -> tuple[int, ...]:
    """Cut a key into parts with a scale each: a latent is normed, its rotated part is not."""
    if not keys_are_values(spec) or spec.latent is None:
        return (spec.head_dim,)
    return spec.latent.kv_rank, spec.latent.rope_width


def write_kept(
    spec: ModelSpec,
    held: LayerCache,
    k: Float[Array, "*T K H"],
    v: Float[Array, "*T K V"],
    at: tuple[tuple[Any, ...], tuple[Any, ...]],
) -> LayerCache:
    """Write keys and values of tokens.

    Args:
        spec: The model.
        held: Where they are written.
        k: Keys.
        v: Values; not written where keys are values.
        at: Indices of the tokens in arrays of keys and of values; those out of bounds are dropped.
    """
    new = LayerCache(k, v)
    if held.key_scales is not None:
        k, of_keys = quantize(k, scaled_widths(spec), held.key_scales.dtype)
        v, of_values = quantize(v, v.shape[-1:], held.key_scales.dtype)
        new = LayerCache(k, v, of_keys, of_values)

    def written(old: Array | None, x: Array | None, at: tuple[Any, ...]) -> Any:
        if old is None or x is None or old.shape[-1] == 0:
            return old
        return old.at[at].set(x.astype(old.dtype), mode="drop")

    return LayerCache(*map(written, held, new, at * 2))


def keys_are_values(spec: ModelSpec) -> bool:
    """Tell whether values are not kept, as keys are the values, too."""
    return spec.latent is not None and spec.latent.absorbed


class PageTables(NamedTuple):
    """Which pages of a pool each row has, and what attends over them.

    Attributes:
        table: in order: token j of a row is in page j // S of its own. What stands past the row's
            end is not read.
        kernel: with the arguments of `models.paged_attention.attend_gathered`.
    """

    table: Int[Array, "B n"]
    kernel: Callable[..., Array]

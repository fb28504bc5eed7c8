"""Decoding with a key/value cache: prefill prompts, share them among samples, step token by token.

The cache is carried through the loop over layers and updated in place. Scanning over its stacked
layers instead would copy all of it at every step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import attend, attend_cache
from jaxrl_llm.models.spec import ModelSpec, Params
from jaxrl_llm.models.transformer import (
    Layer,
    attending,
    decoder_layer,
    embed,
    final_norm,
    rotations,
    stacked_layers,
)
from jaxrl_llm.sharding.layout import Layout


class Cache(NamedTuple):
    """Keys (after rotation) and values of all layers; slot s of row b holds position s of row b.

    Latent attention in its absorbed form has the keys as values too; `values` then has width 0.
    """

    keys: Float[Array, "layers B S K H"]
    values: Float[Array, "layers B S K value"]


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

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> init_cache(spec, 3, 5).keys.shape
    (1, 3, 5, 1, 2)
    """
    shape = (spec.layers, batch, length, spec.kv_heads)
    values = 0 if _keys_are_values(spec) else spec.head_width
    return Cache(jnp.zeros((*shape, spec.head_width), dtype), jnp.zeros((*shape, values), dtype))


def _keys_are_values(spec: ModelSpec) -> bool:
    return spec.latent is not None and spec.latent.absorbed


def prefill(
    params: Params,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    cache_length: int,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
) -> tuple[Float[Array, "B D"], Cache]:
    """Run right-padded prompts through the model and keep their keys and values.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        tokens: Prompts, real tokens first.
        lengths: Real tokens per prompt, at least 1.
        cache_length: Slots S of the cache, at least T; what is left is room for new tokens.
        dtype: Of the computation and the cache.
        layout: How prompts are split over a mesh, whole each; None leaves it to the compiler.

    Returns:
        The hidden state (after the final norm) of each prompt's last real token, and the cache.
        Slots from `lengths[b]` on hold nothing of meaning.

    Raises:
        ValueError: The prompts do not fit into the cache.

    >>> from jaxrl_llm.models.spec import initialize
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> params = initialize(spec, key=jax.random.key(0))
    >>> prompts, lengths = jnp.array([[3, 5, 2], [1, 0, 0]]), jnp.array([3, 1])
    >>> hidden, cache = prefill(params, spec, prompts, lengths, cache_length=8)
    >>> hidden.shape, cache.keys.shape
    ((2, 4), (1, 2, 8, 1, 2))
    """
    length = tokens.shape[1]
    if length > cache_length:
        raise ValueError(f"prompts of {length} tokens do not fit into cache_length={cache_length}")
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    by = rotations(spec, positions)

    def body(x: Array, of_layer: tuple[Params, Layer]) -> tuple[Array, Cache]:
        weights, layer = of_layer
        how = attending(spec, layer)

        def attention(q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
            room = ((0, 0), (0, cache_length - length), (0, 0), (0, 0))
            held = v[..., :0] if _keys_are_values(spec) else v
            return attend(q, k, v, segment_ids, how), Cache(jnp.pad(k, room), jnp.pad(held, room))

        x, cache, _ = decoder_layer(weights, spec, x, by.of(layer), attention, layout=layout)
        return place(x), cache

    place = layout.place if layout else lambda x: x
    x = place(embed(params, spec, tokens, dtype=dtype))
    caches = []
    for stack in stacked_layers(params, spec):
        x, cache = jax.lax.scan(body, x, stack)
        caches.append(cache)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    joined = caches[0] if len(caches) == 1 else jax.tree.map(lambda *x: jnp.concat(x), *caches)
    return final_norm(params, spec, last), joined


def take(cache: Cache, rows: Int[Array, " B"]) -> Cache:
    """Gather rows of a cache, repeats allowed: G samples of a prompt share one prefill.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> take(init_cache(spec, 2, 5), jnp.array([0, 0, 1, 1])).keys.shape
    (1, 4, 5, 1, 2)
    """
    return Cache(cache.keys[:, rows], cache.values[:, rows])


def decode_step(
    params: Params,
    spec: ModelSpec,
    cache: Cache,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
) -> tuple[Float[Array, "B D"], Cache]:
    """Run one token per row, writing slot `positions[b]` of row b and attending up to it.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        cache: Filled below `positions`; donate it under `jax.jit`, it is updated in place.
        tokens: The rows' newest tokens.
        positions: Their positions, each below S. At a position of S or more nothing is written and
            the row's result means nothing.
        dtype: Of the computation.
        layout: How rows are split over a mesh; None leaves it to the compiler.

    Returns:
        Hidden states after the final norm, and the cache with the tokens' keys and values.

    >>> from jaxrl_llm.models.spec import initialize
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> params = initialize(spec, key=jax.random.key(0))
    >>> cache = init_cache(spec, 2, 5)
    >>> hidden, cache = decode_step(params, spec, cache, jnp.array([3, 4]), jnp.array([0, 0]))
    >>> hidden.shape
    (2, 4)
    """
    by = rotations(spec, positions[:, None])
    rows = jnp.arange(tokens.shape[0])

    def body(
        carry: tuple[Array, Cache], of_layer: tuple[Params, Layer]
    ) -> tuple[tuple[Array, Cache], None]:
        x, cache = carry
        weights, layer = of_layer
        how, number = attending(spec, layer), layer.number

        def attention(q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
            keys = cache.keys.at[number, rows, positions].set(k[:, 0].astype(cache.keys.dtype))
            values = cache.values
            if not _keys_are_values(spec):
                values = values.at[number, rows, positions].set(v[:, 0].astype(values.dtype))
            mixed_in = keys if _keys_are_values(spec) else values
            mixed = attend_cache(q[:, 0], keys[number], mixed_in[number], positions + 1, how)
            return mixed[:, None], Cache(keys, values)

        x, cache, _ = decoder_layer(weights, spec, x, by.of(layer), attention, layout=layout)
        return (place(x), cache), None

    place = layout.place if layout else lambda x: x
    carry = place(embed(params, spec, tokens[:, None], dtype=dtype)), cache
    for stack in stacked_layers(params, spec):
        carry, _ = jax.lax.scan(body, carry, stack)
    x, cache = carry
    return final_norm(params, spec, x[:, 0]), cache

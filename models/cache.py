"""Decoding with a key/value cache: prefill prompts, share them among samples, step token by token.

Every layer has arrays of its own here, of the cache and, for those who decode, of the weights:
taking a layer out of stacked arrays would copy it at every step.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import Attending, attend, attend_cache
from jaxrl_llm.models.spec import ModelSpec, Params
from jaxrl_llm.models.transformer import (
    Layer,
    attending,
    decoder_layer,
    embed,
    final_norm,
    rotations,
)
from jaxrl_llm.sharding.layout import Layout


class Cache(NamedTuple):
    """Keys (after rotation) and values of each layer; slot s of row b holds position s of row b.

    Latent attention in its absorbed form has the keys as values too; `values` then has width 0.
    """

    keys: tuple[Float[Array, "B K S H"], ...]
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

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> init_cache(spec, 3, 5).keys[0].shape
    (3, 1, 5, 2)
    """

    def zeros(width: int) -> tuple[Array, ...]:
        shape = (batch, spec.kv_heads, length, width)
        return tuple(jnp.zeros(shape, dtype) for _ in range(spec.layers))

    return Cache(zeros(spec.head_width), zeros(0 if _keys_are_values(spec) else spec.head_width))


def _keys_are_values(spec: ModelSpec) -> bool:
    return spec.latent is not None and spec.latent.absorbed


def by_layer(params: Params, spec: ModelSpec) -> Params:
    """Return parameters with each stack of layers' array as a tuple of one array per layer.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=2, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> params = {"embed": jnp.ones((8, 4)), "layers": {"up": jnp.ones((2, 4, 6))}}
    >>> [up.shape for up in by_layer(params, spec)["layers"]["up"]]
    [(4, 6), (4, 6)]
    """
    return params | {
        name: {key: tuple(stacked) for key, stacked in params[name].items()} for name in spec.stacks
    }


def _layers(params: Params, spec: ModelSpec) -> Iterator[tuple[Params, Layer]]:
    """Yield each layer's weights, from stacked arrays or from those of `by_layer`."""
    for name, numbers in spec.stacks.items():
        for index, number in enumerate(numbers):
            windowed = spec.windowed_layers[number] if spec.windowed_layers else None
            weights = {key: arrays[index] for key, arrays in params[name].items()}
            yield weights, Layer(number, windowed)


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
        params: Parameters nested as `declare(spec)`, stacked or `by_layer`.
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
    >>> hidden.shape, cache.keys[0].shape
    ((2, 4), (2, 1, 8, 2))
    """
    length = tokens.shape[1]
    if length > cache_length:
        raise ValueError(f"prompts of {length} tokens do not fit into cache_length={cache_length}")
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    by = rotations(spec, positions)

    def attention(
        how: Attending, q: Array, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        room = ((0, 0), (0, 0), (0, cache_length - length), (0, 0))
        held = v[..., :0] if _keys_are_values(spec) else v
        kept = jnp.pad(k.swapaxes(1, 2), room), jnp.pad(held.swapaxes(1, 2), room)
        return attend(q, k, v, segment_ids, how), kept

    place = layout.place if layout else lambda x: x
    x, kept = place(embed(params, spec, tokens, dtype=dtype)), []
    for weights, layer in _layers(params, spec):
        attend_row = functools.partial(attention, attending(spec, layer))
        x, of_layer, _ = decoder_layer(weights, spec, x, by.of(layer), attend_row, layout=layout)
        x = place(x)
        kept.append(of_layer)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    keys, values = zip(*kept, strict=True)
    return final_norm(params, spec, last), Cache(keys, values)


def take(cache: Cache, rows: Int[Array, " B"]) -> Cache:
    """Gather rows of a cache, repeats allowed: G samples of a prompt share one prefill.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> take(init_cache(spec, 2, 5), jnp.array([0, 0, 1, 1])).keys[0].shape
    (4, 1, 5, 2)
    """
    return jax.tree.map(lambda layer: layer[rows], cache)


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
        params: Parameters nested as `declare(spec)`, stacked or `by_layer`.
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

    def attention(
        number: int, how: Attending, q: Array, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        keys = cache.keys[number].at[rows, :, positions].set(k[:, 0].astype(cache.keys[0].dtype))
        values = cache.values[number]
        if not _keys_are_values(spec):
            values = values.at[rows, :, positions].set(v[:, 0].astype(values.dtype))
        mixed_in = keys if _keys_are_values(spec) else values
        mixed = attend_cache(q[:, 0], keys, mixed_in, positions + 1, how)
        return mixed[:, None], (keys, values)

    place = layout.place if layout else lambda x: x
    x, kept = place(embed(params, spec, tokens[:, None], dtype=dtype)), []
    for number, (weights, layer) in enumerate(_layers(params, spec)):
        attend_slot = functools.partial(attention, number, attending(spec, layer))
        x, of_layer, _ = decoder_layer(weights, spec, x, by.of(layer), attend_slot, layout=layout)
        x = place(x)
        kept.append(of_layer)
    keys, values = zip(*kept, strict=True)
    return final_norm(params, spec, x[:, 0]), Cache(keys, values)

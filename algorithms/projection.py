"""Hidden states onto a vocabulary in chunks of tokens, so that no array holds all logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

NEVER = -1e30
"""The logit of a token that is never drawn. It is finite, as differences of two must be numbers."""


@dataclass(frozen=True)
class HeadProjection:
    """How hidden states become logits.

    Attributes:
        temperature: what logits are divided by, after the soft-cap.
        softcap: the bound of the logits' magnitude; None for none.
        chunk: the most tokens in a chunk.
        embed_axes: inside `jax.shard_map`, the mesh axes over which the rows of the output
            projection are split; they split tokens, too.
        vocab_axes: those over which its columns are split; their devices have the same tokens.
        never: ids of tokens that are never drawn: they have the logit `NEVER`, and no gradient.
    """

    temperature: float = 1.0
    softcap: float | None = None
    chunk: int = 1024
    embed_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()
    never: tuple[int, ...] = ()

    def gather(self, head: Float[Array, "d V"], dtype: jnp.dtype) -> Float[Array, "D V"]:
        """Return the whole output projection in a dtype."""
        narrow = head.astype(dtype)
        if not self.embed_axes:
            return narrow
        return jax.lax.all_gather(narrow, self.embed_axes, axis=0, tiled=True)

    def scatter(self, gradient: Float32[Array, "D V"]) -> Float32[Array, "d V"]:
        """Return this device's part of the gradient of the output projection."""
        if not self.embed_axes:
            return gradient
        return jax.lax.psum_scatter(gradient, self.embed_axes, scatter_dimension=0, tiled=True)

    def logits(
        self, hidden: Float[Array, "x D"], head: Float[Array, "D V"]
    ) -> Float32[Array, "x V"]:
        """Return logits, of this device's part of the vocabulary."""
        return self.from_raw(jnp.matmul(hidden, head, preferred_element_type=jnp.float32))

    def from_raw(self, raw: Float32[Array, "x V"]) -> Float32[Array, "x V"]:
        """Apply soft-cap and temperature to products."""
        capped = raw if self.softcap is None else self.softcap * jnp.tanh(raw / self.softcap)
        return self._with_never(capped / self.temperature, NEVER)

    def to_raw(
        self, cotangent: Float32[Array, "x V"], logits: Float32[Array, "x V"]
    ) -> Float32[Array, "x V"]:
        """Take a gradient by the logits back through temperature and soft-cap."""
        cotangent = cotangent / self.temperature
        if self.softcap is not None:
            cotangent *= 1.0 - jnp.square(logits * (self.temperature / self.softcap))
        return self._with_never(cotangent, 0.0)

    def _with_never(self, x: Float32[Array, "x V"], value: float) -> Float32[Array, "x V"]:
        """Put a value in the columns of tokens that are never drawn."""
        if not self.never:
            return x
        ids = jnp.arange(x.shape[-1])
        if self.vocab_axes:
            ids += jax.lax.axis_index(self.vocab_axes) * x.shape[-1]
        return jnp.where(jnp.isin(ids, jnp.array(self.never)), value, x)


@dataclass(frozen=True)
class Sharers:
    """Devices that have the same tokens, each a part of the vocabulary: they share a chunk.

    Each device gets the logits of its share of the tokens over the whole vocabulary. A matrix that
    is whole on every device is multiplied with the share alone.

    Attributes:
        axes: the mesh axes of these devices, inside `jax.shard_map`; without any there is one.
    """

    axes: tuple[str, ...]

    def logits(
        self, projection: HeadProjection, hidden: Float[Array, "x D"], head: Float[Array, "D v"]
    ) -> Float32[Array, "y V"]:
        """Return the logits of this device's share of x tokens."""
        products = projection.logits(self.rows(projection, hidden), head)
        return self.exchange(projection, products)

    def rows(self, projection: HeadProjection, x: Array) -> Array:
        """Return the tokens whose products this device computes."""
        return self._padded(x) if projection.vocab_axes else self.share(x)

    def exchange(
        self, projection: HeadProjection, logits: Float32[Array, "x v"]
    ) -> Float32[Array, "y V"]:
        """Return the whole logits of this device's share, from parts of those of all tokens.

        Raises:
            ValueError: the vocabulary is split over other axes than those of these devices.
        """
        if not projection.vocab_axes:
            return logits
        if projection.vocab_axes != self.axes:
            raise ValueError(
                "the vocabularies of student and teacher are split over "
                f"{self.axes} and {projection.vocab_axes}; expected the same mesh axes"
            )
        return jax.lax.all_to_all(logits, self.axes, split_axis=0, concat_axis=1, tiled=True)

    def share(self, x: Array) -> Array:
        """Return this device's share of tokens."""
        if not self.axes:
            return x
        x = self._padded(x)
        size = len(x) // jax.lax.axis_size(self.axes)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * size, size)

    def join(self, x: Array, tokens: int) -> Array:
        """Return what there is of all tokens, from each device's share."""
        if not self.axes:
            return x
        return jax.lax.all_gather(x, self.axes, axis=0, tiled=True)[:tokens]

    def _padded(self, x: Array) -> Array:
        padding = -len(x) % jax.lax.axis_size(self.axes) if self.axes else 0
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x


def chunk_count(tokens: int, chunk: int) -> int:
    """Return how many chunks to take, at best of equal size: padding is hard to share evenly."""
    least = -(-tokens // chunk)
    return next((n for n in range(least, 2 * least + 1) if n and tokens % n == 0), least)


class TokenChunks:
    """X tokens in chunks of equal size: needed ones first, or each chunk every n-th of them.

    Args:
        tokens: X.
        count: of chunks.
        needed: the tokens to compute; None: all.
    """

    def __init__(self, tokens: int, count: int, needed: Bool[Array, " X"] | None) -> None:
        """Put the tokens in order."""
        self.tokens, self.count = tokens, count
        self.order, self.is_needed = None, None
        if needed is not None:
            padding = -tokens % count
            order = jnp.argsort(~needed, stable=True)
            self.order = jnp.pad(order, (0, padding), constant_values=tokens)
            firsts = jnp.arange(count) * ((tokens + padding) // count)
            self.is_needed = firsts < jnp.sum(needed)

    def cut(self, x: Array) -> Array:
        """Return [chunks, x, …] of values [X, …]."""
        if self.order is not None:
            # the order is padded with a number one past the tokens
            taken = x.at[self.order].get(mode="fill", fill_value=0)
            return taken.reshape(self.count, -1, *x.shape[1:])
        x = jnp.pad(x, [(0, -x.shape[0] % self.count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, self.count, *x.shape[1:]).swapaxes(0, 1)

    def join(self, x: Array) -> Array:
        """Return [X, …] of values [chunks, x, …]; the inverse of `cut`."""
        if self.order is not None:
            flat = x.reshape(-1, *x.shape[2:])
            zeros = jnp.zeros((self.tokens, *flat.shape[1:]), flat.dtype)
            return zeros.at[self.order].set(flat, mode="drop")
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[: self.tokens]

    def if_needed(self, compute: Callable[..., Any], skip: Callable[..., Any]) -> Any:
        """Return a function of (…, (is_needed, block)) that computes needed chunks only."""

        def run(*given: Any) -> Any:
            *carry, (is_needed, block) = given
            if is_needed is None:
                return compute(*carry, block)
            return jax.lax.cond(is_needed, compute, skip, *carry, block)

        return run

"""A checksum of an array tree, to see that what arrived is what was sent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32


def checksum(tree: Any) -> UInt32[Array, ""]:
    """Return a checksum of every bit of an array tree, whatever its layout.

    Each array's bits, as unsigned words w_i, add up to sum_i h(w_i) * (2i + 1) mod 2^32, where h
    is the finalizer of MurmurHash3 (one to one, h(0) = 0); the arrays' sums are chained in the
    tree's order. A changed word always changes it, swapped words do but by bad luck. A tuple of
    arrays counts as these stacked.

    >>> tree = {"a": jnp.array([1.0, 2.0])}
    >>> bool(checksum(tree) == checksum({"a": jnp.array([2.0, 1.0])}))
    False
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(tree, is_leaf=_is_stack):
        pieces = leaf if _is_stack(leaf) else (leaf,)
        sums = (_sum(piece, number * piece.size) for number, piece in enumerate(pieces))
        total = total * jnp.uint32(1000003) + sum(sums, jnp.zeros((), jnp.uint32))
    return total


def _is_stack(tree: Any) -> bool:
    return type(tree) is tuple and len(tree) > 0 and all(hasattr(piece, "dtype") for piece in tree)


def _sum(piece: Any, first: int) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(piece, jnp.dtype(f"uint{piece.dtype.itemsize * 8}"))
    place = jnp.arange(piece.size, dtype=jnp.uint32).reshape(piece.shape)
    place += np.uint32(first % 2**32)
    return jnp.sum(_mix(bits.astype(jnp.uint32)) * (2 * place + 1), dtype=jnp.uint32)


def _mix(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Spread a difference in any bits over all: floats often differ only in their high ones."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)

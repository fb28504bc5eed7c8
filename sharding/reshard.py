"""Moving an array tree from one layout to another, and checking what arrived."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32


def reshard(tree: Any, target: Any, *, dtype: DTypeLike | None = None) -> Any:
    """Return a copy of `tree` in the target layout.

    Args:
        tree: arrays.
        target: a sharding for each of them, or one for all.
        dtype: cast floating-point arrays to this on the way.

    Returns:
        New arrays that share no buffer with `tree`, so that the source may be donated.
    """

    def convert(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.copy(cast(x, dtype)), tree)

    return jax.jit(convert, out_shardings=target)(tree)


def cast(array: Array, dtype: DTypeLike | None) -> Array:
    """Cast a floating-point array; leave others, and None leaves all.

    >>> cast(jnp.ones(2), jnp.bfloat16).dtype
    dtype(bfloat16)
    """
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(dtype)


def checksum(tree: Any) -> UInt32[Array, ""]:
    """Return a checksum of every bit of an array tree, whatever its layout.

    Each array's bits, as unsigned words w_i, add up to sum_i w_i * (2i + 1) mod 2^32; the arrays'
    sums are chained in the tree's order. Swapped, missing or changed entries change it.

    >>> tree = {"a": jnp.array([1.0, 2.0])}
    >>> bool(checksum(tree) == checksum({"a": jnp.array([2.0, 1.0])}))
    False
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{leaf.dtype.itemsize * 8}"))
        place = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
        words = bits.astype(jnp.uint32) * (2 * place + 1)
        total = total * jnp.uint32(1000003) + jnp.sum(words, dtype=jnp.uint32)
    return total

"""Moving an array tree from one layout to another, and checking what arrived."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32


def reshard(tree: Any, target: Any, *, dtype: Any = None) -> Any:
    """Return a copy of `tree` in the target layout.

    Args:
        tree: arrays.
        target: a sharding for each of them, or one for all; on the devices of `tree` or on others.
        dtype: cast to this on the way: a dtype for all floating-point arrays, or a tree of them.

    Returns:
        New arrays that share no buffer with `tree`, so that the source may be donated.
    """
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(cast_like(tree, dtype)))
    if _devices(tree) == _devices(target):
        return jax.jit(_copy, static_argnums=1, out_shardings=target)(tree, dtypes)
    # One program runs on one list of devices, so these copies leave the source's layout as it is.
    return jax.device_put(jax.jit(_copy, static_argnums=1)(tree, dtypes), target)


def _copy(tree: Any, dtypes: tuple[Any, ...]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    copies = [jnp.copy(x.astype(dtype)) for x, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(structure, copies)


def cast_like(tree: Any, dtype: Any) -> Any:
    """Return the shapes and dtypes that `tree` has after a cast.

    >>> cast_like({"w": jnp.ones(2), "n": jnp.ones(3)}, {"w": jnp.bfloat16, "n": None})["w"].dtype
    dtype(bfloat16)
    """
    return jax.eval_shape(lambda tree: cast_tree(tree, dtype), tree)


def cast_tree(tree: Any, dtype: Any) -> Any:
    """Cast floating-point arrays to one dtype, or to a tree of dtypes; None leaves them.

    >>> cast_tree({"w": jnp.ones(2), "n": jnp.ones(3)}, jnp.bfloat16)["n"].dtype
    dtype(bfloat16)
    """
    leaves, structure = jax.tree.flatten(tree)
    wanted = structure.flatten_up_to(dtype) if isinstance(dtype, dict) else [dtype] * len(leaves)
    return jax.tree.unflatten(structure, map(cast, leaves, wanted))


def _devices(tree: Any) -> set[tuple[Any, ...]]:
    """Return the lists of devices over which arrays, or shardings, lie."""

    def listing(leaf: Any) -> tuple[Any, ...]:
        layout = leaf.sharding if isinstance(leaf, jax.Array) else leaf
        grid = layout.mesh.devices if isinstance(layout, NamedSharding) else None
        return tuple(layout.device_set if grid is None else grid.flat)

    return {listing(leaf) for leaf in jax.tree.leaves(tree)}


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

    Each array's bits, as unsigned words w_i, add up to sum_i h(w_i) * (2i + 1) mod 2^32, where h
    is the finalizer of MurmurHash3 (one to one, h(0) = 0); the arrays' sums are chained in the
    tree's order. A changed word always changes it, swapped words do but by bad luck.

    >>> tree = {"a": jnp.array([1.0, 2.0])}
    >>> bool(checksum(tree) == checksum({"a": jnp.array([2.0, 1.0])}))
    False
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{leaf.dtype.itemsize * 8}"))
        place = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
        words = _mix(bits.astype(jnp.uint32)) * (2 * place + 1)
        total = total * jnp.uint32(1000003) + jnp.sum(words, dtype=jnp.uint32)
    return total


def _mix(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Spread a difference in any bits over all: floats often differ only in their high ones."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)

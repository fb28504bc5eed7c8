"""A checksum of an array tree, to see that what arrived is what was sent."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxrl_llm.sharding.reshard import on_device

LARGE = 2**20  # words
MOST_PARTS = 32
AT_ONCE = 8  # arrays of layers: one loop over each of them takes twice as long to compile


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
        terms = [t for n, piece in enumerate(pieces) for t in _terms(piece, n * piece.size)]
        sums = (_sum(terms[n : n + AT_ONCE]) for n in range(0, len(terms), AT_ONCE))
        total = total * jnp.uint32(1000003) + sum(sums, jnp.zeros((), jnp.uint32))
    return total


def checksum_of_leaves(tree: Any) -> UInt32[Array, ""]:
    """Return the `checksum` of a tree by one program for all nestings of the same arrays.

    >>> tree = {"a": jnp.array([1.0, 2.0])}
    >>> bool(checksum_of_leaves(tree) == checksum(tree))
    True
    """
    return _compiled_checksum(jax.tree.leaves(tree, is_leaf=_is_stack))


_compiled_checksum = jax.jit(checksum)


def digests(tree: Any) -> Any:
    """Return the checksum of each array of a tree, as arrays on the devices.

    Each is computed by a program of its own, and so at once with the others; arrays in the host's
    memory are copied to the devices, one after another.

    Args:
        tree: arrays.

    Returns:
        A tree of the same structure.

    >>> {name: int(digest) for name, digest in digests({"a": jnp.zeros(3)}).items()}
    {'a': 0}
    """

    def digest(leaf: Any) -> UInt32[Array, ""]:
        with on_device(jnp.asarray(leaf)) as array:
            value = _digest(array, parts=_parts(array))
            return value if array is leaf else value.block_until_ready()

    return jax.tree.map(digest, tree)


@functools.partial(jax.jit, static_argnames="parts")
def _digest(leaf: Any, *, parts: int) -> UInt32[Array, ""]:
    return _sum(_terms(_plain(leaf), 0, parts))


def _parts(leaf: jax.Array) -> int:
    """Return into how many parts rows are cut: XLA adds up a single CPU's rows word by word.

    Parts that are added to each other first are added in vectors, in a quarter of the time. An
    array of several devices is not cut, as a part may lie across two of them; nor is a small one,
    as the program takes longer to compile.
    """
    [*others, device] = leaf.sharding.device_set
    if others or device.platform != "cpu" or leaf.size < LARGE or leaf.shape[-1] % MOST_PARTS:
        return 1
    return MOST_PARTS


def _plain(leaf: Any) -> Any:
    """Return an array in a type whose bits can be read."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf


def _is_stack(tree: Any) -> bool:
    return type(tree) is tuple and len(tree) > 0 and all(hasattr(piece, "dtype") for piece in tree)


def _sum(terms: Sequence[Any]) -> UInt32[Array, ""]:
    """Add up terms of one shape, first to each other: a sum of each would be a program's loop."""
    return jnp.sum(functools.reduce(operator.add, terms), dtype=jnp.uint32)


def _terms(piece: Any, first: int, parts: int = 1) -> list[UInt32[Array, "..."]]:
    """Return what each word adds to the checksum, in parts of one shape.

    Args:
        piece: an array, whose words are `first`, `first` + 1, ... of their array's.
        first: place of its first word.
        parts: into how many its rows are cut.
    """
    cut = jnp.split(piece, parts, axis=-1) if parts > 1 else [piece]
    terms = []
    for part in cut:
        terms.append(_mix(_words(part)) * (2 * _places(part.shape, piece.shape, first) + 1))
        first += part.shape[-1] if parts > 1 else 0
    return terms


def _words(array: Any) -> UInt32[Array, "..."]:
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{array.dtype.itemsize * 8}"))
    return bits.astype(jnp.uint32)


def _places(shape: tuple[int, ...], of: tuple[int, ...], first: int) -> UInt32[Array, "..."]:
    """Return the place of each word of a part in the rows of an array of shape `of`."""
    places, stride = jnp.full(shape, np.uint32(first % 2**32)), 1
    for axis in reversed(range(len(shape))):
        count = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        places, stride = places + count * np.uint32(stride % 2**32), stride * of[axis]
    return places


def _mix(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Spread a difference in any bits over all: floats often differ only in their high ones."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)

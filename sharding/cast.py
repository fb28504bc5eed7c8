"""Casts of array trees from one dtype to another."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


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
    expected = structure.flatten_up_to(dtype) if isinstance(dtype, dict) else [dtype] * len(leaves)
    return jax.tree.unflatten(structure, map(cast, leaves, expected))


def cast(array: Array, dtype: DTypeLike | None) -> Array:
    """Cast a floating-point array; leave others, and None leaves all.

    >>> cast(jnp.ones(2), jnp.bfloat16).dtype
    dtype(bfloat16)
    """
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(dtype)

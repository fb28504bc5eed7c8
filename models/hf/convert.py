"""Our arrays as Hugging Face arrays and back.

Names, shapes and merged dimensions all come from `models.parameters.declare`, so one conversion
serves every array in both directions.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.models.arrays import ArrayDecl


def hf_arrays(declaration: ArrayDecl, array: Any) -> Iterator[tuple[str, Any]]:
    """Split one of our arrays into Hugging Face arrays, with their names.

    Args:
        declaration: Of the array.
        array: Of the declared shape; numpy, or jax (also traced: the split is pure reshaping).

    Returns:
        Pairs of name and array, one per index of the stacked axes.

    >>> from jaxrl_llm.models.arrays import NORMAL
    >>> decl = ArrayDecl(shape=(2, 3, 4), axes=("layers", "ff", "embed"), initializer=NORMAL,
    ...                  hf_name="{layers}.down.weight", hf_axes=(("embed",), ("ff",)))
    >>> [(name, a.shape) for name, a in hf_arrays(decl, np.ones((2, 3, 4)))]
    [('0.down.weight', (4, 3)), ('1.down.weight', (4, 3))]
    """
    for name, index in declaration.hf_indices():
        yield name, to_hf(declaration, array[index])


def to_hf(declaration: ArrayDecl, array: Any) -> Any:
    """Convert one slice of ours (without the stacked axes) to one Hugging Face array.

    It is the inverse of `from_hf`.

    Args:
        declaration: Of our array.
        array: Of our dimensions after the stacked ones; numpy, or jax (also traced).

    Returns:
        The same numbers in shape `declaration.hf_shape`.

    >>> from jaxrl_llm.models.arrays import NORMAL
    >>> decl = ArrayDecl(shape=(2, 3, 4), axes=("layers", "ff", "embed"), initializer=NORMAL,
    ...                  hf_name="{layers}.down.weight", hf_axes=(("embed",), ("ff",)))
    >>> to_hf(decl, np.ones((3, 4))).shape
    (4, 3)
    """
    own = declaration.axes[len(declaration.stacked) :]
    order = [own.index(axis) for group in declaration.hf_axes for axis in group]
    return array.transpose(order).reshape(declaration.hf_shape)


def from_hf(declaration: ArrayDecl, array: np.ndarray) -> np.ndarray:
    """Convert one Hugging Face array to one slice of ours (without the stacked axes).

    It is the inverse of `to_hf`.

    Args:
        declaration: Of our array.
        array: Of shape `declaration.hf_shape`.

    Returns:
        A view with our dimensions.

    >>> from jaxrl_llm.models.arrays import NORMAL
    >>> decl = ArrayDecl(shape=(2, 3, 4), axes=("layers", "ff", "embed"), initializer=NORMAL,
    ...                  hf_name="{layers}.down.weight", hf_axes=(("embed",), ("ff",)))
    >>> from_hf(decl, np.ones((4, 3))).shape
    (3, 4)
    """
    sizes = dict(zip(declaration.axes, declaration.shape, strict=True))
    merged = [axis for group in declaration.hf_axes for axis in group]
    own = declaration.axes[len(declaration.stacked) :]
    split = array.reshape([sizes[axis] for axis in merged])
    return split.transpose([merged.index(axis) for axis in own])

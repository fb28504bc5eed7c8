"""Our arrays as Hugging Face arrays and back.

Names, shapes and merged dimensions all come from `models.parameters.declare`, so one conversion
serves every array in both directions.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.models.arrays import ArrayDecl


def hf_arrays(declaration: ArrayDecl, array: Any) -> Iterator[tuple[str, Any]]:
    """Split one of our arrays into Hugging Face arrays, with their names.

    Args:
        declaration: Of the array.
        array: Of the declared shape; numpy, or jax (also traced: the split is pure reshaping).

    Returns:
        Pairs of name and array, or part of one, for each index of the stacked axes.

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

    It is the inverse of `from_hf`. An array that is a part of theirs stays one: the axes of
    `hf_part` are one axis, as long as ours.

    Args:
        declaration: Of our array.
        array: Of our dimensions after the stacked ones; numpy, or jax (also traced).

    Returns:
        The same numbers in shape `declaration.hf_shape`; of a part, that which `join_parts` takes.

    >>> from jaxrl_llm.models.arrays import NORMAL
    >>> decl = ArrayDecl(shape=(2, 3, 4), axes=("layers", "ff", "embed"), initializer=NORMAL,
    ...                  hf_name="{layers}.down.weight", hf_axes=(("embed",), ("ff",)))
    >>> to_hf(decl, np.ones((3, 4))).shape
    (4, 3)
    """
    own = declaration.axes[len(declaration.stacked) :]
    order = [own.index(axis) for group in declaration.hf_axes for axis in group]
    moved = array.transpose(order)
    if declaration.hf_part is None:
        return moved.reshape(declaration.hf_shape)
    before, size, after = _part_shape(declaration)
    return moved.reshape(*before, size, *after)


def join_parts(declarations: Sequence[ArrayDecl], parts: Sequence[Any]) -> np.ndarray:
    """Join arrays that are parts of one Hugging Face array.

    Args:
        declarations: Of all its parts.
        parts: Each as `to_hf` gives it.

    Returns:
        The Hugging Face array.

    Raises:
        ValueError: The parts do not make up the whole.

    >>> from jaxrl_llm.models.arrays import NORMAL, HfPart
    >>> gate, up = (
    ...     ArrayDecl(shape=(2, 3), axes=("embed", "ff"), initializer=NORMAL, hf_name="gate_up",
    ...               hf_axes=(("ff",), ("embed",)), hf_part=HfPart(("ff",), start, 6))
    ...     for start in (0, 3)
    ... )
    >>> join_parts([gate, up], [np.ones((3, 2)), np.zeros((3, 2))]).shape
    (6, 2)
    """
    first = declarations[0]
    if first.hf_part is None:
        return np.asarray(parts[0])
    before, _, after = _part_shape(first)
    whole = np.empty((*before, first.hf_part.total, *after), parts[0].dtype)
    filled = 0
    for declaration, part in zip(declarations, parts, strict=True):
        assert declaration.hf_part is not None  # all arrays of one name are parts
        size = part.shape[len(before)]
        at = (slice(None),) * len(before) + (declaration.hf_part.entries(size),)
        whole[at] = np.asarray(part)
        filled += size
    if filled != first.hf_part.total:
        raise ValueError(f"{first.hf_name}: got {filled} of {first.hf_part.total} entries")
    return whole.reshape(first.hf_shape)


def _part_shape(declaration: ArrayDecl) -> tuple[list[int], int, list[int]]:
    """Return the sizes before the axis that is a part, its own size, and those after it."""
    assert declaration.hf_part is not None
    part, sizes = (
        declaration.hf_part.axes,
        dict(zip(declaration.axes, declaration.shape, strict=True)),
    )
    merged = [axis for group in declaration.hf_axes for axis in group]
    at = merged.index(part[0])
    before, after = merged[:at], merged[at + len(part) :]
    own = math.prod(sizes[axis] for axis in part)
    return [sizes[axis] for axis in before], own, [sizes[axis] for axis in after]


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
    if declaration.hf_part is not None:
        before, size, after = _part_shape(declaration)
        whole = array.reshape(*before, declaration.hf_part.total, *after)
        array = whole[(slice(None),) * len(before) + (declaration.hf_part.entries(size),)]
    split = array.reshape([sizes[axis] for axis in merged])
    return split.transpose([merged.index(axis) for axis in own])

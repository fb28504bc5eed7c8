"""Our arrays as Hugging Face arrays and back.

Names, shapes and merged dimensions all come from `models.parameters.declare`, so one conversion
serves every array in both directions.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, HfPart


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


def join_parts(declarations: Sequence[ArrayDecl], parts: Iterable[Any]) -> Any:
    """Join arrays that are parts of one Hugging Face array.

    Args:
        declarations: Of all its parts.
        parts: Each as `to_hf` gives it; numpy, or jax (also traced). Each is taken when those
            before it have their place, so that an iterator need not hold them all.

    Returns:
        The Hugging Face array; of numpy, unless the parts are jax'.

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
        [whole] = parts
        return whole
    check_parts(declarations)
    before, _, after = _part_shape(first)
    whole, ordered = None, iter(parts)
    for declaration in declarations:
        part = next(ordered)  # and not by `zip`, which would hold on to the one before
        if whole is None:
            shape = (*before, first.hf_part.total, *after)
            is_jax = isinstance(part, jax.Array)
            whole = (jnp.zeros if is_jax else np.empty)(shape, part.dtype)
        at = (slice(None),) * len(before) + (_entries(declaration),)
        if isinstance(whole, jax.Array):
            whole = whole.at[at].set(part)
        else:
            whole[at] = part
        del part  # before the next one is fetched
    assert whole is not None
    return whole.reshape(first.hf_shape)


def check_parts(declarations: Sequence[ArrayDecl]) -> None:
    """Check that arrays that are parts of one Hugging Face array are all there, each entry once.

    Raises:
        ValueError: They do not make up the whole, or do not fit together.
    """
    first = declarations[0]
    forms = {(d.hf_shape, d.hf_part and d.hf_part.total) for d in declarations}
    if len(forms) > 1 or (first.hf_part is None and len(declarations) > 1):
        raise ValueError(f"{first.hf_name}: its parts are of different arrays: {forms}")
    if first.hf_part is None:
        return
    counts = np.zeros(first.hf_part.total, int)
    for declaration in declarations:
        counts[_entries(declaration)] += 1
    if (counts != 1).any():
        raise ValueError(
            f"{first.hf_name}: its parts make up {(counts > 0).sum()} of {len(counts)} entries, "
            f"and {(counts > 1).sum()} of them more than once; expected each once"
        )


def _entries(declaration: ArrayDecl) -> slice:
    """Return which entries of the axis that is a part are ours."""
    assert declaration.hf_part is not None
    return declaration.hf_part.entries(_part_shape(declaration)[1])


def _part_shape(declaration: ArrayDecl) -> tuple[list[int], int, list[int]]:
    """Return the sizes before the axis that is a part, its own size, and those after it."""
    assert declaration.hf_part is not None
    part = declaration.hf_part.axes
    sizes = dict(zip(declaration.axes, declaration.shape, strict=True))
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
        before, _, after = _part_shape(declaration)
        whole = array.reshape(*before, declaration.hf_part.total, *after)
        array = whole[(slice(None),) * len(before) + (_entries(declaration),)]
    split = array.reshape([sizes[axis] for axis in merged])
    return split.transpose([merged.index(axis) for axis in own])


def hf_entries(declaration: ArrayDecl, part: Sequence[slice]) -> tuple[np.ndarray, ...]:
    """Say which entries of each dimension of a Hugging Face array are in a part of ours.

    Args:
        declaration: Of our array.
        part: Of each of our dimensions after the stacked ones, with start and stop.

    Returns:
        Ascending indices for each dimension of `declaration.hf_shape`.

    >>> from jaxrl_llm.models.arrays import NORMAL
    >>> decl = ArrayDecl(shape=(4, 2, 3), axes=("embed", "heads", "head_dim"), initializer=NORMAL,
    ...                  hf_name="q.weight", hf_axes=(("heads", "head_dim"), ("embed",)))
    >>> [list(map(int, x)) for x in hf_entries(decl, [slice(0, 2), slice(1, 2), slice(0, 3)])]
    [[3, 4, 5], [0, 1]]
    """
    own = declaration.axes[len(declaration.stacked) :]
    chosen = dict(zip(own, part, strict=True))
    sizes = dict(zip(declaration.axes, declaration.shape, strict=True))
    indices = []
    for group, whole in zip(declaration.hf_axes, declaration.hf_groups, strict=True):
        lengths = [size for _, size in whole]
        numbers = np.arange(math.prod(lengths)).reshape(lengths)
        if declaration.hf_part is not None and declaration.hf_part.axes[0] in group:
            at = group.index(declaration.hf_part.axes[0])
            numbers = numbers[(slice(None),) * at + (_entries(declaration),)]
        numbers = numbers.reshape([sizes[axis] for axis in group])
        indices.append(numbers[tuple(chosen[axis] for axis in group)].ravel())
    return tuple(indices)


def part_from_hf(declaration: ArrayDecl, part: Sequence[slice], entries: np.ndarray) -> np.ndarray:
    """Convert the entries that `hf_entries` names to that part of ours.

    Args:
        declaration: Of our array.
        part: As there.
        entries: Of the Hugging Face array, those and no others.

    Returns:
        A view with our dimensions, as long as the part is.
    """
    own = declaration.axes[len(declaration.stacked) :]
    sizes = {axis: ends.stop - ends.start for axis, ends in zip(own, part, strict=True)}
    merged = [axis for group in declaration.hf_axes for axis in group]
    split = entries.reshape([sizes[axis] for axis in merged])
    return split.transpose([merged.index(axis) for axis in own])


# -------------------------------------------------------------------------------- routed experts

# The forms in which checkpoints have routed experts: a matrix for each expert and projection, or,
# as Qwen 3.5, a layer's together in two arrays, `gate_up_proj` [E 2·F D] and `down_proj` [E D F],
# in which transformers 5 holds those of the others, too; tools that save its arrays as they are
# leave them in files. In published files of Qwen3-VL-MoE these are transposed, [E D 2·F] and
# [E F D]; transformers takes and saves either.
APART = re.compile(r"(.*\.experts)\.\{experts\}\.\w+\.weight")
TOGETHER = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


# The forms in which checkpoints have routed experts: each matrix apart, or a layer's together.
#
# Most families have a matrix for each expert and projection. Some, such as Qwen 3.5, have two
# arrays for a layer, `gate_up_proj` [E 2·F D] and `down_proj` [E D F], in which transformers 5
# holds those of the others, too; tools that save its arrays as they are leave them in files. In
# published files of Qwen3-VL-MoE these are transposed, [E D 2·F] and [E F D]; transformers takes
# and saves either.


def experts_as_stored(
    declarations: Declarations, shapes: Mapping[str, tuple[int, ...]]
) -> Declarations:
    """Declare routed experts in that form which a checkpoint has.

    Args:
        declarations: Of a model.
        shapes: Of the checkpoint's arrays, by name.

    Returns:
        The declarations; arrays whose other form is not there either are as they were.
    """

    def stored(path: tuple[Any, ...], declaration: ArrayDecl) -> ArrayDecl:
        other = _other_form(jax.tree_util.keystr(path[-1:], simple=True), declaration)
        for form in (declaration, other) if other else ():
            if shapes.get(next(form.hf_indices())[0]) == form.hf_shape:
                return form
        return declaration

    return jax.tree_util.tree_map_with_path(stored, declarations)


def _other_form(name: str, declaration: ArrayDecl) -> ArrayDecl | None:
    """Return the other form of an array of experts; None for other arrays, and other forms."""
    kind = name.removeprefix("expert_")
    if kind not in ("gate", "up", "down"):
        return None
    outputs = "expert_embed" if kind == "down" else "expert_ff"
    axes = declaration.hf_axes
    if apart := APART.fullmatch(declaration.hf_name):
        width = declaration.hf_shape[0]
        start = {"gate": 0, "up": width}
        return dataclasses.replace(
            declaration,
            hf_name=f"{apart[1]}.{'gate_up' if kind in start else 'down'}_proj",
            hf_axes=(("experts",), *axes),
            hf_part=HfPart((outputs,), start[kind], 2 * width) if kind in start else None,
        )
    together = TOGETHER.fullmatch(declaration.hf_name)
    if together is None:
        return None
    if axes[:2] != (("experts",), (outputs,)):
        turns = declaration.hf_part is not None and declaration.hf_part.step > 1
        is_bias = len(axes) < 3
        swapped = (("experts",), *reversed(axes[1:]))
        return None if turns or is_bias else dataclasses.replace(declaration, hf_axes=swapped)
    return dataclasses.replace(
        declaration,
        hf_name=f"{together[1]}.{{experts}}.{kind}_proj.weight",
        hf_axes=axes[1:],
        hf_part=None,
    )

"""Load parameters from a Hugging Face directory."""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, HfPart, Params
from jaxrl_llm.models.hf.config import untouched_prefixes
from jaxrl_llm.models.hf.files import FLOAT_TYPES, StoredArray, check_contents, find_arrays
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.hf.quantized import (
    BlockScaled,
    MicroScaled,
    ReadableArray,
    read_quantization,
    restore_arrays,
)
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.distributed import process_slice

log = logging.getLogger(__name__)

NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")  # that old versions of transformers saved
NEXT_TOKEN_LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""Of DeepSeek and GLM, after the last of the model."""


def load_params(
    directory: str | Path, spec: ModelSpec, *, dtype: DTypeLike = np.float32, shardings: Any = None
) -> Params:
    """Load parameters from the safetensors files of a Hugging Face directory.

    Each device's part of each of our (stacked) arrays is read by itself and sent there: besides the
    result, host memory holds one such part and one Hugging Face array at once.

    Args:
        directory: Holds `model.safetensors`, or several files and `model.safetensors.index.json`;
            or the name of a repository of the Hugging Face hub, as `resolve` takes it.
        spec: The model.
        dtype: To convert to; float32 holds bfloat16 and float16 exactly.
        shardings: A tree as `declare(spec)` of shardings; None puts all on the default device.

    Returns:
        Parameters nested as `declare(spec)`.

    Raises:
        ValueError: Arrays are missing, surplus, misshapen or not of a float type (all are listed),
            or a file is damaged: `save_params` leaves checksums, which are compared. A surplus
            `lm_head.weight` of a model with tied embeddings is accepted and ignored, and so are
            saved rotary frequencies, the layers of DeepSeek and GLM for multi-token prediction and
            what the family's `untouched` names; of the last the log has a line.
        FileNotFoundError: There are no safetensors files.
    """
    where = resolve(directory)
    has_config = (where / "config.json").exists()
    return load_arrays(
        where,
        declare(spec),
        dtype=dtype,
        shardings=shardings,
        is_ignored=functools.partial(_is_ignored, spec=spec),
        untouched=untouched_prefixes(where, vision=bool(spec.vision)) if has_config else (),
    )


def load_arrays(
    directory: str | Path,
    declarations: Declarations,
    *,
    dtype: DTypeLike = np.float32,
    shardings: Any = None,
    is_ignored: Callable[[str], bool] = lambda name: False,
    untouched: tuple[str, ...] = (),
) -> Params:
    """Load declared arrays as `load_params` does.

    Args:
        directory: As there.
        declarations: Of any model.
        dtype: To convert to.
        shardings: Nested as the declarations; None puts all on the default device.
        is_ignored: Whether an array of the directory that is not declared is passed over.
        untouched: What names of others begin with that are passed over; the log says so.

    Raises:
        ValueError: As there.
        FileNotFoundError: There are no safetensors files.
    """
    where = resolve(directory)
    places = jax.tree.map(lambda _: None, declarations) if shardings is None else shardings
    files = find_arrays(where)
    stored, problems = restore_arrays(files, read_quantization(where))
    declarations = experts_as_stored(declarations, {k: x.shape for k, x in stored.items()})
    if others := find_untouched(stored, untouched):
        log_untouched(str(where), untouched, len(others))
    ours = {name: array for name, array in stored.items() if name not in others}
    _check_arrays(where, ours, declarations, is_ignored, problems)
    check_contents(list(files.items())[process_slice(len(files))])

    def load(decl: ArrayDecl, place: Sharding | None) -> jax.Array:
        if place is None:
            return jax.device_put(_read_part(decl, stored, _everything(decl), dtype))
        return _load_sharded(decl, stored, place, dtype)

    return jax.tree.map(load, declarations, places)


def find_untouched(
    stored: Mapping[str, ReadableArray], prefixes: tuple[str, ...]
) -> dict[str, ReadableArray]:
    """Return the arrays whose names begin with one of some prefixes.

    >>> array = StoredArray(Path("model.safetensors"), "F32", (4,), 0, 16, None)
    >>> [*find_untouched({"mtp.norm.weight": array, "model.norm.weight": array}, ("mtp.",))]
    ['mtp.norm.weight']
    """
    return {name: array for name, array in stored.items() if name.startswith(prefixes)}


@functools.cache
def log_untouched(directory: str, prefixes: tuple[str, ...], count: int) -> None:
    """Say once that arrays of a directory are not loaded, and that exports have them."""
    names = ", ".join(f"{prefix}*" for prefix in prefixes)
    log.info(
        "%s: %d arrays are no part of the language model: they stay as they are, and exports have "
        "them, too (%s)",
        directory,
        count,
        names,
    )


Part = tuple[slice, ...]


def _everything(declaration: ArrayDecl) -> Part:
    return tuple(slice(0, size) for size in declaration.shape)


def _load_sharded(
    declaration: ArrayDecl, stored: Mapping[str, ReadableArray], place: Sharding, dtype: DTypeLike
) -> jax.Array:
    """Read each part of an array once, and put it on all the devices that hold it."""
    shape = declaration.shape
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, part in place.addressable_devices_indices_map(shape).items():
        full = part or _everything(declaration)
        ends = tuple(s.indices(n)[:2] for s, n in zip(full, shape, strict=True))
        holders.setdefault(ends, []).append(device)
    pieces = []
    for ends, devices in holders.items():
        part = tuple(slice(*end) for end in ends)
        values = _read_part(declaration, stored, part, dtype)
        for device in devices:
            target = SingleDeviceSharding(device, memory_kind=place.memory_kind)
            pieces.append(jax.device_put(values, target))
        jax.block_until_ready(pieces)  # else host memory fills with parts on their way
    return jax.make_array_from_single_device_arrays(shape, place, pieces)


def _read_part(
    declaration: ArrayDecl, stored: Mapping[str, ReadableArray], part: Part, dtype: DTypeLike
) -> np.ndarray:
    values = np.empty([ends.stop - ends.start for ends in part], dtype)
    outer, inner = part[: len(declaration.stacked)], part[len(declaration.stacked) :]
    for name, index in declaration.hf_indices():
        if all(ends.start <= i < ends.stop for i, ends in zip(index, outer, strict=True)):
            at = tuple(i - ends.start for i, ends in zip(index, outer, strict=True))
            array = stored[name]
            if isinstance(array, StoredArray):
                values[at] = from_hf(declaration, array.map())[inner]
            else:
                _restore(declaration, array, inner, values[at])
    return values


def _restore(
    declaration: ArrayDecl, array: BlockScaled | MicroScaled, part: Part, values: np.ndarray
) -> None:
    """Restore a part of a quantized array; where all experts are in one, an expert at a time."""
    pieces = [part]
    if declaration.hf_axes[0] == ("experts",):
        experts = range(part[0].start, part[0].stop)
        pieces = [(slice(expert, expert + 1), *part[1:]) for expert in experts]
    for piece in pieces:
        first, size = piece[0].start - part[0].start, piece[0].stop - piece[0].start
        restored = array.read(hf_entries(declaration, piece))
        values[first : first + size] = part_from_hf(declaration, piece, restored)


def _check_arrays(
    directory: Path,
    stored: Mapping[str, ReadableArray],
    declarations: Declarations,
    is_ignored: Callable[[str], bool],
    problems: list[str],
) -> None:
    """Raise ValueError with all that is wrong, with arrays and, as given, with scales."""
    leaves = jax.tree.leaves(declarations)
    expected = {name: decl for decl in leaves for name, _ in decl.hf_indices()}
    tolerated = {name for name in stored if is_ignored(name)}
    problems = problems + [f"missing: {name}" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"surplus: {name}" for name in sorted(stored.keys() - expected.keys() - tolerated)]
    for name in sorted(expected.keys() & stored.keys()):
        array, shape = stored[name], expected[name].hf_shape
        if array.shape != shape:
            problems.append(f"misshapen: {name} is {array.shape}, expected {shape}")
        if array.type is not None and array.type not in FLOAT_TYPES:
            problems.append(
                f"unsupported type: {name} is {array.type}, expected one of {[*FLOAT_TYPES]}"
            )
    if problems:
        raise ValueError(f"{directory} does not fit the spec:\n  " + "\n  ".join(problems))


def _is_ignored(name: str, spec: ModelSpec) -> bool:
    if name == "lm_head.weight":
        return spec.tied_embeddings and not (spec.value_head or spec.reward_head)
    may_predict_more = spec.moe is not None and isinstance(spec.moe.router, SigmoidRouter)
    layer = NEXT_TOKEN_LAYER.match(name) if may_predict_more else None
    return bool(NOT_WEIGHTS.search(name)) or (layer is not None and int(layer[1]) >= spec.layers)


# Hugging Face arrays as ours; `models.hf.save` has the other direction. Names, shapes and merged
# dimensions all come from `models.parameters.declare`, so one conversion serves every array.


def part_entries(declaration: ArrayDecl) -> slice:
    """Return which entries of the axis that is a part are ours."""
    assert declaration.hf_part is not None
    return declaration.hf_part.entries(part_shape(declaration)[1])


def part_shape(declaration: ArrayDecl) -> tuple[list[int], int, list[int]]:
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
        before, _, after = part_shape(declaration)
        whole = array.reshape(*before, declaration.hf_part.total, *after)
        array = whole[(slice(None),) * len(before) + (part_entries(declaration),)]
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
            numbers = numbers[(slice(None),) * at + (part_entries(declaration),)]
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

"""Load parameters from a Hugging Face directory."""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, Params
from jaxrl_llm.models.hf.config import untouched_prefixes
from jaxrl_llm.models.hf.convert import experts_as_stored, from_hf, hf_entries, part_from_hf
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
    directory: str | Path,
    spec: ModelSpec,
    *,
    dtype: DTypeLike = np.float32,
    shardings: Any = None,
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

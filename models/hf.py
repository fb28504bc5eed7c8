"""Hugging Face directories: load parameters, save a model that `transformers` loads.

Names, shapes and merged dimensions all come from `models.parameters.declare`, so one conversion
serves every array in both directions.
"""

import functools
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, Params
from jaxrl_llm.models.hf_config import config_to_save
from jaxrl_llm.models.hf_files import (
    FLOAT_TYPES,
    StoredArray,
    check_contents,
    check_new_directory,
    find_arrays,
    whole_directory,
    write_shards,
)
from jaxrl_llm.models.hf_hub import resolve
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.distributed import gather, is_first, once, share, whole

NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")  # that old versions of transformers saved
NEXT_TOKEN_LAYER = re.compile(r"model\.layers\.(\d+)\.")  # DeepSeek's, after the last of the model
ALWAYS_FLOAT32 = "e_score_correction_bias"  # also in transformers, whatever the model's dtype
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


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
            saved rotary frequencies and DeepSeek's layers for multi-token prediction.
        FileNotFoundError: There are no safetensors files.
    """
    declarations, where = declare(spec), resolve(directory)
    places = jax.tree.map(lambda _: None, declarations) if shardings is None else shardings
    stored = find_arrays(where)
    _check_arrays(where, stored, spec)
    check_contents(list(stored.items())[share(len(stored))])

    def load(decl: ArrayDecl, place: Sharding | None) -> jax.Array:
        if place is None:
            return jax.device_put(_read_part(decl, stored, _everything(decl), dtype))
        return _load_sharded(decl, stored, place, dtype)

    return jax.tree.map(load, declarations, places)


def save_params(
    directory: str | Path,
    params: Params,
    spec: ModelSpec,
    *,
    source: str | Path | None,
    dtype: DTypeLike,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Save a model as a Hugging Face directory that `transformers` and vLLM load.

    The directory appears complete or not at all. Arrays are fetched from their devices as they are
    written, one layer of one array at a time. Of several processes all call this, the first one
    writes, and all return when it has.

    Args:
        directory: To create; it must not exist, unless empty.
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        source: The directory or hub repository the model came from; its config, tokenizer files,
            chat template and generation config are taken over. A model with a value head may come
            from a language or reward model. None for a model that has no ancestor: the config comes
            from `make_config`, and there is no tokenizer.
        dtype: Of the saved arrays: float32, bfloat16 or float16. The bias of sigmoid routers stays
            float32, as its updates are too small for the others.
        max_shard_bytes: Size above which the arrays are split over several files; one array larger
            than that gets its own file.

    Raises:
        FileExistsError: The directory exists and is not empty.
        ValueError: The parameters do not fit the spec, the spec does not fit the source, or the
            dtype cannot be saved.
    """
    directory, source = Path(directory), source if source is None else resolve(source)
    once(lambda: check_new_directory(directory, dtype))
    declarations = declare(spec)
    _check_params(params, declarations)
    config = config_to_save(spec, source, np.dtype(dtype))
    leaves = list(zip(jax.tree.leaves(declarations), jax.tree.leaves(params), strict=True))
    leaves.sort(key=lambda pair: not pair[0].hf_name.endswith(ALWAYS_FLOAT32))
    shapes = {name: decl.hf_shape for decl, _ in leaves for name, _ in decl.hf_indices()}
    arrays = (array for _, array in host_arrays((*leaf, None) for leaf in leaves))
    if not is_first():
        for _ in arrays:  # this process's part in gathering them
            pass
        gather("saved")
        return
    with whole_directory(directory) as place:
        (place / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_shards(
            place,
            shapes,
            arrays,
            {n: np.dtype(np.float32 if n.endswith(ALWAYS_FLOAT32) else dtype) for n in shapes},
            max_bytes=max_shard_bytes,
        )
        for name in COMPANION_FILES:
            if source is not None and (source / name).exists():
                shutil.copyfile(source / name, place / name)
    gather("saved")


def host_arrays(
    leaves: Iterable[tuple[ArrayDecl, Any, DTypeLike | None]],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a model's Hugging Face arrays by name; one layer of one of ours is on the host at once.

    Args:
        leaves: Our arrays with their declarations, and the dtype to give them; None leaves it.
    """
    for declaration, leaf, dtype in leaves:
        if not declaration.stacked:
            [(name, _)] = declaration.hf_indices()
            kept = leaf if dtype is None else leaf.astype(dtype)
            yield name, to_hf(declaration, np.asarray(whole(kept)))
            continue
        for layer, names in groupby(declaration.hf_indices(), key=lambda named: named[1][0]):
            values = np.asarray(whole(_layer(leaf, layer, dtype)))
            for name, index in names:
                yield name, to_hf(declaration, values[index[1:]])


def _layer(leaf: Any, layer: int, dtype: DTypeLike | None) -> Any:
    """Return one layer of a stack, by a program that serves all of them."""
    kind = leaf.dtype if dtype is None else np.dtype(dtype)
    if isinstance(leaf, jax.Array):
        return _take(leaf, layer, kind)
    return leaf[layer].astype(kind, copy=False)


@functools.partial(jax.jit, static_argnums=2)
def _take(leaf: jax.Array, layer: ArrayLike, kind: np.dtype) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False).astype(kind)


Part = tuple[slice, ...]


def _everything(declaration: ArrayDecl) -> Part:
    return tuple(slice(0, size) for size in declaration.shape)


def _load_sharded(
    declaration: ArrayDecl, stored: Mapping[str, StoredArray], place: Sharding, dtype: DTypeLike
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
    declaration: ArrayDecl, stored: Mapping[str, StoredArray], part: Part, dtype: DTypeLike
) -> np.ndarray:
    values = np.empty([ends.stop - ends.start for ends in part], dtype)
    outer, inner = part[: len(declaration.stacked)], part[len(declaration.stacked) :]
    for name, index in declaration.hf_indices():
        if all(ends.start <= i < ends.stop for i, ends in zip(index, outer, strict=True)):
            at = tuple(i - ends.start for i, ends in zip(index, outer, strict=True))
            values[at] = from_hf(declaration, stored[name].map())[inner]
    return values


def _check_arrays(directory: Path, stored: Mapping[str, StoredArray], spec: ModelSpec) -> None:
    leaves = jax.tree.leaves(declare(spec))
    wanted = {name: decl for decl in leaves for name, _ in decl.hf_indices()}
    tolerated = {name for name in stored if _is_ignored(name, spec)}
    problems = [f"missing: {name}" for name in sorted(wanted.keys() - stored.keys())]
    problems += [f"surplus: {name}" for name in sorted(stored.keys() - wanted.keys() - tolerated)]
    for name in sorted(wanted.keys() & stored.keys()):
        shape, kind = stored[name].shape, stored[name].type
        if shape != wanted[name].hf_shape:
            problems.append(f"misshapen: {name} is {shape}, wanted {wanted[name].hf_shape}")
        if kind not in FLOAT_TYPES:
            problems.append(f"unsupported type: {name} is {kind}, wanted one of {[*FLOAT_TYPES]}")
    if problems:
        raise ValueError(f"{directory} does not fit the spec:\n  " + "\n  ".join(problems))


def _is_ignored(name: str, spec: ModelSpec) -> bool:
    if name == "lm_head.weight":
        return spec.tied_embeddings and not (spec.value_head or spec.reward_head)
    layer = NEXT_TOKEN_LAYER.match(name) if spec.latent is not None else None
    return bool(NOT_WEIGHTS.search(name)) or (layer is not None and int(layer[1]) >= spec.layers)


def _check_params(params: Params, declarations: Declarations) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
            for path, leaf in leaves
        }

    got, wanted = shapes(params), shapes(declarations)
    problems = [
        f"{name}: got {got.get(name, 'nothing')}, wanted {wanted.get(name, 'nothing')}"
        for name in sorted(got.keys() | wanted.keys())
        if got.get(name) != wanted.get(name)
    ]
    if problems:
        raise ValueError("params do not fit the spec:\n  " + "\n  ".join(problems))

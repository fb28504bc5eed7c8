"""Hugging Face directories: load parameters, save a model that `transformers` loads.

Names, shapes and merged dimensions all come from `models.spec.declare`, so one conversion serves
every array in both directions.
"""

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors asks for by name)
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike

from jaxrl_llm.models.hf_config import config_to_save, read_json
from jaxrl_llm.models.spec import ArrayDecl, Declarations, ModelSpec, Params, declare

FLOAT_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
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

    >>> from jaxrl_llm.models.spec import NORMAL
    >>> decl = ArrayDecl(shape=(2, 3, 4), axes=("layers", "ff", "embed"), initializer=NORMAL,
    ...                  hf_name="{layers}.down.weight", hf_axes=(("embed",), ("ff",)))
    >>> [(name, a.shape) for name, a in hf_arrays(decl, np.ones((2, 3, 4)))]
    [('0.down.weight', (4, 3)), ('1.down.weight', (4, 3))]
    """
    own = declaration.axes[len(declaration.stacked) :]
    order = [own.index(axis) for group in declaration.hf_axes for axis in group]
    for name, index in _hf_indices(declaration):
        yield name, array[index].transpose(order).reshape(declaration.hf_shape)


def from_hf(declaration: ArrayDecl, array: np.ndarray) -> np.ndarray:
    """Convert one Hugging Face array to one slice of ours (without the stacked axes).

    It is the inverse of `hf_arrays`.

    Args:
        declaration: Of our array.
        array: Of shape `declaration.hf_shape`.

    Returns:
        A view with our dimensions.

    >>> from jaxrl_llm.models.spec import NORMAL
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

    Arrays are read one at a time; host memory holds one of our (stacked) arrays at once.

    Args:
        directory: Holds `model.safetensors`, or several files and `model.safetensors.index.json`.
        spec: The model.
        dtype: To convert to; float32 holds bfloat16 and float16 exactly.
        shardings: A tree as `declare(spec)` of shardings; None puts all on the default device.

    Returns:
        Parameters nested as `declare(spec)`.

    Raises:
        ValueError: Arrays are missing, surplus, misshapen or not of a float type (all are listed),
            or a file is damaged. A surplus `lm_head.weight` of a model with tied embeddings is
            accepted and ignored.
        FileNotFoundError: There are no safetensors files.
    """
    declarations = declare(spec)
    places = jax.tree.map(lambda _: None, declarations) if shardings is None else shardings
    with ExitStack() as stack:
        files = _open_arrays(Path(directory), stack)
        may_carry_head = spec.tied_embeddings and not spec.value_head
        _check_arrays(Path(directory), files, declarations, may_carry_head=may_carry_head)

        def load(decl: ArrayDecl, place: Any) -> jax.Array:
            array = np.empty(decl.shape, dtype)
            for name, index in _hf_indices(decl):
                array[index] = from_hf(decl, files[name].get_tensor(name))
            return jax.device_put(array, place)

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

    The directory appears complete or not at all: it is written beside its place, then renamed.

    Args:
        directory: To create; it must not exist, unless empty.
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        source: The directory the model came from; its config, tokenizer files, chat template and
            generation config are taken over. A model with a value head may come from a language
            model. None for a model that has no ancestor: the config comes from `make_config`, and
            there is no tokenizer.
        dtype: Of the saved arrays: float32, bfloat16 or float16.
        max_shard_bytes: Size above which the arrays are split over several files; one array larger
            than that gets its own file.

    Raises:
        FileExistsError: The directory exists and is not empty.
        ValueError: The parameters do not fit the spec, the spec does not fit the source, or the
            dtype cannot be saved.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} exists and is not empty; give a new directory")
    if np.dtype(dtype).name not in FLOAT_TYPES.values():
        raise ValueError(f"dtype {np.dtype(dtype).name}; wanted one of {[*FLOAT_TYPES.values()]}")
    declarations = declare(spec)
    _check_params(params, declarations)
    config = config_to_save(spec, source, np.dtype(dtype))
    partial = directory.with_name(f".{directory.name}.partial")
    if partial.exists():  # of a run that was killed here
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _write_arrays(partial, params, declarations, np.dtype(dtype), max_shard_bytes)
        for name in COMPANION_FILES:
            if source is not None and (Path(source) / name).exists():
                shutil.copyfile(Path(source) / name, partial / name)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _hf_indices(declaration: ArrayDecl) -> Iterator[tuple[str, tuple[int, ...]]]:
    for index in np.ndindex(*declaration.shape[: len(declaration.stacked)]):
        counts = dict(zip(declaration.stacked, index, strict=True))
        yield declaration.hf_name.format(**counts), index


def _open_arrays(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """Map the name of each array to the open file that holds it."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        paths = sorted({directory / name for name in read_json(index)["weight_map"].values()})
    elif single.exists():
        paths = [single]
    else:
        raise FileNotFoundError(f"{directory} has neither {single.name} nor {index.name}")
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise ValueError(f"{index} names files that do not exist: {absent}")
    arrays = {}
    for path in paths:
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is damaged or truncated: {error}") from error
        arrays.update(dict.fromkeys(file.keys(), file))
    return arrays


def _check_arrays(
    directory: Path, files: dict[str, Any], declarations: Declarations, *, may_carry_head: bool
) -> None:
    wanted = {name: decl for decl in jax.tree.leaves(declarations) for name, _ in _hf_indices(decl)}
    tolerated = {"lm_head.weight"} if may_carry_head else set()
    problems = [f"missing: {name}" for name in sorted(wanted.keys() - files.keys())]
    problems += [f"surplus: {name}" for name in sorted(files.keys() - wanted.keys() - tolerated)]
    for name in sorted(wanted.keys() & files.keys()):
        header = files[name].get_slice(name)
        shape = tuple(header.get_shape())
        if shape != wanted[name].hf_shape:
            problems.append(f"misshapen: {name} is {shape}, wanted {wanted[name].hf_shape}")
        if header.get_dtype() not in FLOAT_TYPES:
            problems.append(
                f"unsupported type: {name} is {header.get_dtype()}, wanted one of {[*FLOAT_TYPES]}"
            )
    if problems:
        raise ValueError(f"{directory} does not fit the spec:\n  " + "\n  ".join(problems))


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


def _write_arrays(
    directory: Path,
    params: Params,
    declarations: Declarations,
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    leaves = list(zip(jax.tree.leaves(declarations), jax.tree.leaves(params), strict=True))
    sizes = {
        name: int(np.prod(decl.hf_shape)) * dtype.itemsize
        for decl, _ in leaves
        for name, _ in _hf_indices(decl)
    }
    shards = _plan_shards(sizes, max_shard_bytes)
    arrays = (
        (name, np.ascontiguousarray(array))
        for decl, leaf in leaves
        for name, array in hf_arrays(decl, np.asarray(jax.device_get(leaf)).astype(dtype))
    )
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        shard = dict(itertools.islice(arrays, len(names)))
        safetensors.numpy.save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _plan_shards(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards

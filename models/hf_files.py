"""Safetensors files, read and written one array at a time.

The format (https://huggingface.co/docs/safetensors) is the length of a header in 8 bytes, the
header in JSON, and the arrays one after the other. `safetensors` itself maps a whole file to read,
and wants a whole file's arrays to write; here only one array is in memory at once.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import safetensors
from jax.typing import DTypeLike

from jaxrl_llm.models.hf_config import read_json

FLOAT_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies: its file, the name of its type there, its shape and its first byte."""

    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> np.ndarray:
        """Map the array into memory, read-only: only the parts that are used will be read."""
        kind = np.dtype(FLOAT_TYPES[self.type])
        return np.memmap(self.path, kind, "r", offset=self.offset, shape=self.shape)


def find_arrays(directory: Path) -> dict[str, StoredArray]:
    """Find the arrays of a Hugging Face directory, by name.

    Args:
        directory: Holds `model.safetensors`, or several files and `model.safetensors.index.json`.

    Returns:
        The place of each array. Nothing is read but the headers of the files.

    Raises:
        ValueError: A file is damaged, truncated or absent, or an array is in two files.
        FileNotFoundError: There are no safetensors files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_file(Path(directory) / "model.safetensors", {"a": (2,)},
    ...                iter([np.ones(2, np.float32)]), {"a": np.dtype("float32")})
    ...     find_arrays(Path(directory))["a"].map().tolist()
    [1.0, 1.0]
    """
    index, single = directory / INDEX, directory / SINGLE
    if single.exists():
        paths = [single]
    elif index.exists():
        paths = sorted({directory / name for name in read_json(index)["weight_map"].values()})
    else:
        raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}")
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise ValueError(f"{index} names files that do not exist: {absent}")
    found: dict[str, StoredArray] = {}
    for path in paths:
        arrays = _read_header(path)
        twice = sorted(found.keys() & arrays.keys())
        if twice:
            raise ValueError(f"{path} holds arrays that another file holds too: {twice}")
        found |= arrays
    return found


def _read_header(path: Path) -> dict[str, StoredArray]:
    try:
        with safetensors.safe_open(path, framework="numpy"):  # which checks all of the header
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredArray(
            path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


def check_new_directory(directory: Path, dtype: DTypeLike) -> None:
    """Check that a directory can be created, to hold arrays of a dtype.

    Raises:
        FileExistsError: The directory exists and is not empty.
        ValueError: The dtype can't be saved.

    >>> check_new_directory(Path("no/such/directory"), "bfloat16")
    """
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} exists and is not empty; give a new directory")
    if np.dtype(dtype).name not in FLOAT_TYPES.values():
        raise ValueError(f"dtype {np.dtype(dtype).name}; wanted one of {[*FLOAT_TYPES.values()]}")


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Give a place to write a directory, which appears complete or not at all.

    It is written beside its own place and renamed in the end. What a run that was killed left there
    is removed.

    Args:
        directory: To create; `check_new_directory` says whether it can be.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_directory(Path(folder) / "model") as place:
    ...         _ = (place / "config.json").write_text("{}")
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['model']
    """
    partial = directory.with_name(f".{directory.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial)
        raise


def write_shards(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Iterator[np.ndarray],
    dtypes: Mapping[str, np.dtype],
    *,
    max_bytes: int,
) -> None:
    """Write arrays as one safetensors file, or as several with an index.

    Args:
        directory: To write into.
        shapes: Of each array, by name, in the order of `arrays`.
        arrays: Of any float type; each is read when those before it are written.
        dtypes: To convert to, by name: float32, bfloat16 or float16. Wider ones come first, or
            their arrays would not begin at multiples of their size.
        max_bytes: Size of a file; an array larger than that gets its own.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_shards(Path(directory), {"a": (2,), "b": (3,)}, iter([np.ones(2), np.ones(3)]),
    ...                  dict.fromkeys("ab", np.dtype("float32")), max_bytes=12)
    ...     sorted(path.name for path in Path(directory).glob("*.safetensors"))
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    shards = _plan_shards(sizes, max_bytes)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
        write_file(directory / file, {name: shapes[name] for name in names}, arrays, dtypes)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Iterator[np.ndarray],
    dtypes: Mapping[str, np.dtype],
) -> None:
    """Write one safetensors file, array by array, and wait until it is on the disk.

    Args:
        path: To write.
        shapes: Of each array, by name.
        arrays: As many as there are shapes are taken from it.
        dtypes: To convert to, by name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory) / "x.safetensors"
    ...     write_file(path, {"a": (2,)}, iter([np.ones(2)]), {"a": np.dtype("float16")})
    ...     safetensors.safe_open(path, framework="numpy").get_tensor("a").tolist()
    [1.0, 1.0]
    """
    kinds = {ours: theirs for theirs, ours in FLOAT_TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        dtype = dtypes[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kinds[dtype.name], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in zip(shapes, itertools.islice(arrays, len(shapes)), strict=True):
            whole = np.ascontiguousarray(array, dtypes[name])
            file.write(whole.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


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

"""Safetensors files, read and written one array at a time.

The format (https://huggingface.co/docs/safetensors) is the length of a header in 8 bytes, the
header in JSON, and the arrays one after the other. `safetensors` itself maps a whole file to read,
and wants a whole file's arrays to write; here only one array is in memory at once. The format has
no checksums, so ours are in the header's metadata, where other readers pass over them.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import safetensors
from jax.typing import DTypeLike

FLOAT_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""What weights are loaded from and saved as."""
STORED_TYPES = FLOAT_TYPES | {
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""What arrays that are no weights of ours may be, and quantized ones."""
CHECKSUMS = "jaxrl_llm.crc32"
"""Key of a file's metadata: JSON with the CRC-32 of each array's bytes, in hexadecimal, by name."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies: its file, the name of its type there, its shape, its bytes' place.

    `checksum` is the CRC-32 of its bytes in hexadecimal; None where the file's writer left none.
    """

    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    end: int
    checksum: str | None

    @property
    def dtype(self) -> np.dtype:
        """Return what numpy calls its type.

        Raises:
            ValueError: Numpy has no such numbers.
        """
        if self.type not in STORED_TYPES:
            raise ValueError(
                f"{self.path} has numbers of type {self.type}; expected one of {[*STORED_TYPES]}"
            )
        return np.dtype(STORED_TYPES[self.type])

    def map(self, dtype: DTypeLike | None = None) -> np.ndarray:
        """Map the array into memory, read-only: only the parts that are used will be read.

        Args:
            dtype: To take its numbers for; None: its own.
        """
        kind = self.dtype if dtype is None else np.dtype(dtype)
        if self.end == self.offset:  # of which there is no map
            return np.empty(self.shape, kind)
        return np.memmap(self.path, kind, "r", offset=self.offset, shape=self.shape)

    def is_whole(self) -> bool:
        """Read its bytes, and tell whether they have the checksum, if there is one."""
        if self.checksum is None or self.end == self.offset:
            return True
        shape = (self.end - self.offset,)
        return self.checksum == crc32(np.memmap(self.path, "u1", "r", self.offset, shape))


def crc32(array: np.ndarray) -> str:
    """Return the CRC-32 of an array's bytes, as hexadecimal digits.

    >>> crc32(np.zeros(3, np.uint8))
    'ff41d912'
    """
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"


def check_contents(arrays: Iterable[tuple[str, StoredArray]]) -> None:
    """Compare arrays on the disk with the checksums that their files have of them.

    Args:
        arrays: By name; those without a checksum are passed over.

    Raises:
        ValueError: Naming the first one that is not what was written.
    """
    for name, array in arrays:
        if not array.is_whole():
            raise ValueError(f"{array.path} is damaged: {name} is not what was written")


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
    stored: dict[str, StoredArray] = {}
    for path in paths:
        arrays = read_header(path)
        twice = sorted(stored.keys() & arrays.keys())
        if twice:
            raise ValueError(f"{path} holds arrays that another file holds too: {twice}")
        stored |= arrays
    return stored


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        ValueError: The file is not valid JSON.
        FileNotFoundError: There is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "x.json").write_text('{"a": 1}')
    ...     read_json(Path(directory) / "x.json")
    {'a': 1}
    """
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_header(path: Path) -> dict[str, StoredArray]:
    """Read which arrays a file holds.

    Raises:
        ValueError: The file is damaged or truncated.
    """
    try:
        with safetensors.safe_open(
            path, framework="numpy"
        ) as file:  # which checks all of the header
            checksums = json.loads((file.metadata() or {}).get(CHECKSUMS, "{}"))
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    if checksums and set(checksums) != set(header):
        raise ValueError(f"{path} is damaged: its checksums are of other arrays than it holds")
    begin = 8 + length
    return {
        name: StoredArray(
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            begin + entry["data_offsets"][0],
            begin + entry["data_offsets"][1],
            checksums.get(name),
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
        raise ValueError(f"dtype {np.dtype(dtype).name}; expected one of {[*FLOAT_TYPES.values()]}")


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
        dtypes: To convert to, by name: any of `STORED_TYPES`. Wider ones come first, or their
            arrays would not begin at multiples of their size.
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
    checksums = dict.fromkeys(shapes, "0" * 8)
    with path.open("wb") as file:
        file.write(_header(shapes, dtypes, checksums))
        for name, array in zip(shapes, itertools.islice(arrays, len(shapes)), strict=True):
            stored = np.ascontiguousarray(array, dtypes[name])
            file.write(stored.reshape(-1).view(np.uint8).data)
            checksums[name] = crc32(stored)
        file.seek(0)
        file.write(_header(shapes, dtypes, checksums))
        file.flush()
        os.fsync(file.fileno())


def _header(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype],
    checksums: Mapping[str, str],
) -> bytes:
    """Return what a file begins with; it is as long whatever the checksums are."""
    kinds = {ours: theirs for theirs, ours in STORED_TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CHECKSUMS: json.dumps(checksums)}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtypes[name].itemsize
        kind = kinds[dtypes[name].name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


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

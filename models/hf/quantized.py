"""Quantized checkpoints, restored to floats: float8 in blocks, and MXFP4.

Two arrays of such a checkpoint, numbers of few bits and their scales, are one array here. It is
restored as it is read, and of it only what is asked for.

- Float8: `X` [… out in] in float8_e4m3fn, and `X_scale_inv` with a number for each block of, as a
  rule, 128 × 128 of a matrix: weight = value × the scale of its block (DeepSeek-V3, section 3.3,
  https://arxiv.org/abs/2412.19437).
- MXFP4: `X_blocks` [E out in/32 16], two numbers of 4 bits in a byte, the first one in the low
  bits, and `X_scales` [E out in/32]: weight = value × 2^(scale − 127)
  (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). Here
  they are X [E in out], the form in which gpt-oss has them in bfloat16.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import ml_dtypes
import numpy as np

from jaxrl_llm.models.hf.files import FLOAT_TYPES, StoredArray, read_json

QUANTIZATION = "quantization_config"
"""Key of `config.json` that says how weights are quantized."""
SCALE_SUFFIX = "_scale_inv"
PACKED_SUFFIXES = "_blocks", "_scales"
PACKED_GROUP = 32
"""Numbers of an MXFP4 array that share a scale."""
FP8_NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FP4_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_SIGNED = np.concatenate([FP4_NUMBERS, -FP4_NUMBERS])
FP4_PAIRS = np.stack([FP4_SIGNED[np.arange(256) % 16], FP4_SIGNED[np.arange(256) // 16]], axis=-1)
"""The two numbers of each byte."""
POWERS = np.ldexp(np.float32(1), np.arange(-127, 128))
POWERS = np.append(POWERS, np.float32(np.nan))
"""What each scale of MXFP4 stands for."""

Entries: TypeAlias = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class BlockScaled:
    """An array in float8 with a scale for each block of its matrices."""

    values: StoredArray
    scales: StoredArray
    block: tuple[int, int]
    type: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the restored array."""
        return self.values.shape

    def read(self, entries: Entries) -> np.ndarray:
        """Restore the chosen entries of each dimension, in ascending order, to float32."""
        *batch, rows, columns = entries
        restored = FP8_NUMBERS[take_entries(self.values.map("uint8"), entries)]
        high, wide = rows // self.block[0], columns // self.block[1]
        within = (*batch, np.unique(high), np.arange(self.scales.shape[-1]))
        scales = take_entries(self.scales.map(), within).astype(np.float32)
        starts = [*np.flatnonzero(np.diff(high, prepend=-1)), len(rows)]
        for i, ends in enumerate(itertools.pairwise(starts)):
            restored[..., slice(*ends), :] *= scales[..., i, None, :][..., wide]
        return restored


@dataclass(frozen=True)
class MicroScaled:
    """The matrices of experts in MXFP4."""

    blocks: StoredArray
    scales: StoredArray
    type: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the restored array."""
        experts, outputs, groups, _ = self.blocks.shape
        return experts, PACKED_GROUP * groups, outputs

    def read(self, entries: Entries) -> np.ndarray:
        """Restore the chosen entries of each dimension, in ascending order, to float32."""
        experts, inputs, outputs = entries
        groups = np.arange(inputs[0] // PACKED_GROUP, inputs[-1] // PACKED_GROUP + 1)
        chosen = experts, outputs, groups
        packed = take_entries(self.blocks.map(), (*chosen, np.arange(PACKED_GROUP // 2)))
        # as one number of 64 bits, a pair is looked up four times as fast
        numbers = FP4_PAIRS.view(np.float64)[..., 0][packed].view(np.float32)
        numbers *= POWERS[take_entries(self.scales.map(), chosen)][..., None]
        matrices = numbers.reshape(*map(len, (experts, outputs)), -1).swapaxes(1, 2)
        every = tuple(np.arange(size) for size in (len(experts), len(outputs)))
        return take_entries(matrices, (every[0], inputs - PACKED_GROUP * groups[0], every[1]))


ReadableArray: TypeAlias = StoredArray | BlockScaled | MicroScaled


def check_quantization(config: Mapping[str, Any]) -> None:
    """Check that weights are quantized in a way that we can restore, if they are.

    Args:
        config: The keys of a `config.json`.

    Raises:
        ValueError: They are quantized in another way.

    >>> check_quantization({"quantization_config": {"quant_method": "mxfp4"}})
    """
    quantization = config.get(QUANTIZATION) or {}
    if not isinstance(quantization, Mapping):
        raise ValueError(f"{QUANTIZATION}={quantization!r}; expected an object")
    method, form = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    block = quantization.get("weight_block_size")
    sides = block if isinstance(block, list | tuple) else ()
    in_blocks = len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
    if not quantization or method == "mxfp4" or (method == "fp8" and in_blocks and form == "e4m3"):
        return
    kind = f"{method!r}"
    if method == "fp8":
        kind += f" with weight_block_size={block} and fmt={form!r}"
    raise ValueError(
        f"the weights are quantized by {kind}; expected 'fp8' (e4m3) with a weight_block_size such "
        "as [128, 128], 'mxfp4', or a copy of the model in bfloat16, float16 or float32"
    )


def read_quantization(directory: Path) -> dict[str, Any]:
    """Return how the weights of a directory are quantized; an empty dict: they are not.

    Raises:
        ValueError: They are quantized in a way that we can't restore.
    """
    path = directory / "config.json"
    config = read_json(path) if path.exists() else {}
    try:
        check_quantization(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config.get(QUANTIZATION) or {}


def restore_arrays(
    stored: Mapping[str, StoredArray], quantization: Mapping[str, Any]
) -> tuple[dict[str, ReadableArray], list[str]]:
    """Make one array of the two that each quantized array is stored as.

    Args:
        stored: The arrays of a directory, by name.
        quantization: As `read_quantization` returns it.

    Returns:
        The arrays by name, and what is wrong with scales.
    """
    arrays: dict[str, ReadableArray] = dict(stored)
    problems: list[str] = []
    if quantization.get("quant_method") == "fp8":
        high, wide = quantization["weight_block_size"]
        for name in [name for name, array in stored.items() if array.type == "F8_E4M3"]:
            scales, shape = arrays.pop(name + SCALE_SUFFIX, None), stored[name].shape
            if len(shape) < 2:
                problems.append(f"misshapen: {name} is {shape}, expected a matrix, as it is in F8")
                continue
            expected = (*shape[:-2], -(-shape[-2] // high), -(-shape[-1] // wide))
            problems += _check_scales(name + SCALE_SUFFIX, scales, expected, [*FLOAT_TYPES])
            if isinstance(scales, StoredArray):
                arrays[name] = BlockScaled(stored[name], scales, (high, wide))
    elif quantization.get("quant_method") == "mxfp4":
        of_blocks, of_scales = PACKED_SUFFIXES
        for name in [name for name in stored if name.endswith(of_blocks)]:
            base, blocks = name.removesuffix(of_blocks), stored[name]
            scales = arrays.pop(base + of_scales, None)
            if blocks.type != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != 16:
                problems.append(
                    f"misshapen: {name} is {blocks.type} {blocks.shape}, expected U8 "
                    "[experts, outputs, groups, 16]"
                )
                continue
            problems += _check_scales(base + of_scales, scales, blocks.shape[:-1], ["U8"])
            if isinstance(scales, StoredArray):
                arrays[base] = MicroScaled(blocks, scales)
                del arrays[name]
    return arrays, problems


def _check_scales(
    name: str, scales: ReadableArray | None, shape: tuple[int, ...], types: list[str]
) -> list[str]:
    if not isinstance(scales, StoredArray):
        return [f"missing: {name}, the scales of a quantized array"]
    if scales.shape != shape:
        return [f"misshapen: {name} is {scales.shape}, expected {shape}"]
    if scales.type not in types:
        return [f"unsupported type: {name} is {scales.type}, expected one of {types}"]
    return []


def take_entries(array: np.ndarray, entries: Entries) -> np.ndarray:
    """Return the chosen entries of each dimension; a view as far as they are side by side.

    >>> take_entries(np.arange(6).reshape(2, 3), (np.array([1]), np.array([0, 2]))).tolist()
    [[3, 5]]
    """
    for axis, chosen in enumerate(entries):
        first, count = int(chosen[0]), len(chosen)
        if int(chosen[-1]) - first == count - 1:
            array = array[(slice(None),) * axis + (slice(first, first + count),)]
    for axis, chosen in enumerate(entries):
        if int(chosen[-1]) - int(chosen[0]) != len(chosen) - 1:
            array = array.take(chosen, axis)
    return array

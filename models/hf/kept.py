"""What saved arrays take over from the files that a model came from.

Published models have arrays that are no part of the language model, such as a vision tower or
layers for multi-token prediction. They are not loaded, and saved as they were. Some have a few
arrays of the language model in float32 beside others in bfloat16, and these stay in float32.
"""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.arrays import ArrayDecl, Declarations
from jaxrl_llm.models.hf.config import untouched_prefixes
from jaxrl_llm.models.hf.experts import experts_as_stored
from jaxrl_llm.models.hf.files import INDEX, SINGLE, StoredArray, find_arrays
from jaxrl_llm.models.hf.quantized import ReadableArray, read_quantization, restore_arrays

log = logging.getLogger(__name__)

ALWAYS_FLOAT32 = "e_score_correction_bias"  # also in transformers, whatever the model's dtype


class Kept(NamedTuple):
    """What saved arrays take over.

    Attributes:
        float32: Names of the model's arrays that are saved in float32, whatever the others are.
        untouched: Arrays that are no part of it, by name.
        shapes: Of all arrays that are there, by name.
    """

    float32: frozenset[str] = frozenset()
    untouched: Mapping[str, ReadableArray] = {}
    shapes: Mapping[str, tuple[int, ...]] = {}

    def is_wide(self, declaration: ArrayDecl) -> bool:
        """Tell whether an array is saved in float32."""
        if declaration.hf_name.endswith(ALWAYS_FLOAT32):
            return True
        return all(name in self.float32 for name, _ in declaration.hf_indices())


def find_kept(directory: Path | None, declarations: Declarations) -> Kept:
    """Find what saved arrays take over from a model's directory.

    Args:
        directory: That the model came from; None, or one without weights: nothing is untouched, and
            what the computation needs in float32 is saved so.
        declarations: Of the model.

    Raises:
        ValueError: A file is damaged, or scales of quantized arrays are missing.
    """
    stored: dict[str, ReadableArray] = {}
    if directory is not None and any((directory / name).exists() for name in (SINGLE, INDEX)):
        stored, problems = restore_arrays(find_arrays(directory), read_quantization(directory))
        if problems:
            raise ValueError(f"{directory}:\n  " + "\n  ".join(problems))
        declarations = experts_as_stored(declarations, {k: x.shape for k, x in stored.items()})
    declared = {
        name: leaf.float32
        for leaf in jax.tree.leaves(declarations)
        for name, _ in leaf.hf_indices()
    }
    precise = {name for name, is_precise in declared.items() if is_precise}
    if directory is None or not stored:
        return Kept(frozenset(precise))
    ours = stored.keys() & declared.keys()
    wide = {name for name in ours if _type(stored[name]) == "F32"}
    float32 = (precise - (ours - wide)) | (wide if wide < ours else set())
    prefixes = untouched_prefixes(directory, vision="vision" in declarations)
    untouched = find_untouched(stored, prefixes)
    shapes = {name: array.shape for name, array in stored.items()}
    return Kept(frozenset(float32), untouched, shapes)


def find_untouched(
    stored: Mapping[str, ReadableArray], prefixes: tuple[str, ...]
) -> dict[str, ReadableArray]:
    """Return the arrays whose names begin with one of some prefixes.

    >>> array = StoredArray(Path("model.safetensors"), "F32", (4,), 0, 16, None)
    >>> [*find_untouched({"mtp.norm.weight": array, "model.norm.weight": array}, ("mtp.",))]
    ['mtp.norm.weight']
    """
    return {name: array for name, array in stored.items() if name.startswith(prefixes)}


def read_untouched(array: ReadableArray) -> np.ndarray:
    """Read an array: as it is, or, of a quantized one, what it stands for."""
    if isinstance(array, StoredArray):
        return array.map()
    return array.read(tuple(np.arange(size) for size in array.shape))


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


def _type(array: ReadableArray) -> str | None:
    return array.type if isinstance(array, StoredArray) else None

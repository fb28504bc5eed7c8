"""Save a model as a Hugging Face directory that `transformers` loads."""

import functools
import itertools
import json
import operator
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, Params
from jaxrl_llm.models.hf.config import SCORING, config_to_save, untouched_prefixes
from jaxrl_llm.models.hf.files import (
    INDEX,
    SINGLE,
    StoredArray,
    check_new_directory,
    find_arrays,
    whole_directory,
    write_shards,
)
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.hf.load import experts_as_stored, find_untouched, part_entries, part_shape
from jaxrl_llm.models.hf.quantized import ReadableArray, read_quantization, restore_arrays
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.distributed import all_gather, is_first, replicate, run_on_first

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
    "preprocessor_config.json",  # of models that see images, as are the next two
    "video_preprocessor_config.json",
    "processor_config.json",
)
ALWAYS_FLOAT32 = "e_score_correction_bias"  # also in transformers, whatever the model's dtype


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
    before, size, after = part_shape(declaration)
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
    before, _, after = part_shape(first)
    whole, ordered = None, iter(parts)
    for declaration in declarations:
        part = next(ordered)  # and not by `zip`, which would hold on to the one before
        if whole is None:
            shape = (*before, first.hf_part.total, *after)
            is_jax = isinstance(part, jax.Array)
            whole = (jnp.zeros if is_jax else np.empty)(shape, part.dtype)
        at = (slice(None),) * len(before) + (part_entries(declaration),)
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
        counts[part_entries(declaration)] += 1
    if (counts != 1).any():
        raise ValueError(
            f"{first.hf_name}: its parts make up {(counts > 0).sum()} of {len(counts)} entries, "
            f"and {(counts > 1).sum()} of them more than once; expected each once"
        )


class Kept(NamedTuple):
    """What saved arrays take over from the files that a model came from.

    Published models have arrays that are no part of the language model, such as a vision tower or
    layers for multi-token prediction. They are not loaded, and saved as they were. Some have a few
    arrays of the language model in float32 beside others in bfloat16, and these stay in float32.

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
    wide = {name for name in ours if stored[name].type == "F32"}
    float32 = (precise - (ours - wide)) | (wide if wide < ours else set())
    prefixes = untouched_prefixes(directory, vision="vision" in declarations)
    untouched = find_untouched(stored, prefixes)
    shapes = {name: array.shape for name, array in stored.items()}
    return Kept(frozenset(float32), untouched, shapes)


def read_untouched(array: ReadableArray) -> np.ndarray:
    """Read an array: as it is, or, of a quantized one, what it stands for."""
    if isinstance(array, StoredArray):
        return array.map()
    return array.read(tuple(np.arange(size) for size in array.shape))


def save_params(
    directory: str | Path,
    params: Params,
    spec: ModelSpec,
    *,
    source: str | Path | None,
    dtype: DTypeLike,
    scoring: dict[str, Any] | None = None,
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
            chat template and generation config are taken over, and arrays that are no part of the
            model, such as a vision tower where the spec has none. A model with a value head may
            come from a language or reward model. None for a model that has no ancestor: the config
            comes from `make_config`, and there is no tokenizer.
        dtype: Of the saved arrays: float32, bfloat16 or float16. The bias of sigmoid routers stays
            float32, as its updates are too small for the others, and so do arrays that are float32
            in a source whose others are narrower.
        scoring: Of a reward model, how it reads answers; see `models.hf.config.read_scoring`.
        max_shard_bytes: Size above which the arrays are split over several files; one array larger
            than that gets its own file.

    Raises:
        FileExistsError: The directory exists and is not empty.
        ValueError: The parameters do not fit the spec, the spec does not fit the source, or the
            dtype cannot be saved.
    """
    path = source if source is None else resolve(source)
    run_on_first(lambda: check_new_directory(Path(directory), dtype))
    config = config_to_save(spec, path, np.dtype(dtype))
    declarations = declare(spec)
    kept = find_kept(path, declarations)
    save_arrays(
        directory,
        params,
        experts_as_stored(declarations, kept.shapes),
        config=config | ({SCORING: scoring} if scoring else {}),
        source=path,
        dtype=dtype,
        kept=kept,
        max_shard_bytes=max_shard_bytes,
    )


def save_arrays(
    directory: str | Path,
    params: Params,
    declarations: Declarations,
    *,
    config: dict[str, Any] | None,
    source: str | Path | None,
    dtype: DTypeLike,
    kept: Kept | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Save declared arrays as `save_params` does.

    Args:
        directory: As there.
        params: Parameters nested as the declarations.
        declarations: Of any model.
        config: What `config.json` holds; None: there is none.
        source: The directory or repository whose tokenizer files are taken over, if any.
        dtype: Of the saved arrays.
        kept: What else is saved, and what is saved in float32; None: as without a source.
        max_shard_bytes: As there.

    Raises:
        FileExistsError: The directory exists and is not empty.
        ValueError: The parameters do not fit the declarations, or the dtype cannot be saved.
    """
    directory, source = Path(directory), source if source is None else resolve(source)
    run_on_first(lambda: check_new_directory(directory, dtype))
    _check_params(params, declarations)
    kept = kept or find_kept(None, declarations)
    pairs = zip(jax.tree.leaves(declarations), jax.tree.leaves(params), strict=True)
    kinds = {False: np.dtype(dtype), True: np.dtype(np.float32)}
    ours = joined((decl, leaf, kinds[kept.is_wide(decl)]) for decl, leaf in pairs)
    ours.sort(key=lambda parts: -parts[0][2].itemsize)
    if not is_first():
        for parts in ours:  # this process's part in gathering them
            for _ in host_arrays(parts):
                pass
        all_gather("saved")
        return
    saved = [_of_model(parts) for parts in ours]
    saved += [_taken_over(name, array, kinds[False]) for name, array in kept.untouched.items()]
    saved.sort(key=lambda some: -some[0].itemsize)  # see `write_shards`
    with whole_directory(directory) as place:
        if config is not None:
            text = json.dumps(config, indent=2, sort_keys=True)
            (place / "config.json").write_text(text + "\n")
        write_shards(
            place,
            {name: shape for _, shapes, _ in saved for name, shape in shapes.items()},
            itertools.chain.from_iterable(arrays for _, _, arrays in saved),
            {name: dtype for dtype, shapes, _ in saved for name in shapes},
            max_bytes=max_shard_bytes,
        )
        for name in COMPANION_FILES:
            if source is not None and (source / name).exists():
                shutil.copyfile(source / name, place / name)
    all_gather("saved")


_Saved = tuple[np.dtype, dict[str, tuple[int, ...]], Iterator[np.ndarray]]
"""Some arrays to write: their dtype, their shapes by name, and they themselves."""


def _of_model(parts: list[tuple[ArrayDecl, Any, Any]]) -> _Saved:
    declaration, _, dtype = parts[0]
    shapes = {name: declaration.hf_shape for name, _ in declaration.hf_indices()}
    return dtype, shapes, (array for _, array in host_arrays(parts))


def _taken_over(name: str, array: ReadableArray, dtype: np.dtype) -> _Saved:
    own = array.dtype if isinstance(array, StoredArray) else dtype
    return own, {name: array.shape}, map(read_untouched, [array])


def host_arrays(
    leaves: Iterable[tuple[ArrayDecl, Any, DTypeLike | None]],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a model's Hugging Face arrays by name; one layer of one of them is on the host at once.

    Where arrays of ours are parts of one, that is the whole layer and one part of it.

    Args:
        leaves: Our arrays with their declarations, and the dtype to give them; None leaves it.
            Parts of one Hugging Face array must all be there, in any order.

    Raises:
        ValueError: Parts are missing, or have different dtypes.
    """
    for parts in joined(leaves):
        declarations = [declaration for declaration, *_ in parts]
        first = declarations[0]
        if not first.stacked:
            [(name, _)] = first.hf_indices()
            wholes = (
                np.asarray(replicate(leaf if dtype is None else leaf.astype(dtype)))
                for _, leaf, dtype in parts
            )
            yield name, join_parts(declarations, map(to_hf, declarations, wholes))
            continue
        for layer, group in itertools.groupby(first.hf_indices(), key=lambda named: named[1][0]):
            names = list(group)
            values: Iterable[np.ndarray] = (
                np.asarray(replicate(_layer(leaf, layer, dtype))) for _, leaf, dtype in parts
            )  # fetched one by one, as nothing holds on to one of them
            if len(names) > 1:  # several arrays of a layer, such as its experts
                values = list(values)
            for name, index in names:
                own = map(operator.itemgetter(index[1:]), values)
                yield name, join_parts(declarations, map(to_hf, declarations, own))


def joined(leaves: Iterable[tuple[ArrayDecl, Any, Any]]) -> list[list[tuple[ArrayDecl, Any, Any]]]:
    """Gather arrays that are parts of the same Hugging Face arrays; others are by themselves.

    Raises:
        ValueError: Parts are missing, or have different dtypes.
    """
    groups: dict[tuple[str, int], list[tuple[ArrayDecl, Any, Any]]] = {}
    for leaf in leaves:
        declaration = leaf[0]
        first = declaration.layer_number(0) if declaration.is_stack else 0
        groups.setdefault((declaration.hf_name, first), []).append(leaf)
    for parts in groups.values():
        check_parts([declaration for declaration, *_ in parts])
        if len(dtypes := {str(dtype) for *_, dtype in parts}) > 1:
            raise ValueError(f"{parts[0][0].hf_name}: its parts have the dtypes {sorted(dtypes)}")
    return list(groups.values())


def _layer(leaf: Any, layer: int, dtype: DTypeLike | None) -> Any:
    """Return one layer of a stack, by a program that serves all of them."""
    kind = leaf.dtype if dtype is None else np.dtype(dtype)
    if isinstance(leaf, jax.Array):
        return _take(leaf, layer, kind)
    return leaf[layer].astype(kind, copy=False)


@functools.partial(jax.jit, static_argnums=2)
def _take(leaf: jax.Array, layer: ArrayLike, kind: np.dtype) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False).astype(kind)


def _check_params(params: Params, declarations: Declarations) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
            for path, leaf in leaves
        }

    got, expected = shapes(params), shapes(declarations)
    problems = [
        f"{name}: got {got.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in sorted(got.keys() | expected.keys())
        if got.get(name) != expected.get(name)
    ]
    if problems:
        raise ValueError("params do not fit the spec:\n  " + "\n  ".join(problems))

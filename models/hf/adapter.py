"""Adapters on disk, in the format of the `peft` library: `save_adapter`, `load_adapter`.

Each matrix of each routed expert is saved by itself, under its name in a checkpoint, as vLLM reads
them. Where `transformers` keeps the experts of a layer in two arrays, `peft` fuses such adapters as
it loads them, gate and up into one of twice the rank; those that it saves are split here.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike

from jaxrl_llm.models.arrays import ArrayDecl, Params
from jaxrl_llm.models.hf.files import (
    CHECKSUMS,
    check_contents,
    check_new_directory,
    crc32,
    read_header,
    read_json,
    whole_directory,
)
from jaxrl_llm.models.hf.load import from_hf
from jaxrl_llm.models.hf.save import host_arrays
from jaxrl_llm.models.lora import split_adapter, without_adapter
from jaxrl_llm.models.parameters import PEFT_PREFIX, adaptable, declare
from jaxrl_llm.models.spec import LoraSpec, ModelSpec
from jaxrl_llm.sharding.distributed import fetch

PEFT_CONFIG = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "use_dora": False,
}
"""What an adapter's config must say, where it says anything: other values change the model."""

PEFT_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
PEFT_INITIALIZERS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Those that leave the base as it is."""

EXPERTS = ("expert_gate", "expert_up", "expert_down")
FUSED_EXPERTS = re.compile(r"(.*)\.experts(\.base_layer)?\.lora_([AB])\.weight")


def save_adapter(
    directory: str | Path, adapter: Params, spec: ModelSpec, *, base: str, dtype: DTypeLike
) -> None:
    """Save an adapter in the format of the `peft` library.

    The directory appears complete or not at all. `peft` takes the three matrices of the routed
    experts together or not at all: those that have no adapter are saved with zeros. It would
    multiply rank-stabilized ones of gate and up by √2, so with experts the same scale is saved as
    a plain alpha.

    Args:
        directory: To create; it must not exist, unless empty.
        adapter: The adapter's part of the parameters.
        spec: The model with its adapter.
        base: Path or hub id of the base model, for the adapter's config.
        dtype: Of the saved arrays: float32, bfloat16 or float16.

    Raises:
        FileExistsError: The directory exists and is not empty.
        ValueError: There is no adapter, or the dtype cannot be saved.
    """
    directory = Path(directory)
    if spec.lora is None:
        raise ValueError("the spec has no adapter; expected spec.lora")
    check_new_directory(directory, dtype)
    saved = _with_all_experts(spec)
    config = PEFT_CONFIG | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": saved.rank,
        "lora_alpha": int(saved.alpha) if saved.alpha == int(saved.alpha) else saved.alpha,
        "use_rslora": saved.rslora,
        "rank_pattern": {},
        "alpha_pattern": {},
        **_peft_targets(spec, saved),
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    declared = zip(_adapter_declarations(spec), jax.tree.leaves(adapter), strict=True)
    leaves = [(decl, fetch(value).astype(dtype), None) for decl, value in declared]
    arrays = {name: np.ascontiguousarray(array) for name, array in host_arrays(leaves)}
    for decl in _adapter_declarations(dataclasses.replace(spec, lora=saved)):
        for name, _ in decl.hf_indices():
            arrays.setdefault(name, np.zeros(decl.hf_shape, dtype))
    with whole_directory(directory) as place:
        text = json.dumps(config, indent=2, sort_keys=True)
        (place / "adapter_config.json").write_text(text + "\n")
        checksums = json.dumps({name: crc32(array) for name, array in arrays.items()})
        safetensors.numpy.save_file(
            arrays,
            place / "adapter_model.safetensors",
            metadata={"format": "pt", CHECKSUMS: checksums},
        )


def read_adapter_spec(directory: str | Path, base: ModelSpec) -> ModelSpec:
    """Read which adapter a directory in `peft`'s format holds.

    Args:
        directory: Holds `adapter_config.json` and `adapter_model.safetensors`.
        base: The model that it was made for.

    Returns:
        The base's spec with the adapter, whose rank is the largest of any matrix.

    Raises:
        ValueError: It is another kind of adapter, or not one of this model: arrays are surplus, or
            none is there.
        FileNotFoundError: A file is missing.
    """
    lora, arrays = _read(directory, base)
    modules = {re.sub(r"\.\d+\.", ".*.", name.partition(".lora_")[0]) for name in arrays}
    targets = [
        name
        for name, module in adaptable(declare(base)).items()
        if PEFT_PREFIX + re.sub(r"\.{\w+}\.", ".*.", module) in modules
    ]
    spec = dataclasses.replace(base, lora=dataclasses.replace(lora, targets=tuple(sorted(targets))))
    known = {name for decl in _adapter_declarations(spec) for name, _ in decl.hf_indices()}
    surplus = sorted(arrays.keys() - known)
    if surplus or not arrays:
        raise ValueError(
            f"{directory} does not fit the model: "
            + (f"{len(surplus)} surplus arrays, as {surplus[0]}" if surplus else "it has no arrays")
        )
    return spec


def load_adapter(directory: str | Path, spec: ModelSpec) -> Params:
    """Load an adapter from a directory in `peft`'s format.

    Matrices of a smaller rank than the adapter's are filled up with zeros, which training leaves at
    zero; the scale of matrices that have another one is multiplied into their B.

    Args:
        directory: Holds `adapter_config.json` and `adapter_model.safetensors`.
        spec: The model with the adapter, as `read_adapter_spec` gives it.

    Returns:
        The adapter's part of the parameters as float32 numpy arrays.

    Raises:
        ValueError: Arrays are missing or misshapen, or the file is damaged.
        FileNotFoundError: A file is missing.
    """
    arrays = _read(directory, spec)[1]
    problems = [
        f"{name}: got {arrays[name].shape if name in arrays else 'nothing'}, "
        f"expected {decl.hf_shape}"
        for decl in _adapter_declarations(spec)
        for name, _ in decl.hf_indices()
        if name not in arrays or arrays[name].shape != decl.hf_shape
    ]
    if problems:
        raise ValueError(
            f"{directory} does not fit the model: {len(problems)} arrays; {problems[0]}"
        )

    def load(decl: ArrayDecl) -> np.ndarray:
        array = np.empty(decl.shape, np.float32)
        for name, index in decl.hf_indices():
            array[index] = from_hf(decl, arrays[name])
        return array

    return jax.tree.map(load, split_adapter(declare(spec))[0])


def _read(directory: str | Path, spec: ModelSpec) -> tuple[LoraSpec, dict[str, np.ndarray]]:
    """Read an adapter, without its targets, and its arrays as if all had one rank and scale."""
    path = Path(directory) / "adapter_config.json"
    config = read_json(path)
    _check_config(path, config)
    with _open(directory) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rank, alpha = config["r"], float(config["lora_alpha"])
    base = LoraSpec(rank=rank, alpha=alpha, targets=(), rslora=config.get("use_rslora", False))
    ranks, alphas = (config.get(f"{kind}_pattern") or {} for kind in ("rank", "alpha"))
    entries = [
        (
            name,
            array,
            dataclasses.replace(
                base,
                rank=_by_pattern(ranks, module, rank),
                alpha=float(_by_pattern(alphas, module, alpha)),
            ),
        )
        for name, array, module in _split_experts(stored, config, spec)
    ]
    largest = max((own.rank for _, _, own in entries), default=rank)
    ratio = largest / rank
    lora = dataclasses.replace(
        base, rank=largest, alpha=alpha * (math.sqrt(ratio) if base.rslora else ratio)
    )
    return lora, {name: _conform(name, array, own, lora) for name, array, own in entries}


def _conform(name: str, array: np.ndarray, own: LoraSpec, lora: LoraSpec) -> np.ndarray:
    """Give an array of one adapter the rank and scale of another, of no smaller rank."""
    axis = 0 if name.endswith(".lora_A.weight") else 1
    if array.ndim == 2 and array.shape[axis] == own.rank < lora.rank:
        missing = [(0, 0), (0, 0)]
        missing[axis] = (0, lora.rank - own.rank)
        array = np.pad(array, missing)
    ratio = own.scale / lora.scale
    is_same = math.isclose(ratio, 1.0, rel_tol=1e-12)
    return array if axis == 0 or is_same else array.astype(np.float32) * np.float32(ratio)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Look a module up as `peft` does: the first pattern that its path ends in."""
    fits = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fits, default)


def _split_experts(
    arrays: Mapping[str, np.ndarray], config: Mapping[str, Any], spec: ModelSpec
) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield each array, those of fused experts split, with the path by which `peft` knows it.

    With r the rank and E the experts, A of a fused array is [E*r inputs] and B [outputs r*E]. Gate
    and up share A, and B holds the outputs of one after those of the other.
    """
    parameters = [name.rpartition(".")[2] for name in config.get("target_parameters") or ()]
    for name, array in arrays.items():
        fused = FUSED_EXPERTS.fullmatch(name)
        if fused is None or spec.moe is None:
            yield name, array, name.removeprefix(PEFT_PREFIX).partition(".lora_")[0]
            continue
        layer, inner, kind = fused.groups()
        is_down = inner is None and "down_proj" in parameters
        gate, up, down = spec.moe.hf_projections
        projections = (down,) if is_down else (gate, up)
        at = f"{layer.rpartition('.')[0]}.{spec.moe.hf_module}.experts"
        module = f"{layer.removeprefix(PEFT_PREFIX)}.experts."
        module += "down_proj" if is_down else "gate_up_proj"
        split = _split_fused(name, array, spec.moe.experts, len(projections))
        for expert, i in np.ndindex(*split.shape[:2]):
            part = f"{at}.{expert}.{projections[i]}.lora_{kind}.weight"
            yield part, split[expert, i], module


def _split_fused(name: str, array: np.ndarray, experts: int, parts: int) -> np.ndarray:
    """Split A [E*r inputs] to [E parts r inputs], or B [parts*outputs r*E] to [E parts outputs r].

    Raises:
        ValueError: The array can't be split so.
    """
    is_a = name.endswith(".lora_A.weight")
    expected = (experts, 1) if is_a else (parts, experts)
    if array.ndim != 2 or any(n % size for n, size in zip(array.shape, expected, strict=True)):
        raise ValueError(
            f"{name} has shape {array.shape}; expected one of {experts} experts, whose sizes are "
            f"multiples of {expected}"
        )
    if is_a:
        split = array.reshape(experts, 1, -1, array.shape[1])
        return np.broadcast_to(split, (experts, parts, *split.shape[2:]))
    return array.reshape(parts, array.shape[0] // parts, -1, experts).transpose(3, 0, 1, 2)


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    for key, expected in (PEFT_CONFIG | dict.fromkeys(PEFT_UNSUPPORTED)).items():
        got = config.get(key, expected)
        if got != expected and (got or expected):  # None, false and {} mean the same
            raise ValueError(f"{path}: {key}={got!r}; supported is {expected!r}")
    initializer = config.get("init_lora_weights", True)
    if initializer not in PEFT_INITIALIZERS:
        raise ValueError(
            f"{path}: init_lora_weights={initializer!r} changes the base; it can't be loaded"
        )
    missing = [key for key in ("r", "lora_alpha") if key not in config]
    if missing:
        raise ValueError(f"{path}: the keys {missing} are missing")


def _with_all_experts(spec: ModelSpec) -> LoraSpec:
    """Return the adapter that is saved: with all matrices of the routed experts, or none."""
    assert spec.lora is not None
    lora = spec.lora
    if not set(lora.targets) & set(EXPERTS):
        return lora
    return LoraSpec(
        rank=lora.rank,
        alpha=lora.scale * lora.rank if lora.rslora else lora.alpha,
        targets=tuple(sorted({*lora.targets, *EXPERTS})),
    )


def _peft_targets(spec: ModelSpec, lora: LoraSpec) -> dict[str, list[str]]:
    """Return the names by which `peft` finds the modules, longer where short ones fit others.

    In a model with experts it takes `gate_proj`, `up_proj` and `down_proj` for theirs, so weights
    of other modules of these names are named as parameters.
    """
    able = adaptable(declare(without_adapter(spec)))
    others = {
        module.rpartition(".")[2] for name, module in able.items() if name not in lora.targets
    }
    modules, parameters = set(), set()
    for name in lora.targets:
        path = able[name].rpartition("{layers}.")[2]
        short = path.rpartition(".")[2]
        if name in EXPERTS:
            modules.add(short)
        elif spec.moe is not None and short in spec.moe.hf_projections:
            parameters.add(f"{path}.weight")
        else:
            modules.add(path if short in others else short)
    return {"target_modules": sorted(modules), "target_parameters": sorted(parameters)}


def _open(directory: str | Path) -> Any:
    path = Path(directory) / "adapter_model.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected an adapter in PEFT's format")
    check_contents(read_header(path).items())
    return safetensors.safe_open(path, framework="numpy")


def _adapter_declarations(spec: ModelSpec) -> list[ArrayDecl]:
    return jax.tree.leaves(split_adapter(declare(spec))[0])

"""Declarations of the arrays of low-rank adapters.

A and B of the array `query` are the arrays `query_lora_a` and `query_lora_b` beside it. Their
Hugging Face names and shapes are those of the `peft` library, so that adapters go from one to the
other. Arrays that are parts of one matrix in a checkpoint, which has one A there, share the A of
the first of them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxrl_llm.models.arrays import ZEROS, ArrayDecl, Declarations, Initializer
from jaxrl_llm.models.spec import ModelSpec

A, B = "_lora_a", "_lora_b"
ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."


def declare_lora(declarations: Declarations, spec: ModelSpec) -> Declarations:
    """Add the two arrays of each adapted matrix to a model's declarations.

    A begins uniform within ±1/√inputs and B at zero, as `peft`'s do (its Kaiming-uniform with
    a = √5), so that an adapter changes nothing at first.

    Args:
        declarations: Of the model without an adapter.
        spec: The model; `spec.lora.targets` are names of arrays, as `find_targets` gives them.

    Returns:
        The declarations, with `{name}_lora_b` beside each target and `{name}_lora_a` beside each
        that is the first part of its matrix.

    Raises:
        ValueError: There is no adapter, or a target is no matrix that can have one.

    >>> spec = tiny_spec(layers=3)
    >>> from jaxrl_llm.models.parameters import declare
    >>> from jaxrl_llm.models.spec import LoraSpec
    >>> lora = LoraSpec(rank=2, alpha=4.0, targets=("query",))
    >>> layers = declare(dataclasses.replace(spec, lora=lora))["layers"]
    >>> layers["query_lora_a"].shape, layers["query_lora_b"].shape
    ((3, 4, 2), (3, 2, 2, 2))
    """
    if spec.lora is None:
        raise ValueError("the spec has no adapter; expected spec.lora")
    rank, targets = spec.lora.rank, spec.lora.targets
    able = adaptable(declarations)
    wrong = sorted(set(targets) - able.keys())
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} is no matrix that can have an adapter; {target_options(able)}"
        )
    modules = {able[target] for target in targets}
    if missing := sorted(name for name in able.keys() - set(targets) if able[name] in modules):
        raise ValueError(f"{missing} are parts of matrices that have an adapter; expected them too")

    def add(group: Declarations) -> Declarations:
        added: Declarations = {}
        for target, first in first_parts(group).items():
            if target in targets:
                pair = _declare_pair(target, group[target], rank)
                added |= pair if target == first else {target + B: pair[target + B]}
        return group | added

    return {k: add(v) if isinstance(v, dict) else v for k, v in declarations.items()}


def _is_adaptable(decl: ArrayDecl) -> bool:
    """Say whether an array is a matrix in every layer, or in every expert of one; no router is.

    Nor are experts that a checkpoint joins in one array: `peft` adapts modules.
    """
    is_matrix = len(decl.hf_axes) == decl.dimensions == 2
    return "layers" in decl.stacked and is_matrix and "routes" not in decl.axes


def adaptable(declarations: Declarations) -> dict[str, str]:
    """Return the names of the matrices that can have an adapter, with their modules' paths."""
    return {
        name: decl.hf_name.removesuffix(".weight")
        for group in declarations.values()
        if isinstance(group, dict)
        for name, decl in group.items()
        if _is_adaptable(decl)
    }


def first_parts(group: Declarations) -> dict[str, str]:
    """Return, for each matrix of a stack, the first that is a part of the same in a checkpoint.

    That is the array itself unless it is such a part; an adapter's A stands beside the first.
    """
    able = {name: decl.hf_name for name, decl in group.items() if _is_adaptable(decl)}
    firsts: dict[str, str] = {}
    for name, hf_name in able.items():
        firsts.setdefault(hf_name, name)
    return {name: firsts[hf_name] for name, hf_name in able.items()}


def target_options(able: Mapping[str, str]) -> str:
    modules = sorted({module.rpartition(".")[2] for module in able.values()})
    return f"expected {ALL_LINEAR}, or some of {', '.join(modules)}, or patterns for them"


def _declare_pair(name: str, decl: ArrayDecl, rank: int) -> Declarations:
    sizes = dict(zip(decl.axes, decl.shape, strict=True)) | {"rank": rank}
    outputs, inputs = decl.hf_axes
    bound = 1 / math.sqrt(math.prod(sizes[axis] for axis in inputs))
    module = PEFT_PREFIX + decl.hf_name.removesuffix(".weight")

    def array(
        kind: str, axes: tuple[str, ...], initializer: Initializer, hf_axes: Any
    ) -> ArrayDecl:
        return dataclasses.replace(
            decl,
            shape=tuple(sizes[axis] for axis in decl.stacked + axes),
            axes=decl.stacked + axes,
            initializer=initializer,
            hf_name=f"{module}.lora_{kind}.weight",
            hf_axes=hf_axes,
            hf_part=decl.hf_part if kind == "B" else None,
        )

    first, second = (*inputs, "rank"), ("rank", *outputs)
    return {
        name + A: array("A", first, _uniform(bound), (("rank",), inputs)),
        name + B: array("B", second, ZEROS, (outputs, ("rank",))),
    }


def _uniform(bound: float) -> Initializer:
    def draw(key: Any, shape: Sequence[int], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw

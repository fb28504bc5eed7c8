"""Low-rank adapters: two thin matrices beside each adapted one, trained while the rest is frozen.

For a matrix W the model computes `x W + scale (x A) B`, with A [inputs, rank] and B [rank, outputs]
(Hu et al. 2021, https://arxiv.org/abs/2106.09685, eq. 3). A and B of the array `query` are the
arrays `query_lora_a` and `query_lora_b` beside it. Their Hugging Face names and shapes are those of
the `peft` library, so that adapters go from one to the other.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.models.spec import (
    ZEROS,
    ArrayDecl,
    Declarations,
    Initializer,
    ModelSpec,
    Params,
    declare,
)

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
        The declarations, with `{name}_lora_a` and `{name}_lora_b` beside each target.

    Raises:
        ValueError: There is no adapter, or a target is no matrix that can have one.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=3, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> from jaxrl_llm.models.spec import LoraSpec
    >>> lora = LoraSpec(rank=2, alpha=4.0, targets=("query",))
    >>> layers = declare(dataclasses.replace(spec, lora=lora))["layers"]
    >>> layers["query_lora_a"].shape, layers["query_lora_b"].shape
    ((3, 4, 2), (3, 2, 2, 2))
    """
    if spec.lora is None:
        raise ValueError("the spec has no adapter; wanted spec.lora")
    rank, targets = spec.lora.rank, spec.lora.targets
    able = adaptable(declarations)
    wrong = sorted(set(targets) - able.keys())
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no matrix that can have an adapter; {_options(able)}")

    def add(group: Declarations) -> Declarations:
        added = {
            name: adapter
            for target in targets
            if target in group and _is_adaptable(group[target])
            for name, adapter in _declare_pair(target, group[target], rank).items()
        }
        return group | added

    return {k: add(v) if isinstance(v, dict) else v for k, v in declarations.items()}


def find_targets(wanted: Sequence[str], spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the arrays that a user's targets mean.

    Args:
        wanted: "all-linear", or shell patterns (`*`, `?`, `[…]`) for our name of an array, `query`,
            Hugging Face's of its module, `q_proj`, or the module's path, `*.mlp.*`.
        spec: The model.

    Returns:
        Names of arrays, sorted.

    Raises:
        ValueError: A pattern fits no matrix that can have an adapter.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=3, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> find_targets(["q_proj", "value", "*.mlp.*"], spec)
    ('down', 'gate', 'query', 'up', 'value')
    """
    able = adaptable(declare(without_adapter(spec)))
    found: set[str] = set()
    for pattern in wanted:
        fits = {
            name
            for name, module in able.items()
            if pattern == ALL_LINEAR
            or any(fnmatchcase(n, pattern) for n in (name, module, module.rpartition(".")[2]))
        }
        if not fits:
            raise ValueError(f"{pattern!r} is no matrix that can have an adapter; {_options(able)}")
        found |= fits
    return tuple(sorted(found))


def without_adapter(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the model alone.

    >>> from jaxrl_llm.models.spec import LoraSpec
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32, lora=LoraSpec(rank=2, alpha=4.0, targets=("up",)))
    >>> without_adapter(spec).lora is None
    True
    """
    return dataclasses.replace(spec, lora=None)


def split_adapter(params: Params) -> tuple[Params, Params]:
    """Split a model's parameters, or a tree like them, into its adapter and its base.

    >>> split_adapter({"embed": 1, "layers": {"up": 2, "up_lora_a": 3, "up_lora_b": 4}})
    ({'layers': {'up_lora_a': 3, 'up_lora_b': 4}}, {'embed': 1, 'layers': {'up': 2}})
    """
    adapter: Params = {}
    base: Params = {}
    for name, value in params.items():
        if isinstance(value, dict):
            ours, theirs = split_adapter(value)
            adapter |= {name: ours} if ours else {}
            base |= {name: theirs} if theirs else {}
        else:
            (adapter if name.endswith((A, B)) else base)[name] = value
    return adapter, base


def join(params: Params, rest: Params | None) -> Params:
    """Join two parts of a model's parameters; the inverse of `split_adapter`.

    >>> join({"layers": {"up_lora_a": 3}}, {"embed": 1, "layers": {"up": 2}})
    {'embed': 1, 'layers': {'up': 2, 'up_lora_a': 3}}
    """
    joined = dict(rest or {})
    for name, value in params.items():
        joined[name] = join(value, joined[name]) if name in joined else value
    return joined


def merge(params: Params, spec: ModelSpec) -> tuple[Params, ModelSpec]:
    """Add an adapter to its base, W + scale A B, computed in float32.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model with its adapter.

    Returns:
        Parameters of the model without an adapter, each in its own dtype, and its spec. Arrays
        without an adapter are shared with `params`.

    Raises:
        ValueError: There is no adapter.

    >>> from jaxrl_llm.models.spec import LoraSpec, initialize
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32, lora=LoraSpec(rank=2, alpha=4.0, targets=("up",)))
    >>> params, alone = merge(initialize(spec, key=jax.random.key(0)), spec)
    >>> "up_lora_a" in params["layers"], alone == without_adapter(spec)
    (False, True)
    """
    if spec.lora is None:
        raise ValueError("the spec has no adapter; wanted spec.lora")
    scale = spec.lora.scale

    def merged(group: Params, declared: Declarations) -> Params:
        found = {}
        for name, value in group.items():
            if isinstance(value, dict):
                found[name] = merged(value, declared[name])
            elif name + A in group:
                found[name] = _add(value, group[name + A], group[name + B], declared, name, scale)
            elif not name.endswith((A, B)):
                found[name] = value
        return found

    return merged(params, declare(spec)), without_adapter(spec)


def _is_adaptable(decl: ArrayDecl) -> bool:
    """Say whether an array is a matrix in every layer, or in every expert of one; no router is."""
    is_router = "routes" in decl.axes
    return "layers" in decl.stacked and len(decl.hf_axes) == 2 and not is_router


def adaptable(declarations: Declarations) -> dict[str, str]:
    """Return the names of the matrices that can have an adapter, with their modules' paths."""
    return {
        name: decl.hf_name.removesuffix(".weight")
        for group in declarations.values()
        if isinstance(group, dict)
        for name, decl in group.items()
        if _is_adaptable(decl)
    }


def _options(able: Mapping[str, str]) -> str:
    modules = sorted({module.rpartition(".")[2] for module in able.values()})
    return f"wanted {ALL_LINEAR}, or some of {', '.join(modules)}, or patterns for them"


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


def _add(matrix: Any, a: Any, b: Any, declared: Declarations, name: str, scale: float) -> Array:
    letters = {axis: chr(ord("a") + i) for i, axis in enumerate((*declared[name].axes, "rank"))}
    first, second, own = (
        "".join(letters[axis] for axis in declared[n].axes) for n in (name + A, name + B, name)
    )
    product = jnp.einsum(
        f"{first},{second}->{own}",
        jnp.asarray(a, jnp.float32),
        jnp.asarray(b, jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return (jnp.asarray(matrix, jnp.float32) + scale * product).astype(matrix.dtype)

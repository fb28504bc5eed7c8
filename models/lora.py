"""Low-rank adapters: two thin matrices beside each adapted one, trained while the rest is frozen.

For a matrix W the model computes `x W + scale (x A) B`, with A [inputs, rank] and B [rank, outputs]
(Hu et al. 2021, https://arxiv.org/abs/2106.09685, eq. 3). `models.parameters` declares A and B.
"""

import dataclasses
import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.models.arrays import Declarations, Params
from jaxrl_llm.models.parameters import (
    ALL_LINEAR,
    A,
    B,
    adaptable,
    declare,
    first_parts,
    target_options,
)
from jaxrl_llm.models.spec import ModelSpec


def find_targets(patterns: Sequence[str], spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the arrays that a user's targets mean.

    Args:
        patterns: "all-linear", or shell patterns (`*`, `?`, `[…]`) for our name of an array,
            `query`, Hugging Face's of its module, `q_proj`, or the module's path, `*.mlp.*`.
        spec: The model.

    Returns:
        Names of arrays, sorted.

    Raises:
        ValueError: A pattern fits no matrix that can have an adapter.

    >>> spec = tiny_spec(layers=3)
    >>> find_targets(["q_proj", "value", "*.mlp.*"], spec)
    ('down', 'gate', 'query', 'up', 'value')
    """
    able = adaptable(declare(without_adapter(spec)))
    targets: set[str] = set()
    for pattern in patterns:
        fits = {
            name
            for name, module in able.items()
            if pattern == ALL_LINEAR
            or any(fnmatchcase(n, pattern) for n in (name, module, module.rpartition(".")[2]))
        }
        if not fits:
            raise ValueError(
                f"{pattern!r} is no matrix that can have an adapter; {target_options(able)}"
            )
        modules = {able[name] for name in fits}  # all parts of one, or none
        targets |= {name for name, module in able.items() if module in modules}
    return tuple(sorted(targets))


def without_adapter(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the model alone.

    >>> from jaxrl_llm.models.spec import LoraSpec
    >>> spec = tiny_spec(lora=LoraSpec(rank=2, alpha=4.0, targets=("up",)))
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


def combine_params(params: Params, rest: Params | None) -> Params:
    """Join two parts of a model's parameters; the inverse of `split_adapter`.

    >>> combine_params({"layers": {"up_lora_a": 3}}, {"embed": 1, "layers": {"up": 2}})
    {'embed': 1, 'layers': {'up': 2, 'up_lora_a': 3}}
    """
    joined = dict(rest or {})
    for name, value in params.items():
        joined[name] = combine_params(value, joined[name]) if name in joined else value
    return joined


def merge_adapter(params: Params, spec: ModelSpec) -> tuple[Params, ModelSpec]:
    """Add an adapter to its base, W + scale A B, computed in float32.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model with its adapter.

    Returns:
        Parameters of the model without an adapter, each in its own dtype, and its spec. Arrays
        without an adapter are shared with `params`.

    Raises:
        ValueError: There is no adapter.

    >>> from jaxrl_llm.models.spec import LoraSpec
    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec(lora=LoraSpec(rank=2, alpha=4.0, targets=("up",)))
    >>> params, alone = merge_adapter(init_params(spec, key=jax.random.key(0)), spec)
    >>> "up_lora_a" in params["layers"], alone == without_adapter(spec)
    (False, True)
    """
    if spec.lora is None:
        raise ValueError("the spec has no adapter; expected spec.lora")
    scale = spec.lora.scale

    def merged(group: Params, declared: Declarations) -> Params:
        result = {}
        for name, value in group.items():
            if isinstance(value, dict):
                result[name] = merged(value, declared[name])
            elif name + B in group:
                first = first_parts(declared)[name] + A
                a, b = ((group[n], declared[n].axes) for n in (first, name + B))
                result[name] = _add((value, declared[name].axes), a, b, scale)
            elif not name.endswith((A, B)):
                result[name] = value
        return result

    return merged(params, declare(spec)), without_adapter(spec)


_Matrix = tuple[Any, tuple[str, ...]]  # and the names of its axes


def _add(matrix: _Matrix, a: _Matrix, b: _Matrix, scale: float) -> Array:
    letters = {axis: chr(ord("a") + i) for i, axis in enumerate((*matrix[1], "rank"))}
    own, first, second = ("".join(letters[axis] for axis in axes) for _, axes in (matrix, a, b))
    product = jnp.einsum(
        f"{first},{second}->{own}",
        jnp.asarray(a[0], jnp.float32),
        jnp.asarray(b[0], jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return (jnp.asarray(matrix[0], jnp.float32) + scale * product).astype(matrix[0].dtype)


@functools.lru_cache(maxsize=64)
def factor_names(spec: ModelSpec) -> dict[str, tuple[str, str]]:
    """Return, for each adapted matrix of a model, the names of its A and of its B.

    >>> from jaxrl_llm.models.spec import LoraSpec
    >>> factor_names(tiny_spec(lora=LoraSpec(rank=2, alpha=4.0, targets=("up",))))
    {'up': ('up_lora_a', 'up_lora_b')}
    """
    declared = declare(spec)
    return {
        name: (first + A, name + B)
        for stack in spec.stacks
        for name, first in first_parts(declared[stack]).items()
        if name + B in declared[stack]
    }

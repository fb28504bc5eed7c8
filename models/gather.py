"""Weights gathered, for a product, from the devices of a mesh that hold parts of them."""

from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.linear import Sharded
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout


def layer_gatherer(spec: ModelSpec, dtype: DTypeLike, layout: Layout) -> Callable[[Params], Params]:
    """Return a function from one layer's weights to the same, ready to be used on a mesh.

    Matrices are gathered by the products that take them, and those of experts by
    `models.moe.expert_parallel`. What else there is, a row per layer, is cast and gathered at once.
    """
    declared, dtypes = declare(spec), compute_dtypes(spec, dtype)
    homes = {
        name: layout.sharding(*home.spec[1:])
        for stack in spec.stacks
        for name, home in layout.gathered(declared[stack]).items()
    }
    kinds = {name: kind for stack in spec.stacks for name, kind in dtypes[stack].items()}

    def gather(name: str, value: Array) -> Array | Sharded:
        if name.startswith(("router", "expert_")):
            return value
        if name.endswith(("_norm", "_bias")):
            return jax.lax.with_sharding_constraint(value.astype(kinds[name]), homes[name])
        return Sharded(value, homes[name])

    return lambda weights: {name: gather(name, value) for name, value in weights.items()}


def gathered(params: Params, spec: ModelSpec, name: str, layout: Layout | None) -> Array:
    """Return an array that is no layer's, gathered from the devices that split tokens."""
    if layout is None:
        return params[name]
    home = layout.gathered({name: declare(spec)[name]})[name]
    return jax.lax.with_sharding_constraint(params[name], home)

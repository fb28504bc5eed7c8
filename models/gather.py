"""Weights gathered, for a product, from the devices of a mesh that hold parts of them."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.linear import Sharded
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import TOKENS, Layout


def layer_gatherer(
    spec: ModelSpec, dtype: DTypeLike, layout: Layout, *, keep: bool
) -> Callable[[Params], Params]:
    """Return a function from one layer's weights to the same, ready to be used on a mesh.

    Matrices are gathered by the products that take them, and those of experts by
    `models.moe.expert_parallel`. What else there is, a row per layer, is cast and gathered at once.

    Args:
        spec: The model.
        dtype: Of the computation.
        layout: How activations are split.
        keep: Whether products keep what they gathered for the backward pass: where the layer is
            computed again there, or each matrix would be gathered twice for it.
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
        return Sharded(value, homes[name], keep)

    return lambda weights: {name: gather(name, value) for name, value in weights.items()}


class SplitMatrix(NamedTuple):
    """A matrix of which the devices that split tokens hold parts, outside of `jax.shard_map`.

    Attributes:
        array: The matrix.
        rows: The mesh axes that its rows are split over.
        columns: Those of its columns. Axes that don't split tokens count in neither.
    """

    array: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def spec(self) -> PartitionSpec:
        """Return how `jax.shard_map` over the axes of tokens takes the matrix."""
        return PartitionSpec(self.rows, self.columns)

    def transposed(self) -> "SplitMatrix":
        """Return the transpose."""
        return SplitMatrix(self.array.T, self.columns, self.rows)


def split_matrix(params: Params, spec: ModelSpec, name: str, layout: Layout) -> SplitMatrix:
    """Return a matrix that is no layer's, and how it is held."""
    held = layout.of({name: declare(spec)[name]})[name].spec
    parts = [(part,) if isinstance(part, str) else part or () for part in held]
    rows, columns = (tuple(axis for axis in part if axis in TOKENS) for part in parts)
    return SplitMatrix(params[name], rows, columns)


def lookup(
    table: SplitMatrix, tokens: Int[Array, "R L"], layout: Layout, *, dtype: DTypeLike
) -> Float[Array, "R L D"]:
    """Look tokens up in an embedding [V, D] of which each device holds some columns.

    Rather than gathering the table, each device looks up the tokens of all that share the table,
    and sends them their columns. The gradient is summed over the tokens in the table's dtype.
    """
    columns = table.columns

    def run(part: Array, tokens: Array) -> Array:
        if table.rows:  # by rules of the user's own
            part = jax.lax.all_gather(part, table.rows, axis=0, tiled=True)
        if not columns:
            return _rows(part, tokens, jnp.dtype(dtype))
        everyones = jax.lax.all_gather(tokens, columns, axis=0, tiled=True)
        rows = _rows(part, everyones, jnp.dtype(dtype))
        return jax.lax.all_to_all(rows, columns, split_axis=0, concat_axis=2, tiled=True)

    specs = table.spec, PartitionSpec(TOKENS)
    return layout.by_tokens(run, in_specs=specs)(table.array, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    return table.astype(dtype)[tokens]


def _rows_forward(
    table: Array, tokens: Array, dtype: jnp.dtype
) -> tuple[Array, tuple[Array, Array]]:
    return _rows(table, tokens, dtype), (table, tokens)


def _rows_backward(
    dtype: jnp.dtype, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None]:
    del dtype
    table, tokens = saved
    return jnp.zeros_like(table).at[tokens].add(cotangent.astype(table.dtype)), None


_rows.defvjp(_rows_forward, _rows_backward)

"""Weights gathered, for a product, from the devices of a mesh that hold parts of them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
        if name == "sinks" or name.endswith(("_norm", "_bias", "_taps", "_log")):
            return jax.lax.with_sharding_constraint(value.astype(kinds[name]), homes[name])
        return Sharded(value, homes[name], keep)

    return lambda weights: {name: gather(name, value) for name, value in weights.items()}


class SplitMatrix(NamedTuple):
    """The embedding [V, D] or the output projection [D, V], of which devices hold parts.

    Attributes:
        array: The matrix.
        embed_axes: The mesh axes that D is split over; they split tokens, too.
        vocab_axes: The mesh axes that V is split over; they don't.
    """

    array: Array
    embed_axes: tuple[str, ...]
    vocab_axes: tuple[str, ...]


def split_matrix(params: Params, spec: ModelSpec, name: str, layout: Layout) -> SplitMatrix:
    """Return the embedding or the output projection, and how it is held.

    A dimension that rules of the user's own split over other axes is gathered from these.
    """
    declared = declare(spec)[name]
    held = layout.of({name: declared})[name].spec
    split: dict[str, tuple[str, ...]] = {}
    for axis, part in zip(declared.axes, held, strict=True):
        over = (part,) if isinstance(part, str) else part or ()
        split[axis] = tuple(a for a in over if (a in TOKENS) == (axis == "embed"))
    home = layout.sharding(*(split[axis] for axis in declared.axes))
    array = jax.lax.with_sharding_constraint(params[name], home)
    return SplitMatrix(array, split["embed"], split["vocab"])


def lookup(
    table: SplitMatrix, tokens: Int[Array, "R L"], layout: Layout, *, dtype: DTypeLike
) -> Float[Array, "R L D"]:
    """Look tokens up in an embedding of which devices hold parts.

    Rather than gathering the table, a device looks up the tokens of all that hold other columns,
    and sends them its own. The gradient is summed over the tokens in the table's dtype.

    Args:
        table: The embedding.
        tokens: Token ids.
        layout: How they are split.
        dtype: Of the result.
    """
    embed_axes, vocab_axes = table.embed_axes, table.vocab_axes

    def run(part: Array, tokens: Array) -> Array:
        if embed_axes:
            tokens = jax.lax.all_gather(tokens, embed_axes, axis=0, tiled=True)
        if vocab_axes:
            tokens = tokens - jax.lax.axis_index(vocab_axes) * len(part)
        x: Any = _rows(part, tokens, jnp.dtype(dtype))
        if vocab_axes:
            x = jax.lax.psum(x, vocab_axes)
        if embed_axes:
            x = jax.lax.all_to_all(x, embed_axes, split_axis=0, concat_axis=2, tiled=True)
        return x

    specs = PartitionSpec(vocab_axes, embed_axes), PartitionSpec(TOKENS)
    x: Array = layout.by_tokens(run, in_specs=specs)(table.array, tokens)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    """Return rows of a table, and zeros for tokens that it does not have.

    A device has some rows: the others' are added by `psum`. So an id that no device has is zeros,
    too, without a gradient; those of rows and of requests are compared with the vocabulary where
    they are encoded, and once more before an update (`data.dataset.check_ids`).
    """
    tokens = jnp.where(tokens < 0, len(table), tokens)
    return table.astype(dtype).at[tokens].get(mode="fill", fill_value=0)


def _rows_forward(
    table: Array, tokens: Array, dtype: jnp.dtype
) -> tuple[Array, tuple[Array, Array]]:
    return _rows(table, tokens, dtype), (table, tokens)


def _rows_backward(
    dtype: jnp.dtype, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None]:
    del dtype
    table, tokens = saved
    tokens = jnp.where(tokens < 0, len(table), tokens)
    wide = cotangent.astype(table.dtype)
    return jnp.zeros_like(table).at[tokens].add(wide, mode="drop"), None


_rows.defvjp(_rows_forward, _rows_backward)

"""Products with the matrices of a layer: their biases, low-rank factors, and parts on a mesh."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.lora import factor_names
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.quantization import QuantizedMatrix, quantized_product
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import TOKENS, Layout


def linear(
    weights: Params, spec: ModelSpec, name: str, x: Float[Array, "R L ..."], *, inputs: int = 1
) -> Array:
    r"""Apply the projection `name` of a layer, $x W + b + \mathrm{scale}\,(x A) B$.

    The bias `{name}_bias` and the low-rank factors `{name}_lora_a` [in…, r] and `{name}_lora_b`
    [r, out…] (https://arxiv.org/abs/2106.09685) take part where `weights` holds them; the first may
    be that of another part of the same matrix. All are cast to the dtype of x.

    Args:
        weights: One layer's arrays.
        spec: The model; its `lora` gives the scale.
        name: Of the matrix W [in…, out…].
        x: Input; its last `inputs` dimensions are contracted.
        inputs: How many dimensions of W are inputs.

    Returns:
        The projection [R, L, out…].

    >>> spec = tiny_spec()
    >>> weights = {"up": jnp.ones((4, 6)), "up_bias": jnp.ones(6)}
    >>> linear(weights, spec, "up", jnp.ones((1, 1, 4)))[0, 0].tolist()
    [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    y = project(x, weights[name], inputs=inputs)
    if f"{name}_bias" in weights:
        y = y + weights[f"{name}_bias"].astype(x.dtype)
    if spec.lora is not None and f"{name}_lora_b" in weights:
        low, high = (weights[factor] for factor in factor_names(spec)[name])
        y = y + project(project(x, low, inputs=inputs), high) * spec.lora.scale
    return y


def adapted_matrix(weights: Params, spec: ModelSpec, name: str) -> Array:
    r"""Return the matrix that `linear` applies, $W + \mathrm{scale}\,A B$.

    >>> spec = tiny_spec()
    >>> adapted_matrix({"up": jnp.ones((4, 6))}, spec, "up").shape
    (4, 6)
    """
    if spec.lora is None or f"{name}_lora_b" not in weights:
        return weights[name]
    low, high = (weights[factor] for factor in factor_names(spec)[name])
    return weights[name] + jnp.tensordot(low, high, axes=1) * spec.lora.scale


@dataclass(frozen=True)
class Sharded:
    """A matrix of which devices hold parts, to be gathered by the product that takes it.

    Attributes:
        held: The matrix.
        home: Its layout in the product.
        keep: Whether the gathered matrix is kept for the backward pass, rather than gathered again.
            In a layer that is computed again, "again" begins with the backward pass of that layer,
            so a layer's matrices are kept, and never those of two layers.
    """

    held: Array
    home: NamedSharding
    keep: bool = False


def project(
    x: Float[Array, "R L ..."], matrix: Array | Sharded | QuantizedMatrix, *, inputs: int = 1
) -> Array:
    """Contract the last `inputs` dimensions of x with the first ones of a matrix.

    A matrix in float8 is multiplied by `quantized_product`. Another is cast to the dtype of x, and
    then gathered where it has to be; the backward pass gathers it again, unless it is to be kept.
    Its gradient is summed over the tokens in float32, also over those of other devices.

    It is one product of two flat matrices, which XLA's CPU backend computes and differentiates
    faster than the same contraction over rows of tokens.

    >>> project(jnp.ones((2, 3, 4, 5)), jnp.ones((4, 5, 7)), inputs=2).shape
    (2, 3, 7)
    """
    if isinstance(matrix, QuantizedMatrix):
        return quantized_product(x, matrix)
    if isinstance(matrix, Sharded):
        return _product(x, matrix.held, matrix.home, inputs, matrix.keep)
    return _product(x, matrix, None, inputs, False)


def _flat(
    x: Array, matrix: Array, home: NamedSharding | None, inputs: int
) -> tuple[Float[Array, "X D"], Float[Array, "D F"]]:
    """Return both factors flat, the matrix in the dtype of x and whole."""
    width = math.prod(matrix.shape[:inputs])
    narrow = matrix.astype(x.dtype)  # first, so that narrow numbers travel
    if home is not None:
        narrow = jax.lax.with_sharding_constraint(narrow, home)
    return x.reshape(-1, width), narrow.reshape(width, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(
    x: Float[Array, "R L ..."], matrix: Array, home: NamedSharding | None, inputs: int, keep: bool
) -> Array:
    return _product_forward(x, matrix, home, inputs, keep)[0]


def _product_forward(
    x: Array, matrix: Array, home: NamedSharding | None, inputs: int, keep: bool
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    # what is stored is x as it came: the products that share it then share one copy
    left, right = _flat(x, matrix, home, inputs)
    out = (left @ right).reshape(*x.shape[:2], *matrix.shape[inputs:])
    return out, (x, matrix, right if keep else None)


def _product_backward(
    home: NamedSharding | None,
    inputs: int,
    keep: bool,
    saved: tuple[Array, Array, Array | None],
    cotangent: Float[Array, "R L ..."],
) -> tuple[Array, Array]:
    x, matrix, kept = saved
    if kept is None:
        left, right = _flat(x, matrix, home, inputs)
    else:
        left, right = x.reshape(-1, len(kept)), kept
    flat = cotangent.reshape(len(left), -1)
    to_matrix = jnp.matmul(left.T, flat, preferred_element_type=jnp.float32)
    to_x = (flat @ right.T).reshape(x.shape)
    return to_x, to_matrix.reshape(matrix.shape).astype(matrix.dtype)


_product.defvjp(_product_forward, _product_backward)


def layer_gatherer(
    spec: ModelSpec, dtype: DTypeLike, layout: Layout, *, keep: bool
) -> Callable[[Params], Params]:
    """Return a function from one layer's weights to the same, ready to be used on a mesh.

    Matrices are gathered by the products that take them, and those of experts by
    `models.moe.mixture`. What else there is, a row per layer, is cast and gathered at once.

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

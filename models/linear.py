"""Products with the matrices of a layer: their biases, low-rank factors, and parts on a mesh."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.lora import factor_names
from jaxrl_llm.models.quantization import QuantizedMatrix, quantized_product
from jaxrl_llm.models.spec import ModelSpec


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
        return _product(x, matrix.held, _Product(matrix.home, inputs, matrix.keep))
    return _product(x, matrix, _Product(None, inputs))


class _Product(NamedTuple):
    """Where a matrix is multiplied, its input dimensions, and whether it is kept."""

    home: NamedSharding | None
    inputs: int
    keep: bool = False

    def flat(self, x: Array, matrix: Array) -> tuple[Float[Array, "X D"], Float[Array, "D F"]]:
        """Return both factors flat, the matrix in the dtype of x and whole."""
        width = math.prod(matrix.shape[: self.inputs])
        narrow = matrix.astype(x.dtype)  # first, so that narrow numbers travel
        if self.home is not None:
            narrow = jax.lax.with_sharding_constraint(narrow, self.home)
        return x.reshape(-1, width), narrow.reshape(width, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Float[Array, "R L ..."], matrix: Array, product: _Product) -> Array:
    return _product_forward(x, matrix, product)[0]


def _product_forward(
    x: Array, matrix: Array, product: _Product
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    # what is stored is x as it came: the products that share it then share one copy
    left, right = product.flat(x, matrix)
    out = (left @ right).reshape(*x.shape[:2], *matrix.shape[product.inputs :])
    return out, (x, matrix, right if product.keep else None)


def _product_backward(
    product: _Product, saved: tuple[Array, Array, Array | None], cotangent: Float[Array, "R L ..."]
) -> tuple[Array, Array]:
    x, matrix, kept = saved
    if kept is None:
        left, right = product.flat(x, matrix)
    else:
        left, right = x.reshape(-1, len(kept)), kept
    flat = cotangent.reshape(len(left), -1)
    to_matrix = jnp.matmul(left.T, flat, preferred_element_type=jnp.float32)
    to_x = (flat @ right.T).reshape(x.shape)
    return to_x, to_matrix.reshape(matrix.shape).astype(matrix.dtype)


_product.defvjp(_product_forward, _product_backward)

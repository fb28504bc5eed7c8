"""Layers' matrices in float8 for the engine: a scale per output channel, and their products.

W8A8: weights and activations are both float8_e4m3fn (https://arxiv.org/abs/2209.05433), so that a
GPU multiplies by its float8 tensor cores. Scales multiply the product and not the factors, because
XLA recognizes a product of float8 numbers only where nothing but one scalar stands before it.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, Params
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec

FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_MAX = 448.0
"""The largest float8_e4m3fn."""

PRECISE_AXES = {"routes", "delta_heads", "_one"}
"""Axes of the matrices that are never in float8: routers, DeltaNets and gates of one output."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix in float8, or the matrices of a stack of layers; or what is declared of them.

    Inputs come last, whatever their order in the matrix, as on Hopper the tensor cores' float8
    products want it.

    Attributes:
        values: [out… in…], of dtype float8_e4m3fn.
        scale: [out…], float32; an output channel's numbers are values times it.
    """

    values: Any
    scale: Any

    def __getitem__(self, layer: int) -> "QuantizedMatrix":
        """Return the matrix of one layer of a stack."""
        return QuantizedMatrix(self.values[layer], self.scale[layer])

    @property
    def inputs(self) -> int:
        """Return how many dimensions are inputs."""
        return len(self.values.shape) - len(self.scale.shape)


def declare_quantized(spec: ModelSpec) -> Declarations:
    """Declare a model's arrays as the engine holds them in float8.

    These are the matrices that `models.linear.linear` multiplies by. Routers, routed experts, the
    embedding, the head and latent attention's `kv_b`, which is not multiplied as a whole, stay; so
    do gates of one output, and a DeltaNet, whose state sums up what its inputs lose over all
    tokens.

    Args:
        spec: The model.

    Returns:
        `declare(spec)`, with a `QuantizedMatrix` of two declarations for each of those matrices.

    >>> declared = declare_quantized(tiny_spec(layers=3))["layers"]["query"]
    >>> declared.values.axes, declared.scale.shape
    (('layers', 'heads', 'head_dim', 'embed'), (3, 2, 2))
    """

    def quantized(path: tuple[Any, ...], decl: ArrayDecl) -> ArrayDecl | QuantizedMatrix:
        kept = (PRECISE_AXES | {"experts"}) & set(decl.axes)
        if not decl.is_stack or len(decl.hf_axes) != 2 or kept or path[-1].key == "kv_b":
            return decl
        sizes = dict(zip(decl.axes, decl.shape, strict=True))
        outputs, inputs = decl.hf_axes

        def reordered(axes: tuple[str, ...], hf_axes: tuple[tuple[str, ...], ...]) -> ArrayDecl:
            shape = tuple(sizes[axis] for axis in axes)
            return dataclasses.replace(decl, shape=shape, axes=axes, hf_axes=hf_axes, hf_part=None)

        return QuantizedMatrix(
            reordered((*decl.stacked, *outputs, *inputs), decl.hf_axes),
            reordered((*decl.stacked, *outputs), (outputs,)),
        )

    return jax.tree_util.tree_map_with_path(quantized, declare(spec))


def quantized_dtypes(declared: Declarations, dtypes: Any) -> Any:
    """Return the dtype of each array of `declare_quantized`, given those of the model's arrays."""

    def kinds(decl: Any, dtype: Any) -> Any:
        return QuantizedMatrix(FP8, np.dtype(np.float32)) if is_quantized(decl) else dtype

    return jax.tree.map(kinds, declared, dtypes, is_leaf=is_quantized)


def quantize_params(params: Params, declared: Declarations, dtypes: Any) -> Params:
    """Quantize a model's weights.

    Args:
        params: Of the model, without an adapter.
        declared: As `declare_quantized`.
        dtypes: Of the computation, nested as `params`; a matrix is rounded to its own first.

    Returns:
        A `QuantizedMatrix` where there is one in `declared`, and the other arrays as they came.
    """

    def quantized(decl: Any, matrix: Any, dtype: Any) -> Any:
        return quantize_stack(matrix, decl.inputs, dtype) if is_quantized(decl) else matrix

    return jax.tree.map(quantized, declared, params, dtypes, is_leaf=is_quantized)


def quantize_stack(
    stack: Float[Array, "layers ..."], inputs: int, dtype: DTypeLike
) -> QuantizedMatrix:
    """Quantize the matrices [in… out…] of a stack of layers, each rounded to a dtype first."""
    return jax.vmap(lambda matrix: quantize_matrix(matrix.astype(dtype), inputs))(stack)


def is_quantized(tree: Any) -> bool:
    """Tell whether a part of a tree is a matrix in float8."""
    return isinstance(tree, QuantizedMatrix)


def quantize_matrix(matrix: Float[Array, "..."], inputs: int = 1) -> QuantizedMatrix:
    r"""Quantize a matrix, each output channel by its largest number.

    $s_o = \max_i |W_{io}| / 448$ and $V_{oi} = \mathrm{e4m3}(W_{io} / s_o)$.

    Args:
        matrix: [in… out…].
        inputs: How many dimensions are inputs.

    >>> small = quantize_matrix(jnp.array([[1.0, 0.0], [-2.0, 0.0]]))
    >>> small.values.astype(float).tolist(), (small.scale * 448).tolist()
    ([[224.0, -448.0], [0.0, 0.0]], [2.0, 448.0])
    """
    outputs = matrix.ndim - inputs
    turned = jnp.moveaxis(matrix, range(inputs, matrix.ndim), range(outputs))
    values, scale = round_to_fp8(turned, tuple(range(outputs, matrix.ndim)))
    return QuantizedMatrix(values, scale.reshape(scale.shape[:outputs]))


def round_to_fp8(
    x: Float[Array, "..."], axes: tuple[int, ...]
) -> tuple[Array, Float32[Array, "..."]]:
    """Round to float8 by the largest number along some axes.

    Returns:
        The numbers and the scales, which have a size of 1 along the axes; 1 where all is 0.

    >>> numbers, scale = round_to_fp8(jnp.array([[1.0, -4.0]]), (1,))
    >>> numbers.astype(float).tolist(), scale.shape
    ([[112.0, -448.0]], (1, 1))
    """
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(axes, keepdims=True) * np.float32(1 / FP8_MAX)
    scale = jnp.where(scale > 0, scale, 1)
    return (wide / scale).astype(FP8), scale


def quantized_product(x: Float[Array, "R L ..."], matrix: QuantizedMatrix) -> Array:
    r"""Contract the last dimensions of x with the inputs of a matrix, both in float8.

    $y_{to} = \Big(\sum_i \mathrm{e4m3}(x_{ti} / a_t)\, V_{oi}\Big)\, a_t s_o$ with
    $a_t = \max_i |x_{ti}| / 448$: a scale per token and one per output channel. The sum is in
    float32; it is rounded to the dtype of x before it is scaled.

    >>> small = quantize_matrix(jnp.array([[1.0, 0.5], [-2.0, 1.0]]))
    >>> quantized_product(jnp.array([[[1.0, 0.0], [0.0, 4.0]]]), small).round(4).tolist()
    [[[1.0, 0.5], [-8.0, 4.0]]]
    """
    width = math.prod(x.shape[x.ndim - matrix.inputs :])
    numbers, steps = round_to_fp8(x.reshape(-1, width), (1,))
    product = jax.lax.dot_general(
        numbers,
        matrix.values.reshape(-1, width),
        (((1,), (1,)), ((), ())),
        preferred_element_type=x.dtype,
    )
    y = product.astype(jnp.float32) * steps * matrix.scale.reshape(-1)
    return y.astype(x.dtype).reshape(*x.shape[:2], *matrix.scale.shape)

"""Send tokens to experts on one device and back, without dropping any.

`grouped_matmul` is all that the experts know about their matrices, so a faster kernel is chosen
there.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.moe.grouped import multiply_groups, sum_outer_products
from jaxrl_llm.models.moe.routing import Routing


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["transposed"]
)
@dataclass(frozen=True)
class Interleaved:
    """Matrices of groups, with the axis of groups between those of rows and columns.

    So parts of them that several devices hold lie after each other once they are gathered.

    Attributes:
        array: The matrices [D E F].
        transposed: Whether rows are multiplied by the transposed matrices.
    """

    array: Any
    transposed: bool


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "M D"], matrices: Float[Array, "E D F"] | Interleaved, sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Multiply consecutive groups of rows by one matrix each: y[m] = x[m] @ matrices[group of m].

    In 16 bits on NVIDIA GPUs this is done by the kernels of `models.moe.grouped`. Elsewhere every
    group is padded to whole blocks of rows, and the blocks are one batched product with the
    gathered matrices. The work is then at most about 1.5 times that of the rows, and about three
    times the matrices are gathered. `jax.lax.ragged_dot` has no kernel on CPU and multiplies all
    rows by all matrices.

    The backward pass keeps the arguments only. The gradient of the matrices is summed in float32,
    whatever the dtype of `x`.

    Args:
        x: Rows, ordered by group.
        matrices: One matrix per group.
        sizes: Rows of each group. Where they sum to less than M, the rows after the last group have
            to be zeros.

    Returns:
        The products, in the dtype of `x`, to which the matrices are cast.

    >>> x, matrices = jnp.ones((3, 1)), jnp.array([[[1.0]], [[5.0]]])
    >>> grouped_matmul(x, matrices, jnp.array([2, 1]))[:, 0].tolist()
    [1.0, 1.0, 5.0]
    """
    return _products(x, matrices, sizes)


def _matmul_forward(x: Array, matrices: Any, sizes: Array) -> tuple[Array, tuple[Any, ...]]:
    return _products(x, matrices, sizes), (x, matrices, sizes)


def _matmul_backward(
    saved: tuple[Any, ...], gradient: Float[Array, "M F"]
) -> tuple[Array, Any, None]:
    x, matrices, sizes = saved
    to_x = _products(gradient, matrices, sizes, backward=True)
    if not isinstance(matrices, Interleaved):
        to_matrices = _by_platform(x.dtype, sum_outer_products, _blocked_sums)(x, gradient, sizes)
        return to_x, to_matrices.astype(matrices.dtype), None
    left, right = (gradient, x) if matrices.transposed else (x, gradient)
    kernel = functools.partial(sum_outer_products, between=True)
    blocked = functools.partial(_blocked_sums, between=True)
    total = _by_platform(x.dtype, kernel, blocked)(left, right, sizes)
    return to_x, Interleaved(total.astype(matrices.array.dtype), matrices.transposed), None


grouped_matmul.defvjp(_matmul_forward, _matmul_backward)


def _products(x: Array, matrices: Any, sizes: Array, *, backward: bool = False) -> Array:
    between = isinstance(matrices, Interleaved)
    array, transposed = (matrices.array, matrices.transposed) if between else (matrices, False)
    how = {"transposed": transposed != backward, "between": between}
    kernel, blocked = (functools.partial(f, **how) for f in (multiply_groups, _blocked_products))
    return _by_platform(x.dtype, kernel, blocked)(x, array.astype(x.dtype), sizes)


def _by_platform(
    dtype: Any, kernel: Callable[..., Array], blocked: Callable[..., Array]
) -> Callable[..., Any]:
    """Choose what computes: the kernel where a program is compiled for CUDA, in 16 bits."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return blocked
    return functools.partial(jax.lax.platform_dependent, cuda=kernel, default=blocked)


class _Blocks(NamedTuple):
    """Groups of rows that are padded to whole blocks.

    Attributes:
        slot: Of each row its place among the blocks' rows.
        owner: Of each block its group.
        size: Rows of a block.
    """

    slot: Int[Array, " M"]
    owner: Int[Array, " blocks"]
    size: int

    @staticmethod
    def of(sizes: Int[Array, " E"], rows: int) -> "_Blocks":
        """Cut groups into blocks."""
        groups = len(sizes)
        block = max(rows // (2 * groups) // 8 * 8, 8)
        blocks = (rows + min(groups, rows) * (block - 1)) // block  # the most that can be needed
        needed = -(-sizes // block)
        first_slot = (jnp.cumsum(needed) - needed) * block
        first_row = jnp.cumsum(sizes) - sizes
        group = jnp.repeat(jnp.arange(groups), sizes, total_repeat_length=rows)
        slot = first_slot[group] + jnp.arange(rows) - first_row[group]
        owner = jnp.repeat(jnp.arange(groups), needed, total_repeat_length=blocks)
        return _Blocks(slot, owner, block)

    def fill(self, x: Float[Array, "M D"]) -> Float[Array, "blocks size D"]:
        """Put rows into their blocks, and zeros beside them."""
        blocks = len(self.owner)
        padded = jnp.zeros((blocks * self.size, x.shape[1]), x.dtype)
        padded = padded.at[self.slot].set(x, unique_indices=True, indices_are_sorted=True)
        return padded.reshape(blocks, self.size, -1)


def _blocked_products(
    x: Array, matrices: Array, sizes: Array, *, transposed: bool, between: bool
) -> Array:
    blocks = _Blocks.of(sizes, len(x))
    matrices = jnp.swapaxes(matrices, 0, 1) if between else matrices
    own = matrices.at[blocks.owner].get(indices_are_sorted=True, mode="promise_in_bounds")
    pattern = "bsf,bdf->bsd" if transposed else "bsd,bdf->bsf"
    products = jnp.einsum(pattern, blocks.fill(x), own)
    return products.reshape(len(blocks.owner) * blocks.size, -1)[blocks.slot]


def _blocked_sums(
    x: Array, y: Array, sizes: Array, *, between: bool = False
) -> Float32[Array, "a b c"]:
    blocks = _Blocks.of(sizes, len(x))
    of_blocks = jnp.einsum(
        "bsd,bsf->bdf", blocks.fill(x), blocks.fill(y), preferred_element_type=jnp.float32
    )
    none = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), jnp.float32)
    total = none.at[blocks.owner].add(of_blocks, indices_are_sorted=True, mode="promise_in_bounds")
    return jnp.swapaxes(total, 0, 1) if between else total


def dispatch(
    x: Float[Array, "T D"],
    routing: Routing,
    experts: Callable[[Array, Array], Array],
) -> Float[Array, "T D"]:
    r"""Send each token to its experts and add what they return, $\sum_{e} w_e\, f_e(x)$.

    Tokens are sorted by expert, so no expert has a capacity and no token is dropped. Sorting and
    its inverse are gathers, in the backward pass too, so the result does not depend on the order
    in which a device adds.

    Args:
        x: Tokens.
        routing: Their experts and weights; the number of experts stands for none, of a token that
            is zeros.
        experts: `(rows [M D], sizes [E]) -> [M D]`, f of consecutive groups of rows, one per
            expert, with `sizes` rows each, and zeros of zeros after them.

    Returns:
        The weighted sums, taken in float32, in the dtype of `x`.

    >>> routing = Routing(jnp.array([[1, 0]]), jnp.array([[0.5, 0.25]]), jnp.ones((1, 2)) / 2)
    >>> dispatch(jnp.array([[4.0]]), routing, lambda rows, sizes: rows).tolist()
    [[3.0]]
    """
    tokens, top = routing.experts.shape
    choices = routing.experts.reshape(-1)
    order = jnp.argsort(choices)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(choices, length=routing.probabilities.shape[1])
    out = experts(take_or_zero(jnp.repeat(x, top, axis=0), order, inverse), sizes)
    returned = take_or_zero(out, inverse, order).reshape(tokens, top, -1)
    weighted = returned.astype(jnp.float32) * routing.weights[:, :, None]
    return weighted.sum(axis=1).astype(x.dtype)


@jax.custom_vjp
def take_or_zero(
    x: Float[Array, "N D"], index: Int[Array, " M"], inverse: Int[Array, " N"]
) -> Float[Array, "M D"]:
    """Gather rows, zeros where `index` is outside; the gradient is a gather by `inverse`.

    Args:
        x: Rows.
        index: For each result its row; no row twice.
        inverse: For each row its place in the result, outside where it has none.

    Returns:
        The rows x[index].

    >>> take_or_zero(jnp.array([[5.0], [6.0]]), jnp.array([1, 2]), jnp.array([2, 0])).tolist()
    [[6.0], [0.0]]
    """
    return x.at[index].get(mode="fill", fill_value=0)


def _take_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, Array]:
    return take_or_zero(x, index, inverse), inverse


def _take_backward(inverse: Array, gradient: Array) -> tuple[Array, None, None]:
    return gradient.at[inverse].get(mode="fill", fill_value=0), None, None


take_or_zero.defvjp(_take_forward, _take_backward)

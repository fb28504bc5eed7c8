"""Grouped products: consecutive groups of rows, each multiplied by a matrix of its own.

`grouped_matmul` is all that the experts know about their matrices. What computes it is told by
`GroupedKernels`: XLA on blocks of rows here, or `models.moe.grouped_triton`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


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


class GroupedKernels(NamedTuple):
    """What computes grouped products and their gradients.

    Attributes:
        multiply: `(x [M K], matrices, sizes [E], transposed=, between=) -> [M N]`, the products in
            the dtype of both; `between` says that the axis of groups is the matrices' second one.
        sum_outer_products: `(x [M K], y [M N], sizes [E], between=) -> [E K N]`, or [K E N], in
            float32: the sum of x^T y over the rows of each group.
    """

    multiply: Callable[..., Array]
    sum_outer_products: Callable[..., Array]


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
    # owners are repeated numbers of groups, so all are of one
    own = matrices.at[blocks.owner].get(indices_are_sorted=True, mode="promise_in_bounds")
    pattern = "bsf,bdf->bsd" if transposed else "bsd,bdf->bsf"
    products = jnp.einsum(pattern, blocks.fill(x), own)
    return products.reshape(len(blocks.owner) * blocks.size, -1)[blocks.slot]


def _blocked_sums(x: Array, y: Array, sizes: Array, *, between: bool) -> Float32[Array, "a b c"]:
    blocks = _Blocks.of(sizes, len(x))
    of_blocks = jnp.einsum(
        "bsd,bsf->bdf", blocks.fill(x), blocks.fill(y), preferred_element_type=jnp.float32
    )
    none = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), jnp.float32)
    total = none.at[blocks.owner].add(of_blocks, indices_are_sorted=True, mode="promise_in_bounds")
    return jnp.swapaxes(total, 0, 1) if between else total


BLOCKED = GroupedKernels(_blocked_products, _blocked_sums)
"""Groups padded to whole blocks of rows, and one batched product of the blocks with the gathered
matrices, by XLA on any platform. The work is at most about 1.5 times that of the rows, and about
three times the matrices are gathered."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x: Float[Array, "M D"],
    matrices: Float[Array, "E D F"] | Interleaved,
    sizes: Int[Array, " E"],
    kernels: GroupedKernels = BLOCKED,
) -> Float[Array, "M F"]:
    """Multiply consecutive groups of rows by one matrix each: y[m] = x[m] @ matrices[group of m].

    The backward pass keeps the arguments only. The gradient of the matrices is summed in float32,
    whatever the dtype of `x`. `jax.lax.ragged_dot` multiplies, without a kernel for it, all rows by
    all matrices.

    Args:
        x: Rows, ordered by group.
        matrices: One matrix per group.
        sizes: Rows of each group. Where they sum to less than M, the rows after the last group have
            to be zeros.
        kernels: What computes it.

    Returns:
        The products, in the dtype of `x`, to which the matrices are cast.

    >>> x, matrices = jnp.ones((3, 1)), jnp.array([[[1.0]], [[5.0]]])
    >>> grouped_matmul(x, matrices, jnp.array([2, 1]))[:, 0].tolist()
    [1.0, 1.0, 5.0]
    """
    return _products(kernels, x, matrices, sizes)


def _matmul_forward(
    x: Array, matrices: Any, sizes: Array, kernels: GroupedKernels
) -> tuple[Array, tuple[Any, ...]]:
    return _products(kernels, x, matrices, sizes), (x, matrices, sizes)


def _matmul_backward(
    kernels: GroupedKernels, saved: tuple[Any, ...], gradient: Float[Array, "M F"]
) -> tuple[Array, Any, None]:
    x, matrices, sizes = saved
    to_x = _products(kernels, gradient, matrices, sizes, backward=True)
    if not isinstance(matrices, Interleaved):
        total = kernels.sum_outer_products(x, gradient, sizes, between=False)
        return to_x, total.astype(matrices.dtype), None
    left, right = (gradient, x) if matrices.transposed else (x, gradient)
    total = kernels.sum_outer_products(left, right, sizes, between=True)
    return to_x, Interleaved(total.astype(matrices.array.dtype), matrices.transposed), None


grouped_matmul.defvjp(_matmul_forward, _matmul_backward)


def _products(
    kernels: GroupedKernels, x: Array, matrices: Any, sizes: Array, *, backward: bool = False
) -> Array:
    between = isinstance(matrices, Interleaved)
    array, transposed = (matrices.array, matrices.transposed) if between else (matrices, False)
    return kernels.multiply(
        x, array.astype(x.dtype), sizes, transposed=transposed != backward, between=between
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def group_rows(
    vectors: Float[Array, "E F"], sizes: Int[Array, " E"], rows: int
) -> Float[Array, "M F"]:
    """Return for each row of consecutive groups the vector of its group, as a bias of experts is.

    Its gradient is a product, so that it does not depend on the order in which a device adds.

    Args:
        vectors: One per group.
        sizes: Rows of each group; the rows after the last group get zeros.
        rows: Their number M.

    >>> group_rows(jnp.array([[1.0], [5.0]]), jnp.array([2, 1]), 4)[:, 0].tolist()
    [1.0, 1.0, 5.0, 0.0]
    """
    return vectors.at[_groups(sizes, rows)].get(mode="fill", fill_value=0)


def _groups(sizes: Int[Array, " E"], rows: int) -> Int[Array, " M"]:
    """Return the group of each row; E of those after the last one."""
    with_rest = jnp.append(sizes, rows - sizes.sum())
    return jnp.repeat(jnp.arange(len(sizes) + 1), with_rest, total_repeat_length=rows)


def _group_rows_forward(vectors: Array, sizes: Array, rows: int) -> tuple[Array, Array]:
    return group_rows(vectors, sizes, rows), sizes


def _group_rows_backward(
    rows: int, sizes: Array, gradient: Float[Array, "M F"]
) -> tuple[Array, None]:
    member = jax.nn.one_hot(_groups(sizes, rows), len(sizes), dtype=jnp.float32)
    precise = jax.lax.Precision.HIGHEST
    total = jnp.matmul(member.T, gradient.astype(jnp.float32), precision=precise)
    return total.astype(gradient.dtype), None


group_rows.defvjp(_group_rows_forward, _group_rows_backward)

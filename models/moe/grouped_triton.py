"""Kernels for grouped products on GPUs: no padded rows, no copied matrices, float32 gradients.

A tile of rows belongs to one group, and its program reads the group's matrix where it is, as
MegaBlocks does (https://arxiv.org/abs/2211.15841). They are written in Pallas for Triton, which jax
0.11 has deprecated; so `models.moe.grouped` alone imports this, where it is wanted.
`jax.lax.ragged_dot` is no such kernel: up to jax 0.10.2 XLA multiplies, on GPUs, all rows by all
matrices, and the gradient of the matrices remains so with cuDNN's fusions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.kernels import GroupedKernels

LEAST_WIDTH = 16
"""Of rows and columns: vectors of 16 numbers are what a tensor core takes."""


def cut_tiles(
    sizes: Int[Array, " E"], rows: int, tile: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"], Int[Array, " tiles"]]:
    """Cut each group into tiles of rows, the last of which may be shorter.

    Args:
        sizes: Rows of each group.
        rows: Their sum, or more: what comes after the last group is cut, too.
        tile: Rows of a tile.

    Returns:
        The group of each tile, E for the rows after the last group; its first row; and the row
        after the group's last, at most the first where there is no such tile.

    >>> group, start, _ = cut_tiles(jnp.array([3, 0, 1]), 5, 2)
    >>> group.tolist(), start.tolist()
    ([0, 0, 2, 3, 3, 3], [0, 2, 3, 4, 6, 8])
    """
    sizes = sizes.astype(jnp.int32)
    sizes = jnp.append(sizes, rows - sizes.sum(dtype=jnp.int32))
    groups = len(sizes)
    needed = -(-sizes // tile)
    most = rows // tile + min(groups, rows)
    group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), needed, total_repeat_length=most)
    stop = jnp.cumsum(sizes)
    number = jnp.arange(most, dtype=jnp.int32) - (jnp.cumsum(needed) - needed)[group]
    return group, (stop - sizes)[group] + number * tile, stop[group]


def multiply_groups(
    x: Float[Array, "M K"],
    matrices: Float[Array, "a b c"],
    sizes: Int[Array, " E"],
    *,
    transposed: bool = False,
    between: bool = False,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """Multiply consecutive groups of rows by one matrix each, on a GPU.

    Args:
        x: Rows, ordered by group.
        matrices: One per group, in the dtype of `x`: [E K N], or [E N K] if transposed.
        sizes: Rows of each group; they sum to at most M.
        transposed: Multiply by the transposed matrices.
        between: Whether the axis of groups is the second one, between the matrices' rows and
            columns, rather than the first.
        interpret: Run on any device, slowly.

    Returns:
        The products in the dtype of `x`, summed in float32; zeros for rows after the last group.

    >>> x, matrices = jnp.ones((3, 16)), jnp.stack([jnp.eye(16), 5 * jnp.eye(16)])
    >>> multiply = jax.jit(functools.partial(multiply_groups, interpret=True))
    >>> multiply(x, matrices, jnp.array([2, 1]))[:, 0].tolist()
    [1.0, 1.0, 5.0]
    """
    rows, inner = x.shape
    groups = matrices.shape[1 if between else 0]
    columns = matrices.size // (groups * inner)
    tile = _power(rows // groups, 128)  # few empty rows in one of a usual group
    size = _Block(tile, _power(columns, 128), _power(inner, 64), transposed, between)
    tiles = cut_tiles(sizes, rows, tile)
    run = pl.pallas_call(
        functools.partial(_multiply, size=size),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid=(pl.cdiv(columns, size.columns), len(tiles[0])),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="multiply_groups",
    )
    return run(x, matrices, *tiles)


def sum_outer_products(
    x: Float[Array, "M K"],
    y: Float[Array, "M N"],
    sizes: Int[Array, " E"],
    *,
    between: bool = False,
    interpret: bool = False,
) -> Float32[Array, "E K N"] | Float32[Array, "K E N"]:
    r"""Return $\sum_m x_m^\top y_m$ over the rows of each group, on a GPU.

    Args:
        x: Rows, ordered by group.
        y: Others, in the same order and dtype.
        sizes: Rows of each group; they sum to at most M.
        between: Whether the axis of groups is to be the second one.
        interpret: Run on any device, slowly.

    >>> x = jnp.ones((3, 16))
    >>> sum_outer_products(x, x, jnp.array([0, 3]), interpret=True)[:, 0, 0].tolist()
    [0.0, 3.0]
    """
    (rows, inner), columns, groups = x.shape, y.shape[1], len(sizes)
    tile = _power(rows // groups, 64)
    size = _Block(tile, _power(columns, 128), _power(inner, 128), False, between)
    stop = jnp.cumsum(sizes.astype(jnp.int32))
    run = pl.pallas_call(
        functools.partial(_sum_products, size=size),
        out_shape=jax.ShapeDtypeStruct(
            (inner, groups, columns) if between else (groups, inner, columns), jnp.float32
        ),
        grid=(groups, pl.cdiv(inner, size.inner), pl.cdiv(columns, size.columns)),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="sum_outer_products",
    )
    return run(x, y, stop - sizes.astype(jnp.int32), stop)


TRITON = GroupedKernels(multiply_groups, sum_outer_products)


class _Block(NamedTuple):
    """What a program takes at once: rows, columns and inner dimensions, and of which matrices."""

    rows: int
    columns: int
    inner: int
    transposed: bool
    between: bool

    def place(self, group: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
        """Return the place of a part of a group's matrix."""
        return (first, group, second) if self.between else (group, first, second)


def _power(width: int, most: int) -> int:
    """Return the power of two, up to `most`, that covers a width."""
    return min(max(1 << (width - 1).bit_length(), LEAST_WIDTH), most)


def _span(start: Any, length: int, stop: Any) -> tuple[Any, Array]:
    """Return a slice, and which of its places are before `stop`."""
    return pl.ds(start, length), start + jnp.arange(length) < stop


def _dot(a: Array, b: Array) -> Array:
    return triton.dot(a, b, allow_tf32=False)  # a choice for float32 only


def _multiply(
    x_ref: Any,
    matrices_ref: Any,
    group_ref: Any,
    start_ref: Any,
    stop_ref: Any,
    out_ref: Any,
    *,
    size: _Block,
) -> None:
    """Compute one tile of rows and columns of the products."""
    tile = pl.program_id(1)
    inner, columns, groups = x_ref.shape[1], out_ref.shape[1], matrices_ref.shape[size.between]
    group, start, stop = group_ref[tile], start_ref[tile], stop_ref[tile]
    width, in_width = _span(pl.program_id(0) * size.columns, size.columns, columns)
    own, in_group = _span(start, size.rows, stop)

    def add(step: Array, total: Array) -> Array:
        part, in_part = _span(step * size.inner, size.inner, inner)
        left = triton.load(
            x_ref.at[own, part], mask=in_group[:, None] & in_part[None, :], other=0.0
        )
        if size.transposed:
            mask = in_width[:, None] & in_part[None, :]
            right = triton.load(
                matrices_ref.at[size.place(group, width, part)], mask=mask, other=0.0
            ).T
        else:
            mask = in_part[:, None] & in_width[None, :]
            right = triton.load(
                matrices_ref.at[size.place(group, part, width)], mask=mask, other=0.0
            )
        return total + _dot(left, right)

    def store(total: Array) -> None:
        mask = in_group[:, None] & in_width[None, :]
        triton.store(out_ref.at[own, width], total.astype(out_ref.dtype), mask=mask)

    is_tile, none = start < stop, jnp.zeros((size.rows, size.columns), jnp.float32)

    @pl.when(is_tile & (group < groups))
    def _() -> None:
        store(jax.lax.fori_loop(0, pl.cdiv(inner, size.inner), add, none))

    @pl.when(is_tile & (group == groups))
    def _() -> None:
        store(none)


def _sum_products(
    x_ref: Any, y_ref: Any, start_ref: Any, stop_ref: Any, out_ref: Any, *, size: _Block
) -> None:
    """Compute one tile of a group's sum."""
    group = pl.program_id(0)
    start, stop = start_ref[group], stop_ref[group]
    inner, columns = x_ref.shape[1], y_ref.shape[1]
    height, in_height = _span(pl.program_id(1) * size.inner, size.inner, inner)
    width, in_width = _span(pl.program_id(2) * size.columns, size.columns, columns)

    def add(step: Array, total: Array) -> Array:
        own, in_group = _span(start + step * size.rows, size.rows, stop)
        mask = in_group[:, None] & in_height[None, :]
        left = triton.load(x_ref.at[own, height], mask=mask, other=0.0)
        mask = in_group[:, None] & in_width[None, :]
        right = triton.load(y_ref.at[own, width], mask=mask, other=0.0)
        return total + _dot(left.T, right)

    total = jnp.zeros((size.inner, size.columns), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(stop - start, size.rows), add, total)
    mask = in_height[:, None] & in_width[None, :]
    triton.store(out_ref.at[size.place(group, height, width)], total, mask=mask)

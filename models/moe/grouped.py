"""Grouped products: consecutive groups of rows, each multiplied by a matrix of its own.

`grouped_matmul` is all that the experts know about their matrices. What computes it is told by
`GroupedKernels`: XLA on blocks of rows here, or `models.moe.grouped_triton`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.kernels import (
    DeviceInfo,
    GroupedKernels,
    KernelChoice,
    Trial,
    device_objection,
    try_kernel,
)
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

LEAST_CAPABILITY = (8, 0)  # Ampere: older GPUs have no bfloat16
TRIED = (([3, 0, 1, 9], 3), ([150, 0, 290, 1], 71))
"""Rows of each group, and rows after the last one, in the smallest and in the largest tiles."""

TOLERANCE = 0.01
"""Most that a row of a result may be off in 16 bits; rounding it makes at most 2^-8, 0.4 %."""


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
    >>> jax.jit(grouped_matmul)(x, matrices, jnp.array([2, 1]))[:, 0].tolist()
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


def grouped_widths(spec: ModelSpec, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return by what the experts of a model multiply on a device of a layout.

    Args:
        spec: A model with experts.
        layout: Where it runs.

    Returns:
        Inner width and columns of each kind of matrix.

    >>> from jaxrl_llm.models.moe.spec import MoeSpec
    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> spec = tiny_spec(hidden_size=8, moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6))
    >>> grouped_widths(spec, Layout(make_mesh({}, jax.devices()[:1])))
    ((8, 6), (6, 8))
    """
    assert spec.moe is not None, "expected a model with experts"
    embed, whole, tensor = spec.hidden_size, spec.moe.ff_width, layout.mesh.shape["tensor"]
    width = whole // tensor if whole % tensor == 0 else whole
    widths = [(embed, width), (width, embed)]
    if spec.lora is not None:
        rank, targets = spec.lora.rank, spec.lora.targets
        if {"expert_gate", "expert_up"} & set(targets):
            widths += [(embed, rank), (rank, width)]
        if "expert_down" in targets:
            widths += [(width, rank), (rank, embed)]
    return tuple(dict.fromkeys(widths))


def grouped_objection(dtype: DTypeLike, device: DeviceInfo) -> str | None:
    """Return why the kernels can't be used, or None if nothing speaks against trying them.

    >>> grouped_objection("float32", DeviceInfo("cuda", (9, 0), (0, 10, 2)))
    'the compute dtype is float32, they need bfloat16 or float16'
    """
    if against := device_objection(device, LEAST_CAPABILITY, "Ampere", verb="they need"):
        return against
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the compute dtype is {jnp.dtype(dtype)}, they need bfloat16 or float16"
    return None


def grouped_difference(
    kernels: GroupedKernels,
    widths: Sequence[tuple[int, int]],
    dtype: DTypeLike,
    *,
    is_batched: bool,
) -> float:
    r"""Return how far kernels are off on a few groups of random rows, forward and backward.

    Groups have no row, one, or several tiles of them; rows of zeros come after the last one. The
    matrices lie after each other and interleaved. With rows $a_i$ of the products, and of both
    gradients, and $b_i$ of XLA's in float32, it is the largest
    $\lVert a_i - b_i \rVert / \max(\lVert b_i \rVert, \mathrm{rms}(b))$.

    Args:
        kernels: What is tried.
        widths: Inner width and columns of the matrices to try them with.
        dtype: Of the rows; XLA gets the same numbers in float32.
        is_batched: Whether products are a batch of one, as those of the layers of a stage.

    >>> grouped_difference(BLOCKED, [(4, 6)], "float32", is_batched=False)
    0.0
    """
    return max(
        _furthest(kernels, own, rows, after, dtype, is_batched=is_batched)
        for own in widths
        for rows, after in TRIED
    )


def _furthest(
    kernels: GroupedKernels,
    widths: tuple[int, int],
    rows: Sequence[int],
    after: int,
    dtype: DTypeLike,
    *,
    is_batched: bool,
) -> float:
    total, sizes = sum(rows) + after, jnp.array(rows)
    inner, columns = widths
    shapes = (total, inner), (total, columns), (len(rows), inner, columns)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, y, matrices = (
        jax.random.normal(key, shape).astype(dtype).astype(jnp.float32)
        for key, shape in zip(keys, shapes, strict=True)
    )
    x, y = (a.at[total - after :].set(0.0) for a in (x, y))

    def results(kernels: GroupedKernels, dtype: DTypeLike) -> list[Float32[Array, "..."]]:
        @jax.jit
        def run(x: Array, y: Array, matrices: Array) -> list[Array]:
            every = []
            for given in (
                matrices,
                Interleaved(jnp.swapaxes(matrices, 0, 1), transposed=False),
                Interleaved(jnp.moveaxis(matrices, 2, 0), transposed=True),
            ):
                products, back = jax.vjp(
                    lambda x, matrices: grouped_matmul(x, matrices, sizes, kernels),
                    x.astype(dtype),
                    given,
                )
                every += [products, *jax.tree.leaves(back(y.astype(dtype)))]
            return [a.astype(jnp.float32) for a in every]

        if not is_batched:
            return run(x, y, matrices)
        return [a[0] for a in jax.vmap(run)(x[None], y[None], matrices[None])]

    with jax.default_matmul_precision("float32"):
        expected = results(BLOCKED, jnp.float32)
    return max(map(_off, results(kernels, dtype), expected))


def _off(got: Float32[Array, "... n"], expected: Float32[Array, "... n"]) -> float:
    size, off = (jnp.sqrt(jnp.square(a).sum(-1)) for a in (expected, got - expected))
    return float(jnp.max(off / jnp.maximum(size, jnp.sqrt(jnp.mean(jnp.square(size))))))


def choose_grouped_kernels(
    asked: str,
    spec: ModelSpec,
    layout: Layout,
    dtype: DTypeLike,
    *,
    device: DeviceInfo,
    kernels: GroupedKernels | None = None,
) -> KernelChoice:
    """Decide how a model with experts multiplies their rows.

    Args:
        asked: xla, triton, or auto: triton where it is possible.
        spec: The model.
        layout: Where it runs.
        dtype: Of the computation.
        device: The devices. Where they are not here the kernels are taken untried.
        kernels: What is tried; None: those of `models.moe.grouped_triton`.

    Raises:
        ValueError: triton is asked for and not possible.

    >>> from jaxrl_llm.models.moe.spec import MoeSpec
    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> spec = tiny_spec(moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6))
    >>> layout, cpu = Layout(make_mesh({}, jax.devices()[:1])), DeviceInfo("cpu", (), (0, 10, 2))
    >>> choose_grouped_kernels("auto", spec, layout, "bfloat16", device=cpu)
    KernelChoice(name='xla', reason='the devices are cpu, not cuda', kernel=None)
    """
    if asked == "xla":
        return KernelChoice("xla", "it was asked for")

    def load() -> Any:
        if kernels is not None:
            return kernels
        # not above: a jax to come will have no Pallas for Triton
        from jaxrl_llm.models.moe.grouped_triton import TRITON

        return TRITON

    if against := grouped_objection(dtype, device):
        choice = KernelChoice("xla", against)
    else:
        untried = "compiled for devices that are not here, so not tried"
        choice = try_kernel(
            "triton",
            load,
            lambda kernels: grouped_difference(
                kernels, grouped_widths(spec, layout), dtype, is_batched=layout.stages > 1
            ),
            Trial(TOLERANCE, "the kernels", "their results", "a row's"),
            untried=None if device.is_here else untried,
        )
    if asked == "triton" and choice.name != "triton":
        raise ValueError(
            f"the kernels for products of experts can't be used: {choice.reason}; "
            "expected auto or xla"
        )
    return choice

"""Whether rows of experts are multiplied by the kernels for Triton.

As `models.kernels` decides for attention: the kernels are taken where nothing speaks against them
and they have just agreed with XLA's products on the device.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from jaxrl_llm.models.kernels import DeviceInfo
from jaxrl_llm.models.moe.grouped import BLOCKED, GroupedKernels, Interleaved, grouped_matmul
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

LEAST_CAPABILITY = (8, 0)  # Ampere: older GPUs have no bfloat16
TRIED = (([3, 0, 1, 9], 3), ([150, 0, 290, 1], 71))
"""Rows of each group, and rows after the last one, in the smallest and in the largest tiles."""

TOLERANCE = 0.01
"""Most that a row of a result may be off in 16 bits; rounding it makes at most 2^-8, 0.4 %."""


class GroupedShapes(NamedTuple):
    """The matrices by which experts multiply rows on one device.

    Attributes:
        widths: Inner width and columns of each kind of matrix.
        is_batched: Whether the products of a stage's layers are a batch of one.
    """

    widths: tuple[tuple[int, int], ...]
    is_batched: bool


class GroupedChoice(NamedTuple):
    """How rows of experts are multiplied in a run.

    Attributes:
        name: triton or xla.
        reason: Why, in words.
        kernels: What computes it; None: XLA on blocks of rows.
    """

    name: Literal["triton", "xla"]
    reason: str
    kernels: GroupedKernels | None = None


def grouped_shapes(spec: ModelSpec, layout: Layout) -> GroupedShapes:
    """Return by what the experts of a model multiply on a device of a layout.

    Args:
        spec: A model with experts.
        layout: Where it runs.

    >>> from jaxrl_llm.models.moe.spec import MoeSpec
    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> spec = tiny_spec(hidden_size=8, moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6))
    >>> grouped_shapes(spec, Layout(make_mesh({}, jax.devices()[:1]))).widths
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
    return GroupedShapes(tuple(dict.fromkeys(widths)), layout.stages > 1)


def grouped_objection(dtype: DTypeLike, device: DeviceInfo) -> str | None:
    """Return why the kernels can't be used, or None if nothing speaks against trying them.

    >>> grouped_objection("float32", DeviceInfo("cuda", (9, 0), (0, 10, 2)))
    'the compute dtype is float32, they need bfloat16 or float16'
    """
    capability, least = (".".join(map(str, x)) for x in (device.capability, LEAST_CAPABILITY))
    reasons = {
        f"the devices are {device.platform}, not cuda": device.platform != "cuda",
        f"compute capability {capability}, they need {least} (Ampere) or later": (
            device.capability < LEAST_CAPABILITY
        ),
        f"the compute dtype is {jnp.dtype(dtype)}, they need bfloat16 or float16": (
            jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def grouped_difference(kernels: GroupedKernels, shapes: GroupedShapes, dtype: DTypeLike) -> float:
    r"""Return how far kernels are off on a few groups of random rows, forward and backward.

    Groups have no row, one, or several tiles of them; rows of zeros come after the last one. The
    matrices lie after each other and interleaved. With rows $a_i$ of the products, and of both
    gradients, and $b_i$ of XLA's in float32, it is the largest
    $\lVert a_i - b_i \rVert / \max(\lVert b_i \rVert, \mathrm{rms}(b))$.

    Args:
        kernels: What is tried.
        shapes: Sizes of the matrices to try them with.
        dtype: Of the rows; XLA gets the same numbers in float32.

    >>> grouped_difference(BLOCKED, GroupedShapes(((4, 6),), is_batched=False), "float32")
    0.0
    """
    return max(
        _furthest(kernels, widths, rows, after, dtype, is_batched=shapes.is_batched)
        for widths in shapes.widths
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
) -> GroupedChoice:
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
    GroupedChoice(name='xla', reason='the devices are cpu, not cuda', kernels=None)
    """
    if asked == "xla":
        return GroupedChoice("xla", "it was asked for")
    against = grouped_objection(dtype, device)
    agreed = "compiled for devices that are not here, so not tried"
    if against is None:
        try:
            if kernels is None:  # not above: a jax to come will have no Pallas for Triton
                from jaxrl_llm.models.moe.grouped_triton import TRITON

                kernels = TRITON
            shapes = grouped_shapes(spec, layout)
            if device.is_here:
                against, agreed = _tried(kernels, shapes, dtype)
        except Exception as error:  # whatever stops a kernel speaks against it
            message = (str(error).strip() or "no message").splitlines()[0]
            against = f"the kernels failed: {type(error).__name__}: {message}"
    if against is None:
        return GroupedChoice("triton", agreed, kernels)
    if asked == "triton":
        raise ValueError(
            f"the kernels for products of experts can't be used: {against}; expected auto or xla"
        )
    return GroupedChoice("xla", against)


def _tried(
    kernels: GroupedKernels, shapes: GroupedShapes, dtype: DTypeLike
) -> tuple[str | None, str]:
    """Return what speaks against kernels that have run, or else what speaks for them."""
    off = grouped_difference(kernels, shapes, dtype)
    by = f"their results differ from XLA's in float32 by up to {off:.2%} of a row's"
    if not off <= TOLERANCE:
        return f"{by}, forward or backward; at most {TOLERANCE:.0%} is rounding", ""
    return None, by

"""Attention over rows that several devices share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import PLAIN, Attending, attend
from jaxrl_llm.models.ring import attend_in_ring
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import BATCH


def attend_pieces(
    q: Float[Array, "P l N H"],
    k: Float[Array, "P l K H"],
    v: Float[Array, "P l K H"],
    segment_ids: Int[Array, "P l"],
    options: Attending = PLAIN,
    *,
    layout: Layout,
) -> Float[Array, "P l N H"]:
    """Attend within rows of which every device holds a piece; `attend` says the equation.

    The collectives follow from where queries, keys and values have to be: see `Layout`.

    Args:
        q: Queries of pieces, c after each other from one row.
        k: Keys.
        v: Values.
        segment_ids: As for `attend`, unique in a row.
        options: Scale, window, soft-cap and sinks of the scores.
        layout: How rows are split, and the kernel that attends on each device, if any.

    Returns:
        The mixed values of the pieces.

    Raises:
        ValueError: The heads can't be split over the `tensor` and `context` axes, or a kernel, or
            what is not causal, is to attend in a ring; or devices share rows, or have a kernel,
            where tokens attend to some ahead of them.

    >>> from jaxrl_llm.sharding.mesh import make_mesh
    >>> x, one = jnp.ones((1, 3, 2, 4)), make_mesh({}, jax.devices()[:1])
    >>> attend_pieces(x, x, x, jnp.ones((1, 3), jnp.int32), layout=Layout(one)).shape
    (1, 3, 2, 4)
    """
    _check_ahead(options, layout)
    if layout.pieces == 1:
        if layout.kernel is not None:
            return _on_each(layout, "tensor", options)(q, k, v, segment_ids, options.sinks)
        return attend(q, k, v, segment_ids, options, longest=layout.longest)
    q, k, v, segment_ids = map(layout.merge_context, (q, k, v, segment_ids))
    if layout.context == "ring":
        return _in_ring(q, k, v, segment_ids, options, layout)
    if layout.context == "heads":
        k, v = _repeated(q, k, v, layout)
        heads = layout.sharding(BATCH, None, ("tensor", "context"), None)
        q, k, v = (jax.lax.with_sharding_constraint(x, heads) for x in (q, k, v))
    else:
        whole = layout.sharding(BATCH, None, "tensor", None)
        k, v = (jax.lax.with_sharding_constraint(x, whole) for x in (k, v))
        q = jax.lax.with_sharding_constraint(q, layout.sharding(BATCH, "context", "tensor", None))
    segment_ids = jax.lax.with_sharding_constraint(segment_ids, layout.sharding(BATCH, None))
    if layout.kernel is not None:
        by = _on_each(layout, ("tensor", "context"), options)
        mixed = by(q, k, v, segment_ids, options.sinks)
    else:
        in_blocks = layout.context == "heads"
        longest = layout.longest if in_blocks else None
        mixed = attend(q, k, v, segment_ids, options, longest=longest, in_blocks=in_blocks)
    own = layout.sharding(BATCH, "context", "tensor", None)
    return layout.split_context(jax.lax.with_sharding_constraint(mixed, own))


def _in_ring(
    q: Array, k: Array, v: Array, segment_ids: Array, options: Attending, layout: Layout
) -> Array:
    if layout.kernel is not None:
        raise ValueError("a kernel can't attend in a ring; expected none, or context by heads")
    if not options.causal:
        raise ValueError("attention in a ring is causal; expected context by heads or keys")
    k, v = _repeated(q, k, v, layout)
    mixed = attend_in_ring(q, k, v, segment_ids, options, layout=layout)
    return layout.split_context(mixed)


def _check_ahead(options: Attending, layout: Layout) -> None:
    if options.ahead is not None and (layout.pieces > 1 or layout.kernel is not None):
        raise ValueError(
            "tokens of an image attend to those after them: expected rows that no devices share "
            f"and no kernel, got context={layout.pieces} and {layout.kernel}"
        )


def _on_each(layout: Layout, heads: Any, options: Attending) -> Any:
    """Let each device attend to its rows with its heads; XLA can't divide a kernel itself."""
    kernel, rows = layout.kernel, PartitionSpec(BATCH)
    assert kernel is not None, "attend_pieces asked"
    mixed = PartitionSpec(BATCH, None, heads)

    def attend_part(q: Array, k: Array, v: Array, segment_ids: Array, sinks: Any) -> Array:
        return kernel(q, k, v, segment_ids, options._replace(sinks=sinks))

    return jax.shard_map(
        attend_part,
        mesh=layout.mesh,
        in_specs=(mixed, mixed, mixed, rows, PartitionSpec(heads)),
        out_specs=mixed,
        check_vma=False,  # a kernel does not say along which axes its results vary
    )


def _repeated(q: Array, k: Array, v: Array, layout: Layout) -> tuple[Array, Array]:
    """Repeat keys and values until every device has as many of their heads."""
    axes = ("tensor",) if layout.context == "ring" else ("tensor", "context")
    parts = math.prod(layout.mesh.shape[axis] for axis in axes)
    queries, held = q.shape[2], k.shape[2]
    for times in range(1, queries // held + 1):
        if held * times % parts == 0 and queries % (held * times) == 0:
            return jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2)
    raise ValueError(
        f"{queries} heads can't be split over "
        f"{' times '.join(f'{axis}={layout.mesh.shape[axis]}' for axis in axes)} devices; expected "
        f"a divisor of {queries}{' as their product' * (len(axes) - 1)}, or context by keys"
    )

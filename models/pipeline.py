"""Layers in stages, one per device, through which micro-batches of rows pass one after another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.sharding.layout import TOKENS, Layout
from jaxrl_llm.sharding.mesh import batch_shards

Step = Callable[[Array, Any, Any], tuple[Array, Any]]


def run_stages(
    step: Step, x: Float[Array, "P l D"], rows: Any, stack: Any, layout: Layout
) -> tuple[Float[Array, "P l D"], Any]:
    """Scan a stack of layers of which every stage holds a run.

    The rows are split into as many micro-batches as one data shard has rows. At each tick all
    stages work, on a micro-batch each, and hand it on (GPipe, https://arxiv.org/abs/1811.06965):
    with M micro-batches and S stages the share (S - 1) / (M + S - 1) of the work is idle. While a
    stage waits it works on padding, which reports nothing.

    Args:
        step: `(x, rows, layer) -> (x, report)`; reports are sums over tokens that are not padding.
        x: Embedded pieces of rows.
        rows: What the layers know of them, arrays whose first axis is P; zeros mean padding.
        stack: The layers' weights, each with a leading axis of layers.
        layout: How rows and layers are split.

    Returns:
        The pieces after the last layer, and the reports, stacked over the layers.

    Raises:
        ValueError: The stages can't share the layers evenly.

    >>> from jaxrl_llm.sharding.mesh import make_mesh
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> step = lambda x, rows, layer: (x * layer, rows.sum())
    >>> rows = jnp.ones((2, 1))
    >>> x, report = run_stages(step, jnp.ones((2, 1, 1)), rows, jnp.array([2.0, 3.0]), layout)
    >>> x.ravel().tolist(), report.tolist()
    ([6.0, 6.0], [2.0, 2.0])
    """
    layers, stages = jax.tree.leaves(stack)[0].shape[0], layout.stages
    if layers % stages:
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(f"stage={stages} can't share {layers} layers; expected one of {divisors}")

    def run(stack: Any, x: Array, rows: Any) -> tuple[Array, Any]:
        return jax.lax.scan(lambda x, layer: step(x, rows, layer), x, stack)

    by_stage = jax.tree.map(lambda w: w.reshape(stages, -1, *w.shape[1:]), stack)
    by_stage = _on_stages(by_stage, layout)
    every_stage = jax.vmap(run, spmd_axis_name="stage")

    def tick(held: tuple[Array, Any], entering: tuple[Array, Any]) -> tuple[Any, Any]:
        shifted = jax.tree.map(
            lambda new, old: jnp.concatenate([new[None], old[:-1]]), entering, held
        )
        x, rows = _on_stages(shifted, layout, TOKENS)
        x, report = every_stage(by_stage, x, rows)
        return (x, rows), (x[-1], report)

    entering = jax.tree.map(lambda a: _micro_batches(a, layout), (x, rows))
    empty = jax.tree.map(lambda a: jnp.zeros((stages, *a.shape[1:]), a.dtype), entering)
    _, (left, reports) = jax.lax.scan(tick, empty, entering)
    left = left[stages - 1 :].reshape(-1, batch_shards(layout.mesh), layout.pieces, *x.shape[1:])
    left = left.swapaxes(0, 1).reshape(x.shape)
    summed = jax.tree.map(lambda r: r.sum(0).reshape(layers, *r.shape[3:]), reports)
    return layout.constrain(left), summed


def _on_stages(tree: Any, layout: Layout, *more: Any) -> Any:
    """Keep the first axis of arrays split over the stages, and further axes as told."""
    sharding = layout.sharding("stage", *more)
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, sharding), tree)


def _micro_batches(a: Array, layout: Layout) -> Array:
    """Cut pieces of rows into micro-batches, one a tick, and padding while the last ones leave."""
    shards, pieces = batch_shards(layout.mesh), layout.pieces
    micro = a.shape[0] // (shards * pieces)
    parts = a.reshape(shards, micro, pieces, *a.shape[1:]).swapaxes(0, 1)
    parts = parts.reshape(micro, shards * pieces, *a.shape[1:])
    return jnp.pad(parts, [(0, layout.stages - 1)] + [(0, 0)] * (parts.ndim - 1))

"""Passes without gradients: what a model says of a batch, in micro-batches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.compilation import abstract
from jaxrl_llm.compiler_options import Task, compiler_options
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.lora import combine_params
from jaxrl_llm.models.moe.routing import NO_ROUTE, RouterStats, balance_weights
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.sharding.layout import replicated
from jaxrl_llm.training.forward import (
    ForwardConfig,
    hidden_states_and_routes,
    router_totals,
    token_fields,
    token_stats_from_hidden,
    value_fields,
)
from jaxrl_llm.training.microbatches import (
    Fields,
    MicroBatchStep,
    merge_microbatches,
)
from jaxrl_llm.types import ROUTES, Batch, Rows


def logprob_pass(
    model: ForwardConfig,
    shape: RowShape,
    mesh: Mesh,
    names: tuple[str, ...] = ("logprobs", "entropy"),
    *,
    frozen: Params | None = None,
) -> "Inference":
    """Return a function from parameters and a batch to some of its TokenStats [B T], by name.

    Args:
        model: how the model is run. If it replays choices of experts, it takes those of a batch
            that has such.
        shape: of the micro-batches.
        mesh: the devices.
        names: of TokenStats; and `ROUTES` where it is to report the experts of each token, if the
            model replays.
        frozen: the parameters that are not in those given at each call.
    """

    def infer(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        everything = combine_params(params, rest)
        if ROUTES not in names:
            stats = token_fields(everything, rows, model, mesh)._asdict()
            return {name: stats[name] for name in names}
        hidden, routes = hidden_states_and_routes(everything, rows, model, mesh)
        stats = token_stats_from_hidden(everything, hidden, rows, model, mesh)._asdict()
        return {name: (stats | {ROUTES: routes})[name] for name in names}

    return Inference(infer, shape, mesh, frozen or {}, model)


def value_pass(model: ForwardConfig, shape: RowShape, mesh: Mesh) -> "Inference":
    """Return a function from a critic's parameters and a batch to its `values` [B T]."""

    def infer(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        return {"values": value_fields(combine_params(params, rest), rows, model, mesh)}

    return Inference(infer, shape, mesh, {}, model)


class Inference:
    """A pass without gradients: (params, batch) -> what a model says of each token [B T], by name.

    Args:
        compute: (params, frozen, rows) -> the same of a micro-batch [b T].
        shape: of the micro-batches.
        mesh: the devices.
        frozen: the parameters that are not in those given at each call.
        model: how the model is run, which says what rows hold for it beside tokens.

    Attributes:
        run: `compute`, jitted.
        step: `run` over micro-batches.
    """

    def __init__(
        self,
        compute: Callable[[Params, Params, Rows], dict[str, Array]],
        shape: RowShape,
        mesh: Mesh,
        frozen: Params,
        model: ForwardConfig,
    ) -> None:
        """Compile nothing yet."""
        options = compiler_options(Task.TRAIN, mesh.devices.flat)
        self.run: Any = jax.jit(compute, compiler_options=options)
        self.step = MicroBatchStep(
            "log-probs", self.run, shape, mesh, place=2, visuals=model.visuals
        )
        self._frozen, self._route_shape = frozen, model.route_shape

    def compile_ahead(self, params: Params, rows_like: Callable[[RowShape], Rows]) -> None:
        """Begin to compile what the first batch needs in all likelihood.

        Args:
            params: that it will be given, or their shapes.
            rows_like: bucket -> rows as shapes.
        """
        like = abstract((params, self._frozen))
        self.step.begin(like[0], lambda bucket: (*like, rows_like(bucket)))

    def __call__(self, params: Params, batch: Batch) -> dict[str, np.ndarray]:
        """Run over a batch, in micro-batches."""
        marks = ()
        if self._route_shape is not None:
            batch, marks = with_routes(batch, self._route_shape), (ROUTES,)
        parts = (
            (indices, self.step(params, self._frozen, micro.rows))
            for indices, micro in self.step.microbatches(batch, marks)
        )
        return merge_microbatches(parts, batch)


def with_routes(batch: Batch, shape: RouteShape) -> Batch:
    """Return a batch with choices of experts: its own, or none of any token."""
    if ROUTES in batch.fields:
        return batch
    each = *batch.tokens.shape, shape.layers, shape.top
    none = np.asarray(NO_ROUTE, shape.dtype)
    return batch.add(**{ROUTES: np.broadcast_to(none, each)})  # which takes no memory


def balance_pass(
    model: ForwardConfig, shape: RowShape, mesh: Mesh, frozen: Params
) -> Callable[[Params, Batch], Fields]:
    """Return a function from parameters and a mini-batch to the coefficients of its balance loss.

    They are the constant part of `load_balance_loss` times the model's coefficient. Without experts
    or with a coefficient of 0 there are none, and nothing is run.
    """
    everywhere = replicated(mesh)
    options = compiler_options(Task.TRAIN, mesh.devices.flat)

    @functools.partial(jax.jit, out_shardings=everywhere, compiler_options=options)
    def count(params: Params, rest: Params, rows: Rows) -> RouterStats:
        return router_totals(combine_params(params, rest), rows, model, mesh)

    step = MicroBatchStep("experts' load", count, shape, mesh, place=2, visuals=model.visuals)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def weigh(total: RouterStats) -> Array:
        return model.router_loss_coef * balance_weights(total)

    def find(params: Params, batch: Batch) -> Fields:
        if not model.model.has_router or model.router_loss_coef == 0:
            return {}
        cut = step.microbatches(batch, model.marks)
        counted = (step(params, frozen, micro.rows) for _, micro in cut)
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), counted)
        return {"balance_weights": weigh(total)}

    return find

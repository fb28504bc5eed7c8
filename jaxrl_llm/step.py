"""The jitted steps: log-probs of a batch, and updates by accumulated gradients.

A mini-batch is cut into micro-batches of packed rows. The reduction's weights are computed over
the whole mini-batch first, so a micro-batch adds `sum(weights * loss)` and the sum over them is
exactly the mini-batch's loss, however it is cut. The load-balance loss of experts is a product of
means over the mini-batch. One of them, how often each expert is chosen, has no gradient: a pass
before the update counts it, and with that held constant this loss is such a sum too.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import RowShape, pack_rows, plan
from jaxrl_llm.dataflow import describe
from jaxrl_llm.functions import RunError
from jaxrl_llm.models.lora import join
from jaxrl_llm.models.moe import (
    RouterStats,
    balance_weights,
    load_balance_loss,
    router_metrics,
    update_bias,
)
from jaxrl_llm.objective import (
    Fields,
    Forward,
    LossError,
    MicroBatch,
    Objective,
    Params,
    per_token,
    router_totals,
    token_fields,
    value_fields,
)
from jaxrl_llm.sharding import processes
from jaxrl_llm.sharding.mesh import over_batch, replicated
from jaxrl_llm.types import Batch, Rows


class TrainState(NamedTuple):
    """What an update changes.

    Attributes:
        params: float32 master weights of what is trained: the whole model, or its adapter.
        opt_state: the optimizer's.
        updates: updates that were applied.
        skipped: updates in a row that were skipped because the gradient was not finite.
    """

    params: Params
    opt_state: Any
    updates: jax.Array
    skipped: jax.Array


class TrainingError(RunError):
    """A run that must not go on."""


def microbatches(
    batch: Batch, names: set[str], shape: RowShape, mesh: Mesh
) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """Cut a batch into micro-batches on the devices, each with the indices of its sequences.

    Raises:
        ValueError: a batch wider than a row.
    """
    if batch.tokens.shape[1] > shape.length:
        raise ValueError(
            f"a batch of {batch.tokens.shape[1]} columns, wanted at most a row's {shape.length}"
        )
    sharding = over_batch(mesh)
    for members in plan(batch.sizes, shape):
        indices = np.array([i for row in members for i in row])
        rows = pack_rows(batch.tokens, batch.sizes, members, shape)
        fields = {name: _pad(batch[name][indices], shape) for name in names}
        yield indices, processes.put(MicroBatch(rows, fields), sharding)


def _pad(values: np.ndarray, shape: RowShape) -> np.ndarray:
    widths = [(0, shape.sequences - len(values))]
    if values.ndim > 1:
        widths.append((0, shape.length - values.shape[1]))
    return np.pad(values, widths)


def logprob_pass(
    model: Forward,
    shape: RowShape,
    mesh: Mesh,
    names: tuple[str, ...] = ("logprobs", "entropy"),
    *,
    frozen: Params | None = None,
) -> Callable[[Params, Batch], dict[str, np.ndarray]]:
    """Return a function from parameters and a batch to some of its TokenStats [B T], by name.

    Args:
        model: how the model is run.
        shape: of the micro-batches.
        mesh: the devices.
        names: of TokenStats.
        frozen: the parameters that are not in those given at each call.
    """

    def compute(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        stats = token_fields(join(params, rest), rows, model, mesh)._asdict()
        return {name: stats[name] for name in names}

    return _inference(compute, shape, mesh, frozen or {})


def value_pass(
    model: Forward, shape: RowShape, mesh: Mesh
) -> Callable[[Params, Batch], dict[str, np.ndarray]]:
    """Return a function from a critic's parameters and a batch to its `values` [B T]."""

    def compute(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        return {"values": value_fields(join(params, rest), rows, model, mesh)}

    return _inference(compute, shape, mesh, {})


def _inference(
    compute: Callable[[Params, Params, Rows], dict[str, Array]],
    shape: RowShape,
    mesh: Mesh,
    frozen: Params,
) -> Callable[[Params, Batch], dict[str, np.ndarray]]:
    run = jax.jit(compute)

    def infer(params: Params, batch: Batch) -> dict[str, np.ndarray]:
        pending = [
            (indices, run(params, frozen, micro.rows))
            for indices, micro in microbatches(batch, set(), shape, mesh)
        ]
        found: dict[str, np.ndarray] = {}
        for indices, results in pending:
            for name, values in processes.fetch(results).items():
                whole = found.setdefault(name, np.zeros(batch.tokens.shape, np.float32))
                whole[indices] = values[: len(indices), : batch.tokens.shape[1]]
        return found

    return infer


def balance_pass(
    model: Forward, shape: RowShape, mesh: Mesh, frozen: Params
) -> Callable[[Params, Batch], Fields]:
    """Return a function from parameters and a mini-batch to the coefficients of its balance loss.

    They are the constant part of `load_balance_loss` times the model's coefficient. Without experts
    or with a coefficient of 0 there are none, and nothing is run.
    """
    everywhere = replicated(mesh)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def count(params: Params, rest: Params, rows: Rows) -> RouterStats:
        return router_totals(join(params, rest), rows, model, mesh)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def weigh(total: RouterStats) -> Array:
        return model.router_loss_coef * balance_weights(total)

    def find(params: Params, batch: Batch) -> Fields:
        if model.spec.moe is None or model.router_loss_coef == 0:
            return {}
        cut = microbatches(batch, set(), shape, mesh)
        counted = (count(params, frozen, micro.rows) for _, micro in cut)
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), counted)
        return {"balance_weights": weigh(total)}

    return find


class Learner(NamedTuple):
    """The jitted halves of an update, and how to start.

    Attributes:
        init: params -> TrainState.
        update: (state, batch, coefficients) -> (state, metrics). Donates the state.
        state_shardings: the layout of a TrainState.
        differentiate: (params, frozen, micro, coefficients) -> (gradients, metrics), jitted.
        apply: (state, gradients, router statistics) -> (state, metrics), jitted.
    """

    init: Callable[[Params], TrainState]
    update: Callable[[TrainState, Batch, dict[str, float]], tuple[TrainState, dict[str, Any]]]
    state_shardings: TrainState
    differentiate: Any
    apply: Any


def make_learner(
    objective: Objective,
    model: Forward,
    optimizer: optax.GradientTransformation,
    *,
    reduce: Callable[..., Any],
    shape: RowShape,
    mesh: Mesh,
    params_like: Any,
    frozen: Params | None = None,
) -> Learner:
    """Build the update for one objective.

    Args:
        objective: what an update minimises.
        model: how the model is run.
        optimizer: with gradient clipping and learning rate already in it.
        reduce: mask [B T] -> weights [B T], over a whole mini-batch.
        shape: of the micro-batches.
        mesh: the devices.
        params_like: shape, dtype and sharding of each parameter; gradients and moments follow it.
        frozen: the model's other parameters, which have neither. They are read, never donated, so
            that others may share them.
    """
    rest = frozen or {}
    names = objective.asks_for() | {"mask", "weights", "token_weights"}
    param_shardings = jax.tree.map(lambda like: like.sharding, params_like)
    state_shardings = _state_shardings(optimizer, params_like, mesh)
    everywhere = replicated(mesh)

    @functools.partial(jax.jit, out_shardings=state_shardings)
    def init(params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        return TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params), zero, zero)

    @functools.partial(jax.jit, out_shardings=(param_shardings, everywhere))
    def differentiate(
        params: Params, rest: Params, micro: MicroBatch, coefs: Fields
    ) -> tuple[Params, Fields]:
        def loss(params: Params) -> tuple[Array, Fields]:
            return objective(join(params, rest), micro, coefs, model, mesh)

        return jax.grad(loss, has_aux=True)(params)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(param_shardings, everywhere))
    def add(total: tuple[Params, Fields], part: tuple[Params, Fields]) -> tuple[Params, Fields]:
        return jax.tree.map(jnp.add, total, part)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(state_shardings, everywhere))
    def apply(
        state: TrainState, grads: Params, router: RouterStats | None
    ) -> tuple[TrainState, Fields]:
        state, metrics = apply_gradients(
            state, grads, optimizer, router, router_bias_rate=model.router_bias_rate
        )
        return state, metrics | ({} if router is None else _router_summary(router))

    balance = balance_pass(model, shape, mesh, rest)

    @jax.jit
    def weigh(mask: Array) -> tuple[Array, Array]:
        return per_token(reduce(mask), reduce, "reduce", mask.shape), token_mean(mask)

    def update(
        state: TrainState, batch: Batch, coefs: dict[str, float]
    ) -> tuple[TrainState, dict[str, Any]]:
        weights, token_weights = map(np.asarray, weigh(batch["mask"]))
        if not np.isfinite(weights[batch["mask"]]).all():
            raise LossError(f"reduce {describe(reduce)!r} returned NaN or infinity as a weight")
        batch = batch.add(weights=weights, token_weights=token_weights)
        coefs = coefs | balance(state.params, batch)
        total = None
        for _, micro in microbatches(batch, names, shape, mesh):
            part = differentiate(state.params, rest, micro, coefs)
            total = part if total is None else add(total, part)
        assert total is not None, "a mini-batch holds at least one sequence"
        grads, metrics = total
        state, applied = apply(state, grads, metrics.pop("router", None))
        return state, metrics | applied

    return Learner(init, update, state_shardings, differentiate, apply)


def apply_gradients(
    state: TrainState,
    grads: Params,
    optimizer: optax.GradientTransformation,
    router: RouterStats | None = None,
    *,
    router_bias_rate: float = 0.001,
) -> tuple[TrainState, Fields]:
    """Apply an update, or skip it where the gradient is not finite.

    The bias of sigmoid routers has no gradient. It is not the optimizer's, with its weight decay:
    `update_bias` moves it by what the routers chose in the mini-batch.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))

    def move(state: TrainState) -> TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if router is not None:
            params = _move_bias(state.params, params, router, router_bias_rate)
        return TrainState(params, opt_state, state.updates + 1, jnp.zeros_like(state.skipped))

    def skip(state: TrainState) -> TrainState:
        return state._replace(skipped=state.skipped + 1)

    # a branch updates in place; choosing between whole trees would hold both
    state = jax.lax.cond(jnp.isfinite(norm), move, skip, state)
    return state, {"grad_norm": norm, "skipped": state.skipped}


def _move_bias(before: Params, after: Params, router: RouterStats, rate: float) -> Params:
    bias = before.get("layers", {}).get("router_bias")
    if bias is None:  # another router, or frozen beside an adapter
        return after
    moved = update_bias(bias, router.choices, rate=rate)
    return after | {"layers": after["layers"] | {"router_bias": moved}}


def _router_summary(router: RouterStats) -> Fields:
    """Return the busiest expert's load, idle experts and entropy over all layers, and the loss."""
    found = router_metrics(router)
    return {
        "router_loss": load_balance_loss(router),
        "router_max_load": found["max_load"].max(),
        "router_idle": jnp.mean(found["tokens_per_expert"] == 0),
        "router_entropy": found["router_entropy"].mean(),
    }


def check_skipped(skipped: int, limit: int, key: str = "optim") -> None:
    """Raise TrainingError when more than `limit` updates in a row were skipped.

    Args:
        skipped: updates in a row.
        limit: the most that may be.
        key: the config key of the optimizer.
    """
    if skipped > limit:
        raise TrainingError(
            f"{skipped} updates in a row had a gradient that is not finite "
            f"({key}.max_skipped={limit}); the last checkpoint is untouched. "
            "Look at the loss's inputs, lower the learning rate, or compute in float32"
        )


def _state_shardings(
    optimizer: optax.GradientTransformation, params_like: Any, mesh: Mesh
) -> TrainState:
    scalar: Any = replicated(mesh)

    def masked(leaf: Any) -> bool:  # what an optimizer for some of the parameters has of the others
        return isinstance(leaf, optax.MaskedNode)

    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, like: leaf if masked(leaf) else like.sharding,
        jax.eval_shape(optimizer.init, params_like),
        params_like,
        transform_non_params=lambda _: scalar,
        is_leaf=masked,
    )
    return TrainState(
        jax.tree.map(lambda like: like.sharding, params_like), opt_state, scalar, scalar
    )

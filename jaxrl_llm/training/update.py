"""An update: gradients accumulated over micro-batches, then one step of the optimizer.

A mini-batch is cut into micro-batches of packed rows. The reduction's weights are computed over
the whole mini-batch first, so a micro-batch adds `sum(weights * loss)` and the sum over them is
exactly the mini-batch's loss, however it is cut. Routers of experts add their load-balance loss and
the moves of their bias.
"""

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.compilation import AheadOfCall, Task, abstract, compiler_options
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import name_of
from jaxrl_llm.data.dataset import check_ids
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.lora import combine_params
from jaxrl_llm.models.moe.routing import RouterStats, load_balance_loss, router_metrics, update_bias
from jaxrl_llm.sharding.layout import Layout, replicated
from jaxrl_llm.sharding.offload import on_device, to_device
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.forward import ForwardConfig, balance_pass
from jaxrl_llm.training.load_model import LoadedModel
from jaxrl_llm.training.microbatches import (
    Fields,
    MicroBatch,
    MicroBatchStep,
    empty_total,
    finished_metrics,
    merge_metrics,
    merge_microbatches,
)
from jaxrl_llm.training.objectives import (
    LossError,
    Objective,
    PolicyObjective,
    PreferenceObjective,
    StepObjective,
    ValueObjective,
    per_token,
)
from jaxrl_llm.training.optimizer import OptimizerOf
from jaxrl_llm.types import Batch

ROUTER = "router"
"""The name of the routers' statistics in an objective's metrics, which add up."""


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


States = dict[str, TrainState]
"""The states of a run's models, by name."""


class TrainingError(RunError):
    """A run that must not go on."""


@dataclass(frozen=True, eq=False)
class Learner:
    """The update of a model for one objective; its jitted parts are made when first used.

    Attributes:
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

    objective: Objective
    model: ForwardConfig
    optimizer: optax.GradientTransformation
    _: KW_ONLY
    reduce: Callable[..., Any]
    shape: RowShape
    mesh: Mesh
    params_like: Any
    frozen: Params | None = None

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """The layout of a TrainState."""
        return _state_shardings(self.optimizer, self.params_like, self.mesh)

    @functools.cached_property
    def init(self) -> Callable[[Params], TrainState]:
        """The jitted function from parameters to the state to start from."""

        @functools.partial(jax.jit, out_shardings=self.state_shardings)
        def init(params: Params) -> TrainState:
            zero, copy = jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params)
            return TrainState(copy, self.optimizer.init(params), zero, zero)

        return init

    @functools.cached_property
    def _make_zeros(self) -> Callable[[], tuple[Params, Fields]]:
        total = functools.partial(empty_total, self._shapes["total"])
        return jax.jit(total, out_shardings=self._total_shardings)

    def zeros(self, *inputs: Any) -> tuple[Params, Fields]:
        """Return the sum of gradients and metrics over no micro-batches.

        Args:
            *inputs: parameters, frozen ones, a micro-batch and coefficients.
        """
        self.total_like(*inputs)
        return self._make_zeros()

    def total_like(self, *inputs: Any) -> tuple[Params, Fields]:
        """Return the shapes of the sum of gradients and metrics, by the inputs of `zeros`."""
        if "total" not in self._shapes:
            metrics: Any = jax.eval_shape(self._loss, *inputs)[1]
            metrics.pop("policy", None)
            params, everywhere = self._total_shardings
            self._shapes["total"] = (
                jax.tree.map(shape_in, self.params_like, params),
                jax.tree.map(lambda x: shape_in(x, everywhere), metrics),
            )
        return self._shapes["total"]

    def state_like(self) -> TrainState:
        """Return the shapes of a TrainState."""
        state = jax.eval_shape(self.init, self.params_like)
        return jax.tree.map(shape_in, state, self.state_shardings)

    def compile_ahead(self, micro_like: Callable[[RowShape], MicroBatch], coefs: Fields) -> None:
        """Begin to compile what the first update needs in all likelihood.

        Args:
            micro_like: bucket -> a micro-batch as shapes.
            coefs: coefficients of the objective, all of them.
        """
        params, rest = abstract(self.params_like), abstract(self._rest)

        def inputs(bucket: RowShape) -> tuple[Any, ...]:
            given = params, rest, micro_like(bucket), coefs
            return self.total_like(*given), *given

        self._accumulate.begin(params, inputs)
        largest = self.shape.buckets[-1]
        self._apply.begin(lambda: (self.state_like(), *_split(inputs(largest)[0])))

    @functools.cached_property
    def accumulate(self) -> Any:
        """(sum, params, frozen, micro, coefficients) -> (sum of gradients and metrics, the policy's
        statistics of the tokens [b T] by name), jitted. Donates the sum.

        The backward pass adds each layer's gradient to the sum where that stands, so no second
        gradient of the whole model exists."""
        evaluate = self._loss

        @functools.partial(
            jax.jit,
            donate_argnums=0,
            out_shardings=(self._total_shardings, None),
            compiler_options=compiler_options(Task.TRAIN, self.mesh.devices.flat),
        )
        def accumulate(
            total: tuple[Params, Fields],
            params: Params,
            rest: Params,
            micro: MicroBatch,
            coefs: Fields,
        ) -> tuple[tuple[Params, Fields], Fields]:
            def loss(params: Params) -> tuple[Array, Fields]:
                return evaluate(params, rest, micro, coefs)

            linearized: Any = jax.vjp(loss, params, has_aux=True)
            value, backward, metrics = linearized
            sums = jax.tree.map(jax.new_ref, total[0])
            backward.with_refs(sums)(jnp.ones_like(value))
            policy_stats = metrics.pop("policy", {})
            metrics = merge_metrics(total[1], metrics)
            return (jax.tree.map(jax.freeze, sums), metrics), policy_stats

        return accumulate

    @functools.cached_property
    def apply(self) -> Any:
        """(state, gradients, router statistics) -> (state, metrics), jitted. Donates the state."""
        shardings = self.state_shardings, replicated(self.mesh)

        @functools.partial(
            jax.jit,
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=compiler_options(Task.TRAIN, self.mesh.devices.flat),
        )
        def apply(state: TrainState, grads: Params, router: Any) -> tuple[TrainState, Fields]:
            if router is None:
                return apply_gradients(state, grads, self.optimizer)
            rate = self.model.router_bias_rate
            change = functools.partial(move_router_bias, router=router, rate=rate)
            state, metrics = apply_gradients(state, grads, self.optimizer, change)
            return state, metrics | summarize_routers(router)

        return apply

    def update(
        self, state: TrainState, batch: Batch, coefs: dict[str, float]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Update on a mini-batch; return the new state and metrics. Donates the state.

        Where the objective reports the policy's statistics of each token, the metrics hold them as
        `policy`, [B T] by name.
        """
        check_ids(batch.tokens, self.model.model.vocab_size)  # rows were: the last line
        weights, token_weights = map(np.asarray, self._weigh(batch["mask"]))
        if not np.isfinite(weights[batch["mask"]]).all():
            raise LossError(f"reduce {name_of(self.reduce)!r} returned NaN or infinity as a weight")
        batch = batch.add(weights=weights, token_weights=token_weights)
        coefs = coefs | self._balance(state.params, batch)
        names = self.objective.asks_for() | {"mask", "weights", "token_weights", *self.model.marks}
        total, parts = None, []
        for indices, micro in self._accumulate.microbatches(batch, names):
            inputs = state.params, self._rest, micro, coefs
            if total is None:
                total_like = self.total_like(*inputs)
                self._accumulate.compile(total_like, *inputs)  # before the sum takes its memory
                like = abstract(state), *_split(total_like)
                self._apply.begin(lambda given=like: given)
                total = self.zeros(*inputs)
            total, policy_stats = self._accumulate(total, *inputs)
            parts.append((indices, policy_stats))
        assert total is not None, "a mini-batch holds at least one sequence"
        state, applied = self._apply(state, *_split(total))
        metrics = {name: value for name, value in total[1].items() if name != ROUTER}
        policy = merge_microbatches(parts, batch)
        return state, finished_metrics(metrics) | applied | ({"policy": policy} if policy else {})

    @functools.cached_property
    def _rest(self) -> Params:
        return self.frozen or {}

    @functools.cached_property
    def _shapes(self) -> dict[str, Any]:
        return {}

    @functools.cached_property
    def _balance(self) -> Callable[[Params, Batch], Fields]:
        return balance_pass(self.model, self.shape, self.mesh, self._rest)

    @functools.cached_property
    def _apply(self) -> AheadOfCall:
        return AheadOfCall("optimizer", self.apply, self.mesh.devices.flat)

    @functools.cached_property
    def _total_shardings(self) -> tuple[Any, Any]:
        params = jax.tree.map(lambda like: like.sharding, self.params_like)
        return params, replicated(self.mesh)

    def _loss(
        self, params: Params, rest: Params, micro: MicroBatch, coefs: Fields
    ) -> tuple[Array, Fields]:
        """Return a micro-batch's loss and metrics; `policy` are statistics of its tokens."""
        everything = combine_params(params, rest)
        return self.objective(everything, micro, coefs, self.model, self.mesh)

    @functools.cached_property
    def _accumulate(self) -> MicroBatchStep:
        return MicroBatchStep(
            *("update", self.accumulate, self.shape, self.mesh),
            place=3,
            params=1,
            visuals=self.model.visuals,
        )

    @functools.cached_property
    def _weigh(self) -> Callable[..., tuple[Array, Array]]:
        reduce = self.reduce

        @jax.jit
        def weigh(mask: Array) -> tuple[Array, Array]:
            return per_token(reduce(mask), reduce, "reduce", mask.shape), token_mean(mask)

        return weigh


class UpdateSpec(NamedTuple):
    """How a model learns: what it minimises, how tokens are weighed, and the optimizer."""

    objective: PolicyObjective | ValueObjective | PreferenceObjective | StepObjective
    reduce: Callable[..., Any]
    optimizer: OptimizerOf
    schedule: Callable[[int], Any]
    max_skipped: int

    def learner(
        self,
        forward: ForwardConfig,
        shape: RowShape,
        layout: Layout,
        params_like: Any,
        frozen: Params | None = None,
    ) -> Learner:
        """Build the update of a model.

        Args:
            forward: how the model is run.
            shape: of its micro-batches.
            layout: where it stands.
            params_like: shape, dtype and sharding of each parameter that is trained.
            frozen: its other parameters.
        """
        return Learner(
            self.objective,
            forward.over(shape),
            self.optimizer(forward.model.declare(), params_like),
            reduce=self.reduce,
            shape=shape,
            mesh=layout.mesh,
            params_like=params_like,
            frozen=frozen,
        )


def _split(total: tuple[Params, Fields]) -> tuple[Params, RouterStats | None]:
    """Return gradients and the routers' statistics of a sum; None where it has none."""
    return total[0], total[1].get(ROUTER)


def shape_in(array: Any, layout: Any) -> jax.ShapeDtypeStruct:
    """Return an array as a shape in a layout."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)


def apply_gradients(
    state: TrainState,
    grads: Params,
    optimizer: optax.GradientTransformation,
    change: Callable[[Params, Params], Params] | None = None,
) -> tuple[TrainState, Fields]:
    """Apply an update, or skip it where the gradient is not finite.

    Args:
        state: before the update.
        grads: of its parameters.
        optimizer: with gradient clipping and learning rate already in it.
        change: (params before, params after the optimizer's step) -> params, of an applied update.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))

    def move(state: TrainState) -> TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        if change is not None:
            params = change(state.params, params)
        return TrainState(params, opt_state, state.updates + 1, jnp.zeros_like(state.skipped))

    def skip(state: TrainState) -> TrainState:
        return state._replace(skipped=state.skipped + 1)

    # a branch updates in place; choosing between whole trees would hold both
    state = jax.lax.cond(jnp.isfinite(norm), move, skip, state)
    return state, {"grad_norm": norm, "skipped": state.skipped}


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
    """Place what an optimizer has of a parameter, in its shape, where that lies."""
    everywhere: Any = replicated(mesh)
    places = dict(jax.tree_util.tree_flatten_with_path(params_like)[0])

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        ends = (places.get(path[start:]) for start in range(len(path)))
        like = next((like for like in ends if like is not None), None)
        return everywhere if like is None or like.shape != leaf.shape else like.sharding

    opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params_like))
    shardings = jax.tree.map(lambda like: like.sharding, params_like)
    return TrainState(shardings, opt_state, everywhere, everywhere)


# What routers of experts add to an update: their load-balance loss, and the moves of their bias.


def move_router_bias(before: Params, after: Params, router: RouterStats, *, rate: float) -> Params:
    """Return parameters after an update, with the routers' bias moved from what it was before.

    Args:
        before: the parameters before the update.
        after: those that the optimizer made of them.
        router: statistics of the mini-batch, by layer.
        rate: how far the bias is moved.
    """
    bias = before.get("layers", {}).get("router_bias")
    if bias is None:  # another router, or frozen beside an adapter
        return after
    moved = update_bias(bias, router.choices, rate=rate)
    return after | {"layers": after["layers"] | {"router_bias": moved}}


def summarize_routers(router: RouterStats) -> Fields:
    """Return the busiest expert's load, idle experts and entropy over all layers, and the loss.

    Where recorded choices were replayed, also which share of them the routers would not have made.
    """
    by_layer, replayed = router_metrics(router), {}
    if router.replayed is not None and router.replaced is not None:
        share = router.replaced.sum() / jnp.maximum(router.replayed.sum(), 1)
        replayed["router_replaced"] = share
    return replayed | {
        "router_loss": load_balance_loss(router),
        "router_max_load": by_layer["max_load"].max(),
        "router_idle": jnp.mean(by_layer["tokens_per_expert"] == 0),
        "router_entropy": by_layer["router_entropy"].mean(),
    }


# The moving average of a policy's weights, which follows it from step to step.


class MovingAverage:
    """The exponential moving average of a policy's trained weights, in float32.

    Args:
        rate: the share of the policy's weights that it takes over in each step.
        params_like: shape, dtype and sharding of each parameter.
        layout: where they stand.
    """

    def __init__(self, rate: float, params_like: Any, layout: Layout) -> None:
        """Begin without any weights."""
        everywhere: Any = replicated(layout.mesh)
        shardings = jax.tree.map(lambda like: like.sharding, params_like)
        self._like = params_like
        self.state_shardings = TrainState(shardings, (), everywhere, everywhere)

        @functools.partial(jax.jit, out_shardings=self.state_shardings)
        def init(params: Params) -> TrainState:
            zero = jnp.zeros((), jnp.int32)
            return TrainState(jax.tree.map(jnp.copy, params), (), zero, zero)

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
        def move(average: Params, params: Params) -> Params:
            return jax.tree.map(lambda a, p: a + rate * (p - a), average, params)

        self.init, self._move = init, move

    def state_like(self) -> TrainState:
        """Return the shapes of the average's state."""
        return jax.tree.map(shape_in, jax.eval_shape(self.init, self._like), self.state_shardings)

    def follow(self, state: TrainState, policy: TrainState) -> TrainState:
        """Return the state after a step of the policy. Donates the old one."""
        target = self.state_shardings.params
        with on_device(policy.params) as params:
            same = jax.tree.map(lambda p, there: p.sharding == there, params, target)
            here = params if jax.tree.all(same) else reshard(params, target)
            average = self._move(to_device(state.params), here)
        return state._replace(params=average, updates=state.updates + 1)


class TrainableModel(NamedTuple):
    """A model that changes in a run: one that is trained, or follows such a one.

    Attributes:
        model: the weights to start from.
        learner: makes its state, and changes it.
        key: of the config, that names the model.
    """

    model: LoadedModel
    learner: Learner | MovingAverage
    key: str = "model.path"

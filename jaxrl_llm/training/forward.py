"""A model's forward pass over packed rows in training, and its passes without gradients."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.algorithms.logprobs import (
    HeadProjection,
    TokenStats,
    projected_token_stats,
    token_stats_from_logits,
)
from jaxrl_llm.compilation import Task, abstract, compiler_options
from jaxrl_llm.data.packing import RowShape, unpack
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.inputs import PatchRows, RowInputs, VisualTokens
from jaxrl_llm.models.kernels import GroupedKernels, Kernel
from jaxrl_llm.models.linear import SplitMatrix
from jaxrl_llm.models.lora import combine_params
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.moe.routing import NO_ROUTE, RouterStats, balance_weights
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.sharding.layout import DEFAULT_RULES, TOKENS, Layout, Rules, replicated
from jaxrl_llm.training.microbatches import Fields, MicroBatchStep, VisualPacker, merge_microbatches
from jaxrl_llm.types import ROUTES, Batch, Rows


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the model is run in training: everything static about a forward pass.

    `router_loss_coef` is that of the experts' load-balance loss, `router_bias_rate` how far an
    update moves the bias of sigmoid routers, `context` how attention sees rows that devices share
    (`sharding.layout.Layout`), `kernel` what computes it (`models.kernels.choose_kernel`; None:
    XLA), `grouped_kernels` what multiplies rows of experts
    (`models.moe.grouped.choose_grouped_kernels`; None: XLA), `rules` how a model of the
    user's own splits its logical axes, and `longest` is the most tokens of a sequence, where rows
    are longer. Where `router_replay`, the config's key, is not none, tokens go to the experts that
    their rows say. `visuals` packs the images and videos that the model reads; None: it reads none.
    """

    model: Model
    dtype: str = "float32"
    remat: str = "none"
    logprob_chunk: int = 1024
    temperature: float = 1.0
    router_loss_coef: float = 0.0
    router_bias_rate: float = 0.001
    context: str = "heads"
    kernel: Kernel | None = None
    grouped_kernels: GroupedKernels | None = None
    rules: Rules = field(default_factory=lambda: DEFAULT_RULES, hash=False)
    longest: int | None = None
    router_replay: str = "none"
    visuals: VisualPacker | None = field(default=None, hash=False)

    @property
    def replays(self) -> bool:
        """Tell whether tokens go to the experts that their rows say."""
        return self.router_replay != "none"

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the fields of a batch that its rows must hold for the model."""
        return (ROUTES,) if self.replays else ()

    @property
    def route_shape(self) -> RouteShape | None:
        """Return what rows hold of choices of experts; None: nothing is replayed."""
        return self.model.route_shape if self.replays else None

    def projection(self, head: SplitMatrix, temperature: float = 1.0) -> HeadProjection:
        """Return how hidden states become logits by an output projection that devices hold."""
        return HeadProjection(
            temperature=temperature,
            softcap=self.model.logit_softcap,
            chunk=self.logprob_chunk,
            embed_axes=head.embed_axes,
            vocab_axes=head.vocab_axes,
            never=() if self.visuals is None else self.visuals.spec.never_sampled,
        )

    def over(self, shape: RowShape) -> "ForwardConfig":
        """Return the same for micro-batches of a shape."""
        return dataclasses.replace(self, longest=shape.longest)


def token_fields(params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh) -> TokenStats:
    """Run the model over packed rows and gather its per-token results back to [b T].

    Entry (i, t) belongs to token t of sequence i given the tokens before it; entry (i, 0) is 0, and
    so are those of tokens that need not be scored. Activations stay where the rows are, so it is
    the weights that are gathered.
    """
    return token_stats_from_hidden(
        params, hidden_states(params, rows, config, mesh)[0], rows, config, mesh
    )


def token_stats_from_hidden(
    params: Params, hidden: Float[Array, "P l D"], rows: Rows, config: ForwardConfig, mesh: Mesh
) -> TokenStats:
    """Score the rows' tokens, each device its own: the head's gradient is added up over the devices
    once, not once a chunk. Where stages hold the layers, they share the scoring too."""
    layout = Layout(mesh, config.context)
    targets = jnp.roll(jnp.asarray(rows.tokens), -1, axis=1)
    axes = token_axes(layout, targets.size)
    head = split_head(params, config, layout)
    by_token = PartitionSpec(axes)
    places = [hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)]
    if rows.scored is not None:
        places.append(jnp.asarray(rows.scored).reshape(-1))
    specs = [by_token] * len(places)
    if head is None:  # hidden states are logits
        score = functools.partial(token_stats_from_logits, temperature=config.temperature)
    else:
        score = functools.partial(
            projected_token_stats, config.projection(head, temperature=config.temperature)
        )
        places.insert(1, head.array)
        specs.insert(1, PartitionSpec(head.embed_axes, head.vocab_axes))
    stats = layout.by_tokens(score, in_specs=specs, axes=axes)(*places)
    return by_sequence(stats, rows, config)


def token_axes(layout: Layout, tokens: int) -> tuple[str, ...]:
    """Return the mesh axes over which scored tokens are split: the stages' too, if they can be."""
    return TOKENS if tokens % (layout.shards * layout.stages) else (*TOKENS, "stage")


def split_head(params: Params, config: ForwardConfig, layout: Layout) -> SplitMatrix | None:
    """Return the output projection, and how devices hold it; None where hidden states are logits"""
    head = config.model.head_matrix(params, layout)
    return head if head is None or isinstance(head, SplitMatrix) else SplitMatrix(head, (), ())


def hidden_states(
    params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh
) -> tuple[Float[Array, "P l D"], RouterStats | None]:
    """Return the hidden states of the rows, in pieces where devices share a row."""
    hidden, router = _run(params, rows, config, mesh)
    router.pop("experts", None)
    return hidden, RouterStats(**router) if router else None


def hidden_states_and_routes(
    params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh
) -> tuple[Float[Array, "P l D"], Int[Array, "b T M top"]]:
    """Return the hidden states of the rows, and the experts that each sequence's tokens went to.

    The model replays: tokens without a recorded choice go where their router sends them.
    """
    hidden, router = _run(params, rows, config, mesh)
    experts = Layout(mesh, config.context).merge_context(jnp.moveaxis(router["experts"], 0, 2))
    experts = experts.astype(jnp.asarray(rows.routes).dtype)
    return hidden, unpack(experts, *map(jnp.asarray, rows.places), width=_width(rows, config))


def _run(
    params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh
) -> tuple[Float[Array, "P l D"], dict[str, Any]]:
    layout = Layout(
        mesh,
        config.context,
        config.rules,
        kernel=config.kernel,
        grouped_kernels=config.grouped_kernels,
        longest=config.longest,
    )
    tokens, positions, segments = (
        layout.split_context(jnp.asarray(x))
        for x in (rows.tokens, rows.positions, rows.segment_ids)
    )
    given = {}
    if config.replays or config.visuals is not None:
        given["inputs"] = _inputs(params, rows, config, layout)
    return config.model.hidden_states(
        params,
        tokens,
        positions,
        segments,
        dtype=jnp.dtype(config.dtype),
        remat=config.remat,
        layout=layout,
        **given,
    )


def _inputs(params: Params, rows: Rows, config: ForwardConfig, layout: Layout) -> RowInputs:
    """Return what the rows hold beside tokens, with features of the patches that they have."""
    routes = layout.split_context(jnp.asarray(rows.routes)) if config.replays else None
    if config.visuals is None:
        return RowInputs(routes)
    assert rows.visual is not None, "the model's own packer has packed the rows"
    numbers, given, rotary = rows.visual
    if isinstance(given, PatchRows):
        given = config.visuals.model.encode_visuals(
            params,
            given,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            layout=layout,
            bounds=config.visuals.bounds,
        )
    visual = VisualTokens(jnp.asarray(numbers), given)
    return RowInputs(routes, visual, None if rotary is None else jnp.asarray(rotary))


def values_from_hidden(
    params: Params, hidden: Float[Array, "P l D"], rows: Rows, config: ForwardConfig
) -> Float32[Array, "b T"]:
    return by_sequence(config.model.token_values(params, hidden), rows, config)


def token_scores_from_hidden(
    params: Params, hidden: Float[Array, "P l D"], rows: Rows, config: ForwardConfig
) -> Float32[Array, "b T"]:
    """Gather what a value head says of each token itself, not of the state before it, to [b T]."""
    scores = config.model.token_values(params, hidden).reshape(-1, jnp.shape(rows.tokens)[1])
    return unpack(scores, *map(jnp.asarray, rows.places), width=_width(rows, config))


def _width(rows: Rows, config: ForwardConfig) -> int:
    """Return T, the most tokens of a sequence."""
    length = jnp.shape(rows.tokens)[1]
    return min(config.longest or length, length)


def by_sequence(tree: Any, rows: Rows, config: ForwardConfig, *, axes: int = 0) -> Any:
    """Gather [b T …] what the model says at each token as what it says of the next one.

    Entry (i, 0) is 0, and so is what lies beyond a sequence.

    Args:
        tree: arrays for the places of the rows, in their order.
        rows: packed.
        config: how the model is run.
        axes: of what there is at each place; 0 for a number.
    """
    length, width = jnp.shape(rows.tokens)[1], _width(rows, config)
    inside = jnp.arange(width) < jnp.asarray(rows.size)[:, None]
    inside = jnp.expand_dims(inside, range(2, 2 + axes))

    def gather(x: Array) -> Array:
        by_row = x.reshape(-1, length, *x.shape[x.ndim - axes :])
        shifted = unpack(by_row, *map(jnp.asarray, rows.places), width=width)
        return jnp.where(inside, jnp.roll(shifted, 1, axis=1).at[:, 0].set(0), 0)

    return jax.tree.map(gather, tree)


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
        everything = combine_params(params, rest)
        hidden = hidden_states(everything, rows, model, mesh)[0]
        return {"values": values_from_hidden(everything, hidden, rows, model)}

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
        router = hidden_states(combine_params(params, rest), rows, model, mesh)[1]
        assert router is not None, "the model has experts"
        return router

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

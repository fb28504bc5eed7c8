"""The steps of a run, traced for arrays that have a shape and a layout but no bytes.

The CPU backend computes in bfloat16 by converting whole arrays to float32 first, weights and cache
included, which no GPU does. It has float16, which is as large. So what is compiled here is the same
program with float16 in place of bfloat16; nothing of it is ever run.
"""

import dataclasses
import enum
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxlib.mlir import ir

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.lora import split_adapter, without_adapter
from jaxrl_llm.models.model import Model, model_of
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import over_batch, replicated
from jaxrl_llm.training.bind import AlgorithmFunctions, abstract_fields, abstract_pairs
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.load_model import forward_config
from jaxrl_llm.training.microbatches import MicroBatch
from jaxrl_llm.training.objectives import COEFS
from jaxrl_llm.training.roles import (
    inference_of,
    learner_of,
    reference_dtype,
    replaying,
    row_shapes,
    taught_by,
)
from jaxrl_llm.training.teachers import TeacherModel
from jaxrl_llm.training.visuals import FrozenTower
from jaxrl_llm.types import Rows


class StepKind(enum.StrEnum):
    """The compiled steps of a role that trains or is scored with, and those of the engine."""

    ACCUMULATE = enum.auto()
    APPLY = enum.auto()
    INFER = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


class StepId(NamedTuple):
    """The identity of a compiled step: whose it is, and which of its steps.

    >>> str(StepId("actor", StepKind.ACCUMULATE))
    'actor accumulate'
    """

    role: str
    kind: StepKind

    def __str__(self) -> str:
        """Return it as text for tables and messages."""
        return f"{self.role} {self.kind}"


ENGINE = "engine"
"""The role of the steps that sample."""


class AbstractModel(NamedTuple):
    """A model that reads micro-batches, as shapes.

    Attributes:
        spec: the model.
        settings: how it runs.
        layout: where it stands.
        shape: of its micro-batches.
        update_shape: of those of its updates.
        params: its parameters, or its adapter; gradients are as large.
        optimizer: the optimizer's state; None for the reference, which is not trained.
        frozen: the base of an adapter, else nothing.
        needs_inference: whether a step asks it for more than its updates do.
    """

    spec: ModelSpec
    settings: ForwardConfig
    layout: Layout
    shape: RowShape
    update_shape: RowShape
    params: Any
    optimizer: Any
    frozen: Any
    needs_inference: bool = True


def abstract_params(spec: ModelSpec, layout: Layout, dtype: str = "float32") -> Any:
    """Return a model's parameters as shapes in a layout; float32 masters or a copy to compute with.

    >>> from jaxrl_llm.sharding.mesh import make_mesh
    >>> spec = tiny_spec()
    >>> abstract_params(spec, Layout(make_mesh({}, jax.devices()[:1])), "bfloat16")["embed"].dtype
    dtype(bfloat16)
    """
    return abstract_weights(model_of(spec), layout, dtype)


def abstract_weights(model: Model, layout: Layout, dtype: str = "float32") -> Any:
    """Return any model's parameters as `abstract_params` does."""
    declared = model.declare()
    return jax.tree.map(
        lambda d, s, t: jax.ShapeDtypeStruct(d.shape, t, sharding=s),
        declared,
        layout.of(declared),
        model.compute_dtypes(dtype),
    )


def bytes_per_device(tree: Any) -> int:
    """Count the bytes that each device holds of arrays, or of shapes with a layout.

    >>> bytes_per_device({"w": jnp.ones((2, 3))})
    24
    """
    return sum(
        x.dtype.itemsize * _size(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def with_float16(lowered: Any) -> Any:
    """Put float16 in the place of bfloat16 in a lowered program, and return it.

    >>> def double(x): return x * 2
    >>> lowered = with_float16(jax.jit(double).lower(jax.ShapeDtypeStruct((2,), jnp.bfloat16)))
    >>> "bf16" in lowered.as_text()
    False
    """
    module = lowered.compiler_ir("stablehlo")
    text = re.sub(r",\s*algorithm = <[^>]*>", "", str(module))  # the CPU has none for float16
    text = re.sub(r"(?<![A-Za-z_])bf16\b|(?<=x)bf16\b", "f16", text)
    with module.context:
        replaced = ir.Module.parse(text)
    for operation in list(module.body.operations):
        operation.erase()
    for operation in list(replaced.body.operations):
        operation.detach_from_parent()
        module.body.append(operation)
    return lowered


def plan_role(
    config: TrainConfig, functions: AlgorithmFunctions, name: str, spec: ModelSpec, layout: Layout
) -> tuple[AbstractModel, dict[StepId, Callable[..., Any]]]:
    """Return a model that is trained, and the functions that trace its steps.

    Those that read micro-batches are traced for a bucket of their shapes, without one for the
    largest.

    Args:
        config: of the run.
        functions: that it names.
        name: of the role.
        spec: the model, with its adapter or value head.
        layout: where it stands.
    """
    update = functions.updates[name]
    params, frozen = abstract_params(spec, layout), {}
    if spec.lora is not None:
        params = split_adapter(params)[0]
        frozen = abstract_params(without_adapter(spec), layout, config.model.dtype)
    settings = planned_forward(config, spec, layout)
    settings = replaying(settings, config) if name == "actor" else settings
    shape, of_updates = row_shapes(config, settings, layout)
    coefs: dict[str, Any] = dict(COEFS)
    if name == "actor" and functions.runs_teacher_in_update:
        teacher = abstract_teacher(config, spec, layout)
        update, coefs["teacher"] = taught_by(teacher, update, of_updates), teacher.params
    learner = learner_of(update, settings, of_updates, layout, params, frozen)
    state = learner.state_like()
    infer = inference_of(name, functions, settings, shape, layout, frozen)
    if spec.moe is not None and config.model.router_loss_coef:
        everywhere: Any = replicated(layout.mesh)
        weights = jax.ShapeDtypeStruct((spec.moe.experts,), jnp.float32, sharding=everywhere)
        coefs["balance_weights"] = weights

    def micro(names: set[str], bucket: RowShape) -> MicroBatch:
        return abstract_microbatch(names, config, bucket, layout.mesh, settings)

    def inputs(bucket: RowShape) -> tuple[Any, ...]:
        return params, frozen, micro(update.objective.asks_for(), bucket), coefs

    total = learner.total_like(*inputs(of_updates))
    metrics = total[1]
    trace = {
        StepId(name, StepKind.ACCUMULATE): lambda bucket=of_updates: learner.accumulate.trace(
            total, *inputs(bucket)
        ),
        StepId(name, StepKind.APPLY): lambda: learner.apply.trace(
            state, params, metrics.get(learner.hooks.statistics) if learner.hooks else None
        ),
        StepId(name, StepKind.INFER): lambda bucket=shape: infer.run.trace(
            params, frozen, micro(set(), bucket).rows
        ),
    }
    needed = needs_inference(name, functions, has_adapter=spec.lora is not None)
    return AbstractModel(
        *(spec, settings, layout, shape, of_updates),
        *(params, state.opt_state, frozen, needed),
    ), trace


def planned_forward(config: TrainConfig, spec: ModelSpec, layout: Layout) -> ForwardConfig:
    """Return how the policy, or a model like it, is run, with the shapes of a frozen tower."""
    model, temperature, tower = Decoder(spec), config.rollout.temperature, None
    if spec.vision_apart:
        tower = FrozenTower(abstract_tower(config, spec, layout), model, layout, config.model.dtype)
    return forward_config(config.model, model, layout, temperature, tower, config.data.max_pixels)


def abstract_tower(config: TrainConfig, spec: ModelSpec, layout: Layout) -> Any:
    """Return the parameters of a frozen vision tower as shapes."""
    whole = dataclasses.replace(without_adapter(spec), vision_apart=False)
    return abstract_params(whole, layout, config.model.dtype)["vision"]


def abstract_teacher(config: TrainConfig, student: ModelSpec, layout: Layout) -> TeacherModel:
    """Return the teacher that the actor's update runs, as shapes."""
    assert isinstance(config.teacher.path, str), "an update runs one teacher"
    with config_errors_at("teacher.path"):
        spec = read_spec(config.teacher.path)
    is_same = spec.vocab_size == student.vocab_size
    vocab = None if is_same else min(spec.vocab_size, student.vocab_size)  # but for padding
    forward = forward_config(config.model, model_of(spec), layout)
    return TeacherModel(abstract_params(spec, layout, config.model.dtype), forward, vocab)


def needs_inference(name: str, functions: AlgorithmFunctions, *, has_adapter: bool) -> bool:
    """Tell whether a step asks a role for more than its updates do."""
    return (
        name != "actor"
        or not functions.on_policy
        or functions.select_covariant is not None
        or (has_adapter and functions.needs_reference)
    )


def plan_reference(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    spec: ModelSpec,
    layout: Layout,
    *,
    apart: bool,
) -> tuple[AbstractModel, Callable[..., Any]]:
    """Return the reference, and the function that traces its pass.

    Args:
        config: of the run.
        functions: that it names.
        spec: the model.
        layout: where it stands.
        apart: whether that is elsewhere than the actor, whose pass it has otherwise.
    """
    weights = abstract_params(spec, layout, reference_dtype(config))
    settings = planned_forward(config, spec, layout)
    shape = row_shapes(config, settings, layout)[0]
    if apart:
        infer = logprob_pass(settings.over(shape), shape, layout.mesh, ("logprobs",))
    else:
        infer = inference_of("actor", functions, settings, shape, layout)

    def trace(bucket: RowShape = shape) -> Any:
        rows = abstract_microbatch(set(), config, bucket, layout.mesh, settings).rows
        return infer.run.trace(weights, {}, rows)

    return AbstractModel(spec, settings, layout, shape, shape, weights, None, {}), trace


def abstract_microbatch(
    names: set[str],
    config: TrainConfig,
    shape: RowShape,
    mesh: Mesh,
    model: ForwardConfig | None = None,
) -> MicroBatch:
    """Return a micro-batch with the fields that a loss asks for, as shapes.

    Args:
        names: of the fields.
        config: of the run.
        shape: of the micro-batch.
        mesh: the devices.
        model: how the model is run, which says what rows hold for it beside tokens; None: nothing.
    """
    routes, visuals = (None, None) if model is None else (model.route_shape, model.visuals)
    known = abstract_fields(
        shape.sequences,
        shape.width,
        len(config.reward.components),
        config.teacher.top_k or 1,
    )
    per_token = jax.ShapeDtypeStruct((shape.sequences, shape.width), jnp.float32)
    known["correction"] = per_token  # a weight of the loss, no field that a function may ask for
    known |= abstract_pairs(shape.sequences)
    known["second_start"] = jax.ShapeDtypeStruct((shape.sequences,), jnp.int32)
    fields = {name: known[name] for name in names | {"mask"}}
    fields |= {"weights": per_token, "token_weights": per_token}
    row: Any = jax.ShapeDtypeStruct((shape.rows, shape.length), jnp.int32)
    slot: Any = jax.ShapeDtypeStruct((shape.sequences,), jnp.int32)
    scored: Any = jax.ShapeDtypeStruct((shape.rows, shape.length), bool)
    replayed: Any = routes and jax.ShapeDtypeStruct((*row.shape, *routes[:2]), routes.dtype)
    seen: Any = visuals and jax.tree.map(as_shape, visuals.without_any(shape))
    micro = MicroBatch(Rows(row, row, row, slot, slot, slot, scored, replayed, seen), fields)
    return with_shardings(micro, jax.tree.map(lambda _: over_batch(mesh), micro))


def as_shape(array: Any) -> jax.ShapeDtypeStruct:
    """Return an array as a shape."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def with_shardings(tree: Any, layout: Any) -> Any:
    """Return arrays as shapes in a layout."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout
    )

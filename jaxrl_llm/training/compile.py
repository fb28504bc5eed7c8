"""The steps of a run, lowered for arrays without bytes: compiled ahead, and read by the planner."""

import contextlib
import dataclasses
import enum
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from jaxrl_llm.compilation import compiles_ahead
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ModelConfig
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.kernel_choice import choose_cache_kernel
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.kernels import DeviceInfo, KernelChoice, device_of
from jaxrl_llm.models.lora import split_adapter, without_adapter
from jaxrl_llm.models.paged_attention import attend_in_turn, choose_paged_kernel
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.build import native_engine
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout, replicated
from jaxrl_llm.training.bind import AlgorithmFunctions, resolve_functions
from jaxrl_llm.training.forward import (
    ForwardConfig,
    FrozenTower,
    Inference,
    MicroBatch,
    logprob_pass,
)
from jaxrl_llm.training.load_model import (
    Layouts,
    adapted_spec,
    forward_config,
    model_spec,
    open_layouts,
)
from jaxrl_llm.training.roles import (
    abstract_microbatch,
    abstract_weights,
    inference_of,
    make_role,
    needs_inference,
    reference_dtype,
    row_shapes,
    run_forward,
)
from jaxrl_llm.training.teachers import TeacherModel
from jaxrl_llm.training.update import COEFS, ROUTER

# The steps of a run, traced for arrays that have a shape and a layout but no bytes.
#
# The CPU backend computes in bfloat16 by converting whole arrays to float32 first, weights and
# cache included, which no GPU does. It has float16, which is as large. So what is compiled here
# is the same program with float16 in place of bfloat16; nothing of it is ever run.


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

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> spec = tiny_spec()
    >>> abstract_params(spec, Layout(make_mesh({}, jax.devices()[:1])), "bfloat16")["embed"].dtype
    dtype(bfloat16)
    """
    return abstract_weights(Decoder(spec), layout, dtype)


def bytes_per_device(tree: Any) -> int:
    """Count the bytes that each device holds of arrays, or of shapes with a layout.

    >>> bytes_per_device({"w": jnp.ones((2, 3))})
    24
    """
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)
    )


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
    params, frozen, teacher = abstract_params(spec, layout), {}, None
    if spec.lora is not None:
        params = split_adapter(params)[0]
        frozen = abstract_params(without_adapter(spec), layout, config.model.dtype)
    forward, coefs = planned_forward(config, spec, layout), dict[str, Any](COEFS)
    if name == "actor" and functions.runs_teacher_in_update:
        teacher = abstract_teacher(config, spec, layout)
        coefs["teacher"] = teacher.params
    role = make_role(config, functions, name, forward, layout, params, frozen, teacher)
    learner, infer = role.learner, role.infer
    assert isinstance(infer, Inference)
    settings, of_updates = learner.model, learner.shape
    shape, _ = row_shapes(config, forward, layout)
    state = learner.state_like()
    if spec.moe is not None and config.model.router_loss_coef:
        everywhere: Any = replicated(layout.mesh)
        weights = jax.ShapeDtypeStruct((spec.moe.experts,), jnp.float32, sharding=everywhere)
        coefs["balance_weights"] = weights

    def micro(names: set[str], bucket: RowShape) -> MicroBatch:
        return abstract_microbatch(names, config, bucket, layout.mesh, settings)

    def inputs(bucket: RowShape) -> tuple[Any, ...]:
        return params, frozen, micro(learner.objective.asks_for(), bucket), coefs

    total = learner.total_like(*inputs(of_updates))
    router = total[1].get(ROUTER)
    trace = {
        StepId(name, StepKind.ACCUMULATE): lambda bucket=of_updates: learner.accumulate.trace(
            total, *inputs(bucket)
        ),
        StepId(name, StepKind.APPLY): lambda: learner.apply.trace(state, params, router),
        StepId(name, StepKind.INFER): lambda bucket=shape: infer.run.trace(
            params, frozen, micro(set(), bucket).rows
        ),
    }
    needed = needs_inference(name, functions, has_adapter=spec.lora is not None)
    model = AbstractModel(
        spec=spec,
        settings=settings,
        layout=layout,
        shape=shape,
        update_shape=of_updates,
        params=params,
        optimizer=state.opt_state,
        frozen=frozen,
        needs_inference=needed,
    )
    return model, trace


def planned_forward(config: TrainConfig, spec: ModelSpec, layout: Layout) -> ForwardConfig:
    """Return how the policy, or a model like it, is run, with the shapes of a frozen tower."""
    model, tower = Decoder(spec), None
    if spec.vision_apart:
        tower = FrozenTower(abstract_tower(config, spec, layout), model, layout, config.model.dtype)
    return run_forward(config, model, layout, tower)


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
    forward = forward_config(config.model, Decoder(spec), layout)
    return TeacherModel(abstract_params(spec, layout, config.model.dtype), forward, vocab)


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


TEACHER = "teacher"


class Allocation(NamedTuple):
    """Bytes of each device of a layout: of an array of a role's."""

    role: str
    array: str
    size: int | float
    layout: Layout

    @property
    def label(self) -> str:
        """Return the name of the array in tables."""
        return f"{self.role} {self.array}"


class AbstractEngine(NamedTuple):
    """The native engine, as shapes.

    Attributes:
        weights: in the compute dtype.
        pages: of keys and values, with the slots of states.
        rows: the most that are gathered from them; nothing where pages are read in place. With
            them, features of images.
        choice: how it reads its cache.
        prefill_tokens: tokens of prompts that it reads at once, at most.
    """

    weights: Any
    pages: Any
    rows: Any
    choice: KernelChoice
    prefill_tokens: int


def plan_engine(
    config: TrainConfig, spec: ModelSpec, layout: Layout, gpu: DeviceInfo | None
) -> tuple[AbstractEngine, dict[StepId, Callable[[], Any]]]:
    """Return the engine, and the functions that trace its largest programs.

    Args:
        config: of the run.
        spec: the model.
        layout: where it stands.
        gpu: on which it is to run; None: on this machine's devices.
    """
    choice = None if gpu is None else planned_choice(config, spec, layout, gpu)
    if choice is None:
        own = without_adapter(spec)
        choice = choose_cache_kernel(
            config.model.attention,
            own,
            layout,
            config.model.dtype,
            is_int8=config.rollout.kv_cache_dtype == "int8",
        )
    engine = native_engine(config, Decoder(spec), layout, choice=choice)
    engine.close()
    trace = {
        StepId(ENGINE, kind): functools.partial(engine.trace, kind.value)
        for kind in (StepKind.PREFILL, StepKind.DECODE)
    }
    prompts = max(rows * length for rows, length in engine.programs.sizes.prefill_shapes)
    weights, (pages, *rows) = engine.shapes()
    return AbstractEngine(weights, pages, rows, choice, prompts), trace


def planned_choice(
    config: TrainConfig, spec: ModelSpec, layout: Layout, gpu: DeviceInfo
) -> KernelChoice:
    """Decide how an engine on a GPU would read its cache, if the kernel over pages agrees there.

    In programs for CPU devices `attend_in_turn` stands for the kernel.
    """
    is_for_cpu = layout.mesh.devices.flat[0].platform == "cpu"
    return choose_paged_kernel(
        config.model.attention,
        without_adapter(spec),
        layout,
        config.model.dtype,
        device=gpu,
        is_int8=config.rollout.kv_cache_dtype == "int8",
        kernel=attend_in_turn if is_for_cpu else None,
    )


class RunShapes(NamedTuple):
    """A run as the shapes of its arrays.

    Attributes:
        config: of the run.
        layouts: where its models stand.
        spec: the actor.
        roles: the models that read micro-batches, by name.
        throughout: arrays that are held in all phases.
        engine: that samples.
        trace: traces each step; those that read micro-batches for one of the buckets.
        gpu: on which the run is planned; None: on this machine's devices.
    """

    config: TrainConfig
    layouts: Layouts
    spec: ModelSpec
    roles: dict[str, AbstractModel]
    throughout: list[Allocation]
    engine: AbstractEngine
    trace: dict[StepId, Callable[..., Any]]
    gpu: DeviceInfo | None

    @property
    def cache(self) -> int:
        """Return the bytes of a device that the engine's pages and rows take."""
        return bytes_per_device((self.engine.pages, self.engine.rows))


def plan_shapes(
    config: TrainConfig, devices: Sequence[Any] | None = None, gpu: DeviceInfo | None = None
) -> RunShapes:
    """List the models of a run and the bytes of them on each device, from shapes alone.

    Args:
        config: of the run.
        devices: that it runs on, which may be those of a topology; by default jax's.
        gpu: for which jax's own devices stand; those of a topology say it themselves.

    Raises:
        ConfigError: the run could not be built.
    """
    if config.model.function is not None:
        raise ConfigError(
            "model.function: nothing can be planned for a model of one's own, only for that of a "
            "Hugging Face directory"
        )
    functions, layouts = resolve_functions(config), open_layouts(config.mesh, devices)
    gpu = device_of(layouts.rollout) if devices else gpu
    with config_errors_at("model.path"):
        base = model_spec(config.model)
    spec = adapted_spec(base, config.model.lora, config.model.adapter)
    roles: dict[str, AbstractModel] = {}
    throughout: list[Allocation] = []
    trace: dict[StepId, Callable[..., Any]] = {}
    for name in functions.updates:
        layout = layouts.of(name)
        own = spec if name == "actor" else role_spec(config, name, base)
        role, steps = plan_role(config, functions, name, own, layout)
        roles[name] = role
        trace |= steps
        sizes = {"parameters": role.params, "optimizer": role.optimizer}
        sizes |= {"base of the adapter": role.frozen} if role.frozen else {}
        if own.vision_apart and name == "actor":  # the others read its features, too
            sizes["vision tower"] = abstract_tower(config, own, layout)
        for array, tree in sizes.items():
            throughout.append(Allocation(name, array, bytes_per_device(tree), layout))
    if functions.runs_teacher_in_update and not functions.needs_teacher:
        weights = abstract_teacher(config, spec, layouts.train).params
        throughout.append(Allocation(TEACHER, "weights", bytes_per_device(weights), layouts.train))
    for name, of, where, apart in untrained(config, functions, layouts, base):
        role, trace[StepId(name, StepKind.INFER)] = plan_reference(
            config, functions, of, where, apart=apart
        )
        roles[name] = role
        throughout.append(Allocation(name, "weights", bytes_per_device(role.params), where))
    throughout += own_teacher(config, functions, layouts, roles["actor"], base)
    if config.reward.classifier:
        classifier = abstract_params(
            read_spec(config.reward.classifier), layouts.reward_model, config.model.dtype
        )
        size = bytes_per_device(classifier)
        throughout.append(Allocation("classifier", "weights", size, layouts.reward_model))
    engine, steps = plan_engine(config, spec, layouts.rollout, gpu)
    size = bytes_per_device(engine.weights)
    throughout.append(Allocation(ENGINE, "weights", size, layouts.rollout))
    trace |= steps
    return RunShapes(config, layouts, spec, roles, throughout, engine, trace, gpu)


def untrained(
    config: TrainConfig, functions: AlgorithmFunctions, layouts: Layouts, base: ModelSpec
) -> Iterator[tuple[str, ModelSpec, Layout, bool]]:
    """Yield name, spec and layout of the reference and the teachers; whether they run apart."""
    is_adapter = config.model.lora is not None or config.model.adapter is not None
    if functions.needs_reference and not is_adapter:
        where = layouts.reference
        yield "reference", base, where, where is not layouts.train
    paths = config.teacher.path if functions.needs_teacher else None
    several = [paths] if isinstance(paths, str) else dict.fromkeys((paths or {}).values())
    for number, path in enumerate(several, 1):
        with config_errors_at("teacher.path"):
            spec = read_spec(path)
        yield TEACHER if number == 1 else f"{TEACHER} {number}", spec, layouts.teacher, True


def own_teacher(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    layouts: Layouts,
    actor: AbstractModel,
    base: ModelSpec,
) -> list[Allocation]:
    """List what a policy holds to be its own teacher: a float32 average, or its first weights."""
    weights, where, offload = config.teacher.weights, layouts.teacher, config.offload
    shares = functions.needs_reference and where is layouts.reference
    shares &= offload.reference == offload.teacher and not actor.frozen
    shares &= config.reference.refresh_every is None  # else the reference has a copy of its own
    if not functions.needs_teacher or weights in ("given", "live"):
        return []
    if weights == "initial" and shares:
        return []
    if weights == "initial" and not actor.frozen:
        held = abstract_params(base, where, config.model.dtype)
    else:
        held = actor.params if where is layouts.train else abstract_params(base, where)
    return [Allocation(TEACHER, "weights", bytes_per_device(held), where)]


def role_spec(config: TrainConfig, name: str, base: ModelSpec) -> ModelSpec:
    """Return the spec of a critic or of a reward model."""
    path = getattr(config, name).path
    with config_errors_at(f"{name}.path"):
        spec = read_spec(path) if path else base
    return (
        dataclasses.replace(spec, value_head=True, reward_head=False) if name == "critic" else spec
    )


log = logging.getLogger(__name__)

LARGE = 500_000_000
"""Parameters from which on reading them takes longer than lowering the steps a second time."""


@contextlib.contextmanager
def compiling_ahead(config: TrainConfig, folder: Path) -> Iterator[Callable[[], None]]:
    """Compile a run's steps from shapes alone, to be kept where the first step finds them.

    The steps are lowered twice then, which costs some seconds. So it is done for large models only,
    and at the start of a run. Several processes compile when they need to, and CPUs' programs are
    compiled while others run anyway.

    Args:
        config: of the run.
        folder: of the run, as `run_folder` gives it.

    Yields:
        A function that waits until all are compiled. On an error nothing is waited for but the
        program that is being compiled.
    """
    settings: Any = jax.config
    is_kept = bool(settings.jax_compilation_cache_dir)
    is_new = not (folder / "checkpoints").exists()
    is_useful = is_kept and is_new and not compiles_ahead(jax.devices())
    if not is_useful or distributed.process_count() > 1 or not is_large(config.model):
        yield lambda: None
        return
    stopped = Event()
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(compile_steps, config, stopped)

        def wait() -> None:
            if error := done.exception():
                log.warning("the run's steps were not compiled ahead: %s", error)

        try:
            yield wait
        finally:
            stopped.set()


def is_large(config: ModelConfig) -> bool:
    """Tell whether it takes long to read a model's weights; of one's own it is not known."""
    if config.function is not None:
        return False
    with config_errors_at("model.path"):
        arrays = jax.tree.leaves(declare(read_spec(config.path)))
    return not config.random_init and sum(math.prod(a.shape) for a in arrays) >= LARGE


def compile_steps(config: TrainConfig, stopped: Event) -> None:
    """Compile the steps of a run from shapes, one after another, until it is stopped."""
    for program in programs(plan_shapes(config)):
        if stopped.is_set():
            return
        program.lower().compile()


def programs(shapes: RunShapes) -> Iterator[Any]:
    """Trace the steps that a run takes, for every bucket of shapes of micro-batches."""
    for (name, kind), trace in shapes.trace.items():
        if kind is StepKind.INFER and not shapes.roles[name].needs_inference:
            continue
        if kind in (StepKind.ACCUMULATE, StepKind.INFER):  # these read micro-batches
            role = shapes.roles[name]
            shape = role.shape if kind is StepKind.INFER else role.update_shape
            yield from map(trace, shape.in_short_rows.buckets)
        else:
            yield trace()

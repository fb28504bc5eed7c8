"""A run's steps, compiled before they are needed: from shapes, while other things are read."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import jax

from jaxrl_llm.compilation import compiles_ahead
from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ModelConfig
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.model import Model, is_adapted
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.planning.lowering import (
    StepKind,
    abstract_microbatch,
    abstract_weights,
    needs_inference,
)
from jaxrl_llm.planning.memory import RunShapes, plan_shapes
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.inference import Inference
from jaxrl_llm.training.layouts import Layouts
from jaxrl_llm.training.microbatches import MicroBatch
from jaxrl_llm.training.objectives import COEFS, PolicyObjective
from jaxrl_llm.training.roles import Models, Role, reference_dtype

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


def compile_first_step(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    model: Model,
    models: Models,
    layouts: Layouts,
) -> None:
    """Begin to compile what the models of a run need in their first step, where others can wait.

    It is a guess by the config. A batch for which it is wrong waits for its own programs.

    Args:
        config: of the run.
        functions: that it names.
        model: the policy.
        models: as they are built.
        layouts: where they stand.
    """
    roles, actor = models.roles, models.actor

    def micro_like(role: Role, bucket: RowShape) -> MicroBatch:
        learner = role.learner
        names = learner.objective.asks_for()
        return abstract_microbatch(names, config, bucket, learner.mesh, learner.model)

    def infer_ahead(role: Role, params: Any) -> None:
        if isinstance(role.infer, Inference):
            role.infer.compile_ahead(params, lambda bucket: micro_like(role, bucket).rows)

    for name, role in roles.items():
        if needs_inference(name, functions, has_adapter=is_adapted(model)):
            infer_ahead(role, role.learner.params_like)
    is_copy = not is_adapted(model) and layouts.reference is layouts.train
    if functions.needs_reference and is_copy:
        infer_ahead(actor, abstract_weights(model, layouts.reference, reference_dtype(config)))
    for role in models.to_update(1, config.critic.warmup_steps):
        if not role.learner.model.router_loss_coef:  # which needs a pass of its own first
            coefs = COEFS | teacher_like(role, layouts.train, config.model.dtype)
            role.learner.compile_ahead(functools.partial(micro_like, role), coefs)


def teacher_like(role: Role, layout: Layout, dtype: str) -> dict[str, Any]:
    """Return as shapes, by name, the weights of a teacher that a role's update runs."""
    objective = role.learner.objective
    is_policy = isinstance(objective, PolicyObjective)
    distillation = objective.distillation if is_policy else None
    if distillation is None or distillation.teacher is None:
        return {}
    return {"teacher": abstract_weights(distillation.teacher.model, layout, dtype)}

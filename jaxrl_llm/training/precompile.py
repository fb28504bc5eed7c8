"""A new run's steps, compiled in another thread while its weights are read."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import jax

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.sections.model import ModelConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.planning.lowering import StepKind
from jaxrl_llm.planning.memory import RunShapes, plan_shapes
from jaxrl_llm.sharding import distributed

log = logging.getLogger(__name__)

LARGE = 500_000_000
"""Parameters from which on reading them takes longer than lowering the steps a second time."""


@contextlib.contextmanager
def compiling_ahead(config: TrainConfig, folder: Path) -> Iterator[Callable[[], None]]:
    """Compile a run's steps from shapes alone, to be kept where the first step finds them.

    The steps are lowered twice then, which costs some seconds. So it is done for large models only,
    and at the start of a run. Several processes compile when they need to.

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
    if not (is_kept and is_new) or distributed.process_count() > 1 or not is_large(config.model):
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
    """Tell whether it takes long to read a model's weights."""
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
            yield from map(trace, shapes.roles[name].shape.buckets)
        else:
            yield trace()

"""The native engine of a run, as shapes, and its largest programs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.kernel_choice import choose_cache_kernel
from jaxrl_llm.models.kernels import DeviceInfo
from jaxrl_llm.models.lora import without_adapter
from jaxrl_llm.models.model import model_of
from jaxrl_llm.models.paged_attention import attend_in_turn
from jaxrl_llm.models.paged_kernel import PagedChoice, choose_paged_kernel
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.lowering import ENGINE, StepId, StepKind
from jaxrl_llm.rollout.build import native_engine
from jaxrl_llm.sharding.layout import Layout


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
    choice: PagedChoice
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
    engine = native_engine(config, model_of(spec), layout, choice=choice)
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
) -> PagedChoice:
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

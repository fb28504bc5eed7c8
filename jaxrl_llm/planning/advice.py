"""Changes of a config that would make a run fit, tried by arithmetic one after another.

Memory held throughout follows exactly from the changed config. Scratch is scaled from that of
the compiled steps: by tokens on a device, by the parts of the `tensor` axis, and for `remat` by the
numbers that `models.remat` says are stored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.lowering import ENGINE, StepId, StepKind
from jaxrl_llm.planning.memory import (
    PhaseMemory,
    RunShapes,
    longest,
    memory_by_phase,
    plan_shapes,
    tokens_on_device,
)
from jaxrl_llm.sharding.mesh import batch_shards


class Remedy(NamedTuple):
    """Changes of a config, and the fullest phase with them."""

    changes: tuple[str, ...]
    worst: PhaseMemory


def advise(
    shapes: RunShapes,
    scratch: Mapping[StepId, int | float],
    limit: int | float,
    change: Callable[[tuple[str, ...]], TrainConfig],
    *,
    most: int = 6,
    devices: Sequence[Any] | None = None,
) -> list[Remedy]:
    """Look for changes that make every phase fit, each time the one that saves most.

    Args:
        shapes: the run as it is.
        scratch: bytes that its steps were compiled to need.
        limit: bytes of a device.
        change: overrides -> the config with them.
        most: changes to try together.
        devices: of the run; by default jax's.

    Returns:
        The run after each change; the last one fits unless nothing helps.
    """
    done: tuple[str, ...] = ()
    current, now = shapes, fullest_phase(shapes, scratch)
    path: list[Remedy] = []
    while now.total > limit and len(path) < most:
        best: tuple[float, tuple[str, ...], RunShapes, PhaseMemory] | None = None
        for option in list_changes(current, now):
            try:
                tried = plan_shapes(change(done + option), devices, shapes.gpu)
            except (ConfigError, ValueError):
                continue
            phase = fullest_phase(tried, scale_scratch(scratch, shapes, tried))
            if phase.total < (best[0] if best else now.total) * 0.99:
                best = phase.total, option, tried, phase
        if best is None:
            break
        _, option, current, now = best
        done += option
        path.append(Remedy(option, now))
    return path


def fullest_phase(shapes: RunShapes, scratch: Mapping[StepId, int | float]) -> PhaseMemory:
    """Return the phase that needs most."""
    return max(memory_by_phase(shapes, scratch), key=lambda phase: phase.total)


def list_changes(shapes: RunShapes, phase: PhaseMemory) -> Iterator[tuple[str, ...]]:
    """Yield changes that may lower the memory of a phase, as overrides."""
    config, is_engine = shapes.config, phase.step.role == ENGINE
    for key, kind in (
        ("optimizer", "optimizer"),
        ("params", "parameters"),
        ("reference", "reference weights"),
        ("teacher", "teacher weights"),
    ):
        if not getattr(config.offload, key) and any(k.endswith(kind) for k in phase.held):
            yield (f"offload.{key}=true",)
    train, rollout = shapes.layouts.train.mesh.shape, shapes.layouts.rollout.mesh.shape
    has_experts = shapes.spec.moe is not None
    tokens = config.batch.max_tokens_per_device
    fewer = f"batch.max_tokens_per_device={tokens // 2}"
    for axis in ("tensor", "context", *(("expert",) if has_experts else ())):
        finer = "mesh.train.fsdp=-1", f"mesh.train.{axis}={2 * train[axis]}"
        yield finer
        yield (*finer, fewer)
    for axis in ("tensor", *(("expert",) if has_experts else ())):
        yield "mesh.rollout.data=-1", f"mesh.rollout.{axis}={2 * rollout[axis]}"
    if train["data"] > 1:
        yield "mesh.train.data=1", "mesh.train.fsdp=-1"
    if is_engine:
        yield (f"rollout.max_running_sequences={config.rollout.max_running_sequences // 2}",)
        if config.rollout.kv_cache_gb:
            yield (f"rollout.kv_cache_gb={config.rollout.kv_cache_gb / 2:g}",)
        return
    if config.model.remat != "full":
        yield ("model.remat=full",)
    yield (fewer,)


def scale_scratch(
    scratch: Mapping[StepId, int | float], old: RunShapes, new: RunShapes
) -> dict[StepId, int | float]:
    """Scale scratch to a changed config."""
    scaled = {}
    for step, size in scratch.items():
        if step.role == ENGINE:
            scaled[step] = size * _per_slot(new) / _per_slot(old)
        elif step.kind is StepKind.APPLY:
            scaled[step] = size
        else:
            scaled[step] = size * _load(new, step.role) / _load(old, step.role)
            if step.kind is StepKind.ACCUMULATE:
                scaled[step] *= stored_per_token(new) / stored_per_token(old)
    return scaled


def _per_slot(shapes: RunShapes) -> int | float:
    mesh = shapes.layouts.rollout.mesh
    return shapes.config.rollout.max_running_sequences / batch_shards(mesh) / mesh.shape["tensor"]


def _load(shapes: RunShapes, role: str) -> int | float:
    model = shapes.roles[role]
    return tokens_on_device(model) / model.layout.mesh.shape["tensor"]


def stored_per_token(shapes: RunShapes) -> int | float:
    """Return the numbers per token that the backward pass of a model finds stored.

    With full rematerialisation those of one layer are there too, while it is computed again.
    """
    spec, length = shapes.spec, longest(shapes.config)
    everything, products = _numbers(spec, length)
    policy = shapes.config.model.remat
    kept = {"none": everything, "dots": products, "full": spec.hidden_size}[policy]
    return spec.layers * kept + (0 if policy == "none" else everything)


def _numbers(spec: ModelSpec, length: int) -> tuple[int, int]:
    heads, own = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    moe = spec.moe
    width = moe.ff_width * moe.experts_per_token + moe.shared_ff_width if moe else spec.ff_width
    everything = 11 * spec.hidden_size + 5 * heads + 5 * own + 6 * width + 2 * spec.heads * length
    return everything, 2 * spec.hidden_size + heads + 2 * own + (0 if moe else 2 * width)

"""What would make a run fit: changes of its config, tried by arithmetic one after another.

What is held throughout follows exactly from the changed config. Scratch is scaled from what was
compiled: by tokens on a device, by the parts of the `tensor` axis, and for `remat` by the numbers
that `models.remat` says are stored.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.memory import Phase, Shapes, lay_out, longest, phases, tokens_on_device
from jaxrl_llm.sharding.mesh import batch_shards


class Tried(NamedTuple):
    """Changes of a config, and the fullest phase with them."""

    changes: tuple[str, ...]
    worst: Phase


def advise(
    shapes: Shapes,
    scratch: Mapping[str, int | float],
    limit: int | float,
    change: Callable[[tuple[str, ...]], TrainConfig],
    *,
    most: int = 6,
) -> list[Tried]:
    """Look for changes that make every phase fit, each time the one that saves most.

    Args:
        shapes: the run as it is.
        scratch: bytes that its steps were compiled to need.
        limit: bytes of a device.
        change: overrides -> the config with them.
        most: changes to try together.

    Returns:
        The run after each change; the last one fits unless nothing helps.
    """
    done: tuple[str, ...] = ()
    current, now = shapes, worst(shapes, scratch)
    path: list[Tried] = []
    while now.total > limit and len(path) < most:
        best: tuple[float, tuple[str, ...], Shapes, Phase] | None = None
        for option in options(current, now):
            try:
                tried = lay_out(change(done + option))
            except (ConfigError, ValueError):
                continue
            phase = worst(tried, scaled(scratch, shapes, tried))
            if phase.total < (best[0] if best else now.total) * 0.99:
                best = phase.total, option, tried, phase
        if best is None:
            break
        _, option, current, now = best
        done += option
        path.append(Tried(option, now))
    return path


def worst(shapes: Shapes, scratch: Mapping[str, int | float]) -> Phase:
    """Return the phase that needs most."""
    return max(phases(shapes, scratch), key=lambda phase: phase.total)


def options(shapes: Shapes, phase: Phase) -> Iterator[tuple[str, ...]]:
    """Yield changes that may lower what a phase needs, as overrides."""
    config, (name, _) = shapes.config, phase.name.split()
    is_engine = name == "engine"
    for key, kind in (
        ("optimizer", "optimizer"),
        ("params", "parameters"),
        ("reference", "reference weights"),
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


def scaled(scratch: Mapping[str, int | float], old: Shapes, new: Shapes) -> dict[str, int | float]:
    """Scale scratch to a changed config."""
    found = {}
    for name, size in scratch.items():
        role, step = name.split()
        if role == "engine":
            found[name] = size * _per_slot(new) / _per_slot(old)
        elif step == "apply":
            found[name] = size
        else:
            found[name] = size * _load(new, role) / _load(old, role)
            if step == "accumulate":
                found[name] *= stored(new) / stored(old)
    return found


def _per_slot(shapes: Shapes) -> int | float:
    mesh = shapes.layouts.rollout.mesh
    return shapes.config.rollout.max_running_sequences / batch_shards(mesh) / mesh.shape["tensor"]


def _load(shapes: Shapes, role: str) -> int | float:
    found = shapes.roles[role]
    return tokens_on_device(found) / found.layout.mesh.shape["tensor"]


def stored(shapes: Shapes) -> int | float:
    """Return the numbers per token that the backward pass of a model finds stored.

    With full rematerialisation those of one layer are there too, while it is computed again.
    """
    spec, length = shapes.spec, longest(shapes.config)
    everything, products = _numbers(spec, length)
    policy = shapes.config.model.remat
    kept = {"none": everything, "dots": products, "full": spec.width}[policy]
    return spec.layers * kept + (0 if policy == "none" else everything)


def _numbers(spec: ModelSpec, length: int) -> tuple[int, int]:
    heads, own = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
    moe = spec.moe
    width = moe.ff_width * moe.experts_per_token + moe.shared_ff_width if moe else spec.ff_width
    everything = 11 * spec.width + 5 * heads + 5 * own + 6 * width + 2 * spec.heads * length
    return everything, 2 * spec.width + heads + 2 * own + (0 if moe else 2 * width)

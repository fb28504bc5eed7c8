"""A plan as text."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.program import NOTHING, OperationCounts
from jaxrl_llm.planning.steps import (
    BANDWIDTH,
    COMPUTE,
    LINKS,
    CompiledStep,
    PhaseMemory,
    memory_by_phase,
)
from jaxrl_llm.sharding.layout import Layout, batch_shards
from jaxrl_llm.training.compile import ENGINE, RunShapes, StepId, StepKind, plan_shapes
from jaxrl_llm.training.load_model import overlaps_training

# Changes of a config that would make a run fit, tried by arithmetic one after another.
#
# Memory held throughout follows exactly from the changed config. Scratch is scaled from that of
# the compiled steps: by tokens on a device, by the parts of the `tensor` axis, and for `remat` by
# the numbers that `models.layers` says are stored.


def advise(
    shapes: RunShapes,
    scratch: Mapping[StepId, int | float],
    limit: int | float,
    change: Callable[[tuple[str, ...]], TrainConfig],
    *,
    most: int = 6,
    devices: Sequence[Any] | None = None,
) -> list[tuple[tuple[str, ...], PhaseMemory]]:
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
    path: list[tuple[tuple[str, ...], PhaseMemory]] = []
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
        path.append((option, now))
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
    mesh, pieces = model.layout.mesh, model.layout.pieces
    return model.shape.tokens / (batch_shards(mesh) * pieces) / mesh.shape["tensor"]


def stored_per_token(shapes: RunShapes) -> int | float:
    """Return the numbers per token that the backward pass of a model finds stored.

    With full rematerialisation those of one layer are there too, while it is computed again.
    """
    spec, length = shapes.spec, shapes.config.longest_sequence
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


GIB = 2**30
TOKEN_BYTES = 12
"""Of a drawn token in the host's memory and in a checkpoint: its id, log-prob and version."""
LEAST_SHARE = 1e-3
"""Share of the bytes that a step sends below which a collective is not listed."""


def describe_run(shapes: RunShapes) -> list[str]:
    """Describe the run: its models, meshes and micro-batches."""

    def sizes(layout: Layout) -> str:
        return " ".join(f"{a}={n}" for a, n in layout.mesh.shape.items() if n > 1) or "one device"

    billions = parameter_count(shapes.spec) / 1e9
    lines = [f"{'model':10}{shapes.config.model.path}: {billions:.2f} B parameters"]
    for name, role in shapes.roles.items():
        rows = f"micro-batches of {role.shape.rows} rows of {role.shape.length} tokens"
        lines.append(f"{name:10}{sizes(role.layout)}; {rows}")
    running = shapes.config.rollout.max_running_sequences
    slots = f"{running} slots for {shapes.config.longest_sequence} tokens at most"
    lines.append(f"{'engine':10}{sizes(shapes.layouts.rollout)}; {slots}")
    how = "pages in place" if shapes.engine.choice.kernel else "rows gathered from pages"
    return [*lines, f"{'':10}{how}: {shapes.engine.choice.reason}"]


def describe_compiler(gpu: str | None) -> list[str]:
    """Say whose compiler made the programs that the figures are of."""
    if gpu is None:
        return [
            "programs  of the CPU's compiler, which fuses and schedules otherwise than a GPU's;",
            "          --compile-for H100, H200 or B200 has the GPU's programs",
        ]
    return [
        f"programs  of XLA's compiler for {gpu}, nothing timed: matrix products are cuBLAS's,",
        "          attention in rows is XLA's; cuDNN's is not in the figures",
    ]


def describe_memory(phases: Sequence[PhaseMemory], limit: int | float, gpu: str) -> list[str]:
    """Tabulate memory by phase and kind."""
    kinds = list(dict.fromkeys(kind for phase in phases for kind in phase.held))
    width = max(map(len, kinds)) + 2
    names = [str(phase.step) for phase in phases]
    lines = ["memory of a device, GiB", " " * width + "  ".join(names)]

    def row(name: str, values: list[str]) -> str:
        cells = (v.rjust(len(n)) for v, n in zip(values, names, strict=True))
        return name.ljust(width) + "  ".join(cells)

    for kind in kinds:
        sizes = [p.held.get(kind) for p in phases]
        cells = ["" if size is None else f"{size / GIB:.2f}" for size in sizes]
        lines.append(row(kind, cells))
    lines.append(row("together", [f"{p.total / GIB:.2f}" for p in phases]))
    fits = ["fits" if p.total <= limit else f"+{(p.total - limit) / GIB:.1f}" for p in phases]
    return [*lines, row(f"on {gpu}: {limit / GIB:.0f}", fits)]


def describe_advice(
    path: Sequence[tuple[tuple[str, ...], PhaseMemory]], limit: int | float
) -> list[str]:
    """Say which changes make the run fit."""
    lines = ["what would make it fit, one after another (scratch is scaled: plan the result again)"]
    for changes, worst in path:
        size = f"{worst.total / GIB:.1f} GiB in {worst.step}"
        lines.append(f"  {' '.join(changes)}: {size}")
    if not path or path[-1][1].total > limit:
        lines.append("  and still it does not fit: take more devices")
    return lines


def describe_operations(steps: Sequence[CompiledStep]) -> list[str]:
    """Tabulate operations."""
    columns = f"{'runs':>8}{'compiled':>12}{'model':>12}{'ratio':>8}"
    counts_itself = any(s.unlooped is not None for s in steps)
    lines = [f"{'operations of a device, TFLOP':32}{columns}"]
    lines[0] += f"{'loops once':>12}" if counts_itself else ""
    for s in steps:
        done, needed = s.counted.flops / 1e12, s.model_flops / 1e12
        ratio = f"{done / needed:8.2f}" if needed else " " * 8
        own = f"{s.unlooped / 1e12:12.3f}" if s.unlooped is not None else ""
        lines.append(f"{s.step!s:32}{s.runs:8.0f}{done:12.3f}{needed:12.3f}{ratio}{own}")
    return lines


def describe_kernels(steps: Sequence[CompiledStep]) -> list[str]:
    """Tabulate a run of each program and an iteration of its loops.

    The columns are kernels, bytes that they read and write in the GPU's memory, and arrays that are
    gathered.
    """
    columns = f"{'runs':>8}{'kernels':>12}{'memory, GB':>12}{'gathered':>10}"
    lines = [f"{'kernels of a device, loops below':56}{columns}"]

    def row(name: str, trips: str, counts: OperationCounts, branches: OperationCounts) -> str:
        both = counts.plus(branches)
        kernels = " to ".join(dict.fromkeys(f"{n:.0f}" for n in (both.fewest, both.kernels)))
        gathered = sum(n for over, n in both.arrays.items() if over.kind == "all-gather")
        return f"{name:56}{trips:>8}{kernels:>12}{both.moved / 1e9:12.2f}{gathered:10.0f}"

    for s in steps:
        lines.append(row(str(s.step), f"{s.runs:.0f}", s.counted, NOTHING))
        for loop, same in itertools.groupby(s.loops):
            times = len(list(same))
            name = "  " * (loop.depth + 1) + loop.source.partition("/")[2]
            name += f" ({times} such)" if times > 1 else ""
            trips = "?" if loop.trips is None else str(loop.trips)
            lines.append(row(name, trips, loop.once, loop.branches))
    return lines


def describe_collectives(steps: Sequence[CompiledStep]) -> list[str]:
    """Tabulate bytes sent by kind of collective and mesh axes."""
    lines = ["bytes that a device sends in one run, GB"]
    for step in steps:
        lines += [
            f"{step.step!s:24}{over.kind:20}{','.join(over.axes):20}"
            f"{'between nodes' if over.leaves_node else 'in a node':15}{size / 1e9:12.4g}"
            for over, size in step.counted.sent.most_common()
            if size >= LEAST_SHARE * step.counted.sent.total()
        ]
    return lines if len(lines) > 1 else ["no collectives"]


def describe_time(steps: Sequence[CompiledStep], shapes: RunShapes, gpu: str) -> list[str]:
    """Tabulate the estimated time."""
    columns = f"{'runs':>8}{'compute':>12}{'memory':>12}{'network':>12}{'in all':>12}"
    lines = [f"{f'time on {gpu}, s':32}{columns}"]
    total = 0.0
    for s in steps:
        whole = s.time.total * s.runs
        total += whole
        lines.append(
            f"{s.step!s:32}{s.runs:8.0f}{s.time.compute:12.4f}{s.time.memory:12.4f}"
            f"{s.time.communication:12.4f}{whole:12.1f}"
        )
    lines.append(f"{'a training step':76}{total:12.1f}")
    answer, whole = shapes.config.rollout.max_new_tokens, shapes.config.longest_sequence
    return [
        *lines,
        f"assumed: {COMPUTE:.0%} of peak FLOP/s, {BANDWIDTH:.0%} of memory bandwidth, {LINKS:.0%} "
        "of links; computing and memory",
        "traffic overlap, communication does not; balanced experts; nothing for scores and saving;",
        f"every answer has {answer} tokens, so that a sequence has {whole}",
    ]


def describe_window(steps: Sequence[CompiledStep], shapes: RunShapes) -> list[str]:
    """Say what answers that are begun before their step take, if there are any."""
    config = shapes.config
    rollout, longest_answer = config.rollout, config.rollout.max_new_tokens
    if not rollout.staleness:
        return []
    step = config.batch.prompts_per_step * rollout.samples_per_prompt
    held = (rollout.staleness + 1) * step
    size = held * longest_answer * TOKEN_BYTES / GIB
    lines = [
        f"window    rollout.staleness: {rollout.staleness}: at most {held} answers are held on the "
        f"host, {size:.2f} GiB with every token"
    ]
    by_step = {s.step: s.time.total for s in steps}
    if rollout.at_push == "reread":
        slots = min(rollout.max_running_sequences, held)
        runs = math.ceil(slots * config.longest_sequence / shapes.engine.prefill_tokens)
        reading = runs * by_step[StepId(ENGINE, StepKind.PREFILL)]
        lines.append(
            f"{'':10}reading {slots} answers in flight again after a weight sync: {reading:.1f} s "
            "at most"
        )
    sampling, training = (
        sum(s.time.total * s.runs for s in steps if (s.step.role == ENGINE) == is_engine)
        for is_engine in (True, False)
    )
    if overlaps_training(config.rollout, shapes.layouts):
        lines.append(
            f"{'':10}the engine's {sampling:.1f} s and the trainer's {training:.1f} s overlap: a "
            f"step takes {max(sampling, training):.1f} s at least"
        )
    return lines

"""A plan as text."""

import itertools
import math
from collections.abc import Sequence

from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.planning.advice import Remedy
from jaxrl_llm.planning.estimate import BANDWIDTH, COMPUTE, LINKS
from jaxrl_llm.planning.lowering import ENGINE, StepId, StepKind
from jaxrl_llm.planning.memory import PhaseMemory, RunShapes, longest
from jaxrl_llm.planning.program import NOTHING, OperationCounts
from jaxrl_llm.planning.steps import CompiledStep
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.layouts import overlaps_training

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
    slots = f"{running} slots for {longest(shapes.config)} tokens at most"
    lines.append(f"{'engine':10}{sizes(shapes.layouts.rollout)}; {slots}")
    return [*lines, f"{'':10}{shapes.engine.choice}"]


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


def describe_advice(path: Sequence[Remedy], limit: int | float) -> list[str]:
    """Say which changes make the run fit."""
    lines = ["what would make it fit, one after another (scratch is scaled: plan the result again)"]
    for tried in path:
        size = f"{tried.worst.total / GIB:.1f} GiB in {tried.worst.step}"
        lines.append(f"  {' '.join(tried.changes)}: {size}")
    if not path or path[-1].worst.total > limit:
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
    answer, whole = shapes.config.rollout.max_new_tokens, longest(shapes.config)
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
        runs = math.ceil(slots * longest(config) / shapes.engine.prefill_tokens)
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

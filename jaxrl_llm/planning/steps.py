"""The steps of a run, compiled, with the memory, operations and time of their programs."""

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.planning.estimate import PER_NODE, Gpu, StepSeconds, estimate_seconds
from jaxrl_llm.planning.gpu_compiler import UNMERGED
from jaxrl_llm.planning.lowering import StepId, StepKind, with_float16
from jaxrl_llm.planning.memory import RunShapes, Work, workload
from jaxrl_llm.planning.program import Loop, OperationCounts, count_operations, list_loops

log = logging.getLogger(__name__)


class CompiledStep(NamedTuple):
    """A step of a run, compiled.

    Attributes:
        step: whose it is, and which of its steps.
        arguments: bytes of a device.
        scratch: bytes of a device beside arguments, and beside results that take their place.
        counted: operations, bytes sent and kernels of a device in one run.
        loops: of the program.
        unlooped: the compiler's own count of operations, where loops run once; None if it has none.
        model_flops: operations of each device that the model's mathematics needs in one run.
        runs: in a training step.
        time: of one run.
    """

    step: StepId
    arguments: int
    scratch: int
    counted: OperationCounts
    loops: list[Loop]
    unlooped: int | float | None
    model_flops: int | float
    runs: int | float
    time: StepSeconds


def compile_planned_steps(
    shapes: RunShapes, gpu: Gpu, options: Mapping[str, Any] | None = None
) -> list[CompiledStep]:
    """Lower and compile every step of a run, one after another.

    Args:
        shapes: the run, on CPU devices or on those of a GPU's topology.
        gpu: whose times are estimated.
        options: of the GPU's compiler; None where the CPU's compiles.
    """
    steps = []
    for number, (step, trace) in enumerate(shapes.trace.items()):
        begun = time.perf_counter()
        with activity("compiling", len(shapes.trace)) as progress:
            progress.advance(number)
            progress.detail = str(step)
            lowered = trace().lower()
            if options is None:
                compiled = with_float16(lowered).compile()
            else:
                more = UNMERGED if step.kind is StepKind.DECODE else {}
                compiled = lowered.compile(compiler_options={**options, **more})
        log.info("compiled %s in %.0f s", step, time.perf_counter() - begun)
        steps.append(analyze_step(step, compiled, workload(shapes, step), gpu))
    return steps


def analyze_step(step: StepId, compiled: Any, work: Work, gpu: Gpu) -> CompiledStep:
    """Read a compiled program's memory, operations and time on a device.

    A GPU's program says what it reads and writes; for the CPU's the least that it must is taken.
    """
    memory = compiled.memory_analysis()
    scratch = memory.temp_size_in_bytes
    if step.kind is StepKind.INFER:
        scratch += memory.output_size_in_bytes
    text, axes = compiled.as_text(), work.mesh.shape
    counted = count_operations(text, axes, per_node=PER_NODE)
    is_for_cpu = work.mesh.devices.flat[0].platform == "cpu"
    return CompiledStep(
        step,
        memory.argument_size_in_bytes,
        scratch,
        counted,
        list_loops(text, axes, per_node=PER_NODE),
        (compiled.cost_analysis() or {}).get("flops"),
        work.flops / work.mesh.size,
        work.runs,
        estimate_seconds(counted, work.touched if is_for_cpu else counted.moved, gpu),
    )

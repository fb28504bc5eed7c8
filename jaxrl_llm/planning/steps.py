"""The steps of a run, compiled, and what is read off their programs."""

import logging
import time
from typing import Any, NamedTuple

from jaxrl_llm.planning.estimate import PER_NODE, Gpu, Seconds, seconds
from jaxrl_llm.planning.lowering import halves
from jaxrl_llm.planning.memory import Shapes, Work, workload
from jaxrl_llm.planning.program import Counted, count

log = logging.getLogger(__name__)


class Step(NamedTuple):
    """A step of a run, compiled.

    Attributes:
        name: of the model, and of what it does.
        arguments: bytes of a device.
        scratch: bytes of a device beside arguments, and beside results that take their place.
        counted: what a device computes and sends in one run.
        unlooped: the compiler's own count of operations, where loops run once.
        model_flops: what the model needs of each device in one run, nothing computed twice.
        runs: in a training step.
        time: of one run.
    """

    name: str
    arguments: int
    scratch: int
    counted: Counted
    unlooped: int | float
    model_flops: int | float
    runs: int | float
    time: Seconds


def compile_steps(shapes: Shapes, gpu: Gpu) -> list[Step]:
    """Lower and compile every step of a run, one after another."""
    steps = []
    for name, lower in shapes.lower.items():
        lowered = lower()
        parts = {name: lowered}
        if name == "engine":
            parts = {f"engine {step}": program for step, program in lowered.items()}
        for part, program in parts.items():
            begun = time.perf_counter()
            compiled = halves(program).compile()
            log.info("compiled %s in %.0f s", part, time.perf_counter() - begun)
            steps.append(read_step(part, compiled, workload(shapes, part), gpu))
    return steps


def read_step(name: str, compiled: Any, work: Work, gpu: Gpu) -> Step:
    """Read off a compiled program what a device needs for it."""
    memory = compiled.memory_analysis()
    scratch = memory.temp_size_in_bytes
    if name.split()[1] == "infer":
        scratch += memory.output_size_in_bytes
    counted = count(compiled.as_text(), work.mesh.shape, per_node=PER_NODE)
    analysis = compiled.cost_analysis() or {}
    return Step(
        name,
        memory.argument_size_in_bytes,
        scratch,
        counted,
        analysis.get("flops", 0.0),
        work.flops / work.mesh.size,
        work.runs,
        seconds(counted, work.touched, gpu),
    )

"""The steps of a run, compiled, with the memory, operations and time of their programs."""

import contextlib
import importlib.util
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.planning.memory import Work, workload
from jaxrl_llm.planning.program import Loop, OperationCounts, count_operations, list_loops
from jaxrl_llm.training.compile import RunShapes, StepId, StepKind, with_float16


class Gpu(NamedTuple):
    """Published figures of one GPU: dense bfloat16 FLOP/s, bytes, and bytes/s in one direction.

    `link` is NVLink's, within a node of eight; `network` that of one 400 Gb/s adapter per GPU.
    `capability` is for what CUDA compiles.
    """

    flops: int | float
    memory: int | float
    bandwidth: int | float
    link: int | float
    network: int | float
    capability: str


GPUS: Mapping[str, Gpu] = {
    "H100": Gpu(989e12, 80e9, 3.35e12, 450e9, 50e9, "9.0"),
    "H200": Gpu(989e12, 141e9, 4.8e12, 450e9, 50e9, "9.0"),
    "B200": Gpu(2250e12, 180e9, 7.7e12, 900e9, 50e9, "10.0"),
}
PER_NODE = 8
COMPUTE, BANDWIDTH, LINKS = 0.4, 0.7, 0.7
"""Assumed shares of the peaks: of FLOP/s, of memory bandwidth, of links and network."""
USABLE = 0.92
"""Share of the memory that a program gets; the rest is the driver's, and fragmentation."""


class StepSeconds(NamedTuple):
    """One run of a step: computing, memory traffic (these two overlap), and communication."""

    compute: int | float
    memory: int | float
    communication: int | float

    @property
    def total(self) -> int | float:
        """Return the time; communication is not overlapped."""
        return max(self.compute, self.memory) + self.communication


def estimate_seconds(counted: OperationCounts, touched: int | float, gpu: Gpu) -> StepSeconds:
    """Estimate the time of one run of a step.

    Args:
        counted: operations and bytes sent of each device.
        touched: bytes that each reads and writes.
        gpu: the device.

    >>> from jaxrl_llm.planning.program import NOTHING
    >>> round(estimate_seconds(NOTHING._replace(flops=989e12), 0, GPUS["H100"]).total, 2)
    2.5
    """
    sent = sum(
        size / ((gpu.network if over.leaves_node else gpu.link) * LINKS)
        for over, size in counted.sent.items()
    )
    reading = touched / (gpu.bandwidth * BANDWIDTH)
    return StepSeconds(counted.flops / (gpu.flops * COMPUTE), reading, sent)


PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
UNTUNED: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Options of the compiler that cannot try kernels out.

On a GPU XLA times Triton's and cuBLAS's matrix products and takes the faster one. Without one it
would take Triton's in sizes that nobody has timed; so the calls of cuBLAS are taken.
"""
UNMERGED: Mapping[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 0}
"""More of them, for decoding: products of one operand, as of q, k and v, are not merged.

Triton's merged product reads the weights where they are. For cuBLAS XLA concatenates them for each
token, those of all layers before the first one is used.
"""
NOTE = b"Could not find cuda drivers on your machine"
NOTE_HEAD = b"All log messages before absl::InitializeLog"


# XLA's compiler for GPUs that are not there: jax's CUDA plugin and the description of a device.
#
# The plugin compiles without a GPU and without a driver for the devices of a topology, which
# stand in a mesh as real ones do. `targets/` describes the GPUs that can be named.


def describe_topology(gpu: str, devices: int) -> tuple[str, str]:
    """Return a GPU's description as text, and the topology of so many of them.

    These are nodes of eight, or one node of fewer.

    Args:
        gpu: one of those in `targets/`.
        devices: how many.

    Raises:
        ConfigError: the devices do not fill nodes.

    >>> describe_topology("H200", 32)[1]
    '1x4x8'
    """
    nodes, rest = divmod(devices, PER_NODE)
    if devices < 1 or (nodes and rest):
        raise ConfigError(
            f"--devices: got {devices}, expected 1 to {PER_NODE}, or a multiple of {PER_NODE}"
        )
    target = resources.files("jaxrl_llm.planning").joinpath("targets", f"{gpu}.txtpb")
    return target.read_text(), f"1x{nodes}x{PER_NODE}" if nodes else f"1x1x{devices}"


def gpu_devices(gpu: str, devices: int) -> Sequence[Any]:
    """Return the devices of a topology, which are compiled for and hold nothing.

    Args:
        gpu: one of those in `targets/`.
        devices: how many.

    Raises:
        ConfigError: the plugin is not installed, or the devices do not fill nodes.
    """
    target, topology = describe_topology(gpu, devices)
    if not any(_is_installed(plugin) for plugin in PLUGINS):
        raise ConfigError(
            "--compile-for needs XLA's compiler for GPUs, which is in jax's CUDA plugin: "
            "pip install 'jaxrl_llm[gpu-compiler]' (300 MB; no GPU and no driver needed)"
        )
    with _without_driver_notes():
        import jax
        from jax.experimental import topologies

        jax.config.update("jax_platforms", "cpu")  # there is no GPU for constants
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target, topology=topology
        ).devices


def _is_installed(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:  # no plugin at all
        return False


@contextlib.contextmanager
def _without_driver_notes() -> Iterator[None]:
    """Leave out of stderr the plugin's lines that there is no driver, which is known."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            caught.seek(0)
            lines = [line for line in caught if NOTE not in line and NOTE_HEAD not in line]
            os.write(kept, b"".join(lines))
            os.close(kept)


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

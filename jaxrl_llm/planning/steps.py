"""The steps of a run, compiled, with the memory, operations and time of their programs."""

import contextlib
import importlib.util
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.flops import forward_flops, tower_flops
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.planning.program import Loop, OperationCounts, count_operations, list_loops
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.compile import (
    ENGINE,
    TEACHER,
    AbstractModel,
    RunShapes,
    StepId,
    StepKind,
    bytes_per_device,
    with_float16,
)

# Memory per device: arrays that a run holds throughout, and those that each phase adds.


class PhaseMemory(NamedTuple):
    """The bytes that each device holds while a step runs, by the arrays' labels."""

    step: StepId
    held: dict[str, int | float]

    @property
    def total(self) -> int | float:
        """Return the bytes of a device."""
        return sum(self.held.values())


def memory_by_phase(shapes: RunShapes, scratch: Mapping[StepId, int | float]) -> list[PhaseMemory]:
    """Return the bytes that each device holds in each phase.

    Args:
        shapes: the run.
        scratch: bytes that each step needs beside its arguments, by step.
    """
    phases = []
    for name, role in shapes.roles.items():
        updating = (StepKind.ACCUMULATE, StepKind.APPLY) if role.optimizer is not None else ()
        for kind in (*updating, StepKind.INFER):
            step = StepId(name, kind)
            own: dict[str, Any] = {"scratch": scratch.get(step, 0)}
            if kind is not StepKind.INFER:
                own[f"{name} gradients"] = bytes_per_device(role.params)
            phases.append(PhaseMemory(step, _allocated(shapes, step, role.layout) | own))
    for kind in (StepKind.PREFILL, StepKind.DECODE):
        step = StepId(ENGINE, kind)
        own = {"cache": shapes.cache, "scratch": scratch.get(step, 0)}
        allocated = _allocated(shapes, step, shapes.layouts.rollout)
        phases.append(PhaseMemory(step, allocated | own))
    return phases


def _allocated(shapes: RunShapes, step: StepId, layout: Layout) -> dict[str, int | float]:
    """Return the bytes that a layout's devices hold in a step, without offloaded arrays."""
    here, config = set(layout.mesh.devices.flat), shapes.config
    offload = config.offload
    offloaded = {"optimizer": offload.optimizer, "parameters": offload.params}
    held = {}
    for allocation in shapes.throughout:
        role, array, size, where = allocation
        waits = offloaded.get(array, False)
        waits |= role == "reference" and offload.reference
        waits |= role.startswith(TEACHER) and offload.teacher
        is_updating = step.role == "actor" and step.kind is StepKind.ACCUMULATE
        needed = is_updating and role == TEACHER and config.teacher.top_k is None
        needed &= config.algorithm.distillation is not None  # else a pass before the update runs it
        has_no_role = role == TEACHER and TEACHER not in shapes.roles  # the policy's own teacher
        needed |= has_no_role and step == StepId("actor", StepKind.INFER)
        needed |= role == step.role and (array != "optimizer" or step.kind is not StepKind.INFER)
        if here & set(where.mesh.devices.flat) and (needed or not waits):
            held[allocation.label] = size
    return held


class Work(NamedTuple):
    """How often a step runs, and the least that it must read and compute.

    Attributes:
        mesh: where it runs.
        runs: in a training step.
        touched: bytes that a device reads and writes at least in one run.
        flops: that the model needs in one run, on all devices together.
    """

    mesh: Mesh
    runs: int | float
    touched: int | float
    flops: int | float


def workload(shapes: RunShapes, step: StepId) -> Work:
    """Return how often a step runs, and the least that it must read and compute.

    All sequences are taken to be of full length; a token attends to half of its own on average.
    """
    name, kind = step
    if name == ENGINE:
        return _engine_work(shapes, kind)
    config, role = shapes.config, shapes.roles[name]
    batch, mesh = config.batch, role.layout.mesh
    groups = batch.prompts_per_minibatch or batch.prompts_per_step
    updates = batch.prompts_per_step // groups * batch.epochs_per_step
    params, moments = bytes_per_device(role.params), bytes_per_device(role.optimizer)
    shape, longest = role.shape, config.longest_sequence
    packed, length = groups * config.rollout.samples_per_prompt, longest
    if kind is StepKind.ACCUMULATE and config.algorithm.pairs is not None:
        shape, packed, length = role.update_shape, groups, 2 * longest  # a pair of each prompt
    runs = math.ceil(packed / (shape.rows * (shape.length // length)))  # of an update
    forward = forward_flops(role.spec, shape.tokens, shape.tokens * longest / 2)
    forward += _flops_of_images(config, role, shape.tokens / longest)
    if kind is StepKind.APPLY:
        return Work(mesh, updates, 3 * params + 2 * moments, 0.0)
    if kind is StepKind.ACCUMULATE:
        return Work(mesh, updates * runs, 3 * params, 3 * forward)
    passes = runs * batch.prompts_per_step / groups
    idle = not role.needs_inference or (name == "actor" and config.algorithm.use_rollout_logprobs)
    return Work(mesh, 0.0 if idle else passes, params, forward)


def _flops_of_images(
    config: TrainConfig, role: AbstractModel, sequences: int | float
) -> int | float:
    """Return the operations of a model's own vision tower, if each prompt is one square image."""
    vision = role.spec.vision
    if vision is None or role.spec.vision_apart:
        return 0
    room = role.shape.visual_room(config.longest_sequence)
    side = vision.merge * math.isqrt(min(config.data.max_prompt_tokens, room))
    return sequences * tower_flops(vision, [(1, side, side)])


def _state_traffic(states: Any, running: int) -> float:
    """Return the bytes of a device that a step reads and writes of running sequences' states."""
    counts = [math.prod(x.shape[:2]) for x in jax.tree.leaves(states)]
    return 2 * bytes_per_device(states) * running / counts[0] if counts else 0.0


def _engine_work(shapes: RunShapes, kind: StepKind) -> Work:
    config, mesh = shapes.config, shapes.layouts.rollout.mesh
    prompts, slots = config.batch.prompts_per_step, config.rollout.max_running_sequences
    rounds = max(1.0, prompts * config.rollout.samples_per_prompt / slots)
    weights = next(held.size for held in shapes.throughout if held.role == ENGINE)
    prompt, answer = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    spec = shapes.spec.for_decoding
    if kind is StepKind.DECODE:
        attended = prompt + answer / 2
        states = shapes.engine.pages.states
        pages = bytes_per_device(shapes.engine.pages) - bytes_per_device(states)
        cached = pages * attended / config.longest_sequence + _state_traffic(states, slots)
        flops = forward_flops(spec, slots, slots * attended)
        return Work(mesh, rounds * answer, weights + cached, flops)
    tokens = shapes.engine.prefill_tokens
    runs = math.ceil(prompts * prompt / tokens)
    return Work(mesh, runs, weights, forward_flops(spec, tokens, tokens * prompt / 2))


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

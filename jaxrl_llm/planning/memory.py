"""Memory per device: arrays that a run holds throughout, and those that each phase adds."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.flops import forward_flops, tower_flops
from jaxrl_llm.sharding.layout import Layout, batch_shards
from jaxrl_llm.training.compile import (
    ENGINE,
    TEACHER,
    AbstractModel,
    RunShapes,
    StepId,
    StepKind,
    bytes_per_device,
)


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
    here, offload = set(layout.mesh.devices.flat), shapes.config.offload
    offloaded = {"optimizer": offload.optimizer, "parameters": offload.params}
    held = {}
    for allocation in shapes.throughout:
        role, array, size, where = allocation
        waits = offloaded.get(array, False)
        waits |= role == "reference" and offload.reference
        waits |= role.startswith(TEACHER) and offload.teacher
        is_updating = step.role == "actor" and step.kind is StepKind.ACCUMULATE
        needed = is_updating and role == TEACHER and is_run_in_update(shapes.config)
        has_no_role = role == TEACHER and TEACHER not in shapes.roles  # the policy's own teacher
        needed |= has_no_role and step == StepId("actor", StepKind.INFER)
        needed |= role == step.role and (array != "optimizer" or step.kind is not StepKind.INFER)
        if here & set(where.mesh.devices.flat) and (needed or not waits):
            held[allocation.label] = size
    return held


def is_run_in_update(config: TrainConfig) -> bool:
    """Return whether the actor's update runs the teacher, rather than a pass before it."""
    return config.algorithm.distillation is not None and config.teacher.top_k is None


def count_microbatches(config: TrainConfig, role: AbstractModel) -> int:
    """Return the micro-batches of an update if every sequence is of full length."""
    groups = config.batch.prompts_per_minibatch or config.batch.prompts_per_step
    sequences = groups * config.rollout.samples_per_prompt
    per_row = role.shape.length // config.longest_sequence
    return math.ceil(sequences / (role.shape.rows * per_row))


def count_pair_microbatches(config: TrainConfig, role: AbstractModel) -> int:
    """Return the micro-batches of an update on a pair of the longest answers to each prompt."""
    pairs = config.batch.prompts_per_minibatch or config.batch.prompts_per_step
    shape = role.update_shape
    return math.ceil(pairs / (shape.rows * (shape.length // (2 * config.longest_sequence))))


def tokens_on_device(role: AbstractModel) -> int | float:
    """Return the tokens of a micro-batch that each device has."""
    return role.shape.tokens / (batch_shards(role.layout.mesh) * role.layout.pieces)


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
    runs = count_microbatches(config, role)
    params, moments = bytes_per_device(role.params), bytes_per_device(role.optimizer)
    tokens = role.shape.tokens
    if kind is StepKind.ACCUMULATE and config.algorithm.pairs is not None:
        runs, tokens = count_pair_microbatches(config, role), role.update_shape.tokens
    forward = forward_flops(role.spec, tokens, tokens * config.longest_sequence / 2)
    forward += _flops_of_images(config, role, tokens / config.longest_sequence)
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

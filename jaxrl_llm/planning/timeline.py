"""When the GPUs of a synchronous step work, and when they wait for the longest answers.

A step samples, runs the reference, updates and pushes weights, one after another. Sampling is
simulated (`planning.sampling`); the rest are sums under the planner's assumptions.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.flops import forward_flops
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.collectives import PASSES, Collective
from jaxrl_llm.planning.estimate import PER_NODE, Gpu, estimate_seconds
from jaxrl_llm.planning.program import NOTHING
from jaxrl_llm.planning.sampling import Generation, mean_context


class TrainMesh(NamedTuple):
    """Sizes of the trainer's mesh, and the tokens that a micro-batch has per `data` and `fsdp`."""

    data: int
    fsdp: int
    tensor: int
    tokens: int

    @property
    def devices(self) -> int:
        """Return the number of GPUs."""
        return self.data * self.fsdp * self.tensor


def bytes_sent(spec: ModelSpec, mesh: TrainMesh, *, update: bool) -> Counter[Collective]:
    """Count the bytes that a device sends in a micro-batch, as the programs for GPUs do.

    A pass gathers each layer's weights in bfloat16, an update twice, as it recomputes its forward
    pass; both gather the head once, and exchange the tokens' embeddings. An update scatters sums of
    gradients in float32 over `fsdp`, and adds these up over `data`. Over `tensor` a pass sums twice
    in each layer and once for the embedding; an update three times more in each layer, as it needs
    the feed-forward's sum once, and twice more at the ends.

    Raises:
        ValueError: a mixture of experts.
    """
    if spec.moe is not None:
        raise ValueError("got a mixture of experts, expected a dense model: use the planner itself")
    sizes: Counter[Collective] = Counter()

    def add(kind: str, axes: str, inner: int, devices: int, size: int | float) -> None:
        over = Collective(kind, tuple(axes.split()), inner * devices > PER_NODE)
        sizes[over] += round(PASSES[kind] * size * (devices - 1) / devices)

    ends = spec.vocab_size * spec.hidden_size * (2 - spec.tied_embeddings)
    layers, shards = parameter_count(spec) - ends, mesh.fsdp * mesh.tensor
    head, stream = spec.vocab_size * spec.hidden_size, 2 * mesh.tokens * spec.hidden_size
    sums = 5 * spec.layers + 3 if update else 2 * spec.layers + 1
    add("all-reduce", "tensor", 1, mesh.tensor, sums * stream)
    add("all-to-all", "fsdp", mesh.tensor, mesh.fsdp, stream * (2 if update else 1))
    gathered = 2 * ((2 if update else 1) * layers + head)
    add("all-gather", "fsdp", mesh.tensor, mesh.fsdp, gathered / mesh.tensor)
    if update:
        add("reduce-scatter", "fsdp", mesh.tensor, mesh.fsdp, 4 * (layers + head) / mesh.tensor)
        add("all-reduce", "data", shards, mesh.data, 4 * (layers + ends) / shards)
    return sizes


def train_seconds(
    spec: ModelSpec, lengths: np.ndarray, prompt: int, mesh: TrainMesh, gpu: Gpu, *, update: bool
) -> int | float:
    """Return the time of the step's update, or of a pass, over packed rows without padding.

    Args:
        spec: the model, dense.
        lengths: tokens of each answer.
        prompt: tokens of each prompt.
        mesh: of the trainer.
        gpu: the device.
        update: whether there is a backward pass, with the forward pass computed twice.
    """
    whole = lengths + prompt
    tokens = int(whole.sum())
    flops = forward_flops(spec, tokens, tokens * mean_context(whole, 0)) * (4 if update else 1)
    runs = math.ceil(tokens / (mesh.data * mesh.fsdp * mesh.tokens))
    each = bytes_sent(spec, mesh, update=update)
    weights = (12 if update else 2) * parameter_count(spec) / (mesh.fsdp * mesh.tensor)
    counted = NOTHING._replace(flops=flops / mesh.devices).plus(NOTHING._replace(sent=each), runs)
    return estimate_seconds(counted, runs * weights, gpu).total


def sync_seconds(
    size: int | float, *, shared_by: int, copies: int, senders: int, rate: int | float
) -> int | float:
    """Return the time in which engines get weights: that of the busiest sender or receiver.

    Args:
        size: bytes of the model as engines hold it.
        shared_by: GPUs of an engine, each of which takes its part.
        copies: how often each byte is sent off: once if engines pass it on, else to each of them.
        senders: links that send at once.
        rate: bytes/s of each.

    >>> sync_seconds(16.0, shared_by=2, copies=10, senders=4, rate=1.0)
    40.0
    """
    return max(size / shared_by, size * copies / senders) / rate


class StepTimes(NamedTuple):
    """The seconds of a step's phases, and the share of all GPUs' time in which they wait."""

    generation: int | float
    reference: int | float
    update: int | float
    push: int | float
    idle: int | float

    @property
    def total(self) -> int | float:
        """Return the time of a step."""
        return self.generation + self.reference + self.update + self.push

    @property
    def overlapped(self) -> int | float:
        """Return the time if one batch were sampled while the one before is trained on."""
        return max(self.generation, self.reference + self.update) + self.push


def step_times(
    generated: Generation,
    trained: tuple[int | float, int | float],
    push: int | float,
    *,
    samplers: int,
    trainers: int,
    gpus: int,
) -> StepTimes:
    """Put a step's phases together.

    Args:
        generated: by the engines.
        trained: seconds of the reference's pass and of the update.
        push: seconds of the push, in which nobody waits for others.
        samplers: GPUs that sample.
        trainers: GPUs that train; the same ones if there are as many of each as `gpus`.
        gpus: in all.
    """
    times = StepTimes(generated.seconds, *trained, push, 0.0)
    used = samplers * float(generated.engines.mean()) + trainers * sum(trained) + gpus * push
    return times._replace(idle=1 - used / (gpus * times.total))

"""Steps of a run, simulated: when GPUs work and wait, with and without asynchrony."""

import heapq
import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from benchmarks.cluster.simulate_sampling import (
    EngineSpeed,
    Generation,
    assign_engines,
    mean_context,
)
from jaxrl_llm.models.flops import forward_flops
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.program import NOTHING, PASSES, Collective
from jaxrl_llm.planning.steps import PER_NODE, Gpu, estimate_seconds


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


class Requests(NamedTuple):
    """Answers in the order in which they get a slot.

    Attributes:
        left: tokens that are to be drawn of each.
        context: tokens that it has before, the prompt's included.
        unread: those of them that are not in the cache.
    """

    left: np.ndarray
    context: np.ndarray
    unread: np.ndarray

    def of(self, rows: np.ndarray) -> "Requests":
        """Return some of them."""
        return Requests(*(values[rows] for values in self))


class EngineRun(NamedTuple):
    """What an engine has done.

    Attributes:
        seconds: until the answers that are waited for have ended, or until it was stopped.
        drawn: tokens of each answer.
    """

    seconds: int | float
    drawn: np.ndarray


def run_engine(
    requests: Requests, *, slots: int, speed: EngineSpeed, needed: int, until: int | float = np.inf
) -> EngineRun:
    """Run an engine until the first answers have ended, or for so many seconds.

    Args:
        requests: answers, oldest first.
        slots: sequences decoded at once.
        speed: of the engine.
        needed: it stops once the first so many have ended.
        until: it stops after so many seconds, within a step of decoding.

    >>> requests = Requests(np.array([1, 5, 3]), np.zeros(3), np.zeros(3))
    >>> run = run_engine(requests, slots=2, speed=EngineSpeed(step=1.0), needed=2)
    >>> run.seconds, run.drawn.tolist()
    (5.0, [1, 5, 3])
    >>> run_engine(requests, slots=2, speed=EngineSpeed(step=1.0), needed=3, until=2).drawn.tolist()
    [1, 2, 1]
    """
    left = requests.left.astype(int)
    begun = np.full(len(left), -1)
    open_ones = set(range(needed))
    running: list[tuple[int, int]] = []
    clock, step, context, waiting = 0.0, 0, 0.0, 0
    while open_ones and clock < until:
        while waiting < len(left) and len(running) < slots:
            clock += float(requests.unread[waiting]) * speed.prompt
            heapq.heappush(running, (step + int(left[waiting]), waiting))
            begun[waiting], context = step, context + float(requests.context[waiting])
            waiting += 1
        steps = running[0][0] - step
        spent = speed.decode(len(running), int(context), steps)
        if clock + spent > until:
            low, high = 0, steps - 1  # the most steps that end in time
            while low < high:
                middle = (low + high + 1) // 2
                fits = clock + speed.decode(len(running), int(context), middle) <= until
                low, high = (middle, high) if fits else (low, middle - 1)
            steps, spent = low, until - clock
        clock, step = clock + spent, step + steps
        context += steps * len(running)
        while running and running[0][0] == step:
            at = heapq.heappop(running)[1]
            context -= float(requests.context[at]) + int(left[at])
            open_ones.discard(at)
    drawn = np.where(begun < 0, 0, np.minimum(step - begun, left))
    return EngineRun(clock if until == np.inf else until, drawn)


class WindowStep(NamedTuple):
    """What a step's engines do.

    Attributes:
        generation: seconds until the step's own answers are whole, in which the trainer waits.
        reread: tokens of answers in flight that are read again.
        age: updates since the weights that drew a token of the step, on average.
    """

    generation: int | float
    reread: int
    age: int | float


class WindowSettings(NamedTuple):
    """A run with stale answers.

    Attributes:
        staleness: K.
        prompt: tokens of each prompt.
        most: tokens that prompt and answer may have.
        group: answers to a prompt.
        engines: how many.
        slots: of each engine.
        speed: of each engine.
        overlap: seconds for which the engines go on while a step is trained; 0: they have no
            devices of their own.
    """

    staleness: int
    prompt: int
    most: int
    group: int
    engines: int
    slots: int
    speed: EngineSpeed
    overlap: int | float = 0.0


def simulate_window(lengths: np.ndarray, settings: WindowSettings) -> list[WindowStep]:
    """Simulate steps one after the other.

    The first ones begin with an empty window, and the last ones begin nothing beyond the last.

    Args:
        lengths: tokens of each answer of each step [steps answers], those to a prompt side by side.
        settings: of the run.
    """
    steps, size = lengths.shape
    total, drawn = lengths.ravel(), np.zeros(lengths.size, int)
    groups, ages = np.arange(total.size) // settings.group, np.zeros(steps)
    simulated = []
    for step in range(steps):
        end = min(steps, step + settings.staleness + 1) * size
        rows = np.flatnonzero(drawn[:end] < total[:end])
        before, reread = drawn[rows].copy(), 0
        seconds = 0.0
        if len(rows) and (settings.overlap or rows[0] < (step + 1) * size):
            places = assign_engines(groups[rows], settings.most, settings.engines)
            is_first = np.diff(places * (groups[-1] + 1) + groups[rows], prepend=-1) != 0
            unread = before + settings.prompt * is_first
            requests = Requests(total[rows] - before, before + settings.prompt, unread)
            own = [np.flatnonzero(places == engine) for engine in range(settings.engines)]
            needed = [int(np.sum(rows[part] < (step + 1) * size)) for part in own]
            fixed = {"slots": settings.slots, "speed": settings.speed}
            seconds = max(
                run_engine(requests.of(part), needed=n, **fixed).seconds
                for part, n in zip(own, needed, strict=True)
            )
            for part in own:
                run = run_engine(
                    requests.of(part), needed=len(part), until=seconds + settings.overlap, **fixed
                )
                drawn[rows[part]] += run.drawn
            reread = int(before.sum())
        new = drawn[rows] - before
        np.add.at(ages, rows // size, new * (rows // size - step))
        drawn[step * size : (step + 1) * size] = lengths[step]
        simulated.append(WindowStep(seconds, reread, 0.0))
    means = ages / lengths.sum(1)
    return [s._replace(age=float(age)) for s, age in zip(simulated, means, strict=True)]

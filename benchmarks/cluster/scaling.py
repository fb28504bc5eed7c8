"""Where a step's time goes on 8, 64 and 512 H200, simulated, and which placement wins.

    python -m benchmarks.cluster.scaling            the tables, as Markdown; a minute of one core
    python -m benchmarks.cluster.scaling --stale    with answers that are begun before their step
    python -m benchmarks.cluster.scaling --small    to see that all of it works

Nothing is run: engines are simulated answer by answer (`simulate_sampling`), the rest is summed up
from the planner's assumptions (`simulate_steps`). Colocated GPUs sample and train in turn; of
disaggregated ones some train and the others sample, and they wait for each other. Of all divisions
and sizes of engines the shortest steps are shown; last the shortest of any division if sampling
and training overlapped without a tail.

With `--stale` (`simulate_steps`) the same for each `rollout.staleness` K: the mean of some steps
in the middle of a run, answers in flight read again at each push. Disaggregated engines go on while
a step is trained. Each K has the division that is best for it, with the engines of the synchronous
step. Two minutes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.cluster.simulate_sampling import (
    Generation,
    cache_bytes,
    draw_lengths,
    engine_speed,
    mean_context,
    simulate_generation,
)
from benchmarks.cluster.simulate_steps import (
    StepTimes,
    TrainMesh,
    WindowSettings,
    simulate_window,
    step_times,
    sync_seconds,
    train_seconds,
)
from benchmarks.tables import describe_run, markdown_head, markdown_row, parser_of
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.steps import GPUS, LINKS, PER_NODE, USABLE

KS, MIDDLE = (0, 1, 2, 3), 4
"""Values of K, and the steps of which a mean is taken."""
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "plan"
GPU = GPUS["H200"]
PROMPT, LONGEST, GROUP = 512, 16384, 16
MEDIAN, SIGMA = 2000, 1.0  # of answers
MOST_SLOTS = 512  # of an engine
TOKENS = LONGEST  # of a micro-batch, for each part of the batch


class Model(NamedTuple):
    """A model, the part of the trainer's mesh within a node, and what `tensor` engines may have.

    `held` is the bytes of a parameter that colocated trainers keep while engines sample: parameters
    and reference, and the moments unless they wait on the host (`offload.optimizer`).
    """

    name: str
    fsdp: int
    tensor: int
    engines: tuple[int, ...]
    held: int


SMALL = Model("Qwen3-8B", 8, 1, (1, 2, 4, 8), 4 + 8 + 2)
LARGE = Model("Qwen3-32B", 2, 4, (2, 4, 8), 4 + 2)
CASES = [
    (model, gpus, prompts)
    for model in (SMALL, LARGE)
    for gpus, prompts in ((8, 64), (64, 256), (512, 1024))
]
SAME = [(SMALL, gpus, 256) for gpus in (8, 512)]


class Placement(NamedTuple):
    """GPUs in all, those that train, those that sample, and GPUs of an engine."""

    gpus: int
    trainers: int
    samplers: int
    tensor: int

    @property
    def colocated(self) -> bool:
        """Return whether all GPUs do both."""
        return self.trainers + self.samplers > self.gpus

    @property
    def engines(self) -> int:
        """Return the number of engines."""
        return self.samplers // self.tensor


class Row(NamedTuple):
    """A placement and its step; `level` is the same if all answers had the mean's length."""

    placement: Placement
    slots: int
    generated: Generation
    step: StepTimes
    level: StepTimes


def placements(model: Model, gpus: int) -> Iterator[Placement]:
    """List what fits: each division of the GPUs, with each size of engines."""
    parts = [gpus * eighths // 8 for eighths in range(1, 8)]
    if gpus == PER_NODE:  # others do not hold the model's states, or do not divide it
        parts = [2, 4] if model is SMALL else []
    for trainers, samplers in [(gpus, gpus), *((part, gpus - part) for part in parts)]:
        for tensor in model.engines:
            if samplers % tensor == 0:
                yield Placement(gpus, trainers, samplers, tensor)


def mesh_of(model: Model, trainers: int) -> TrainMesh:
    """Return the mesh of the trainers: copies of the model, each within a node."""
    fsdp = min(model.fsdp, trainers // model.tensor)
    return TrainMesh(trainers // (fsdp * model.tensor), fsdp, model.tensor, TOKENS)


def slots_of(model: Model, spec: ModelSpec, lengths: np.ndarray, where: Placement) -> int:
    """Return the slots of an engine: as many as its cache has room for on average."""
    size, mesh = parameter_count(spec), mesh_of(model, where.trainers)
    held = 2 * size / where.tensor
    if where.colocated:
        held += model.held * size / (mesh.fsdp * mesh.tensor)
    room = (GPU.memory * USABLE - held) * where.tensor
    return min(MOST_SLOTS, int(room / cache_bytes(spec) / mean_context(lengths, PROMPT)))


def push_of(spec: ModelSpec, where: Placement, copies: int, senders: int) -> float:
    """Return the seconds of a push; colocated engines gather their weights within the node."""
    if where.colocated:
        copies, senders = 1, PER_NODE
    link = GPU.link if where.colocated or where.gpus <= PER_NODE else GPU.network
    size = 2 * parameter_count(spec)
    return sync_seconds(
        size, shared_by=where.tensor, copies=copies, senders=senders, rate=link * LINKS
    )


def simulate(model: Model, spec: ModelSpec, lengths: np.ndarray, where: Placement) -> Row:
    """Simulate a step."""
    mesh, slots = mesh_of(model, where.trainers), slots_of(model, spec, lengths, where)
    push = push_of(spec, where, copies=1, senders=where.trainers)
    speed = engine_speed(spec, GPU, where.tensor, PROMPT)

    def step(answers: np.ndarray) -> tuple[Generation, StepTimes]:
        generated = simulate_generation(
            answers,
            prompt=PROMPT,
            most=LONGEST,
            group=GROUP,
            engines=where.engines,
            slots=slots,
            speed=speed,
        )
        passed, updated = (
            train_seconds(spec, answers, PROMPT, mesh, GPU, update=update)
            for update in (False, True)
        )
        sizes = {"samplers": where.samplers, "trainers": where.trainers, "gpus": where.gpus}
        return generated, step_times(generated, (passed, updated), push, **sizes)

    equal = np.full(len(lengths), round(float(lengths.mean())))
    return Row(where, slots, *step(lengths), step(equal)[1])


def line(row: Row, overlapped: str, tokens: int) -> list[str]:
    """Return what a table says of a step, in which so many tokens are sampled."""
    where, step = row.placement, row.step
    name = "colocated" if where.colocated else f"{where.trainers} train, {where.samplers} sample"
    return [
        name,
        f"{where.engines} of {where.tensor}",
        f"{step.generation:.0f}",
        f"{row.level.generation:.0f}",
        f"{row.generated.tail:.0%}",
        f"{step.reference + step.update:.0f}",
        f"{step.push:.2f}",
        f"{step.total:.0f}",
        f"{step.idle:.0%}",
        f"{tokens / step.total / where.gpus:.0f}",
        overlapped,
    ]


HEADS = ["model", "responses", "GPUs", "placement", "engines", "generation, s"]
HEADS += ["if all were equally long", "the last tenth's share", "training, s", "weight sync, s"]
HEADS += ["step, s", "idle", "tokens/s of a GPU", "*overlapped, s*"]


def table(cases: list[tuple[Model, int, int]]) -> None:
    """Print the best steps, and the seconds of the best disaggregated one if it overlapped."""
    print(markdown_head(HEADS))
    for model, gpus, prompts in cases:
        spec, size = read_spec(str(CONFIGS / model.name)), prompts * GROUP
        lengths = draw_lengths(0, size, median=MEDIAN, sigma=SIGMA, most=LONGEST - PROMPT)
        rows = [simulate(model, spec, lengths, where) for where in placements(model, gpus)]
        for apart in (False, True):
            group = [row for row in rows if row.placement.colocated != apart]
            if group:
                best = min(group, key=lambda row: row.step.total)
                behind = f"{min(row.step.overlapped for row in group):.0f}" if apart else ""
                cells = [model.name, str(size), str(gpus)]
                cells += line(best, behind, int(lengths.sum()))
                print(markdown_row(cells), flush=True)


class Stale(NamedTuple):
    """A step with stale answers: seconds that the trainer waits, and in all, and what is read."""

    placement: Placement
    generation: float
    step: float
    reread: float
    age: float


def simulate_stale(
    model: Model, spec: ModelSpec, answers: int, where: Placement, staleness: int
) -> Stale:
    """Simulate some steps of a run with this K."""
    lengths = np.stack(
        [
            draw_lengths(seed, answers, median=MEDIAN, sigma=SIGMA, most=LONGEST - PROMPT)
            for seed in range(MIDDLE + 2 * staleness)
        ]
    )
    middle = slice(staleness, staleness + MIDDLE)
    trained = sum(
        train_seconds(spec, step, PROMPT, mesh_of(model, where.trainers), GPU, update=update)
        for step in lengths[middle]
        for update in (False, True)
    )
    trained /= MIDDLE
    settings = WindowSettings(
        staleness,
        PROMPT,
        LONGEST,
        GROUP,
        where.engines,
        slots_of(model, spec, lengths[0], where),
        engine_speed(spec, GPU, where.tensor, PROMPT),
        0.0 if where.colocated else trained,
    )
    steps = simulate_window(lengths, settings)[middle]
    waits, reread, age = (float(np.mean(values)) for values in zip(*steps, strict=True))
    push = push_of(spec, where, copies=1, senders=where.trainers)
    return Stale(where, waits, waits + trained + push, reread / lengths[middle].sum(1).mean(), age)


def stale_table(cases: list[tuple[Model, int, int]]) -> None:
    """Print the best steps for each K, colocated and disaggregated."""
    heads = ["model", "responses", "GPUs", "K", "placement", "engines", "trainer waits, s"]
    heads += ["step, s", "step / synchronous colocated", "read again / drawn", "mean age"]
    print(markdown_head(heads))
    for model, gpus, prompts in cases:
        spec, size = read_spec(str(CONFIGS / model.name)), prompts * GROUP
        lengths = draw_lengths(0, size, median=MEDIAN, sigma=SIGMA, most=LONGEST - PROMPT)
        rows = [simulate(model, spec, lengths, where) for where in placements(model, gpus)]
        synchronous = None
        for apart in (False, True):
            group = [row for row in rows if row.placement.colocated != apart]
            if not group:
                continue
            best = min(group, key=lambda row: row.step.total).placement
            divisions = [row.placement for row in group if row.placement.tensor == best.tensor]
            for staleness in KS:
                tried = [simulate_stale(model, spec, size, where, staleness) for where in divisions]
                step = min(tried, key=lambda one: one.step)
                synchronous = synchronous or step.step
                where = step.placement
                name = f"{where.trainers} train, {where.samplers} sample" if apart else "colocated"
                cells = [model.name, str(size), str(gpus), str(staleness), name]
                cells += [f"{where.engines} of {where.tensor}", f"{step.generation:.0f}"]
                cells += [f"{step.step:.0f}", f"{step.step / synchronous:.2f}"]
                print(markdown_row([*cells, f"{step.reread:.2f}", f"{step.age:.2f}"]), flush=True)


def pushes() -> None:
    """Print what pushes to engines of one GPU each take, by who sends."""
    print(
        "| model | engines | passed on | by each trainer | from one link |\n|---|---|---|---|---|"
    )
    for model, gpus in ((SMALL, 64), (SMALL, 512), (LARGE, 512)):
        spec, tensor = read_spec(str(CONFIGS / model.name)), model.engines[0]
        where = Placement(gpus, gpus // 2, gpus // 2, tensor)
        ways = ((1, where.trainers), (where.engines, where.trainers), (where.engines, 1))
        seconds = " | ".join(f"{push_of(spec, where, *way):.1f}" for way in ways)
        print(f"| {model.name} | {where.engines} of {tensor} | {seconds} |")


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--stale", action="store_true", help="for each rollout.staleness")
    parser.add_argument("--small", action="store_true", help="64 answers on 8 GPUs alone")
    options = parser.parse_args(words)
    few = [(SMALL, 8, 4)]
    cases, same = (few, few) if options.small else (CASES, SAME)
    print(f"{describe_run('cluster.scaling', words)}, simulated\n")
    if options.stale:
        stale_table(cases)
        return
    table(cases)
    print("\nThe 4,096 answers of 64 GPUs on fewer and on more:\n")
    table(same)
    print("\nSeconds of a push to disaggregated engines, on half of the GPUs:\n")
    pushes()


if __name__ == "__main__":
    main()

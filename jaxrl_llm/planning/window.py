"""Steps whose engines begin answers of later steps (`rollout.staleness`), simulated one by one.

The rule is that of `training.buffer`: a step trains on the next groups in the order of the prompts,
answers of K more steps may be begun, and what is in flight at a push is read again.
"""

import heapq
from typing import NamedTuple

import numpy as np

from jaxrl_llm.planning.sampling import EngineSpeed, assign_engines


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
                    requests.of(part),
                    needed=len(part),
                    until=seconds + settings.overlap,
                    **fixed,
                )
                drawn[rows[part]] += run.drawn
            reread = int(before.sum())
        new = drawn[rows] - before
        np.add.at(ages, rows // size, new * (rows // size - step))
        drawn[step * size : (step + 1) * size] = lengths[step]
        simulated.append(WindowStep(seconds, reread, 0.0))
    means = ages / lengths.sum(1)
    return [s._replace(age=float(age)) for s, age in zip(simulated, means, strict=True)]

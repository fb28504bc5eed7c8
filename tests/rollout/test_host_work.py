import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.rollout.native import page_pool, scheduler
from jaxrl_llm.rollout.native.programs import DecodeOutput
from jaxrl_llm.rollout.native.scheduler import SequenceState

FILES = {str(Path(module.__file__)) for module in (page_pool, scheduler)}
FOLDER = Path(page_pool.__file__).parent
ROWS, PARTS, STEPS, NEW = 32, 2, 4, 8
GROWTH = 2.1  # of the calls for twice as many sequences, at most


def prompts(kind, count):
    """All different, alike in their first tokens, or eight of each."""
    drawn = np.random.default_rng(0).integers(0, 32, (count, 20))
    if kind == "alike":
        drawn[:, :5] = 1
    rows = drawn[: count // 8].repeat(8, 0) if kind == "groups" else drawn
    return [tuple(row.tolist()) for row in rows]


def count_calls(engine: Any, asked):
    """Sample twice with programs that draw nothing; return the calls of each step.

    Of steps that prefill, these are those of scheduler and pool; of others, all of the engine's.
    """
    runner, programs, steps = engine._runner, engine.programs, []

    def decode(params, pool, state, *_):
        drawn = np.full((*state.tokens.shape, STEPS), 3, np.int32)
        counts = np.minimum(np.asarray(state.left), STEPS)
        return pool, DecodeOutput(counts, drawn, np.zeros(drawn.shape, np.float32), None, None)

    cache = programs.shapes()[1]
    programs.pool = programs.prefill = programs.copy = lambda *_: lambda *_: cache
    programs.decode = lambda *_: decode

    def note(frame, event, _):
        if event == "call":
            calls[frame.f_code] += 1

    for _ in range(2):
        runner.scheduler.add([SequenceState(Request(p, SamplingParams(NEW), 0)) for p in asked])
        while runner.scheduler.is_busy:
            is_new, calls = bool(runner.scheduler.waiting), Counter()
            sys.setprofile(note)
            try:
                runner.step(None, 0)
            finally:
                sys.setprofile(None)
            files = FILES if is_new else [str(path) for path in FOLDER.glob("*.py")]
            own = {code.co_name: n for code, n in calls.items() if code.co_filename in files}
            steps.append(Counter(own))
    return steps


@pytest.mark.parametrize(
    ("model", "kind"),
    [("dense", "different"), ("dense", "alike"), ("dense", "groups"), ("delta", "alike")],
)
def test_work_of_the_host_is_linear_in_sequences(hollow, model, kind):
    def steps(rows):
        options = {"max_running_sequences": rows, "steps": STEPS, "kernel": attend_gathered}
        engine = hollow(devices=PARTS, axes={"data": PARTS}, model=model, **options)
        return count_calls(engine, prompts(kind, rows))

    one, two = steps(ROWS), steps(2 * ROWS)
    assert len(one) == len(two)
    assert all(sum(step.values()) > ROWS for step in one)
    for number, (few, many) in enumerate(zip(one, two, strict=True)):
        assert sum(many.values()) <= GROWTH * sum(few.values()), (number, many.most_common(5))

"""Simulations of a run: cases by hand, the compiled programs, and the training loop's window."""

import dataclasses

import numpy as np
import pytest

from benchmarks.cluster.simulate_sampling import EngineSpeed
from benchmarks.cluster.simulate_steps import TrainMesh, WindowSettings, bytes_sent, simulate_window
from jaxrl_llm.planning.program import count_operations
from jaxrl_llm.training.compile import StepId, StepKind, plan_shapes, with_float16
from tests.planning.stablehlo import configure
from tests.specs import DENSE
from tests.training.test_window import SAMPLES, SIZE, Turns, open_window, train

pytestmark = pytest.mark.repository

SECOND, STEPS = EngineSpeed(step=1.0), 6


def test_the_bytes_of_a_pass_are_those_of_the_compiled_program(tmp_path):
    sizes = {"vocab_size": 512, "hidden_size": 128, "layers": 4, "head_dim": 32, "ff_width": 512}
    spec = dataclasses.replace(DENSE, **sizes)
    mesh = {"mesh__train__data": 2, "mesh__train__fsdp": 2, "mesh__train__tensor": 2}
    shapes = plan_shapes(configure(tmp_path, spec, model__attention="xla", **mesh))
    lowered = shapes.trace[StepId("reference", StepKind.INFER)]().lower()
    text = with_float16(lowered).compile().as_text()
    compiled = count_operations(text, shapes.layouts.train.mesh.shape).sent
    ours = bytes_sent(spec, TrainMesh(2, 2, 2, 64), update=False)
    assert compiled.total() == pytest.approx(ours.total(), rel=0.03)
    for over, size in ours.items():
        assert compiled[over] == pytest.approx(size, rel=0.03), over


@pytest.mark.parametrize(("staleness", "slots", "overlap"), [(1, 2, 0), (2, 5, 3), (2, 2, 3)])
def test_it_is_the_window_of_the_training_loop(staleness, slots, overlap):
    """The same seconds until a step's answers are whole, tokens that are read again, and ages."""
    engine = Turns(slots, 2.0)
    window = open_window(
        engine, staleness=staleness, steps=STEPS, overlaps=overlap > 0, turns=overlap or None
    )
    reread, taken = [], []
    for step in range(1, STEPS + 1):
        reread.append(sum(s.drawn for g in window._groups for s in g.states if not s.episode))
        taken += train(window, engine, step, step)
    episodes = [rollouts.episodes for rollouts, *_ in taken]
    lengths = np.array([[len(e.tokens) for e in step] for step in episodes])
    ages = [
        float(np.mean(np.concatenate([number - e.versions for e in step])))
        for number, step in enumerate(episodes)
    ]
    simulated = simulate_window(
        lengths, WindowSettings(staleness, 0, 99, SAMPLES, 1, slots, SECOND, float(overlap))
    )
    assert lengths.shape == (STEPS, SIZE * SAMPLES)
    assert [step.age for step in simulated] == pytest.approx(ages)
    assert [step.reread for step in simulated] == reread
    assert sum(reread) > 0 and max(ages) > 0

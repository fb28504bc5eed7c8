"""The simulated window against the one of the training loop, and against synchronous steps."""

import numpy as np
import pytest

from benchmarks.cluster.simulate_sampling import EngineSpeed, draw_lengths, simulate_generation
from benchmarks.cluster.simulate_steps import WindowSettings, simulate_window
from tests.training.test_window import SAMPLES, SIZE, Turns, open_window, train

SECOND = EngineSpeed(step=1.0)
STEPS = 6


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("staleness", [1, 2])
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


def test_without_staleness_it_is_the_synchronous_step():
    lengths = np.stack([draw_lengths(s, 64, median=50, sigma=1, most=400) for s in range(3)])
    speed = EngineSpeed(step=1e-3, weights=2e-3, cached=1e-6, sequence=1e-5, prompt=1e-5)
    sizes = {"prompt": 20, "most": 420, "group": 4, "engines": 2, "slots": 8, "speed": speed}
    simulated = simulate_window(lengths, WindowSettings(0, **sizes))
    expected = [simulate_generation(step, **sizes).seconds for step in lengths]
    assert [step.generation for step in simulated] == pytest.approx(expected)
    assert all(step[1:] == (0, 0.0) for step in simulated)


def test_later_prompts_fill_the_tail():
    """Where decoding few takes as long as decoding many, less time is waited for the longest."""
    lengths = np.stack([draw_lengths(s, 32, median=50, sigma=1, most=1000) for s in range(8)])
    sizes = {"prompt": 0, "most": 1000, "group": 4, "engines": 1, "slots": 16, "speed": SECOND}
    waits = [
        np.mean([s.generation for s in simulate_window(lengths, WindowSettings(k, **sizes))])
        for k in (0, 1, 2)
    ]
    assert waits[1] < 0.9 * waits[0] and waits[2] <= waits[1]

"""The in-order window: prompt order, ages, and what it keeps, whatever lengths answers have."""

import json
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.data.dataset import Prompt, batches
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import PartialEngine
from jaxrl_llm.rollout.sampling import as_rollouts, sample_states
from jaxrl_llm.rollout.types import Completion, SamplingParams
from jaxrl_llm.training.stages.rollout import RolloutStage
from jaxrl_llm.training.stages.scoring import ScoringStage
from jaxrl_llm.training.update import TrainingError
from jaxrl_llm.training.window import Window

PROMPTS = [Prompt(i, (1, 2 + i), "test", str(i)) for i in range(17)]
SIZE, SAMPLES, LONGEST = 3, 2, 12


class Turns(PartialEngine):
    """An engine that draws one token a turn for the first requests that fit.

    An answer's length and its tokens follow from its seed.
    """

    def __init__(self, slots, skew):
        self.slots, self.skew, self.version, self.most = slots, skew, 0, 0

    def length(self, seed):
        return 1 + int((LONGEST - 1) * np.random.default_rng(seed).random() ** self.skew)

    def sample(self, requests):
        return self.sample_until(requests, len(requests))

    def sample_until(self, requests, needed):
        self.most = max(self.most, len(requests))
        drawn = [list(r.drawn.tokens) if r.drawn else [] for r in requests]
        versions = [list(r.drawn.versions) if r.drawn else [] for r in requests]
        lengths = [self.length(r.seed) for r in requests]

        def is_open(i):
            return len(drawn[i]) < lengths[i]

        while any(is_open(i) for i in range(needed)):
            for i in [i for i in range(len(requests)) if is_open(i)][: self.slots]:
                drawn[i].append((requests[i].seed + len(drawn[i])) % 100)
                versions[i].append(self.version)
        return [
            Completion(
                np.array(drawn[i], np.int32),
                np.zeros(len(drawn[i]), np.float32),
                np.array(versions[i], np.int32),
                "" if is_open(i) else "length",
            )
            for i in range(len(requests))
        ]


def open_window(engine, *, staleness=0, steps=5, keep=None, limit=9, score=None):
    """Return a window over a fake engine; `keep` takes a group's prompt."""
    sampling = SamplingParams(max_new_tokens=LONGEST)

    def start(rollouts, clock):
        future = Future()
        scores = [Score(float(len(e.tokens)), {}, None) for e in rollouts.episodes]
        future.set_result(scores)
        return future

    def kept(rollouts, scores):
        return [keep(prompt.index) for prompt in rollouts.prompts[::SAMPLES]]

    config = Mock(
        spec=TrainConfig,
        seed=7,
        batch=SimpleNamespace(prompts_per_step=SIZE),
        rollout=SimpleNamespace(samples_per_prompt=SAMPLES, staleness=staleness),
        algorithm=SimpleNamespace(max_generation_batches=limit),
    )
    rollout = Mock(
        spec=RolloutStage,
        sample=lambda states, needed: sample_states(engine, states, sampling, needed=needed),
        gather=lambda states: as_rollouts(states, decode=str),
        examine=lambda rollouts: rollouts,
        sample_canaries=lambda prompts, step: f"canaries of step {step}",
    )
    return Window(
        config=config,
        total_steps=steps,
        rollout=rollout,
        scoring=Mock(spec=ScoringStage, start=start, keep=keep and kept),
        prompt_batches=batches(PROMPTS, batch_size=SIZE, seed=0),
        prompts=PROMPTS,
    )


def train(window, engine, first, last):
    """Take steps; return each one's prompts, tokens, versions and scores."""
    taken = []
    for step in range(first, last + 1):
        engine.version = step - 1
        rollouts, scores, metrics, canaries = window.take(step, Clock())
        is_stale = all(step - 1 not in episode.versions for episode in rollouts.episodes)
        assert canaries == (f"canaries of step {step}" if is_stale else None)
        taken.append((rollouts, scores(), metrics))
    return taken


CASES = {
    "staleness": st.integers(0, 4),
    "slots": st.integers(1, 20),
    "skew": st.sampled_from([0.2, 1.0, 6.0]),
    "refused": st.sampled_from([None, frozenset(), frozenset({0, 3, 5, 8, 13})]),
}


@hypothesis.given(**CASES)
def test_every_kept_prompt_is_trained_once_in_order_and_no_token_is_too_old(
    staleness, slots, skew, refused
):
    engine = Turns(slots, skew)
    keep = None if refused is None else (lambda index: index not in refused)
    window = open_window(engine, staleness=staleness, keep=keep)
    taken = train(window, engine, 1, 5)
    order = [p.index for batch in batches(PROMPTS, batch_size=1, seed=0, epochs=4) for p in batch]
    expected = [index for index in order if keep is None or keep(index)]
    got = [p.index for rollouts, *_ in taken for p in rollouts.prompts[::SAMPLES]]
    assert got == expected[: len(got)] and len(got) == 5 * SIZE
    for step, (rollouts, scores, _) in enumerate(taken, start=1):
        for episode, score in zip(rollouts.episodes, scores, strict=True):
            ages = step - 1 - episode.versions
            assert ages.min() >= 0 and ages.max() <= staleness
            assert (np.diff(episode.versions) >= 0).all()
            assert score.score == len(episode.tokens)
    assert engine.most <= (staleness + 1) * SIZE * SAMPLES
    assert not window.get_state()["groups"], "nothing is begun beyond the last step"


@hypothesis.given(**CASES)
def test_answers_do_not_depend_on_the_window(staleness, slots, skew, refused):
    """The same tokens and lengths at every K: none is dropped because it is long or old."""

    def lengths(staleness, slots):
        engine = Turns(slots, skew)
        keep = None if refused is None else (lambda index: index not in refused)
        taken = train(open_window(engine, staleness=staleness, keep=keep), engine, 1, 5)
        return [episode.tokens.tolist() for rollouts, *_ in taken for episode in rollouts.episodes]

    assert lengths(staleness, slots) == lengths(0, 99)


@pytest.mark.parametrize("refused", [None, {0, 3, 5, 8, 13}])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_window_goes_on_from_its_state(at, refused):
    keep = None if refused is None else (lambda index: index not in refused)

    def begin():
        engine = Turns(4, 6.0)
        return engine, open_window(engine, staleness=2, keep=keep)

    engine, window = begin()
    expected = train(window, engine, 1, 5)
    engine, window = begin()
    train(window, engine, 1, at)
    state = json.loads(json.dumps([window.prompt_batches.get_state(), window.get_state()]))
    engine, resumed = begin()
    resumed.prompt_batches.set_state(state[0])
    resumed.set_state(state[1])
    for (a, scores, metrics), (b, *rest) in zip(
        train(resumed, engine, at + 1, 5), expected[at:], strict=True
    ):
        assert [scores, metrics] == rest and a.prompts == b.prompts
        for one, other in zip(a.episodes, b.episodes, strict=True):
            for name in ("tokens", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_later_prompts_fill_the_places_of_those_that_end():
    """With a long tail: at K = 2 the engine takes fewer turns for the same answers."""

    def turns(staleness):
        class Counting(Turns):
            count = 0

            def sample_until(self, requests, needed):
                before = [len(r.drawn.tokens) if r.drawn else 0 for r in requests]
                answers = super().sample_until(requests, needed)
                grown = [len(a.tokens) - b for a, b in zip(answers, before, strict=True)]
                self.count += max(grown)
                return answers

        engine = Counting(SIZE * SAMPLES, 6.0)
        train(open_window(engine, staleness=staleness, steps=20), engine, 1, 20)
        return engine.count

    assert turns(2) < 0.8 * turns(0)


def test_too_many_refused_groups_end_the_step_with_what_to_do():
    engine = Turns(4, 1.0)
    window = open_window(engine, keep=lambda index: False, limit=2)
    with pytest.raises(TrainingError, match="kept 0 of 6 groups, expected 3 of at most 6"):
        train(window, engine, 1, 1)

"""The buffer: prompt order, ages, and what it keeps, whatever lengths answers have."""

import json
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.data.dataset import Prompt, batches
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Completion, Engine, SamplingParams
from jaxrl_llm.rollout.rollouts import as_rollouts, sample_states
from jaxrl_llm.training.buffer import (
    FILE,
    Buffer,
    GroupScores,
    Sampler,
    Schedule,
    Scorer,
    needs_canaries,
    scores_of,
    states_of,
)
from jaxrl_llm.training.experience import ScoreError
from jaxrl_llm.training.update import TrainingError
from tests.waiting import wait_until

PROMPTS = [Prompt(i, (1, 2 + i), "test", str(i)) for i in range(17)]
SIZE, SAMPLES, LONGEST = 3, 2, 12
EXECUTOR, EXECUTOR_OF_SCORES = ThreadPoolExecutor(2), ThreadPoolExecutor(1)


class Turns(Engine):
    """An engine that draws one token a turn for the first requests that fit.

    An answer's length and its tokens follow from its seed.
    """

    def __init__(self, slots, skew):
        self.slots, self.skew, self.version, self.most = slots, skew, 0, 0

    def length(self, seed):
        return 1 + int((LONGEST - 1) * np.random.default_rng(seed).random() ** self.skew)

    def sample(self, requests):
        return self.sample_until(requests, len(requests))

    def sample_until(self, requests, needed, stop=None, listener=None):
        self.most = max(self.most, len(requests))
        drawn = [list(r.drawn.tokens) if r.drawn else [] for r in requests]
        versions = [list(r.drawn.versions) if r.drawn else [] for r in requests]
        limits = [r.sampling.max_new_tokens for r in requests]
        lengths = [self.length(r.seed) for r in requests]

        def is_open(i):
            return len(drawn[i]) < min(lengths[i], limits[i])

        def answer(i):
            end = "" if is_open(i) else "stop" if lengths[i] < limits[i] else "length"
            arrays = np.array(drawn[i], np.int32), np.zeros(len(drawn[i]), np.float32)
            return Completion(*arrays, np.array(versions[i], np.int32), end)

        while any(is_open(i) for i in range(needed)) and not (stop and stop.is_set):
            for i in [i for i in range(len(requests)) if is_open(i)][: self.slots]:
                drawn[i].append((requests[i].seed + len(drawn[i])) % 100)
                versions[i].append(self.version)
                if listener and not is_open(i):
                    listener(i, answer(i))
            if stop is not None:
                time.sleep(0.0001)  # others get to say that it is to stop
                stop.count_turn()
        return [answer(i) for i in range(len(requests))]


def done(result):
    future = Future()
    future.set_result(result)
    return future


def open_window(
    engine, *, staleness=0, steps=5, keep=None, limit=9, overlaps=False, schedule=None, **keys
):
    """Return a window over a fake engine; `keep` takes a group's prompt."""
    sampling = SamplingParams(max_new_tokens=LONGEST)

    def start(rollouts, clock):
        return done([Score(float(len(e.tokens)), {}, None) for e in rollouts.episodes])

    def kept(rollouts, scores):
        return [keep(prompt.index) for prompt in rollouts.prompts[::SAMPLES]]

    waiting = {"at_push": "reread", "turns": None, "nodes": 0} | keys
    config = SimpleNamespace(
        rollout=SimpleNamespace(samples_per_prompt=SAMPLES, staleness=staleness, **waiting),
        batch=SimpleNamespace(prompts_per_step=SIZE),
        algorithm=SimpleNamespace(max_generation_batches=limit),
        seed=7,
    )
    sampler = Mock(
        spec=Sampler,
        sample=lambda states, needed, stop, on_end: sample_states(
            engine, states, sampling, needed=needed, stop=stop, on_end=on_end
        ),
        gather=lambda states: as_rollouts(states, decode=str),
        engine=engine,
        overlaps_training=overlaps,
        keeps_cache=False,
        episodes=None,
    )
    return Buffer(
        config=config,
        total_steps=steps,
        sampler=sampler,
        scorer=Mock(
            spec=Scorer,
            start=start,
            keep_groups=kept,
            filters_groups=keep is not None,
            in_background=True,
        ),
        prompt_batches=batches(PROMPTS, batch_size=SIZE, seed=0),
        prompts=PROMPTS,
        schedule=schedule or schedule_of(engine),
        executor=EXECUTOR,
    )


def schedule_of(engine, folder=None, *, done=0, replayed=None):
    """Return a schedule that is written to a folder, or to none."""
    return Schedule(folder, slots=engine.slots, done=done, replayed=replayed, repeats=True)


def train(window, engine, first, last, pause=lambda: None):
    """Take steps; return each one's prompts, tokens, versions and scores."""
    taken = []
    for step in range(first, last + 1):
        engine.version = step - 1
        groups, metrics = window.take(step, Clock())
        rollouts = window.sampler.gather(states_of(groups))
        is_stale = all(step - 1 not in episode.versions for episode in rollouts.episodes)
        assert needs_canaries(rollouts, step, keeps_cache=False) is is_stale
        window.go_on(step)
        pause()
        metrics |= window.interrupt(step, Clock())
        taken.append((rollouts, scores_of(groups), metrics))
    return taken


def drawn(taken):
    """Return tokens and versions of all episodes of each step."""
    return [
        [(e.tokens.tolist(), e.versions.tolist()) for e in rollouts.episodes]
        for rollouts, *_ in taken
    ]


CASES = {
    "staleness": st.integers(0, 4),
    "slots": st.integers(1, 20),
    "skew": st.sampled_from([0.2, 1.0, 6.0]),
    "refused": st.sampled_from([None, frozenset(), frozenset({0, 3, 5, 8, 13})]),
}


def keeping(refused):
    return None if refused is None else (lambda index: index not in refused)


@hypothesis.given(**CASES, overlaps=st.booleans(), at_push=st.sampled_from(["reread", "finish"]))
def test_every_kept_prompt_is_trained_once_in_order_and_no_token_is_too_old(
    staleness, slots, skew, refused, overlaps, at_push
):
    """With the same tokens as without a window: none is dropped because it is long or old."""
    engine, keep = Turns(slots, skew), keeping(refused)
    window = open_window(engine, staleness=staleness, keep=keep, overlaps=overlaps, at_push=at_push)
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
            assert at_push == "reread" or len(set(episode.versions)) == 1
            assert score.score == len(episode.tokens)
    assert engine.most <= (staleness + 1) * SIZE * SAMPLES
    assert not window.get_state()["groups"], "nothing is begun beyond the last step"
    alone = Turns(99, skew)
    plain = drawn(train(open_window(alone, keep=keep), alone, 1, 5))
    assert [[t for t, _ in step] for step in drawn(taken)] == [[t for t, _ in s] for s in plain]


def test_turns_decide_what_is_drawn_and_not_time():
    dice = random.Random(0)

    def run(pause):
        engine = Turns(4, 1.0)
        window = open_window(engine, staleness=2, overlaps=True, turns=3)
        return drawn(train(window, engine, 1, 5, pause))

    plain = run(lambda: None)
    assert run(lambda: time.sleep(dice.uniform(0, 0.01))) == plain
    assert any(len(set(versions)) > 1 for step in plain for _, versions in step)


@hypothesis.settings(max_examples=8)
@hypothesis.given(staleness=st.integers(1, 3), skew=CASES["skew"], refused=CASES["refused"])
def test_a_schedule_replays_a_run(tmp_path_factory, staleness, skew, refused):
    """In the same turns, and with other slots or without devices of its own to the same tokens."""
    keep = keeping(refused)
    dice, folder = random.Random(0), tmp_path_factory.mktemp("run")

    def run(slots, *, overlaps=True, **given):
        engine = Turns(slots, skew)
        schedule = schedule_of(engine, **given)
        window = open_window(
            engine, staleness=staleness, keep=keep, overlaps=overlaps, schedule=schedule
        )
        return drawn(train(window, engine, 1, 5, lambda: time.sleep(dice.uniform(0, 0.003))))

    expected, recorded = run(4, folder=folder), folder / FILE
    again = tmp_path_factory.mktemp("again")
    assert run(4, replayed=str(recorded), folder=again) == expected
    assert (again / FILE).read_text() == recorded.read_text()
    assert run(3, replayed=str(recorded)) == expected
    assert run(4, replayed=str(recorded), overlaps=False) == expected


def test_a_run_that_was_killed_follows_its_own_schedule(tmp_path):
    def begin(done=0):
        engine = Turns(4, 1.0)
        schedule = schedule_of(engine, tmp_path, done=done)
        how = {"keep": keeping({0, 3, 5, 8, 13}), "schedule": schedule}
        return engine, open_window(engine, staleness=2, overlaps=True, **how)

    def pause():
        time.sleep(random.uniform(0, 0.003))

    engine, window = begin()
    expected = train(window, engine, 1, 2, pause)
    state = json.loads(json.dumps([window.prompt_batches.get_state(), window.get_state()]))
    expected += train(window, engine, 3, 4, pause)  # not saved
    rows = (tmp_path / FILE).read_text()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step":5,"tu')  # killed while it wrote
    engine, resumed = begin(done=2)
    assert len((tmp_path / FILE).read_text().splitlines()) == 2
    resumed.prompt_batches.set_state(state[0])
    resumed.set_state(state[1])
    assert drawn(train(resumed, engine, 3, 4, pause)) == drawn(expected[2:])
    assert (tmp_path / FILE).read_text() == rows
    train(resumed, engine, 5, 5, pause)


@pytest.mark.parametrize("overlaps", [False, True])
def test_groups_are_scored_before_the_sampling_ends(overlaps):
    """While one is scored, others wait, and are scored together after it; an error ends a step."""
    engine = Turns(2, 1.0)
    calls, open_ones, first = [], [], Future()

    def finish(scores):
        try:
            wait_until(lambda: calls[0] // SAMPLES + len(window._scores._waiting) >= SIZE)
            first.set_result(scores)
        except AssertionError as error:
            first.set_exception(error)

    def start(rollouts, clock):
        scores = [Score(float(len(e.tokens)), {}, None) for e in rollouts.episodes]
        calls.append(len(scores))
        open_ones.append(sum(s.episode is None for g in window._groups for s in g.states))
        if len(calls) == 1:
            EXECUTOR_OF_SCORES.submit(finish, scores)
            return first
        return done(scores)

    window = open_window(engine, staleness=2, overlaps=overlaps)
    window._scores = GroupScores(start, window.sampler.gather)
    taken = train(window, engine, 1, 5)
    assert open_ones[0] > 0 and max(calls) > SAMPLES
    for rollouts, scores, _ in taken:
        assert [s.score for s in scores] == [len(e.tokens) for e in rollouts.episodes]

    def fail(rollouts, clock):
        raise ScoreError("broken")

    window = open_window(Turns(2, 1.0), staleness=2, overlaps=overlaps)
    window._scores = GroupScores(fail, window.sampler.gather)
    with pytest.raises(ScoreError, match="broken"):
        train(window, window.sampler.engine, 1, 1)


def test_a_schedule_that_does_not_fit_is_told(tmp_path):
    engine = Turns(4, 1.0)
    window = open_window(engine, staleness=2, schedule=schedule_of(engine, tmp_path))
    train(window, engine, 1, 3)
    path = tmp_path / FILE
    for engine, steps, named in ((Turns(4, 6.0), 3, "step 1"), (Turns(4, 1.0), 4, "step 4")):
        window = open_window(engine, staleness=2, schedule=schedule_of(engine, replayed=str(path)))
        with pytest.raises(TrainingError, match=named):
            train(window, engine, 1, steps)
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="schedule"):
        schedule_of(engine, replayed=str(path))


def test_too_many_refused_groups_end_the_step_with_what_to_do():
    engine = Turns(4, 1.0)
    window = open_window(engine, keep=lambda index: False, limit=2)
    with pytest.raises(TrainingError, match="0 of 6"):
        train(window, engine, 1, 1)

import asyncio
import dataclasses
import functools

import numpy as np
import pytest

from jaxrl_llm.rollout.observation import Observation
from tests.episodes import TOKENIZER, play, prompt, same
from tests.rollout.conftest import log_softmax, next_logits, weights
from tests.rollout.conftest import opened as open_engine
from tests.specs import DENSE

SPEC = dataclasses.replace(DENSE, vocab_size=len(TOKENIZER), max_positions=256)
LIMITS = {"turns": 4, "turn_tokens": 7}


SIZES = {"PREFILL_LENGTHS": (64,), "PREFILL_TOKENS": (512,)}
opened = functools.partial(open_engine, SPEC, steps=4, max_tokens=128, sizes=SIZES)


@pytest.fixture(scope="module")
def engine():
    with opened(max_running_sequences=8) as made:
        yield made


def check_logprobs(episode, *versions):
    """Compare an episode's log-probs with those of a forward pass over the whole stream."""
    stream = (*episode.prompt, *episode.tokens.tolist())
    for version in versions:
        expected = log_softmax(next_logits(weights(SPEC, version), stream, SPEC))
        places = np.flatnonzero(episode.versions == version)
        assert len(places), f"no token of version {version}"
        drawn = expected[len(episode.prompt) + places - 1, episode.tokens[places]]
        np.testing.assert_allclose(episode.logprobs[places], drawn, atol=1e-5)


def echoes(rng):
    """Tell each turn some letters of chance, in four turns."""
    while True:
        yield Observation("".join(rng.choices("abcdefgh", k=rng.randint(1, 9))))


def some(engine, **keys):
    prompts = [prompt(f"{i}=") for i in range(3)]
    return play(engine, prompts, samples=3, environment=echoes, limits=LIMITS, tokens=80, **keys)


def test_logprobs_are_those_of_the_whole_stream_however_many_run_at_once(engine):
    many, again, free = some(engine), some(engine), some(engine, order="free")
    with opened(max_running_sequences=4) as smaller:
        few = some(smaller)
    for episode in (*many.episodes, *free.episodes):
        assert episode.turns == 4
        check_logprobs(episode, 0)
    assert same(many, again)
    for one, other in zip(few.episodes, many.episodes, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_the_next_turn_reads_what_is_new_and_after_new_weights_has_their_version(engine):
    engine.load(weights(SPEC), version=0)
    before = engine.stats()
    (episode,) = play(engine, [prompt("x")], environment=echoes, limits=LIMITS, tokens=80).episodes
    # the prompt but its last token, then what was told and the turn's last token, but the last
    read = len(episode.prompt) - 1 + int((~episode.drawn).sum())
    assert engine.stats().prompt_tokens - before.prompt_tokens == read
    assert engine.stats().reused_tokens > before.reused_tokens

    async def renews(chat):
        await chat.generate()
        chat.append("ab")
        await asyncio.to_thread(engine.load, weights(SPEC, 1), 1)
        await chat.generate()

    (episode,) = play(engine, [prompt("x")], agent=renews, limits=LIMITS, order="free").episodes
    for turn in (0, 1):
        assert np.unique(episode.versions[episode.turn_ids == turn]).tolist() == [turn]
    check_logprobs(episode, 0, 1)

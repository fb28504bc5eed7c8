"""Episodes by the native engine: log-probs, versions and what is read anew for each turn."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.observation import Observation
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import forward, logits
from tests.episodes import TOKENIZER, play, prompt, same

SPEC = ModelSpec(
    vocab_size=len(TOKENIZER),
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=256,
)
LONGEST = 128
LIMITS = {"turns": 4, "turn_tokens": 7}


def draw(seed):
    rng = np.random.default_rng(seed)

    def one(decl):
        values = 0.4 * rng.normal(size=decl.shape) + (decl.axes[-1] in ("norm", "head_dim"))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(one, declare(SPEC))


OLD, NEW = draw(0), draw(1)


@pytest.fixture(scope="module")
def build():
    """(sequences at once) -> an engine with the old weights."""
    made = {}

    def make(sequences):
        if sequences not in made:
            made[sequences] = NativeEngine(
                Decoder(SPEC),
                EngineSettings(sequences, LONGEST),
                layout=Layout(make_mesh({"fsdp": -1}, jax.devices()[:1])),
                steps=4,
            )
        made[sequences].load(OLD, version=0)
        return made[sequences]

    yield make
    for engine in made.values():
        engine.close()


@jax.jit
def teacher_forced(params, tokens):
    """Return the log-probs [n V] after each of n tokens."""
    length = jnp.arange(LONGEST)[None]
    hidden = forward(params, SPEC, tokens[None], length, jnp.ones_like(length))
    return jax.nn.log_softmax(logits(params, SPEC, hidden)[0])


def check_logprobs(episode, params_of_version):
    """Compare an episode's log-probs with those of a forward pass over the whole stream."""
    stream = (*episode.prompt, *episode.tokens.tolist())
    row = np.full(LONGEST, 5, np.int32)
    row[: len(stream)] = stream
    for version, params in params_of_version.items():
        expected = np.asarray(teacher_forced(params, row))
        places = np.flatnonzero(episode.versions == version)
        assert len(places), f"no token of version {version}"
        rows = len(episode.prompt) + places
        np.testing.assert_allclose(
            episode.logprobs[places], expected[rows - 1, episode.tokens[places]], atol=1e-5
        )


def echoes(rng):
    """Tell each turn some letters of chance, in four turns."""
    while True:
        yield Observation("".join(rng.choices("abcdefgh", k=rng.randint(1, 9))))


def some(engine, **keys):
    prompts = [prompt(f"{i}=") for i in range(3)]
    keys = {"environment": echoes, "limits": LIMITS, "tokens": 80} | keys
    return play(engine, prompts, samples=3, **keys)


@pytest.mark.parametrize("order", ["lockstep", "free"])
def test_logprobs_are_those_of_the_whole_stream(build, order):
    for episode in some(build(8), order=order).episodes:
        assert episode.turns == 4
        check_logprobs(episode, {0: OLD})


def test_a_turn_after_new_weights_has_their_version_and_their_logprobs(build):
    engine = build(8)

    async def renews(chat):
        await chat.generate()
        chat.append("ab")
        await asyncio.to_thread(engine.load, NEW, 1)
        await chat.generate()

    (episode,) = play(engine, [prompt("x")], agent=renews, limits=LIMITS, order="free").episodes
    assert np.unique(episode.versions[episode.turn_ids == 0]).tolist() == [0]
    assert np.unique(episode.versions[episode.turn_ids == 1]).tolist() == [1]
    check_logprobs(episode, {0: OLD, 1: NEW})


def test_the_next_turn_reads_only_what_is_new(build):
    engine = build(8)
    before = engine.stats()
    (episode,) = play(engine, [prompt("x")], environment=echoes, limits=LIMITS, tokens=80).episodes
    read = engine.stats().prompt_tokens - before.prompt_tokens
    told = int((~episode.drawn).sum())
    # the prompt but its last token, then what was told and the turn's last token, but the last
    assert read == len(episode.prompt) - 1 + told
    assert engine.stats().reused_tokens > before.reused_tokens


def test_lockstep_draws_the_same_however_many_run_at_once(build):
    """The streams are equal; programs of other shapes add up in another order."""
    few, many = (some(build(sequences)) for sequences in (4, 8))
    again = some(build(8))
    assert same(many, again)
    for one, other in zip(few.episodes, many.episodes, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

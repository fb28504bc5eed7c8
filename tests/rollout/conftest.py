import asyncio
import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native import page_pool
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import forward, logits
from tests.specs import SPECS, draw
from tests.tool_pools import open_tools

MAX_TOKENS = 40


def spec_of(model):
    return SPECS[model] if isinstance(model, str) else model


@functools.cache
def weights(model="dense", seed=0):
    return draw(spec_of(model), seed)


def far_from_uniform(spec, seed, times):
    """Return parameters under which some next tokens are much likelier than others."""
    drawn = init_params(spec, key=jax.random.key(seed))
    return jax.tree.map(lambda x: times * x if x.ndim > 1 and x.size > 500 else x, drawn)


def build(devices=1, axes=None, model="dense", sizes=None, **options):
    """Return an engine without weights; `sizes` are constants of the shapes of its programs."""
    mesh = make_mesh(axes or {"fsdp": -1}, jax.devices()[:devices])
    names = {field.name for field in dataclasses.fields(EngineSettings)} & {*options}
    settings = {"max_running_sequences": 4, "max_tokens": MAX_TOKENS}
    settings = EngineSettings(**settings | {name: options.pop(name) for name in names})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (sizes or {}).items():
            patch.setattr(page_pool, name, value)
        return NativeEngine(Decoder(spec_of(model)), settings, layout=Layout(mesh), **options)


@contextlib.contextmanager
def opened(model="dense", **options):
    """Yield an engine with the first weights."""
    with contextlib.closing(build(model=model, **options)) as engine:
        engine.load(weights(model), version=0)
        yield engine


def draw_prompt(length, seed=0):
    return tuple(np.random.default_rng(100 * length + seed).integers(0, 32, length).tolist())


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=2)
def run_forward(params, tokens, spec):
    place = jnp.arange(len(tokens))[None]
    hidden = forward(params, spec, tokens[None], place, jnp.ones_like(place))
    return logits(params, spec, hidden)[0]  # causal: what follows changes nothing


def next_logits(params, tokens, model="dense"):
    """Return the logits [n V] after each of n tokens, by a full forward pass."""
    row = np.full(MAX_TOKENS if len(tokens) <= MAX_TOKENS else 256, 5, np.int32)
    row[: len(tokens)] = tokens
    return np.asarray(run_forward(params, row, spec_of(model)))[: len(tokens)]


def drawn_from(params, request, answer, model="dense"):
    """Return the logits [n V] from which each of an answer's tokens was drawn."""
    return next_logits(params, [*request.prompt, *answer.tokens], model)[
        len(request.prompt) - 1 : -1
    ]


def expected_logprobs(params, request, answer, model="dense"):
    """Return the log-probs [n] of an answer's tokens by one pass over prompt and answer."""
    after = drawn_from(params, request, answer, model) / (request.sampling.temperature or 1.0)
    return log_softmax(after)[np.arange(len(after)), answer.tokens]


def check_logprobs(params, request, answer, model="dense", atol=1e-5):
    """Compare an answer with one pass over prompt and answer."""
    expected = expected_logprobs(params, request, answer, model)
    np.testing.assert_allclose(answer.logprobs, expected, atol=atol)
    if request.sampling.temperature == 0 and request.sampling.repetition_penalty == 1:
        best = drawn_from(params, request, answer, model).argmax(-1)
        assert answer.tokens.tolist() == best.tolist()


def check_same(answers, expected, atol=1e-5):
    for i, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens.tolist() == want.tokens.tolist(), i
        np.testing.assert_allclose(answer.logprobs, want.logprobs, atol=atol)
        assert (answer.finish, answer.stopped_by) == (want.finish, want.stopped_by)


@pytest.fixture(scope="session")
def shared_engine():
    """Compiled once for all tests; decodes five tokens at a time, so that looks are many."""
    with opened(steps=5) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """The shared engine with the first weights, and running."""
    shared_engine.load(weights(), version=0)
    yield shared_engine
    shared_engine.resume()


@pytest.fixture
def hollow():
    """(options) -> an engine that compiles no model; a test that samples replaces `_turn`."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            engine = stack.enter_context(contextlib.closing(build(**options)))
            engine.programs.warm_up = lambda *_: None
            return engine

        yield make


@pytest.fixture
def open_pool():
    """(as `open_tools`) -> what runs tools, closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *tools, **keys: stack.enter_context(open_tools(*tools, **keys))


def call_tools(pool, *calls):
    """Return the results of an episode's calls, each a name and its arguments."""

    async def episode():
        session = pool.open(0, EpisodeRow(0), 0, None)
        results = [await session.call(ToolCall(name, arguments)) for name, arguments in calls]
        await session.close()
        return results

    return asyncio.run(episode())

"""The experts that the engine says its tokens went to, against full forward passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.inputs import RowInputs
from jaxrl_llm.models.moe.routing import NO_ROUTE
from jaxrl_llm.models.paged_attention import attend_in_turn
from jaxrl_llm.rollout.engine import Request, SamplingParams
from tests.decoders import PackedTokens, forward_rows, logits
from tests.guarded import MODEL, NATIVE
from tests.rollout.conftest import MAX_TOKENS, MIXTURE

pytestmark = pytest.mark.guards(*MODEL, *NATIVE)

LAYERS, TOP = 2, 2


def prompt(length, seed=0):
    return tuple(np.random.default_rng(100 * length + seed).integers(0, 32, length).tolist())


RAGGED = [
    Request(prompt(length), SamplingParams(new), seed=seed)
    for seed, (length, new) in enumerate([(1, 16), (24, 16), (7, 11), (16, 1), (17, 13), (24, 9)])
]


@pytest.fixture(scope="module")
def params(draw_params):
    return draw_params(0, "moe")


@functools.cache
def compiled(dtype):
    @jax.jit
    def run(params, tokens, routes):
        positions = jnp.arange(MAX_TOKENS)[None]
        segments, replayed = jnp.ones_like(positions), RowInputs(routes[None])
        rows = PackedTokens(tokens[None], positions, segments, replayed)
        hidden, router = forward_rows(params, MIXTURE, rows, dtype=dtype)
        return logits(params, MIXTURE, hidden)[0], jnp.moveaxis(router["experts"], 0, 2)[0]

    return run


def forward_pass(params, tokens, routes=None, dtype="float32"):
    """Logits after each token, and the experts that each goes to."""
    row = np.full(MAX_TOKENS, 5, np.int32)
    row[: len(tokens)] = tokens
    given = np.full((MAX_TOKENS, LAYERS, TOP), NO_ROUTE, np.int8)
    if routes is not None:
        given[: len(routes)] = routes
    after, experts = compiled(dtype)(params, row, given)
    return np.asarray(after)[: len(tokens)], np.asarray(experts)[: len(tokens)]


def assert_recorded(params, request, answer):
    """The record has all tokens but the last, and the experts of a pass over all of them."""
    tokens = [*request.prompt, *answer.tokens.tolist()]
    assert answer.routes.shape == (len(tokens) - 1, LAYERS, TOP)
    assert answer.routes.dtype == np.int8
    _, experts = forward_pass(params, tokens)
    np.testing.assert_array_equal(answer.routes, experts[:-1])


@pytest.fixture(scope="module")
def build_recording(build, params):
    made = []

    def make(**options):
        engine = build(model="moe", record_routes=True, steps=5, **options)
        made.append(engine)
        engine.load(params, version=0)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engine(build_recording):
    return build_recording()


def test_the_record_is_that_of_a_forward_pass(engine, params):
    for request, answer in zip(RAGGED, engine.sample(RAGGED), strict=True):
        assert_recorded(params, request, answer)


def test_tokens_that_are_read_from_shared_pages_are_recorded(engine, params):
    before = engine.stats().reused_tokens
    start = prompt(21, seed=5)
    requests = [Request(start, SamplingParams(9), seed=seed) for seed in range(6)]
    answers = engine.sample(requests)
    longer = (*start, *answers[0].tokens.tolist(), 3, 4)
    requests.append(Request(longer, SamplingParams(5), seed=9))
    answers += engine.sample(requests[-1:])
    assert engine.stats().reused_tokens - before > 5 * 16
    for request, answer in zip(requests, answers, strict=True):
        assert_recorded(params, request, answer)


def test_an_answer_that_goes_on_keeps_its_record(engine, params, draw_params):
    requests = [Request(prompt(7), SamplingParams(3), 1), Request(prompt(9), SamplingParams(30), 2)]
    ended, begun = engine.sample_until(requests, needed=1)
    assert_recorded(params, requests[0], ended)
    assert not begun.finish
    known = len(begun.routes)
    assert known == 9 + len(begun.tokens) - 1
    assert_recorded(params, requests[1], begun)
    other = draw_params(1, "moe")
    engine.load(other, version=1)
    rest = Request(prompt(9), SamplingParams(30), 2, begun)
    (whole,) = engine.sample([rest])
    engine.load(params, version=0)
    np.testing.assert_array_equal(whole.routes[:known], begun.routes)
    tokens = [*rest.prompt, *whole.tokens.tolist()]
    np.testing.assert_array_equal(whole.routes[known:], forward_pass(other, tokens)[1][known:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"cache_gb": 2e-5},
        {"devices": 4, "axes": {"data": 2, "expert": 2}},
        {"devices": 4, "axes": {"data": 2, "tensor": 2}, "kernel": attend_in_turn},
    ],
    ids=["preempted", "mesh", "mesh, pages in place"],
)
def test_the_record_does_not_depend_on_how_the_cache_is_held(build_recording, params, options):
    engine = build_recording(**options)
    answers = engine.sample(RAGGED * 2)
    for request, answer in zip(RAGGED * 2, answers, strict=True):
        assert_recorded(params, request, answer)
    if "cache_gb" in options:
        assert engine.stats().preemptions > 0


def test_replay_of_an_engine_in_bfloat16_leaves_rounding_only(build_recording, params):
    """Near ties fall otherwise in another precision; the same experts make the same log-probs."""
    engine = build_recording(dtype="bfloat16")
    requests = [Request(prompt(8, seed), SamplingParams(31), seed=seed) for seed in range(12)]
    apart, differs = {"router's own": [], "replayed": []}, []
    for request, answer in zip(requests, engine.sample(requests), strict=True):
        tokens = [*request.prompt, *answer.tokens.tolist()]
        drawn = slice(len(request.prompt) - 1, -1)
        for name, routes in zip(apart, (None, answer.routes), strict=True):
            after, experts = forward_pass(params, tokens, routes)
            logprobs = np.asarray(jax.nn.log_softmax(after[drawn], axis=-1))
            own = np.take_along_axis(logprobs, answer.tokens[:, None], 1)[:, 0]
            apart[name].append(np.abs(own - answer.logprobs))
            if routes is None:
                recorded = answer.routes[drawn.start :, :, None]
                is_same = (experts[drawn][:, :, :, None] == recorded).any(-1)
                differs.append(~is_same.all((1, 2)))
    own, replayed = (np.concatenate(values) for values in apart.values())
    differs = np.concatenate(differs)
    assert differs.sum() >= 5
    assert replayed[differs].mean() < own[differs].mean() / 2
    np.testing.assert_allclose(replayed[differs].mean(), replayed[~differs].mean(), rtol=1)


def test_nothing_is_recorded_unless_it_is_asked_for(build, params):
    engine = build(model="moe")
    assert jax.eval_shape(engine.programs._empty_pool).routes == ()
    assert "routes" not in {name for name, *_ in engine.programs._keys(4)}
    engine.close()


def test_experts_of_a_model_without_any_are_refused(build):
    with pytest.raises(ValueError, match="expected a model with experts"):
        build(record_routes=True)

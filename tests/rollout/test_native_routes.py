import dataclasses
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
from tests.rollout.conftest import MAX_TOKENS, build, draw_prompt, opened, weights
from tests.specs import MOE

pytestmark = pytest.mark.guards(*MODEL, *NATIVE)

LAYERS, TOP = 2, 2
RAGGED = [
    Request(draw_prompt(length), SamplingParams(new), seed=seed)
    for seed, (length, new) in enumerate([(1, 16), (24, 16), (7, 11), (16, 1), (17, 13), (24, 9)])
]
FEW = {"PREFILL_LENGTHS": (32,), "PREFILL_TOKENS": (128,)}
recording = functools.partial(opened, "moe", record_routes=True, steps=5, sizes=FEW)


@functools.partial(jax.jit, static_argnums=3)
def run(params, tokens, routes, dtype):
    positions = jnp.arange(MAX_TOKENS)[None]
    rows = PackedTokens(tokens[None], positions, jnp.ones_like(positions), RowInputs(routes[None]))
    hidden, router = forward_rows(params, MOE, rows, dtype=dtype)
    return logits(params, MOE, hidden)[0], jnp.moveaxis(router["experts"], 0, 2)[0]


def forward_pass(params, tokens, routes=None):
    """Logits after each token, and the experts that each goes to."""
    row = np.full(MAX_TOKENS, 5, np.int32)
    row[: len(tokens)] = tokens
    given = np.full((MAX_TOKENS, LAYERS, TOP), NO_ROUTE, np.int8)
    if routes is not None:
        given[: len(routes)] = routes
    after, experts = run(params, row, given, "float32")
    return np.asarray(after)[: len(tokens)], np.asarray(experts)[: len(tokens)]


def check_recorded(request, answer):
    """The record has all tokens but the last, and the experts of a pass over all of them."""
    tokens = [*request.prompt, *answer.tokens.tolist()]
    assert answer.routes.shape == (len(tokens) - 1, LAYERS, TOP)
    assert answer.routes.dtype == np.int8
    np.testing.assert_array_equal(answer.routes, forward_pass(weights("moe"), tokens)[1][:-1])


@pytest.fixture(scope="module")
def engine():
    with recording() as engine:
        yield engine


def test_the_record_is_that_of_a_forward_pass(engine):
    for request, answer in zip(RAGGED, engine.sample(RAGGED), strict=True):
        check_recorded(request, answer)
    before, start = engine.stats().reused_tokens, draw_prompt(21, seed=5)
    requests = [Request(start, SamplingParams(9), seed=seed) for seed in range(6)]
    for request, answer in zip(requests, engine.sample(requests), strict=True):
        check_recorded(request, answer)
    assert engine.stats().reused_tokens - before > 5 * 16


def test_an_answer_that_goes_on_keeps_its_record(engine):
    requests = [
        Request(draw_prompt(7), SamplingParams(3), 1),
        Request(draw_prompt(9), SamplingParams(30), 2),
    ]
    ended, begun = engine.sample_until(requests, needed=1)
    assert not begun.finish
    for request, answer in zip(requests, (ended, begun), strict=True):
        check_recorded(request, answer)
    known, other = len(begun.routes), weights("moe", 1)
    engine.load(other, version=1)
    (whole,) = engine.sample([dataclasses.replace(requests[1], drawn=begun)])
    engine.load(weights("moe"), version=0)
    np.testing.assert_array_equal(whole.routes[:known], begun.routes)
    tokens = [*requests[1].prompt, *whole.tokens.tolist()]
    np.testing.assert_array_equal(whole.routes[known:], forward_pass(other, tokens)[1][known:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"cache_gb": 2e-5},
        {"devices": 4, "axes": {"data": 2, "tensor": 2}, "kernel": attend_in_turn},
    ],
    ids=["preempted", "mesh, pages in place"],
)
def test_the_record_does_not_depend_on_how_the_cache_is_held(options):
    with recording(**options) as engine:
        for request, answer in zip(RAGGED * 2, engine.sample(RAGGED * 2), strict=True):
            check_recorded(request, answer)
        assert (engine.stats().preemptions > 0) == ("cache_gb" in options)


def test_routes_can_be_recorded_where_there_are_some():
    with pytest.raises(ValueError, match="experts"):
        build(record_routes=True)

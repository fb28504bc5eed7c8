"""Routers in training: balance, the bias of sigmoid routers, and choices that are replayed."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import RowInputs
from jaxrl_llm.models.moe.routing import NO_ROUTE
from jaxrl_llm.rollout.agents.chat import EpisodeLog, Stretch
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.sharding.layout import batch_shards
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.buffer import packed_completion, unpacked_completion
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.roles import replaying
from jaxrl_llm.training.update import PolicyObjective
from jaxrl_llm.types import ROUTES
from tests.decoders import PackedTokens, forward_rows, logits
from tests.guarded import MODEL, UPDATE
from tests.refusals import refuses
from tests.specs import DENSE, MOE, SIGMOID, draw, make_batch
from tests.updates import assert_same, chosen, learn, mesh_of, place, plain

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

COEF, RATE, LENGTH, TOP = 20.0, 0.003, 16, 2
SIZES = (16, 5, 9, 5, 12, 5, 3, 7)
REAL = np.arange(LENGTH) < np.array(SIZES)[:, None]
BATCH = make_batch(SIZES, LENGTH)
LAYERS = 2  # with experts, of either model
OPTIMIZER = optax.chain(optax.trace(decay=0.0), optax.add_decayed_weights(0.1), optax.sgd(0.5))
NOTHING = np.full((*REAL.shape, LAYERS, TOP), NO_ROUTE, np.int8)


def build(spec, params, *, axes=None, tokens=48, objective=None, **settings):
    """Return a learner whose optimizer keeps the gradient, and the state it starts from."""
    mesh = mesh_of(**(axes or {}))
    placed, ranks = place(params, spec, mesh), batch_shards(mesh)
    learner = learn(
        spec,
        placed,
        objective or PolicyObjective(loss=plain),
        row_shape(tokens, LENGTH, sequences=len(SIZES), multiple_of=ranks),
        mesh=mesh,
        optimizer=OPTIMIZER,
        **{"router_loss_coef": COEF, "router_bias_rate": RATE} | settings,
    )
    return learner, learner.init(placed)


@functools.partial(jax.jit, static_argnums=1)
def by_hand(params, spec, coef, routes):
    """The loss of one sequence a row by its equations, and its gradient.

    Besides the log-probs, the balance, how often each expert was chosen, and by which tokens.
    """
    positions = np.broadcast_to(np.arange(LENGTH), REAL.shape)
    arrays = map(jnp.asarray, (BATCH.tokens, positions, REAL.astype(np.int32)))

    def loss(params):
        hidden, router = forward_rows(params, spec, PackedTokens(*arrays, RowInputs(routes)))
        policy = jnp.roll(jax.nn.log_softmax(logits(params, spec, hidden)), 1, axis=1)
        logprobs, mask = chosen(policy, BATCH.tokens), BATCH["mask"]
        total = jnp.sum(jnp.where(mask, plain(logprobs, BATCH["advantages"]), 0)) / mask.sum()
        tokens = LAYERS * sum(SIZES)
        often = jax.lax.stop_gradient(router["choices"]).sum(0) / tokens
        balance = spec.moe.experts * jnp.sum(often * router["probabilities"].sum(0) / tokens)
        experts = jnp.moveaxis(router["experts"], 0, 2)
        return total + coef * balance, (logprobs, balance, router["choices"], experts)

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(
    ("spec", "axes", "tokens"),
    [(SIGMOID, {}, 16), (MOE, {"data": 2, "fsdp": 2, "tensor": 2}, 64)],
    ids=["sigmoid, in parts", "softmax, on a mesh"],
)
def test_an_update_does_not_depend_on_the_split_or_the_mesh(spec, axes, tokens):
    """In 5 micro-batches and in 1 it is that of one pass over the mini-batch."""
    params, experts = draw(spec), spec.moe.experts
    gradient, (_, balance, choices, _) = jax.device_get(by_hand(params, spec, COEF, NOTHING))
    without = jax.device_get(by_hand(params, spec, 0.0, NOTHING)[0])
    balanced, other = (g["layers"]["router"] for g in (gradient, without))
    assert np.abs(balanced - other).max() > 0.1 * np.abs(balanced).max(), "else nothing is shown"
    learner, state = build(spec, params, axes=axes, tokens=tokens)
    state, metrics = learner.update(state, BATCH, {})
    assert_same(jax.device_get(state.opt_state[0].trace), gradient)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["router_loss"], balance, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"] - metrics["pg_loss"], COEF * balance, rtol=1e-4)
    assert choices.sum() == LAYERS * TOP * sum(SIZES), "padding is not counted"
    loads = [max(layer) / (sum(layer) / experts) for layer in choices.tolist()]
    np.testing.assert_allclose(metrics["router_max_load"], max(loads), rtol=1e-6)
    np.testing.assert_allclose(metrics["router_idle"], np.mean(choices == 0), rtol=1e-6)
    assert 0 < metrics["router_entropy"] < np.log(experts)
    if spec is SIGMOID:  # against the load, and neither by weight decay nor by a gradient
        assert not np.any(gradient["layers"]["router_bias"])
        moved = np.array(params["layers"]["router_bias"])
        moved += RATE * np.sign(TOP * sum(SIZES) / experts - choices)
        bias = np.asarray(state.params["layers"]["router_bias"])
        np.testing.assert_allclose(bias, moved, rtol=1e-6)
        infinite = np.where(BATCH["mask"], np.inf, 0).astype(np.float32)
        state, metrics = learner.update(state, BATCH.add(advantages=infinite), {})
        assert metrics["skipped"] == 1
        np.testing.assert_array_equal(state.params["layers"]["router_bias"], bias)


# ------------------------------------------------------------------------------------------ replay


def drawn_routes():
    """Choices that have nothing to do with the routers', and none of each sequence's last token."""
    rng = np.random.default_rng(2)
    each = [rng.permutation(MOE.moe.experts)[:TOP] for _ in range(REAL.size * LAYERS)]
    routes = np.array(each, np.int8).reshape(NOTHING.shape)
    routes[np.arange(len(SIZES)), np.array(SIZES) - 1] = NO_ROUTE
    return routes


@pytest.mark.parametrize(
    "axes",
    [
        {},
        *(
            pytest.param(axes, marks=pytest.mark.slow)
            for axes in ({"expert": 2, "context": 2}, {"stage": 2, "data": 2})
        ),
    ],
    ids=str,
)
def test_an_update_by_recorded_choices_has_their_gradient(axes):
    """Packed in micro-batches, with the balance of what was replayed."""
    routes = drawn_routes()
    learner, state = build(MOE, draw(MOE), axes=axes, router_replay="rollout")
    state, metrics = learner.update(state, BATCH.add(routes=routes), {})
    expected, (*_, experts) = by_hand(draw(MOE), MOE, COEF, routes)
    assert_same(jax.device_get(state.opt_state[0].trace), jax.device_get(expected), rtol=2e-4)
    given = REAL & (routes != NO_ROUTE).all((2, 3))
    np.testing.assert_array_equal(np.asarray(experts)[given], routes[given])
    if not axes:  # else the choice of later layers may fall otherwise at a tie
        own = np.asarray(by_hand(draw(MOE), MOE, COEF, NOTHING)[1][-1])[given][:, 0]
        is_same = (own[:, :, None] == routes[given][:, 0, None]).any(-1)  # in the first layer
        assert abs(float(metrics["router_replaced"]) - (~is_same).mean()) < 0.2


@pytest.mark.slow
def test_the_routers_own_choices_change_nothing_of_an_update():
    """But a last digit here and there: one program takes them as its input."""
    plainly, state = build(MOE, draw(MOE), router_replay="none")
    replays, again = build(MOE, draw(MOE), router_replay="old_policy")
    record = logprob_pass(replays.model, replays.shape, mesh_of(), ("logprobs", ROUTES))
    recorded = record(draw(MOE), BATCH)
    state, _ = plainly.update(state, BATCH, {})
    again, metrics = replays.update(again, BATCH.add(routes=recorded[ROUTES]), {})
    assert float(metrics["router_replaced"]) == 0
    assert_same(again.opt_state[0].trace, state.opt_state[0].trace, rtol=1e-5, atol=1e-6)


def test_the_pass_for_old_log_probs_is_replayed_after_the_policy_has_moved():
    """Its choices come with it; a later pass takes them, and one without them chooses anew."""
    model = ForwardConfig(model=Decoder(MOE), router_replay="old_policy")
    shape = row_shape(48, LENGTH, sequences=len(SIZES))
    infer = logprob_pass(model, shape, mesh_of(), ("logprobs", ROUTES))

    def check(got, params, routes):
        _, (logprobs, *_, experts) = by_hand(params, MOE, COEF, routes)
        wanted, mask = np.asarray(logprobs), BATCH["mask"]
        np.testing.assert_allclose(got["logprobs"][mask], wanted[mask], atol=1e-4)
        return np.asarray(experts)[REAL]

    old, moved = infer(draw(MOE), BATCH), draw(MOE, seed=5)
    assert old[ROUTES].dtype == np.int8
    np.testing.assert_array_equal(old[ROUTES][REAL], check(old, draw(MOE), NOTHING))
    replayed, anew = infer(moved, BATCH.add(routes=old[ROUTES])), infer(moved, BATCH)
    np.testing.assert_array_equal(replayed[ROUTES][REAL], old[ROUTES][REAL])
    check(replayed, moved, old[ROUTES])
    check(anew, moved, NOTHING)
    assert np.abs(anew["logprobs"] - replayed["logprobs"]).max() > 0.1


def record(first, count):
    numbers = np.arange(first, first + count, dtype=np.int8)[:, None, None]
    return numbers * np.ones((1, LAYERS, TOP), np.int8)


ARRAYS = np.array([3, 4], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32)


def test_records_of_several_chains_lie_on_their_tokens():
    """Each chain has its own, from its first token on; none of its last, nor of padding."""

    def told(*tokens, chain=0):
        return Completion.told(tokens, chain)

    def drawn(*tokens, chain=0):
        versions = np.zeros(len(tokens), np.int32)
        return told(*tokens, chain=chain)._replace(versions=versions, drawn=True)

    pieces = (drawn(7, 8), told(20, 21, chain=1), drawn(22, chain=1), told(9), drawn(10, 11))
    chains = Episode((5, 6), pieces, "stop", routes=(record(0, 6), record(30, 2)))
    answer = Episode.of((1, 2), Completion(*ARRAYS, "stop", routes=record(50, 3)))
    broken = Episode((5, 6), (drawn(7),), "broken", error="x", routes=(record(70, 2),))
    rollouts = Rollouts([None] * 3, [chains, answer, broken], [""] * 3)
    routes = lay_out(rollouts, samples=1, max_tokens=12)[ROUTES]
    assert routes.shape == (3, 12, LAYERS, TOP)
    numbers, none = routes[:, :, 0, 0].tolist(), [NO_ROUTE] * 12
    assert numbers[0] == [0, 1, 2, 3, 30, 31, NO_ROUTE, 4, 5, *none[:3]]
    assert numbers[1:] == [[50, 51, 52, *none[:9]], none]


def test_a_later_turn_does_not_change_what_earlier_tokens_were_drawn_with():
    """It records them again where it has read them again."""
    log = EpisodeLog()
    chain = log.begin_chain(Stretch((5, 6)), [])
    for first, count in ((0, 3), (40, 7)):
        log.end_turn(chain, Completion(*ARRAYS, "stop", routes=record(first, count)), "")
    (joined,) = log.routes
    assert joined[:, 0, 0].tolist() == [0, 1, 2, 43, 44, 45, 46]


def test_a_completion_is_packed_with_its_record():
    for routes in (None, record(3, 4), record(3, 4).astype(np.int16)):
        packed = json.loads(json.dumps(packed_completion(Completion(*ARRAYS, "", routes=routes))))
        again = unpacked_completion(packed).routes
        np.testing.assert_array_equal(again, routes)
        assert routes is None or again.dtype == routes.dtype


def test_what_can_not_be_replayed_is_refused():
    key, old = "model.router_replay", {"model.router_replay": "old_policy"}
    for keys in (
        {"algorithm.pairs": "best_and_worst", "algorithm.pair_loss": "dpo"},
        {"rollout.engine": "vllm"},
        old | {"batch.prompts_per_minibatch": None},
        old | {"algorithm.use_rollout_logprobs": True},
        old | {"batch.prompts_per_minibatch": 8, "mesh.train.stage": 2},
    ):
        with refuses(key):
            resolve_functions(load(TrainConfig, "quickstart", {key: "rollout"} | keys))
    config = load(TrainConfig, "quickstart", {key: "rollout"})
    with refuses(key):
        replaying(ForwardConfig(model=Decoder(DENSE)), config)

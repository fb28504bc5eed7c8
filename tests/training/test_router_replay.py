"""Updates and passes by recorded choices of experts, against passes over one sequence a row."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import RowInputs
from jaxrl_llm.models.moe.routing import NO_ROUTE
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.agents.chat import EpisodeLog, Stretch
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.sharding.layout import batch_shards, make_mesh, shardings
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.buffer import packed_completion, unpacked_completion
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.roles import replaying
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import ROUTES, Batch
from tests.decoders import PackedTokens, forward_rows, logits
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

EXPERTS, TOP, LAYERS, COEF, LENGTH = 6, 2, 3, 20.0, 16
SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=LAYERS,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=64,
    moe=MoeSpec(experts=EXPERTS, experts_per_token=TOP, ff_width=8, dense_layers=1),
)
ROUTED = LAYERS - 1
SIZES = np.array([16, 5, 9, 5, 12, 5, 3, 7], np.int32)
REAL = np.arange(LENGTH) < SIZES[:, None]


def draw(seed=0):
    rng = np.random.default_rng(seed)

    def one(decl):
        values = 0.3 * rng.normal(size=decl.shape) + (decl.axes[-1] in ("norm", "head_dim"))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(one, declare(SPEC))


def make_batch(**fields):
    rng = np.random.default_rng(1)
    place = np.arange(LENGTH)
    mask = (place >= 2) & REAL
    fields |= {"mask": mask, "advantages": rng.normal(size=mask.shape).astype(np.float32)}
    return Batch(rng.integers(0, 32, mask.shape).astype(np.int32), SIZES, fields)


def drawn_routes():
    """Choices that have nothing to do with the routers', and none of each sequence's last token."""
    rng = np.random.default_rng(2)
    shape = (*REAL.shape, ROUTED)
    each = [rng.permutation(EXPERTS)[:TOP] for _ in range(np.prod(shape))]
    routes = np.array(each, np.int8).reshape(*shape, TOP)
    routes[np.arange(len(SIZES)), SIZES - 1] = NO_ROUTE
    return routes


def plain(logprobs, advantages):
    return -logprobs * advantages


@jax.jit
def by_rows(params, routes):
    """Log-probs of one sequence a row, what routers report, and the loss by its equations."""
    batch = make_batch()
    positions = np.broadcast_to(np.arange(LENGTH), REAL.shape)
    arrays = map(jnp.asarray, (batch.tokens, positions, REAL.astype(np.int32)))
    hidden, router = forward_rows(params, SPEC, PackedTokens(*arrays, RowInputs(routes)))
    policy = jax.nn.log_softmax(logits(params, SPEC, hidden))[:, :-1]
    chosen = jnp.take_along_axis(policy, batch.tokens[:, 1:, None], axis=-1)[:, :, 0]
    logprobs = jnp.where(REAL, jnp.pad(chosen, [(0, 0), (1, 0)]), 0.0)
    mask = batch["mask"]
    loss = jnp.sum(jnp.where(mask, plain(logprobs, batch["advantages"]), 0)) / mask.sum()
    tokens = ROUTED * SIZES.sum()
    often = jax.lax.stop_gradient(router["choices"]).sum(0) / tokens
    loss += COEF * EXPERTS * jnp.sum(often * router["probabilities"].sum(0) / tokens)
    return loss, (logprobs, jnp.moveaxis(router["experts"], 0, 2))


differentiate = jax.jit(jax.value_and_grad(by_rows, has_aux=True))


def forward(replay, **changes):
    return ForwardConfig(
        model=Decoder(SPEC), router_loss_coef=COEF, router_replay=replay, **changes
    )


def shape_on(mesh):
    return row_shape(48, LENGTH, sequences=len(SIZES), multiple_of=batch_shards(mesh))


@functools.cache
def mesh_of(**axes):
    sizes = axes or {"fsdp": 1}
    return make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


def build(replay, mesh):
    placed = jax.device_put(draw(), shardings(declare(SPEC), mesh))
    settings, shape = forward(replay), shape_on(mesh)
    learner = Learner(
        PolicyObjective(loss=plain),
        settings,
        optax.chain(optax.trace(decay=0.0), optax.sgd(0.5)),
        reduce=token_mean,
        shape=shape,
        mesh=mesh,
        params_like=placed,
    )
    return learner, learner.init(placed)


def assert_scored(results, expected):
    mask = make_batch()["mask"]
    np.testing.assert_allclose(results["logprobs"][mask], np.asarray(expected)[mask], atol=1e-5)


def assert_equal(tree, expected):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 1e-7, rtol=2e-4)


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
    learner, state = build("rollout", mesh_of(**axes))
    state, metrics = learner.update(state, make_batch(routes=routes), {})
    (_, (_, experts)), expected = differentiate(draw(), routes)
    assert_equal(state.opt_state[0].trace, expected)
    given = REAL & (routes != NO_ROUTE).all((2, 3))
    np.testing.assert_array_equal(np.asarray(experts)[given], routes[given])
    _, (_, own) = by_rows(draw(), np.full_like(routes, NO_ROUTE))
    if not axes:  # else the choice of later layers may fall otherwise at a tie
        own = np.asarray(own)[given][:, 0]  # of the first such layer, which sees the same
        is_same = (own[:, :, None] == routes[given][:, 0, None]).any(-1)
        assert abs(float(metrics["router_replaced"]) - (~is_same).mean()) < 0.2


@pytest.mark.slow
def test_the_routers_own_choices_change_no_bit_of_an_update():
    mesh = mesh_of()
    record = logprob_pass(forward("old_policy"), shape_on(mesh), mesh, ("logprobs", ROUTES))
    recorded = record(draw(), make_batch())
    plainly, state = build("none", mesh)
    state, _ = plainly.update(state, make_batch(), {})
    replays, again = build("old_policy", mesh)
    again, metrics = replays.update(again, make_batch(routes=recorded[ROUTES]), {})
    assert float(metrics["router_replaced"]) == 0
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_pass_for_old_log_probs_is_replayed_after_the_policy_has_moved():
    """Its choices come with it; a later pass takes them, and one without them chooses anew."""
    mesh = mesh_of()
    infer = logprob_pass(forward("old_policy"), shape_on(mesh), mesh, ("logprobs", ROUTES))
    batch = make_batch()
    old = infer(draw(), batch)
    nothing = np.full_like(drawn_routes(), NO_ROUTE)
    _, (logprobs, experts) = by_rows(draw(), nothing)
    assert_scored(old, logprobs)
    assert old[ROUTES].dtype == np.int8
    np.testing.assert_array_equal(old[ROUTES][REAL], np.asarray(experts)[REAL])

    moved = draw(seed=5)
    replayed = infer(moved, batch.add(routes=old[ROUTES]))
    np.testing.assert_array_equal(replayed[ROUTES][REAL], old[ROUTES][REAL])
    assert_scored(replayed, by_rows(moved, old[ROUTES])[1][0])
    anew = infer(moved, batch)
    assert_scored(anew, by_rows(moved, nothing)[1][0])
    assert np.abs(anew["logprobs"] - replayed["logprobs"]).max() > 0.1


def record(first, count):
    return np.arange(first, first + count, dtype=np.int8)[:, None, None] * np.ones(
        (1, ROUTED, TOP), np.int8
    )


def test_records_of_several_chains_lie_on_their_tokens():
    """Each chain has its own, from its first token on; none of its last, nor of padding."""

    def told(*tokens, chain=0):
        return Completion.told(tokens, chain)

    def drawn(*tokens, chain=0):
        piece = told(*tokens, chain=chain)
        return piece._replace(versions=np.zeros(len(tokens), np.int32), drawn=True)

    pieces = (drawn(7, 8), told(20, 21, chain=1), drawn(22, chain=1), told(9), drawn(10, 11))
    chains = Episode((5, 6), pieces, "stop", routes=(record(0, 6), record(30, 2)))
    arrays = np.array([3, 4], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32)
    answer = Episode.of((1, 2), Completion(*arrays, "stop", routes=record(50, 3)))
    broken = Episode((5, 6), (drawn(7),), "broken", error="x", routes=(record(70, 2),))
    batch = lay_out(
        Rollouts([None] * 3, [chains, answer, broken], [""] * 3), samples=1, max_tokens=12
    )
    numbers = batch[ROUTES][:, :, 0, 0].tolist()
    assert batch[ROUTES].shape == (3, 12, ROUTED, TOP)
    none = [NO_ROUTE] * 12
    assert numbers[0] == [0, 1, 2, 3, 30, 31, NO_ROUTE, 4, 5, *none[:3]]
    assert numbers[1] == [50, 51, 52, *none[:9]]
    assert numbers[2] == none


def test_a_later_turn_does_not_change_what_earlier_tokens_were_drawn_with():
    """It records them again where it has read them again."""
    log, arrays = EpisodeLog(), (np.zeros(2, np.int32), np.zeros(2, np.float32))
    chain = log.begin_chain(Stretch((5, 6)), [])
    for first, count in ((0, 3), (40, 7)):
        turn = Completion(*arrays, arrays[0], "stop", routes=record(first, count))
        log.end_turn(chain, turn, "")
    (joined,) = log.routes
    assert joined[:, 0, 0].tolist() == [0, 1, 2, 43, 44, 45, 46]


def test_a_completion_is_packed_with_its_record():
    arrays = np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32)
    for routes in (None, record(3, 4), record(3, 4).astype(np.int16)):
        packed = json.loads(json.dumps(packed_completion(Completion(*arrays, "", routes=routes))))
        again = unpacked_completion(packed).routes
        np.testing.assert_array_equal(again, routes)
        assert routes is None or again.dtype == routes.dtype


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"algorithm.pairs": "best_and_worst", "algorithm.pair_loss": "dpo"},
            "algorithm.pairs takes answers of any policy",
        ),
        ({"rollout.engine": "vllm"}, "only the native engine says which experts"),
        (
            {"model.router_replay": "old_policy", "batch.prompts_per_minibatch": None},
            "a step is one update on all of its answers",
        ),
        (
            {"model.router_replay": "old_policy", "algorithm.use_rollout_logprobs": True},
            "there is no pass for the old log-probs",
        ),
        (
            {
                "model.router_replay": "old_policy",
                "batch.prompts_per_minibatch": 8,
                "mesh.train.stage": 2,
            },
            "stages do not report which experts",
        ),
    ],
    ids=str,
)
def test_what_can_not_be_replayed_is_refused(keys, message):
    config = load(TrainConfig, "quickstart", {"model.router_replay": "rollout"} | keys)
    with pytest.raises(ConfigError, match=f"model.router_replay={config.model.router_replay}"):
        try:
            resolve_functions(config)
        except ConfigError as error:
            assert message in str(error)
            raise


def test_a_model_without_experts_replays_nothing():
    config = load(TrainConfig, "quickstart", {"model.router_replay": "rollout"})
    dense = ForwardConfig(model=Decoder(dataclasses.replace(SPEC, moe=None)))
    with pytest.raises(ConfigError, match=r"router_replay=rollout, but .* has no experts"):
        replaying(dense, config)

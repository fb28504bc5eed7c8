"""Routers in training: the load-balance loss, the bias of sigmoid routers, and the metrics."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.algorithms.values import squared_value_loss
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder, with_value_head
from jaxrl_llm.models.moe.routing import RouterStats, SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import batch_shards, make_mesh, shardings
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.update import (
    Learner,
    PolicyObjective,
    TrainState,
    ValueObjective,
    apply_gradients,
    move_router_bias,
)
from jaxrl_llm.types import Batch
from tests.decoders import forward_with_router, logits
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

EXPERTS, TOP, LAYERS, COEF, RATE = 6, 2, 2, 20.0, 0.003
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
    moe=MoeSpec(experts=EXPERTS, experts_per_token=TOP, ff_width=8),
)
SIGMOID = SigmoidRouter(groups=3, top_groups=2, normalize=True, scale=2.5)
SIZES = np.array([16, 5, 9, 5, 12, 5, 3, 7], np.int32)


def sigmoid(spec):
    return dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, router=SIGMOID))


def draw(spec):
    """Parameters whose routers like some experts much better than others."""
    rng = np.random.default_rng(0)

    def one(decl):
        values = 0.3 * rng.normal(size=decl.shape) + (decl.axes[-1] in ("norm", "head_dim"))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(one, declare(spec))


def make_batch():
    rng = np.random.default_rng(1)
    place = np.arange(16)
    mask = (place >= 2) & (place < SIZES[:, None])
    fields = {"mask": mask, "advantages": rng.normal(size=mask.shape).astype(np.float32)}
    return Batch(rng.integers(0, 32, mask.shape).astype(np.int32), SIZES, fields)


def plain(logprobs, advantages):
    return -logprobs * advantages


def one_device():
    return make_mesh({"fsdp": 1}, jax.devices()[:1])


def build(spec, params, *, tokens, mesh=None, coef=COEF, objective=None):
    """Return a learner whose optimizer remembers the gradient, and the state it starts from."""
    mesh = mesh or one_device()
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    forward = ForwardConfig(model=Decoder(spec), router_loss_coef=coef, router_bias_rate=RATE)
    shape = row_shape(tokens, 16, sequences=len(SIZES), multiple_of=batch_shards(mesh))
    learner = Learner(
        objective or PolicyObjective(loss=plain),
        forward,
        optax.chain(optax.trace(decay=0.0), optax.add_decayed_weights(0.1), optax.sgd(0.5)),
        reduce=token_mean,
        shape=shape,
        mesh=mesh,
        params_like=placed,
    )
    return learner, learner.init(placed)


def whole_loss(params, spec, coef):
    """The loss of all sequences, one per row, from the equations; its balance; the choices."""
    batch = make_batch()
    real = np.arange(16) < SIZES[:, None]
    positions = np.broadcast_to(np.arange(16), real.shape)
    rows = map(jnp.asarray, (batch.tokens, positions, real.astype(np.int32)))
    hidden, router = forward_with_router(params, spec, *rows)
    logpi = jax.nn.log_softmax(logits(params, spec, hidden))[:, :-1]
    logprobs = jnp.take_along_axis(logpi, batch.tokens[:, 1:, None], axis=-1)[:, :, 0]
    mask = batch["mask"][:, 1:]
    policy = jnp.sum(jnp.where(mask, plain(logprobs, batch["advantages"][:, 1:]), 0)) / mask.sum()
    tokens = LAYERS * SIZES.sum()
    f = jax.lax.stop_gradient(router["choices"]).sum(0) / tokens
    balance = EXPERTS * jnp.sum(f * router["probabilities"].sum(0) / tokens)
    return policy + coef * balance, (balance, router["choices"])


differentiate = jax.jit(jax.grad(whole_loss, has_aux=True), static_argnums=1)


@pytest.fixture(scope="module", params=[SPEC, sigmoid(SPEC)], ids=["softmax", "sigmoid"])
def case(request):
    """A model, its parameters, and the gradient and the results of one pass over everything."""
    spec = request.param
    params = draw(spec)
    return spec, params, jax.device_get(differentiate(params, spec, COEF))


def assert_same(state, expected):
    got = jax.device_get(state.opt_state[0].trace)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5 * scale)


def test_the_balance_loss_has_a_gradient(case):
    """Or the other comparisons would show nothing."""
    spec, params, (gradient, _) = case
    without = jax.device_get(differentiate(params, spec, 0.0))[0]
    balanced, other = (g["layers"]["router"] for g in (gradient, without))
    assert np.abs(balanced - other).max() > 0.3 * np.abs(balanced).max()


@pytest.mark.parametrize("tokens", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_an_update_does_not_depend_on_the_split(case, tokens):
    """In 5 micro-batches and in 1 it is that of one pass over the mini-batch."""
    spec, params, (gradient, (balance, choices)) = case
    learner, state = build(spec, params, tokens=tokens)
    state, metrics = learner.update(state, make_batch(), {})
    assert_same(state, gradient)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["router_loss"], balance, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"] - metrics["pg_loss"], COEF * balance, rtol=1e-5)
    assert choices.sum() == LAYERS * TOP * SIZES.sum(), "padding is not counted"
    loads = [max(layer) / (sum(layer) / EXPERTS) for layer in choices.tolist()]
    np.testing.assert_allclose(metrics["router_max_load"], max(loads), rtol=1e-6)
    np.testing.assert_allclose(metrics["router_idle"], np.mean(choices == 0), rtol=1e-6)
    assert 0 < metrics["router_entropy"] < np.log(EXPERTS)
    if spec.moe.router is SIGMOID:
        bias = check_bias(params, state, choices, gradient)
        state, metrics = learner.update(state, poisoned(make_batch()), {})
        assert metrics["skipped"] == 1
        np.testing.assert_array_equal(state.params["layers"]["router_bias"], bias)


def check_bias(params, state, choices, gradient):
    """It moves against the load, and neither by weight decay nor by a gradient, which is 0."""
    assert not np.any(gradient["layers"]["router_bias"])
    expected = np.array(params["layers"]["router_bias"])
    mean = TOP * SIZES.sum() / EXPERTS
    for place in np.ndindex(*expected.shape):
        expected[place] += RATE * np.sign(mean - choices[place])
    bias = np.asarray(state.params["layers"]["router_bias"])
    np.testing.assert_allclose(bias, expected, rtol=1e-6)
    return bias


def poisoned(batch):
    return batch.add(advantages=np.where(batch["mask"], np.inf, 0).astype(np.float32))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_optimizer_does_not_touch_the_bias(rate):
    """A rate of 0 freezes it, whatever the weight decay."""
    bias, other = jnp.array([[1.0, -2.0]]), jnp.array([3.0])
    params = {"layers": {"router_bias": bias, "other": other}}
    optimizer, count = optax.adamw(0.1, weight_decay=0.5), jnp.zeros((), jnp.int32)
    grads = jax.tree.map(jnp.zeros_like, params)
    router = RouterStats(jnp.array([4.0]), jnp.array([[3.0, 1.0]]), bias, jnp.array([1.0]))
    state = TrainState(params, optimizer.init(params), count, count)

    def change(before, after):
        return move_router_bias(before, after, router, rate=rate)

    state, _ = apply_gradients(state, grads, optimizer, change)
    assert state.params["layers"]["router_bias"].tolist() == [[1.0 - rate, -2.0 + rate]]
    assert state.params["layers"]["other"] < other


def test_an_update_does_not_depend_on_the_mesh():
    params = draw(SPEC)
    gradient, (balance, _) = differentiate(params, SPEC, COEF)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    learner, state = build(SPEC, params, tokens=64, mesh=mesh)
    state, metrics = learner.update(state, make_batch(), {})
    assert_same(state, jax.device_get(gradient))
    np.testing.assert_allclose(metrics["router_loss"], balance, rtol=1e-5)


def test_without_a_coefficient_there_is_no_balance_loss():
    params = draw(SPEC)
    gradient, (balance, _) = differentiate(params, SPEC, 0.0)
    learner, state = build(SPEC, params, tokens=48, coef=0.0)
    state, metrics = learner.update(state, make_batch(), {})
    assert_same(state, jax.device_get(gradient))
    assert metrics["loss"] == metrics["pg_loss"]
    np.testing.assert_allclose(metrics["router_loss"], balance, rtol=1e-5)


def test_a_critic_balances_its_experts_too():
    """The value head of zeros gives the routers no gradient, so it is that of the balance."""
    params, spec = with_value_head(draw(sigmoid(SPEC)), sigmoid(SPEC))
    batch = make_batch()
    batch = batch.add(returns=np.where(batch["mask"], 1.0, 0.0).astype(np.float32))
    objective = ValueObjective(loss=squared_value_loss)
    learner, state = build(spec, params, tokens=48, objective=objective)
    state, metrics = learner.update(state, batch, {})
    assert np.any(state.opt_state[0].trace["layers"]["router"])
    assert np.any(state.params["layers"]["router_bias"] != params["layers"]["router_bias"])
    assert metrics["router_loss"] > 0

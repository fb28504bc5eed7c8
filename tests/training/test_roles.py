"""The critic's update against one sequence at a time, and what else belongs to a role."""

import functools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.losses import ppo_clip, select_clip_cov, select_kl_cov
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.algorithms.values import clipped_value_loss
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import make_mesh, shardings
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass, value_pass
from jaxrl_llm.training.roles import LabelError, Role, check_labels, covariance_marker
from jaxrl_llm.training.update import Learner, PolicyObjective, TrainState, ValueObjective
from jaxrl_llm.types import Batch
from tests.decoders import forward, logits
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ff_width=16,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=32,
    value_head=True,
)
POLICY = ModelSpec(**{**vars(SPEC), "value_head": False})
SIZES = np.array([8, 3, 5, 6], np.int32)
KEEP_GRADIENT = optax.chain(optax.trace(decay=0.0), optax.sgd(0.5))
SHAPES = [RowShape(4, 8, 4), RowShape(1, 8, 2), RowShape(2, 16, 4), RowShape(1, 24, 3)]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 1}, jax.devices()[:1])


def draw(spec):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda decl: jnp.asarray(rng.normal(scale=0.3, size=decl.shape), jnp.float32), declare(spec)
    )


def make_batch():
    rng = np.random.default_rng(1)
    place = np.arange(8)
    mask = (place >= 1) & (place < SIZES[:, None])
    mask[:, 4] = False
    old, returns = rng.normal(size=(2, 4, 8)).astype(np.float32)
    fields = {"mask": mask, "old_values": old, "returns": returns}
    return Batch(rng.integers(0, 32, (4, 8)).astype(np.int32), SIZES, fields)


@functools.partial(jax.jit, static_argnums=1)
def hidden_states(params, spec, tokens):
    n, tokens = len(tokens), jnp.asarray(tokens)
    return forward(params, spec, tokens[None], jnp.arange(n)[None], jnp.ones((1, n), int))[0]


@jax.jit
def values_of(params, tokens):
    """The values of one sequence [n]: before its first token there is no state."""
    hidden = hidden_states(params, SPEC, tokens)
    after = hidden @ params["score"][:, 0] + params["score_bias"][0]
    return jnp.concatenate([jnp.zeros(1), after[:-1]])


@pytest.mark.parametrize("shape", SHAPES)
def test_values_belong_to_the_state_before_each_token(mesh, shape):
    params, batch = draw(SPEC), make_batch()
    values = value_pass(ForwardConfig(model=Decoder(SPEC)), shape, mesh)(params, batch)["values"]
    for row, tokens, size in zip(values, batch.tokens, SIZES, strict=True):
        np.testing.assert_allclose(row[:size], values_of(params, tokens[:size]), atol=1e-5)
        assert not row[size:].any()


CLIP = 0.7


def critic_loss(params):
    """PPO's clipped value loss, mean over tokens, one sequence after the other."""
    batch, total = make_batch(), 0.0
    for i, size in enumerate(SIZES):
        mask = batch["mask"][i, :size]
        values = values_of(params, batch.tokens[i, :size])
        old, returns = batch["old_values"][i, :size], batch["returns"][i, :size]
        held = jnp.clip(values, old - CLIP, old + CLIP)
        worst = jnp.maximum((values - returns) ** 2, (held - returns) ** 2) / 2
        total += jnp.sum(jnp.where(mask, worst, 0.0))
    return total / batch["mask"].sum()


@pytest.fixture(scope="module")
def by_hand():
    """The critic's loss and its gradient."""
    return jax.device_get(jax.jit(jax.value_and_grad(critic_loss))(draw(SPEC)))


@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES[1:3]), SHAPES[3]]
)
def test_the_critic_s_update_is_the_same_however_it_is_cut(mesh, shape, by_hand):
    params, batch = draw(SPEC), make_batch()
    placed = jax.device_put(params, shardings(declare(SPEC), mesh))
    learner = Learner(
        ValueObjective(loss=functools.partial(clipped_value_loss, clip=CLIP)),
        ForwardConfig(model=Decoder(SPEC)),
        KEEP_GRADIENT,
        reduce=token_mean,
        shape=shape,
        mesh=mesh,
        params_like=placed,
    )
    state, metrics = learner.update(learner.init(placed), batch, {})
    expected, gradient = by_hand
    np.testing.assert_allclose(metrics["vf_loss"], expected, rtol=1e-5)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5),
        jax.device_get(state.opt_state[0].trace),
        gradient,
    )
    values = value_pass(ForwardConfig(model=Decoder(SPEC)), shape, mesh)(params, batch)["values"]
    np.testing.assert_allclose(metrics["vpred_mean"], values[batch["mask"]].mean(), rtol=1e-4)


def test_a_correction_weighs_the_loss_and_not_the_kl(mesh):
    """L = Σ w (c · loss + β · kl): the parts of the metrics say which was weighed."""
    params, batch = draw(POLICY), make_batch()
    rng = np.random.default_rng(2)
    advantages, correction = rng.uniform(0.5, 2.0, (2, 4, 8)).astype(np.float32)
    batch = batch.add(advantages=advantages, correction=correction)
    parts = {}
    for corrected in (False, True):
        learner = Learner(
            PolicyObjective(
                loss=lambda logprobs, advantages: advantages + 0 * logprobs,
                kl=lambda logprobs: 0 * logprobs + 3.0,
                corrected=corrected,
            ),
            ForwardConfig(model=Decoder(POLICY)),
            KEEP_GRADIENT,
            reduce=token_mean,
            shape=SHAPES[0],
            mesh=mesh,
            params_like=params,
        )
        parts[corrected] = learner.update(learner.init(params), batch, {"kl_coef": 0.5})[1]
    on = batch["mask"]
    np.testing.assert_allclose(parts[False]["pg_loss"], advantages[on].mean(), rtol=1e-5)
    weighed = (advantages * correction)[on].mean()
    np.testing.assert_allclose(parts[True]["pg_loss"], weighed, rtol=1e-5)
    np.testing.assert_allclose(parts[True]["kl_loss"], 3.0, rtol=1e-5)
    np.testing.assert_allclose(parts[True]["loss"], weighed + 1.5, rtol=1e-5)


def test_the_sum_of_squared_probabilities(mesh):
    params, batch = draw(POLICY), make_batch()
    names = ("logprobs", "sum_pi_squared")
    inferred = logprob_pass(ForwardConfig(model=Decoder(POLICY)), SHAPES[1], mesh, names)(
        params, batch
    )
    assert set(inferred) == set(names)
    for i, (row, size) in enumerate(zip(inferred["sum_pi_squared"], SIZES, strict=True)):
        scores = logits(params, POLICY, hidden_states(params, POLICY, batch.tokens[i, :size]))
        expected = np.square(np.asarray(jax.nn.softmax(scores, axis=-1))).sum(-1)
        np.testing.assert_allclose(
            row[1:size], np.where(batch["mask"][i, 1:size], expected[:-1], 0.0), rtol=1e-5
        )


# -------------------------------------------------------------------------------- high covariance


def state_after(updates):
    return TrainState({"a": 1}, None, jnp.asarray(updates), jnp.asarray(0))


def marking(select, updates=0, seed=0):
    rng = np.random.default_rng(0)
    current = rng.normal(size=(4, 8)).astype(np.float32)
    batch = make_batch().add(advantages=rng.normal(size=(4, 8)).astype(np.float32))
    seen = []

    def infer(params, batch):
        seen.append(params)
        return {"logprobs": current}

    functions = Mock(spec=AlgorithmFunctions, select_covariant=select)
    role = Role(
        name="actor",
        learner=Mock(spec=Learner),
        infer=infer,
        learning_rate=Mock(),
        max_skipped=0,
        mark_covariant=covariance_marker(functions),
        seed=seed,
    )
    marked = role.annotate(state_after(updates), batch)
    assert seen == [{"a": 1}], "once, with the parameters that are being updated"
    return marked["high_covariance"], (current, batch["advantages"], batch["mask"])


def test_the_tokens_of_highest_covariance_of_a_mini_batch_are_marked():
    marked, (current, advantages, mask) = marking(functools.partial(select_kl_cov, ratio=0.25))
    products = (current - current[mask].mean()) * (advantages - advantages[mask].mean())
    least = np.sort(products[mask])[-int(0.25 * mask.sum())]
    np.testing.assert_array_equal(marked, mask & (products >= least))


def test_tokens_are_drawn_by_seed_and_update():
    draw = functools.partial(select_clip_cov, ratio=0.2, low=-9.0, high=9.0)
    marked = [marking(draw, updates, seed)[0] for updates, seed in ((0, 0), (0, 0), (1, 0), (0, 1))]
    np.testing.assert_array_equal(marked[0], marked[1])
    assert any(np.any(marked[0] != other) for other in marked[2:])
    assert all(f.sum() == marked[0].sum() > 0 for f in marked)


# ---------------------------------------------------------------------------- old log-probs, labels


@pytest.mark.parametrize("scores", [[0.0, 1.5], [-0.1, 1.0]])
def test_scores_that_are_no_labels_are_refused(scores):
    batch = Batch(np.zeros((2, 4), np.int32), np.full(2, 4, np.int32), {})
    labelled = batch.add(raw_scores=np.array([0.0, 1.0], np.float32))
    check_labels(labelled)
    with pytest.raises(LabelError, match=r"learns from labels in \[0, 1\]"):
        check_labels(batch.add(raw_scores=np.array(scores, np.float32)))


def test_ppo_clip_needs_no_critic():
    assert PolicyObjective(loss=ppo_clip).asks_for() == {"old_logprobs", "advantages"}
    asked = ValueObjective(loss=clipped_value_loss).asks_for()
    assert asked == {"old_values", "returns"}

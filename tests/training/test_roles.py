"""The critic's update and passes against one sequence at a time, and what else is a role's."""

import dataclasses
import functools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.losses import ppo_clip, select_clip_cov, select_kl_cov
from jaxrl_llm.algorithms.values import clipped_value_loss
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass, value_pass
from jaxrl_llm.training.roles import LabelError, Role, check_labels, covariance_marker
from jaxrl_llm.training.update import Learner, PolicyObjective, TrainState, ValueObjective
from jaxrl_llm.types import Batch
from tests.decoders import forward
from tests.guarded import MODEL, UPDATE
from tests.specs import DENSE, draw, make_batch
from tests.updates import assert_same, by_rows, learn, mesh_of, plain, updated

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

CRITIC = dataclasses.replace(DENSE, value_head=True)
SIZES = (8, 3, 5, 6)
SHAPES = [RowShape(4, 8, 4), RowShape(1, 8, 2), RowShape(2, 16, 4), RowShape(1, 24, 3)]
CLIP = 0.7


def batch_of():
    old, returns = np.random.default_rng(2).normal(size=(2, 4, 8)).astype(np.float32)
    batch = make_batch(SIZES, 8, old_values=old, returns=returns)
    batch["mask"][0, 4] = False
    return batch


@functools.partial(jax.jit, static_argnums=1)
def values_of(params, n, tokens):
    """The values of one sequence [n]: before its first token there is no state."""
    given = tokens[None, :n], jnp.arange(n)[None], jnp.ones((1, n), int)
    hidden = forward(params, CRITIC, *given)[0]
    after = hidden @ params["score"][:, 0] + params["score_bias"][0]
    return jnp.concatenate([jnp.zeros(1), after[:-1]])


def critic_loss(params):
    """PPO's clipped value loss, mean over tokens, one sequence after the other."""
    batch, total = batch_of(), 0.0
    for i, n in enumerate(SIZES):
        values = values_of(params, n, batch.tokens[i])
        mask, old, returns = (batch[x][i, :n] for x in ("mask", "old_values", "returns"))
        held = jnp.clip(values, old - CLIP, old + CLIP)
        worst = jnp.maximum((values - returns) ** 2, (held - returns) ** 2) / 2
        total += jnp.sum(jnp.where(mask, worst, 0.0))
    return total / batch["mask"].sum()


@pytest.fixture(scope="module")
def by_hand():
    """The critic's loss and its gradient."""
    return jax.device_get(jax.jit(jax.value_and_grad(critic_loss))(draw(CRITIC)))


@pytest.mark.parametrize(
    "shape", [SHAPES[3], *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES[:3])]
)
def test_the_critics_update_and_values_are_the_same_however_they_are_cut(shape, by_hand):
    params, batch = draw(CRITIC), batch_of()
    objective = ValueObjective(loss=functools.partial(clipped_value_loss, clip=CLIP))
    gradient, metrics, _ = updated(learn(CRITIC, params, objective, shape), params, batch)
    np.testing.assert_allclose(metrics["vf_loss"], by_hand[0], rtol=1e-5)
    assert_same(gradient, by_hand[1])
    infer = value_pass(ForwardConfig(model=Decoder(CRITIC)), shape, mesh_of())
    values = infer(params, batch)["values"]
    np.testing.assert_allclose(metrics["vpred_mean"], values[batch["mask"]].mean(), rtol=1e-4)
    for row, tokens, n in zip(values, batch.tokens, SIZES, strict=True):
        np.testing.assert_allclose(row[:n], values_of(params, n, tokens), atol=1e-5)
        assert not row[n:].any()


def test_a_correction_weighs_the_loss_and_not_the_kl():
    """L = Σ w (c · loss + β · kl): the parts of the metrics say which was weighed."""
    params, batch = draw(DENSE), batch_of()
    correction = np.random.default_rng(2).uniform(0.5, 2.0, (4, 8)).astype(np.float32)
    objective = PolicyObjective(
        loss=lambda logprobs, advantages: advantages + 0 * logprobs,
        kl=lambda logprobs: 0 * logprobs + 3.0,
        corrected=True,
    )
    learner = learn(DENSE, params, objective, SHAPES[0])
    _, metrics, _ = updated(learner, params, batch.add(correction=correction), {"kl_coef": 0.5})
    weighed = (batch["advantages"] * correction)[batch["mask"]].mean()
    np.testing.assert_allclose(metrics["pg_loss"], weighed, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_loss"], 3.0, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], weighed + 1.5, rtol=1e-5)


def test_the_sum_of_squared_probabilities():
    params, batch, names = draw(DENSE), batch_of(), ("logprobs", "sum_pi_squared")
    infer = logprob_pass(ForwardConfig(model=Decoder(DENSE)), SHAPES[1], mesh_of(), names)
    inferred = infer(params, batch)
    assert set(inferred) == set(names)
    whole = np.exp(jax.jit(functools.partial(by_rows, DENSE, batch=batch))(params))
    expected = np.where(batch["mask"], np.square(whole).sum(-1), 0.0)
    np.testing.assert_allclose(inferred["sum_pi_squared"], expected, rtol=1e-5)


def marking(select, updates=0, seed=0):
    current, batch, seen = np.random.default_rng(0).normal(size=(4, 8)), batch_of(), []

    def infer(params, batch):
        seen.append(params)
        return {"logprobs": current.astype(np.float32)}

    role = Role(
        name="actor",
        learner=Mock(spec=Learner),
        infer=infer,
        learning_rate=Mock(),
        max_skipped=0,
        mark_covariant=covariance_marker(Mock(spec=AlgorithmFunctions, select_covariant=select)),
        seed=seed,
    )
    state = TrainState({"a": 1}, None, jnp.asarray(updates), jnp.asarray(0))
    marked = role.annotate(state, batch)
    assert seen == [{"a": 1}], "once, with the parameters that are being updated"
    return marked["high_covariance"], (current, batch["advantages"], batch["mask"])


def test_the_tokens_of_highest_covariance_of_a_mini_batch_are_marked():
    marked, (current, advantages, mask) = marking(functools.partial(select_kl_cov, ratio=0.25))
    products = (current - current[mask].mean()) * (advantages - advantages[mask].mean())
    least = np.sort(products[mask])[-int(0.25 * mask.sum())]
    np.testing.assert_array_equal(marked, mask & (products >= least))


def test_tokens_are_drawn_by_seed_and_update():
    select = functools.partial(select_clip_cov, ratio=0.2, low=-9.0, high=9.0)
    marked = [marking(select, *given)[0] for given in ((0, 0), (0, 0), (1, 0), (0, 1))]
    np.testing.assert_array_equal(marked[0], marked[1])
    assert any(np.any(marked[0] != other) for other in marked[2:])
    assert all(each.sum() == marked[0].sum() > 0 for each in marked)


def test_scores_that_are_no_labels_are_refused():
    batch = Batch(np.zeros((2, 4), np.int32), np.full(2, 4, np.int32), {})
    check_labels(batch.add(raw_scores=np.array([0.0, 1.0], np.float32)))
    for scores in ([0.0, 1.5], [-0.1, 1.0]):
        with pytest.raises(LabelError):
            check_labels(batch.add(raw_scores=np.array(scores, np.float32)))


def test_an_objective_asks_for_what_its_loss_asks_for():
    assert PolicyObjective(loss=ppo_clip).asks_for() == {"old_logprobs", "advantages"}
    assert PolicyObjective(loss=plain).asks_for() == {"advantages"}
    asked = ValueObjective(loss=clipped_value_loss).asks_for()
    assert asked == {"old_values", "returns"}

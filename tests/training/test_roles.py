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
SHAPE, LONG = RowShape(4, 8, 4), RowShape(1, 24, 3)
CLIP = 0.7


def batch_of():
    old, returns = np.random.default_rng(2).normal(size=(2, 4, 8)).astype(np.float32)
    batch = make_batch(SIZES, 8, old_values=old, returns=returns)
    batch["mask"][0, 4] = False
    return batch


def values_of(params):
    """The values [B T], one sequence a row: before its first token there is no state."""
    batch, places = batch_of(), np.broadcast_to(np.arange(8), (4, 8))
    real = (places < batch.sequence_lengths[:, None]).astype(np.int32)
    hidden = forward(params, CRITIC, *map(jnp.asarray, (batch.tokens, places, real)))
    after = hidden @ params["score"][:, 0] + params["score_bias"][0]
    return jnp.pad(after, ((0, 0), (1, 0)))[:, :-1]


def critic_loss(params):
    """PPO's clipped value loss, mean over tokens, and the values."""
    batch, values = batch_of(), values_of(params)
    mask, old, returns = (batch[name] for name in ("mask", "old_values", "returns"))
    held = jnp.clip(values, old - CLIP, old + CLIP)
    worst = jnp.maximum((values - returns) ** 2, (held - returns) ** 2) / 2
    return jnp.sum(jnp.where(mask, worst, 0.0)) / mask.sum(), values


def test_the_critics_update_and_values_are_those_of_one_sequence_a_row():
    params, batch = draw(CRITIC), batch_of()
    by_hand = jax.jit(jax.value_and_grad(critic_loss, has_aux=True))
    (loss, wanted), slope = jax.device_get(by_hand(params))
    objective = ValueObjective(loss=functools.partial(clipped_value_loss, clip=CLIP))
    gradient, metrics, _ = updated(learn(CRITIC, params, objective, LONG), params, batch)
    np.testing.assert_allclose(metrics["vf_loss"], loss, rtol=1e-5)
    assert_same(gradient, slope)
    infer = value_pass(ForwardConfig(model=Decoder(CRITIC)), LONG, mesh_of())
    values = infer(params, batch)["values"]
    np.testing.assert_allclose(metrics["vpred_mean"], values[batch["mask"]].mean(), rtol=1e-4)
    real = np.arange(8) < batch.sequence_lengths[:, None]
    np.testing.assert_allclose(values, np.where(real, wanted, 0.0), atol=1e-5)


def test_a_correction_weighs_the_loss_and_not_the_kl():
    """L = Σ w (c · loss + β · kl): the parts of the metrics say which was weighed."""
    params, batch = draw(DENSE), batch_of()
    correction = np.random.default_rng(2).uniform(0.5, 2.0, (4, 8)).astype(np.float32)
    objective = PolicyObjective(
        loss=lambda logprobs, advantages: advantages + 0 * logprobs,
        kl=lambda logprobs: 0 * logprobs + 3.0,
        corrected=True,
    )
    learner = learn(DENSE, params, objective, SHAPE)
    _, metrics, _ = updated(learner, params, batch.add(correction=correction), {"kl_coef": 0.5})
    weighed = (batch["advantages"] * correction)[batch["mask"]].mean()
    np.testing.assert_allclose(metrics["pg_loss"], weighed, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_loss"], 3.0, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], weighed + 1.5, rtol=1e-5)


def test_the_sum_of_squared_probabilities():
    params, batch, names = draw(DENSE), batch_of(), ("logprobs", "sum_pi_squared")
    infer = logprob_pass(ForwardConfig(model=Decoder(DENSE)), SHAPE, mesh_of(), names)
    inferred = infer(params, batch)
    assert set(inferred) == set(names)
    whole = np.exp(jax.jit(functools.partial(by_rows, DENSE, batch=batch))(params))
    expected = np.where(batch["mask"], np.square(whole).sum(-1), 0.0)
    np.testing.assert_allclose(inferred["sum_pi_squared"], expected, rtol=1e-5)


def test_tokens_of_high_covariance_are_drawn_by_seed_and_update():
    """Of a mini-batch, by the log-probs of the parameters that are being updated."""
    current = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    batch, seen = batch_of(), []

    def infer(params, batch):
        seen.append(params)
        return {"logprobs": current}

    def marked(seed, updates, select):
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
        state = TrainState({"a": 1}, None, jnp.asarray(updates), jnp.asarray(0))
        return role.annotate(state, batch)["high_covariance"]

    select = functools.partial(select_clip_cov, ratio=0.2, low=-9.0, high=9.0)
    first, again, *others = (marked(*at, select) for at in ((0, 0), (0, 0), (1, 0), (0, 1)))
    np.testing.assert_array_equal(first, again)
    assert any(np.any(first != other) for other in others)
    assert all(each.sum() == first.sum() > 0 for each in others)
    mask, advantages = batch["mask"], batch["advantages"]
    products = (current - current[mask].mean()) * (advantages - advantages[mask].mean())
    highest = np.where(mask, products, -np.inf).argmax()
    assert np.flatnonzero(marked(0, 0, functools.partial(select_kl_cov, ratio=1e-6))) == [highest]
    assert seen == [{"a": 1}] * 5


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

"""What an update does besides being invariant, of a policy and of other roles."""

import contextlib
import dataclasses
import functools
from unittest.mock import Mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_array_equal

from jaxrl_llm.algorithms.losses import TokenLoss, ppo_clip, select_clip_cov, select_kl_cov
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean
from jaxrl_llm.algorithms.values import clipped_value_loss
from jaxrl_llm.data.packing import MIN_BUCKET_FLOPS, Cost, RowShape, choose_rows
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass, pack_microbatches, value_pass
from jaxrl_llm.training.roles import LabelError, Role, check_labels, covariance_marker
from jaxrl_llm.training.update import (
    Learner,
    PolicyObjective,
    TrainingError,
    TrainState,
    ValueObjective,
    apply_gradients,
    check_skipped,
)
from jaxrl_llm.types import Batch
from tests.specs import DENSE as SPEC
from tests.specs import draw
from tests.specs import make_batch as made
from tests.updates import assert_same, learn, mesh_of, place, updated

SHAPE = RowShape(rows=2, length=8, sequences=4)
SIZES = (8, 3, 5, 6)
BUCKETS = SHAPE._replace(cost=Cost(24576.0, flops=MIN_BUCKET_FLOPS / 8))
PARAMS, MODEL = draw(SPEC, scale=0.2), ForwardConfig(model=Decoder(SPEC))


def make_batch(seed=1, **fields):
    old = np.random.default_rng(seed).normal(-3.4, 0.1, size=(4, 8)).astype(np.float32)
    return made(SIZES, 8, seed=seed, **{"old_logprobs": old} | fields)


def scaled(logprobs, advantages):
    """A loss whose gradient is infinite or NaN where the advantages are."""
    return TokenLoss(-logprobs * advantages, {"seen": advantages})


def learner_of(loss, optimizer=None, shape=SHAPE, params=PARAMS, **options):
    optimizer = optimizer or optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5))
    objective = loss if isinstance(loss, PolicyObjective) else PolicyObjective(loss=loss)
    given = {"optimizer": optimizer, "reduce": sequence_mean_token_mean} | options
    return learn(SPEC, params, objective, shape, **given)


@pytest.fixture(scope="module")
def learner():
    return learner_of(scaled)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_an_update_on_policy_finds_the_old_logprobs():
    """It is that with the log-probs of a pass before it, and says what the pass says."""
    batch, updated = make_batch(), {}
    inferred = logprob_pass(MODEL, SHAPE, mesh_of())(PARAMS, batch)
    for on_policy in (True, False):
        objective = PolicyObjective(loss=ppo_clip, on_policy=on_policy)
        learner = learner_of(objective, optax.sgd(1.0))
        old = np.full((4, 8), np.nan) if on_policy else inferred["logprobs"]
        updated[on_policy] = learner.update(learner.init(PARAMS), batch.add(old_logprobs=old), {})
    (own, metrics), (expected, others) = updated[True], updated[False]
    reported = metrics.pop("policy")
    assert reported.keys() == inferred.keys()
    chex.assert_trees_all_close(reported, inferred, rtol=1e-7, atol=1e-6)
    chex.assert_trees_all_close(own.params, expected.params, rtol=1e-7, atol=1e-7)
    chex.assert_trees_all_close(metrics, others, rtol=1e-7, atol=1e-6)


def test_rows_longer_than_sequences_change_no_number():
    """Loss, gradient and log-probs, on one device and on two, also where short rows are chosen."""

    def results_of(shape):
        mesh = mesh_of(fsdp=shape.ranks)
        params, model = place(PARAMS, SPEC, mesh), MODEL.over(shape)
        learner = learner_of(ppo_clip, optax.sgd(1.0), shape, params, mesh=mesh)
        learner = dataclasses.replace(learner, model=model)
        infer = logprob_pass(model, shape, mesh)

        def results(batch):
            state, metrics = learner.update(learner.init(params), batch, {})
            return jax.device_get((state.params, metrics, infer(params, batch)))

        return results

    plain = results_of(SHAPE)
    for shape, sizes, is_long in (
        (RowShape(1, 21, 4, longest=8), [5, 5, 6, 5], True),
        (RowShape(2, 12, 4, ranks=2, longest=8), [8, 8, 3, 5], False),
    ):
        batch = dataclasses.replace(make_batch(), sequence_lengths=np.array(sizes))
        assert (choose_rows(batch.sequence_lengths, shape).longest is not None) is is_long
        expected = plain(batch)
        chex.assert_trees_all_close(expected, results_of(shape)(batch), rtol=2e-5, atol=2e-6)
        assert np.abs(expected[2]["logprobs"]).max() > 1


# --------------------------------------------------------------------------------- skipped updates


def test_a_gradient_that_is_not_finite_skips_the_update(learner):
    good = make_batch()
    for poison in (np.nan, np.inf, -np.inf):
        poisoned = good["advantages"].copy()
        poisoned[2, 3] = poison
        state, metrics = learner.update(learner.init(PARAMS), good, {})
        assert (int(state.updates), int(state.skipped), int(metrics["skipped"])) == (1, 0, 0)
        before = bits((state.params, state.opt_state))
        for times in (1, 2):
            state, metrics = learner.update(state, good.add(advantages=poisoned), {})
            assert bits((state.params, state.opt_state)) == before
            assert (int(state.updates), int(state.skipped)) == (1, times)
            assert int(metrics["skipped"]) == times
            assert not np.isfinite(metrics["grad_norm"])
        state, metrics = learner.update(state, good, {})
        assert bits(state.params) != before[: len(bits(state.params))]
        assert (int(state.updates), int(state.skipped), int(metrics["skipped"])) == (2, 0, 0)


def test_the_optimizer_is_given_gradients_of_a_finite_norm():
    """Clipping would divide by infinity where every entry is finite, and the norm is not."""
    zero = jnp.zeros((), jnp.int32)
    huge, clipped = {"a": jnp.array([1e30, 1.0])}, optax.clip_by_global_norm(1.0)
    state = TrainState(huge, clipped.init(huge), zero, zero)
    state, metrics = apply_gradients(state, huge, clipped)
    assert state.params["a"].tolist() == huge["a"].tolist() and int(metrics["skipped"]) == 1


def test_too_many_skipped_updates_are_an_error():
    check_skipped(3, 3)
    with pytest.raises(TrainingError, match="max_skipped"):
        check_skipped(4, 3)


# ----------------------------------------------------------------------------- losses and metrics


def test_diagnostics_are_means_over_tokens_and_rows_are_wide_enough(learner):
    """Whatever the reduction: here token_mean of what is logged, sequence means of the loss."""
    batch = make_batch()
    _, metrics = learner.update(learner.init(PARAMS), batch, {})
    expected = batch["advantages"][batch["mask"]].mean()
    np.testing.assert_allclose(metrics["seen"], expected, atol=1e-6)
    assert {"loss", "pg_loss", "grad_norm", "skipped", "seen"} == set(metrics)
    wide = Batch(np.ones((4, 9), np.int32), np.full(4, 5, np.int32), {})
    with pytest.raises(ValueError, match="9"):
        list(pack_microbatches(wide, set(), SHAPE, mesh_of()))


def test_what_users_functions_return_off_the_mask_is_not_read():
    """Loss, metrics and parameters are those without the poison.

    It is a factor, so that the gradient there is 0 times it; one answer has no token on the mask,
    so that its means and its weights are NaN.
    """

    def loss(logprobs, entropy, old_logprobs, advantages, mask, poison):
        means = (logprobs * advantages + 0.1 * entropy).sum(1, where=mask) / mask.sum(1)
        ratio = jnp.exp(logprobs - old_logprobs) * poison
        terms = -ratio * advantages - entropy * ratio + means[:, None]
        return TokenLoss(terms, {"seen": entropy * poison})

    objective = PolicyObjective(
        loss=loss,
        kl=lambda logprobs, entropy, poison: logprobs * entropy * poison,
        entropy=True,
        corrected=True,
    )

    def weigh(mask):
        return jnp.where(mask, sequence_mean_token_mean(mask), jnp.nan)

    learner = learner_of(objective, optax.sgd(0.1), reduce=weigh)
    batch = make_batch()
    batch["mask"][1] = False
    results = []
    for factor in (1.0, np.nan):
        poison = np.where(batch["mask"], 1.0, factor).astype(np.float32)
        given = batch.add(correction=poison / 2, poison=poison)
        coefs = {"kl_coef": 0.1, "entropy_coef": 0.1}
        state, metrics = learner.update(learner.init(PARAMS), given, coefs)
        results.append(jax.device_get((metrics, state.params)))
    assert all(map(np.isfinite, results[0][0].values())) and results[0][0]["grad_norm"] > 0.01
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------- state and layout


def test_equal_updates_are_equal_bit_for_bit_and_the_callers_parameters_survive(learner):
    state = learner.init(PARAMS)
    first = learner.update(state, make_batch(), {})
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(PARAMS))
    assert bits(first) == bits(learner.update(learner.init(PARAMS), make_batch(), {}))


def test_nothing_compiles_after_the_first_update(learner):
    state, _ = learner.update(learner.init(PARAMS), make_batch(), {})
    with contextlib.closing(CompileCounter()) as counter:
        for seed in (2, 3):
            state, metrics = learner.update(state, make_batch(seed), {})
        jax.block_until_ready(metrics)
        assert counter.count == 0
        jax.jit(lambda x: x * 5 + seed)(1.0)
        assert counter.count == 1, "the counter counts"


def test_every_bucket_is_compiled_with_the_first_update(compile_rest, monkeypatch):
    """Later ones have other lengths, and so other shapes."""
    monkeypatch.setattr("jaxrl_llm.training.forward.compiles_ahead", lambda devices: False)
    assert [bucket[:2] for bucket in BUCKETS.buckets] == [(1, 8), (2, 8)]
    infer, plain = (logprob_pass(MODEL, s, mesh_of(), ("logprobs",)) for s in (BUCKETS, SHAPE))
    learner = learner_of(scaled, optax.sgd(0.0), BUCKETS)
    state, counter, counts = learner.init(PARAMS), CompileCounter(), []
    for sizes in ([8, 8, 8, 8], [2, 2, 2, 2], [8, 3, 5, 2]):
        batch = dataclasses.replace(make_batch(), sequence_lengths=np.array(sizes, np.int32))
        logprobs = infer(state.params, batch)["logprobs"]
        state, _ = learner.update(state, batch, {})
        compile_rest()
        counts.append(counter.take())
        np.testing.assert_allclose(logprobs, plain(PARAMS, batch)["logprobs"], atol=1e-6)
        counter.take()
    counter.close()
    assert counts[0] > 0 and counts[1:] == [0, 0]


def test_an_optimizer_for_some_of_the_parameters():
    """Its state holds placeholders for the others; the others are left to another optimizer."""
    labels = {name: "rest" for name in PARAMS} | {"embed": "embedding"}
    optimizer = optax.multi_transform(
        {"embedding": optax.adam(1e-2), "rest": optax.sgd(0.0)}, labels
    )
    learner = learner_of(scaled, optimizer)
    state, _ = learner.apply(learner.init(PARAMS), jax.tree.map(jnp.ones_like, PARAMS), None)
    moved = {name for name in PARAMS if bits(state.params[name]) != bits(PARAMS[name])}
    assert moved == {"embed"}


# ----------------------------------------------------------------------------------- other roles

CRITIC, LONG, CLIP = dataclasses.replace(SPEC, value_head=True), RowShape(1, 24, 3), 0.7


def values_batch():
    old, returns = np.random.default_rng(2).normal(size=(2, 4, 8)).astype(np.float32)
    batch = make_batch(old_values=old, returns=returns)
    batch["mask"][0, 4] = False
    return batch


def values_of(params):
    """The values [B T], one sequence a row: before its first token there is no state."""
    batch, places = values_batch(), np.broadcast_to(np.arange(8), (4, 8))
    real = (places < batch.sequence_lengths[:, None]).astype(np.int32)
    rows = map(jnp.asarray, (batch.tokens, places, real))
    hidden, _ = Decoder(CRITIC).hidden_states(params, *rows)
    after = hidden @ params["score"][:, 0] + params["score_bias"][0]
    return jnp.pad(after, ((0, 0), (1, 0)))[:, :-1]


def critic_loss(params):
    """PPO's clipped value loss, mean over tokens, and the values."""
    batch, values = values_batch(), values_of(params)
    mask, old, returns = (batch[name] for name in ("mask", "old_values", "returns"))
    held = jnp.clip(values, old - CLIP, old + CLIP)
    worst = jnp.maximum((values - returns) ** 2, (held - returns) ** 2) / 2
    return jnp.sum(jnp.where(mask, worst, 0.0)) / mask.sum(), values


def test_the_critics_update_and_values_are_those_of_one_sequence_a_row():
    params, batch = draw(CRITIC), values_batch()
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
    params, batch = PARAMS, values_batch()
    correction = np.random.default_rng(2).uniform(0.5, 2.0, (4, 8)).astype(np.float32)
    objective = PolicyObjective(
        loss=lambda logprobs, advantages: advantages + 0 * logprobs,
        kl=lambda logprobs: 0 * logprobs + 3.0,
        corrected=True,
    )
    learner = learn(SPEC, params, objective, SHAPE)
    _, metrics, _ = updated(learner, params, batch.add(correction=correction), {"kl_coef": 0.5})
    weighed = (batch["advantages"] * correction)[batch["mask"]].mean()
    np.testing.assert_allclose(metrics["pg_loss"], weighed, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_loss"], 3.0, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], weighed + 1.5, rtol=1e-5)


def test_tokens_of_high_covariance_are_drawn_by_seed_and_update():
    """Of a mini-batch, by the log-probs of the parameters that are being updated."""
    current = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    batch, seen = values_batch(), []

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
    assert_array_equal(first, again)
    assert any(np.any(first != other) for other in others)
    assert all(each.sum() == first.sum() > 0 for each in others)
    highest = functools.partial(select_kl_cov, ratio=1e-6)
    fields = map(jnp.asarray, (current, batch["advantages"], batch["mask"]))
    assert_array_equal(marked(0, 0, highest), highest(*fields))
    assert seen == [{"a": 1}] * 5


def test_scores_that_are_no_labels_are_refused():
    batch = Batch(np.zeros((2, 4), np.int32), np.full(2, 4, np.int32), {})
    check_labels(batch.add(raw_scores=np.array([0.0, 1.0], np.float32)))
    for scores in ([0.0, 1.5], [-0.1, 1.0]):
        with pytest.raises(LabelError):
            check_labels(batch.add(raw_scores=np.array(scores, np.float32)))

"""What an update does besides being invariant: skipping, counting, checking, metrics, layout."""

import contextlib
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.losses import TokenLoss, ppo_clip
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean
from jaxrl_llm.data.packing import MIN_BUCKET_FLOPS, Cost, RowShape, choose_rows, row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.sharding.layout import make_mesh, replicated, shardings
from jaxrl_llm.training import forward
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass, pack_microbatches, token_fields
from jaxrl_llm.training.update import (
    Learner,
    PolicyObjective,
    TrainingError,
    TrainState,
    apply_gradients,
    as_token_loss,
    check_skipped,
)
from jaxrl_llm.types import Batch

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
)
SHAPE = RowShape(rows=2, length=8, sequences=4)
SIZES = np.array([8, 3, 5, 6], np.int32)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda decl: jnp.asarray(rng.normal(scale=0.2, size=decl.shape), jnp.float32), declare(SPEC)
    )


def make_batch(seed=0, **changed):
    rng = np.random.default_rng(seed)
    place = np.arange(8)
    fields = {
        "mask": (place >= 2) & (place < SIZES[:, None]),
        "advantages": rng.normal(size=(4, 8)).astype(np.float32),
        "old_logprobs": rng.normal(-3.4, 0.1, size=(4, 8)).astype(np.float32),
    }
    return Batch(rng.integers(0, 32, (4, 8)).astype(np.int32), SIZES, fields | changed)


def scaled(logprobs, advantages):
    """A loss whose gradient is infinite or NaN where the advantages are."""
    return TokenLoss(-logprobs * advantages, {"seen": advantages})


def learn(mesh, params, loss, optimizer=None, shape=SHAPE):
    return Learner(
        PolicyObjective(loss=loss),
        ForwardConfig(model=Decoder(SPEC)),
        optimizer or optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)),
        reduce=sequence_mean_token_mean,
        shape=shape,
        mesh=mesh,
        params_like=params,
    )


@pytest.fixture(scope="module")
def learner(mesh, params):
    return learn(mesh, params, scaled)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_an_update_on_policy_finds_the_old_logprobs(mesh, params):
    """It is that with the log-probs of a pass before it, and says what the pass says."""
    batch, model = make_batch(), ForwardConfig(model=Decoder(SPEC))
    inferred = logprob_pass(model, SHAPE, mesh)(params, batch)
    updated = {}
    for on_policy in (True, False):
        learner = Learner(
            PolicyObjective(loss=ppo_clip, on_policy=on_policy),
            model,
            optax.sgd(1.0),
            reduce=sequence_mean_token_mean,
            shape=SHAPE,
            mesh=mesh,
            params_like=params,
        )
        given = batch.add(
            old_logprobs=np.full((4, 8), np.nan) if on_policy else inferred["logprobs"]
        )
        updated[on_policy] = learner.update(learner.init(params), given, {})
    (own, metrics), (expected, others) = updated[True], updated[False]
    reported = metrics.pop("policy")
    assert reported.keys() == inferred.keys()
    chex.assert_trees_all_close(reported, inferred, rtol=1e-7, atol=1e-6)
    chex.assert_trees_all_close(own.params, expected.params, rtol=1e-7, atol=1e-7)
    chex.assert_trees_all_close(metrics, others, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [RowShape(1, 21, 4, longest=8), RowShape(2, 12, 4, ranks=2, longest=8)]
)
@pytest.mark.parametrize(("sizes", "is_long"), [([5, 5, 6, 5], True), ([8, 8, 3, 5], False)])
def test_rows_longer_than_sequences_change_no_number(mesh, params, shape, sizes, is_long):
    """Loss, gradient and log-probs, on one device and on two, also where short rows are chosen."""
    on = mesh if shape.ranks == 1 else make_mesh({"fsdp": 2}, jax.devices()[:2])
    batch, results = dataclasses.replace(make_batch(), sequence_lengths=np.array(sizes)), []
    assert (choose_rows(batch.sequence_lengths, shape).longest is not None) is is_long
    for rows, where in ((SHAPE, mesh), (shape, on)):
        model = ForwardConfig(model=Decoder(SPEC)).over(rows)
        weights = jax.device_put(params, replicated(where))
        learner = dataclasses.replace(
            learn(where, weights, ppo_clip, optax.sgd(1.0), rows), model=model
        )
        state, metrics = learner.update(learner.init(weights), batch, {})
        inferred = logprob_pass(model, rows, where)(weights, batch)
        results.append(jax.device_get((state.params, metrics, inferred)))
    chex.assert_trees_all_close(*results, rtol=2e-5, atol=2e-6)
    assert np.abs(results[0][2]["logprobs"]).max() > 1


# ------------------------------------------------------------------------------- skipped updates


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_skips_the_update(learner, params, poison):
    good = make_batch()
    poisoned = good["advantages"].copy()
    poisoned[2, 3] = poison
    state, metrics = learner.update(learner.init(params), good, {})
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


def test_a_finite_gradient_is_applied_by_the_optimizer(params):
    optimizer = optax.sgd(0.5, momentum=0.9)
    tree = {"a": jnp.array([3.0, 4.0]), "b": jnp.array(12.0)}
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(jax.tree.map(jnp.ones_like, tree), optimizer.init(tree), zero, zero + 3)
    state, metrics = apply_gradients(state, tree, optimizer)
    assert float(metrics["grad_norm"]) == 13.0
    assert state.params["a"].tolist() == [-0.5, -1.0]
    assert float(state.params["b"]) == -5.0
    assert (int(state.updates), int(state.skipped)) == (1, 0)
    assert (state.updates.dtype, state.skipped.dtype) == (jnp.int32, jnp.int32)


def test_a_norm_that_overflows_skips_the_update():
    """Every entry is finite, their sum of squares is not: clipping would divide by infinity."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tree = {"a": jnp.array([1e30, 1.0])}
    zero = jnp.zeros((), jnp.int32)
    state, metrics = apply_gradients(
        TrainState(tree, optimizer.init(tree), zero, zero), {"a": jnp.array([1e30, 1.0])}, optimizer
    )
    assert state.params["a"].tolist() == tree["a"].tolist()
    assert int(metrics["skipped"]) == 1


def test_too_many_skipped_updates_are_an_error():
    check_skipped(3, 3)
    with pytest.raises(TrainingError) as error:
        check_skipped(4, 3)
    assert str(error.value).startswith("4 updates in a row had a gradient that is not finite")
    assert "optim.max_skipped=3" in str(error.value)


# ---------------------------------------------------------------------------- what a loss returns


def not_an_array(logprobs):
    return 3.0


def a_pair(logprobs):
    return logprobs, {}


def nothing(logprobs):
    return None


def a_scalar(logprobs):
    return logprobs.sum()


def one_per_sequence(logprobs):
    return logprobs.sum(1)


def integers(logprobs):
    return (logprobs > 0).astype(jnp.int32)


def bad_diagnostic(logprobs):
    return TokenLoss(logprobs, {"fine": logprobs, "clipfrac": logprobs > 0})


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (not_an_array, "returned float as 'loss'"),
        (a_pair, "returned tuple as 'loss'"),
        (nothing, "returned NoneType as 'loss'"),
        (a_scalar, "returned float32[] as 'loss'"),
        (one_per_sequence, "returned float32[4] as 'loss'"),
        (integers, "returned int32[4, 8] as 'loss'"),
        (bad_diagnostic, "returned bool[4, 8] as 'clipfrac'"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(loss, got):
    expected = "expected a floating-point array [B T], here [4, 8]: one loss per token"
    with pytest.raises(TypeError) as error:
        as_token_loss(loss(jnp.zeros((4, 8))), functools.partial(loss), (4, 8))
    assert str(error.value) == f"loss {loss.__name__!r} {got}; {expected}"


def test_the_update_checks_the_loss(mesh, params):
    learner = learn(mesh, params, one_per_sequence)
    with pytest.raises(TypeError, match=r"loss 'one_per_sequence' returned float32\[4\] as 'loss'"):
        learner.update(learner.init(params), make_batch(), {})


def test_a_bare_array_is_a_loss_without_diagnostics():
    token_loss = as_token_loss(jnp.ones((2, 3), jnp.bfloat16), not_an_array, (2, 3))
    assert token_loss.diagnostics == {}
    assert token_loss.loss.dtype == jnp.bfloat16


# --------------------------------------------------------------------------------------- metrics


def test_diagnostics_are_means_over_tokens(learner, params):
    """Whatever the reduction: here token_mean of what is logged, sequence means of the loss."""
    batch = make_batch()
    _, metrics = learner.update(learner.init(params), batch, {})
    expected = batch["advantages"][batch["mask"]].mean()
    np.testing.assert_allclose(metrics["seen"], expected, atol=1e-6)
    assert {"loss", "pg_loss", "grad_norm", "skipped", "seen"} == set(metrics)


def test_garbage_off_the_mask_has_no_effect(learner, params):
    batch = make_batch()
    poisoned = np.where(batch["mask"], batch["advantages"], np.nan).astype(np.float32)
    clean, expected = learner.update(learner.init(params), batch, {})
    state, metrics = learner.update(learner.init(params), batch.add(advantages=poisoned), {})
    assert jax.device_get(metrics) == jax.device_get(expected)
    assert int(metrics["skipped"]) == 0
    assert bits(state.params) == bits(clean.params)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_users_functions_return_off_the_mask_is_not_read(mesh, params, poison):
    """Loss, metrics and parameters are those without the poison.

    It is a factor, so that the gradient there is 0 times it; one answer has no token on the mask.
    """
    batch = make_batch()
    batch["mask"][1] = False

    def updated(factor, least):
        def off(mask):
            return jnp.where(mask, 1.0, factor)

        def loss(logprobs, entropy, old_logprobs, advantages, mask):
            means = (logprobs * advantages + 0.1 * entropy).sum(1, where=mask)
            means /= jnp.maximum(mask.sum(1), least)
            ratio = jnp.exp(logprobs - old_logprobs) * off(mask)
            terms = -ratio * advantages - entropy * ratio + means[:, None]
            return TokenLoss(terms, {"seen": entropy * off(mask)})

        learner = dataclasses.replace(
            learn(mesh, params, None, optax.sgd(0.1)),
            objective=PolicyObjective(
                loss=loss,
                kl=lambda logprobs, entropy, mask: logprobs * entropy * off(mask),
                entropy=True,
                corrected=True,
            ),
            reduce=lambda mask: sequence_mean_token_mean(mask) * off(mask),
        )
        given = batch.add(correction=np.where(batch["mask"], 0.5, factor).astype(np.float32))
        coefs = {"kl_coef": 0.1, "entropy_coef": 0.1}
        state, metrics = learner.update(learner.init(params), given, coefs)
        return jax.device_get(metrics), jax.device_get(state.params)

    clean, poisoned = updated(1.0, 1), updated(poison, 0)
    assert all(map(np.isfinite, clean[0].values())) and clean[0]["grad_norm"] > 0.01
    chex.assert_trees_all_close(poisoned, clean, rtol=1e-5, atol=1e-7)


def test_only_fields_that_are_asked_for_travel(mesh):
    objective = PolicyObjective(loss=ppo_clip, kl=lambda logprobs, ref_logprobs: ref_logprobs)
    assert objective.asks_for() == {"old_logprobs", "advantages", "ref_logprobs"}
    assert PolicyObjective(loss=scaled, entropy=True).asks_for() == {"advantages"}
    batch = make_batch(extra=np.ones((4, 8), np.float32))
    for _, micro in pack_microbatches(batch, {"mask"}, SHAPE, mesh):
        assert set(micro.fields) == {"mask"}


def test_micro_batches_hold_every_sequence_once(mesh):
    batch = make_batch(number=np.arange(4, dtype=np.int32) + 1)
    narrow = Batch(batch.tokens, batch.sequence_lengths, {**batch.fields})
    seen = []
    for indices, micro in pack_microbatches(narrow, {"mask", "number"}, SHAPE, mesh):
        rows = jax.device_get(micro.rows)
        assert rows.tokens.shape == (2, 8)
        for slot, index in enumerate(indices):
            n, start, row = rows.size[slot], rows.start[slot], rows.row[slot]
            assert n == batch.sequence_lengths[index]
            inside = slice(start, start + n)
            np.testing.assert_array_equal(rows.tokens[row, inside], batch.tokens[index, :n])
            np.testing.assert_array_equal(rows.positions[row, inside], np.arange(n))
            assert len(set(rows.segment_ids[row, inside])) == 1
            np.testing.assert_array_equal(micro.fields["mask"][slot], batch["mask"][index])
            assert micro.fields["number"][slot] == batch["number"][index]
        assert not np.any(micro.fields["mask"][len(indices) :])
        assert not np.any(rows.size[len(indices) :])
        seen += indices.tolist()
    assert sorted(seen) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------ state and layout


def test_the_callers_parameters_survive_the_donation(learner, params):
    state = learner.init(params)
    learner.update(state, make_batch(), {})
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_equal_updates_are_equal_bit_for_bit(learner, params):
    first = learner.update(learner.init(params), make_batch(), {})
    second = learner.update(learner.init(params), make_batch(), {})
    assert bits(first) == bits(second)


def test_nothing_compiles_after_the_first_update(learner, params):
    state, _ = learner.update(learner.init(params), make_batch(), {})
    with contextlib.closing(CompileCounter()) as counter:
        for seed in (1, 2):
            state, metrics = learner.update(state, make_batch(seed), {})
        jax.block_until_ready(metrics)
        assert counter.count == 0
        jax.jit(lambda x: x * 5 + seed)(1.0)
        assert counter.count == 1, "the counter counts"


def test_every_bucket_is_compiled_with_the_first_update(mesh, params, compile_rest):
    """Later ones have other lengths, and so other shapes."""
    model, names = ForwardConfig(model=Decoder(SPEC)), ("logprobs",)
    shape = SHAPE._replace(cost=Cost(24576.0, flops=MIN_BUCKET_FLOPS / 8))
    assert [bucket[:2] for bucket in shape.buckets] == [(1, 8), (2, 8)]
    infer, plain = (logprob_pass(model, s, mesh, names) for s in (shape, SHAPE))
    params = jax.device_put(params, shardings(declare(SPEC), mesh))
    learner = learn(mesh, params, scaled, optax.sgd(0.0), shape)
    state, counter = learner.init(params), CompileCounter()
    counts = []
    for sizes in ([8, 8, 8, 8], [8, 3, 5, 6], [2, 2, 2, 2], [8, 3, 5, 2]):
        batch = dataclasses.replace(make_batch(), sequence_lengths=np.array(sizes, np.int32))
        logprobs = infer(state.params, batch)["logprobs"]
        state, _ = learner.update(state, batch, {})
        compile_rest()
        counts.append(counter.take())
        expected = plain(params, batch)["logprobs"]
        np.testing.assert_allclose(logprobs, expected, atol=1e-6)
        counter.take()
    counter.close()
    assert counts[0] > 0
    assert counts[1:] == [0, 0, 0]


def test_all_is_compiled_before_the_sum_of_gradients_takes_memory(mesh, params, monkeypatch):
    """As on GPUs, whose compiler measures kernels in what memory is left."""
    monkeypatch.setattr(forward, "compiles_ahead", lambda devices: False)
    calls, compile_all, zeros = [], forward.compile_all, Learner.zeros

    def compiled(programs):
        calls.extend(program.label for program in programs)
        compile_all(programs)

    def begun(learner, *inputs):
        calls.append("zeros")
        return zeros(learner, *inputs)

    monkeypatch.setattr(forward, "compile_all", compiled)
    monkeypatch.setattr(Learner, "zeros", begun)
    shape = SHAPE._replace(cost=Cost(24576.0, flops=MIN_BUCKET_FLOPS / 8))
    learner = learn(mesh, params, scaled, shape=shape)
    learner.update(learner.init(params), make_batch(), {})
    assert calls == ["update 1 x 8", "update 2 x 8", "zeros"]


def test_moments_lie_where_their_parameters_do():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    layout = shardings(declare(SPEC), mesh)
    like = jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s), declare(SPEC), layout
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    placed = learn(mesh, like, scaled, optimizer).state_shardings
    assert placed.params == layout
    adam = placed.opt_state[1][0]
    assert adam.mu == layout
    assert adam.nu == layout
    assert adam.count.is_fully_replicated
    assert placed.updates.is_fully_replicated


def test_fsdp_gathers_weights_and_keeps_activations_where_they_are():
    """Rows stay split over the devices: no device ever holds the hidden states of all rows."""
    mesh = make_mesh({"fsdp": 8})
    model = ForwardConfig(model=Decoder(SPEC))
    params = jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s),
        declare(SPEC),
        shardings(declare(SPEC), mesh),
    )
    batch = Batch(np.zeros((8, 8), np.int32), np.full(8, 8, np.int32), {})
    (_, micro) = next(iter(pack_microbatches(batch, set(), RowShape(8, 8, 8), mesh)))
    compiled = jax.jit(lambda p, r: token_fields(p, r, model, mesh)).lower(params, micro.rows)
    text = compiled.compile().as_text()
    assert "f32[1,8,16]" in text, "one row for each device"
    assert "f32[8,8,16]" not in text, "the residual stream of all rows"


def test_a_batch_wider_than_a_row_is_refused():
    shape = row_shape(64, 16, sequences=4)
    mesh = make_mesh({}, jax.devices()[:1])
    batch = Batch(np.ones((4, 17), np.int32), np.full(4, 5, np.int32), {})
    with pytest.raises(ValueError, match="a batch of 17 columns, expected at most 16"):
        list(pack_microbatches(batch, set(), shape, mesh))


def test_an_optimizer_for_some_of_the_parameters(mesh, params):
    """Its state holds placeholders for the others; the others are left to another optimizer."""
    labels = {name: "rest" for name in params} | {"embed": "embedding"}
    optimizer = optax.multi_transform(
        {"embedding": optax.adam(1e-2), "rest": optax.sgd(0.0)}, labels
    )
    learner = learn(mesh, params, scaled, optimizer)
    state, _ = learner.update(learner.init(params), make_batch(), {})
    moved = {n: bits(state.params[n]) != bits(params[n]) for n in params}
    assert {name for name, changed in moved.items() if changed} == {"embed"}

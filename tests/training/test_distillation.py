"""Distillation in the update: against whole logits, on meshes, cut and packed in any way."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.distillation import with_tail
from jaxrl_llm.algorithms.divergences import (
    forward_kl_divergence,
    generalized_jsd,
    reverse_kl_divergence,
)
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import combine_params, split_adapter
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import LoraSpec, ModelSpec
from jaxrl_llm.sharding.layout import batch_shards, make_mesh, shardings
from jaxrl_llm.training.forward import ForwardConfig, MicroBatch, pack_microbatches
from jaxrl_llm.training.update import Distillation, Learner, PolicyObjective, top_pass
from jaxrl_llm.types import Batch
from tests.decoders import forward, logits
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

STUDENT = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=64,
)
TEACHER = dataclasses.replace(
    STUDENT, vocab_size=40, hidden_size=32, layers=4, tied_embeddings=False, logit_softcap=3.0
)
VOCAB = 30  # of both: the rest of 32 and of 40 is padding
SIZES = (16, 5, 5, 5, 16, 5, 5, 5, 7, 3, 6, 2)
LENGTH, K = 16, 4
COEFS = {"distillation_coef": 0.7}


def draw(spec, seed):
    rng = np.random.default_rng(seed)

    def one(decl):
        values = 0.3 * rng.normal(size=decl.shape) + (decl.axes[-1] in ("norm", "head_dim"))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(one, declare(spec))


def make_batch():
    rng = np.random.default_rng(1)
    shape, place, sizes = (len(SIZES), LENGTH), np.arange(LENGTH), np.array(SIZES, np.int32)
    mask = (place >= 1 + sizes[:, None] // 3) & (place < sizes[:, None])
    advantages = rng.normal(size=shape).astype(np.float32)
    tokens = rng.integers(0, VOCAB, shape).astype(np.int32)
    return Batch(tokens, sizes, {"mask": mask, "advantages": advantages})


def policy_gradient(logprobs, advantages):
    return -logprobs * advantages


def distributions(params, spec, batch, vocab=None):
    """Log-probs of the next token [B T V], entry (i, t) given the tokens before t."""
    real = np.arange(LENGTH) < batch.sequence_lengths[:, None]
    positions = np.broadcast_to(np.arange(LENGTH), real.shape)
    rows = map(jnp.asarray, (batch.tokens, positions, real.astype(np.int32)))
    scores = logits(params, spec, forward(params, spec, *rows))[:, :, :vocab]
    return jnp.roll(jax.nn.log_softmax(scores), 1, axis=1)


@functools.cache
def teacher_logprobs():
    run = jax.jit(lambda params: distributions(params, TEACHER, make_batch(), VOCAB))
    return np.asarray(run(draw(TEACHER, 7)))


@functools.cache
def top_fields():
    """The fields of a teacher that gives its likeliest tokens; of one token it gives one less."""
    ids = np.argsort(-teacher_logprobs(), axis=-1)[..., :K].astype(np.int32)
    top = np.take_along_axis(teacher_logprobs(), ids, -1)
    top[1, 3, K - 1] = -np.inf
    return {"teacher_ids": ids, "teacher_top_logprobs": top}


def loss_by_hand(params, kind, divergence, spec=STUDENT):
    batch = make_batch()
    mask = batch["mask"]
    student = distributions(params, spec, batch, VOCAB)
    pairs = student, jnp.asarray(teacher_logprobs())
    if kind == "top":
        top = top_fields()
        missing = np.isneginf(top["teacher_top_logprobs"])
        own = jnp.take_along_axis(student, top["teacher_ids"], -1)
        pairs = [
            with_tail(jnp.where(missing, -jnp.inf, x)) for x in (own, top["teacher_top_logprobs"])
        ]
    compared = jnp.where(mask, divergence(*pairs), 0.0)
    whole = distributions(params, spec, batch)
    chosen = jnp.take_along_axis(whole, batch.tokens[..., None], axis=-1)[..., 0]
    policy = jnp.where(mask, policy_gradient(chosen, batch["advantages"]), 0.0)
    return (policy.sum() + COEFS["distillation_coef"] * compared.sum()) / mask.sum(), compared


@functools.cache
def expected(kind, divergence):
    top_fields()  # before anything is traced
    run = jax.value_and_grad(loss_by_hand, has_aux=True)
    params = draw(STUDENT, 0)
    return jax.device_get(jax.jit(run, static_argnums=(1, 2))(params, kind, divergence))


def one_device():
    return make_mesh({"fsdp": 1}, jax.devices()[:1])


def learner_on(
    mesh,
    kind,
    divergence,
    *,
    rows=2,
    chunk=24,
    spec=STUDENT,
    teacher=TEACHER,
    params=None,
    **changed,
):
    """Return the updates of a student, and its parameters; of an adapter and its base if given."""
    placed, frozen = params or (draw(spec, 0), None)
    if frozen is None:
        placed = jax.device_put(placed, shardings(declare(spec), mesh))
    shape = row_shape(
        rows * LENGTH * batch_shards(mesh), LENGTH, sequences=12, multiple_of=batch_shards(mesh)
    )
    run = ForwardConfig(model=Decoder(teacher), logprob_chunk=chunk)
    how = Distillation(divergence=divergence, of_top=kind == "top", teacher=run, vocab=VOCAB)
    objective = {"loss": policy_gradient, "distillation": how} | changed
    return Learner(
        PolicyObjective(**objective),
        ForwardConfig(model=Decoder(spec), logprob_chunk=chunk),
        optax.trace(decay=0.0),
        reduce=token_mean,
        shape=shape,
        mesh=mesh,
        params_like=placed,
        frozen=frozen,
    ), placed


def inputs(mesh, kind):
    """The coefficients, with a teacher in them, and the batch."""
    if kind == "top":
        return COEFS, make_batch().add(**top_fields())
    teacher = jax.device_put(draw(TEACHER, 7), shardings(declare(TEACHER), mesh))
    return COEFS | {"teacher": teacher}, make_batch()


def check(mesh, kind, divergence, **how):
    (loss, compared), gradient = expected(kind, divergence)
    learner, placed = learner_on(mesh, kind, divergence, **how)
    coefs, batch = inputs(mesh, kind)
    state, metrics = learner.update(learner.init(placed), batch, coefs)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-5)
    got = jax.device_get(state.opt_state.trace)
    chex.assert_trees_all_close(got, gradient, rtol=1e-3, atol=2e-4 * scale)
    on = compared[batch["mask"]]
    for name, value in {"mean": on.mean(), "max": on.max(), "min": on.min()}.items():
        np.testing.assert_allclose(metrics[f"divergence/{name}"], value, rtol=1e-3, atol=1e-5)


MESHES = [
    {"tensor": 2, "fsdp": 2, "data": 2},
    {"tensor": 2, "context": 2, "data": 2},
    {"stage": 2, "tensor": 2, "fsdp": 2},
]


@pytest.mark.parametrize("kind", ["whole", "top"])
@pytest.mark.parametrize(
    "sizes", [MESHES[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[1:])], ids=str
)
def test_the_mesh_changes_nothing(sizes, kind):
    divergence = forward_kl_divergence if kind == "top" else generalized_jsd
    check(make_mesh(sizes), kind, divergence)


@pytest.mark.parametrize("kind", ["whole", "top"])
@pytest.mark.parametrize(("rows", "chunk"), [(1, 5), (6, 64)])
def test_neither_chunks_nor_microbatches_nor_packing_change_anything(kind, rows, chunk):
    check(one_device(), kind, reverse_kl_divergence, rows=rows, chunk=chunk)


def test_an_adapter_beside_a_frozen_model_learns_the_same():
    """Its gradient is what the whole model's gradient is of it."""
    spec = dataclasses.replace(STUDENT, lora=LoraSpec(rank=2, alpha=4.0, targets=("query", "up")))
    adapter, base = split_adapter(draw(spec, 0))
    mesh = one_device()

    def loss(adapter):
        return loss_by_hand(combine_params(adapter, base), "whole", generalized_jsd, spec)[0]

    top_fields()  # before anything is traced
    value, gradient = jax.jit(jax.value_and_grad(loss))(adapter)
    learner, _ = learner_on(mesh, "whole", generalized_jsd, spec=spec, params=(adapter, base))
    coefs, batch = inputs(mesh, "whole")
    state, metrics = learner.update(learner.init(adapter), batch, coefs)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(state.opt_state.trace, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["whole", "top"])
def test_a_policy_that_is_its_teacher_has_nothing_to_learn(kind):
    """Without a loss of its own; the teacher is the policy, or its likeliest tokens."""
    mesh = one_device()
    learner, placed = learner_on(mesh, "whole", reverse_kl_divergence, loss=None)
    batch, coefs = make_batch(), COEFS | {"teacher": placed}
    how = Distillation(divergence=reverse_kl_divergence, teacher=learner.model)
    if kind == "top":
        own = np.asarray(distributions(placed, STUDENT, batch))
        ids = np.argsort(-own, axis=-1)[..., :K].astype(np.int32)
        top = np.take_along_axis(own, ids, -1)
        batch = batch.add(teacher_ids=ids, teacher_top_logprobs=top)
        how, coefs = Distillation(divergence=reverse_kl_divergence, of_top=True), COEFS
    objective = dataclasses.replace(learner.objective, distillation=how)
    learner = dataclasses.replace(learner, objective=objective)
    state, metrics = learner.update(learner.init(placed), batch, coefs)
    assert "pg_loss" not in metrics
    np.testing.assert_allclose(metrics["top1_agreement"], 1.0, rtol=1e-5)
    np.testing.assert_allclose([metrics["loss"], metrics["divergence/max"]], 0.0, atol=1e-5)
    for leaf in jax.tree.leaves(state.opt_state.trace):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-5)


@pytest.mark.parametrize("sizes", MESHES[:1], ids=str)
def test_a_teachers_likeliest_tokens_are_those_of_its_distributions(sizes):
    mesh = make_mesh(sizes)
    shape = row_shape(
        2 * LENGTH * batch_shards(mesh), LENGTH, sequences=12, multiple_of=batch_shards(mesh)
    )
    model = ForwardConfig(model=Decoder(TEACHER), logprob_chunk=24)
    params = jax.device_put(draw(TEACHER, 7), shardings(declare(TEACHER), mesh))
    batch = make_batch()
    mask, expected = batch["mask"], np.sort(teacher_logprobs(), axis=-1)[..., ::-1][..., :K]
    found = top_pass(model, shape, mesh, count=K, vocab=VOCAB)(params, batch)
    logprobs = found.pop("logprobs")
    assert {x.shape for x in found.values()} == {(12, LENGTH, K)}
    whole = jax.jit(lambda params: distributions(params, TEACHER, batch))(draw(TEACHER, 7))
    drawn = np.take_along_axis(np.asarray(whole), batch.tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs[mask], drawn[mask], atol=1e-4)
    np.testing.assert_allclose(found["teacher_top_logprobs"][mask], expected[mask], atol=1e-4)
    assert found["teacher_ids"].dtype == np.int32
    at_ids = np.take_along_axis(teacher_logprobs(), found["teacher_ids"], -1)
    np.testing.assert_allclose(found["teacher_top_logprobs"][mask], at_ids[mask], atol=1e-4)


def arrays_of(program):
    """List the sizes of all arrays in a compiled program."""
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", program.as_text())
    return [tuple(map(int, shape.split(","))) for shape in set(shapes)]


@pytest.mark.parametrize("chunk", [16, 1024])
def test_no_array_of_the_update_has_all_tokens_and_all_words(chunk):
    """But where a chunk holds all tokens, which shows that the measure sees them."""
    mesh, words = one_device(), 500
    specs = [dataclasses.replace(s, vocab_size=words) for s in (STUDENT, TEACHER)]
    learner, placed = learner_on(
        mesh, "whole", generalized_jsd, rows=8, chunk=chunk, spec=specs[0], teacher=specs[1]
    )
    coefs = COEFS | {"teacher": draw(specs[1], 7)}
    sizes = [learner.shape.sequences, LENGTH]
    like = {name: jax.ShapeDtypeStruct(sizes, jnp.float32) for name in ("advantages", "weights")}
    like |= {"mask": jax.ShapeDtypeStruct(sizes, bool), "token_weights": like["weights"]}
    batch = make_batch()
    _, micro = next(pack_microbatches(batch, (), learner.shape, mesh))
    given = placed, {}, MicroBatch(micro.rows, like), coefs
    program = learner.accumulate.lower(learner.total_like(*given), *given).compile()
    tokens = micro.rows.tokens.size
    assert tokens == 8 * LENGTH
    is_whole = any(words in a and math.prod(a) >= tokens * words for a in arrays_of(program))
    assert is_whole == (chunk > tokens)


def one_number(student_logprobs, teacher_logprobs):
    return jnp.sum(student_logprobs - teacher_logprobs)


def test_a_divergence_that_returns_something_else_is_named():
    learner, placed = learner_on(one_device(), "top", one_number)
    text = r"divergence 'one_number' returned float32\[\] for log-probs \[\d+, 5\]; expected a "
    with pytest.raises(TypeError, match=text):
        learner.update(learner.init(placed), inputs(one_device(), "top")[1], COEFS)

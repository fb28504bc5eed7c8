"""Distillation in the update: against whole logits, on meshes, cut and packed in any way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.distillation import with_tail
from jaxrl_llm.algorithms.divergences import (
    forward_kl_divergence,
    generalized_jsd,
    reverse_kl_divergence,
)
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding.layout import batch_shards
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.update import Distillation, PolicyObjective, top_pass
from tests.guarded import MODEL, UPDATE
from tests.specs import DENSE, draw, make_batch
from tests.updates import assert_same, by_rows, chosen, learn, mesh_of, place, plain, updated

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

STUDENT = DENSE
TEACHER = dataclasses.replace(DENSE, vocab_size=40, hidden_size=24, logit_softcap=3.0)
VOCAB = 30  # of both: the rest of 32 and of 40 is padding
SIZES = (16, 5, 5, 5, 16, 5, 5, 5, 7, 3, 6, 2)
LENGTH, K = 16, 4
COEFS = {"distillation_coef": 0.7}
BATCH = make_batch(SIZES, LENGTH, VOCAB)
EIGHT = {"tensor": 2, "fsdp": 2, "data": 2}


@functools.cache
def teachers_whole():
    """Log-probs [B T V] of the teacher, of all of its tokens."""
    return np.asarray(jax.jit(lambda params: by_rows(TEACHER, params, BATCH))(draw(TEACHER, 7)))


@functools.cache
def teacher_logprobs():
    """The same of the shared vocabulary."""
    return np.asarray(jax.nn.log_softmax(teachers_whole()[:, :, :VOCAB]))


@functools.cache
def top_fields():
    """The fields of a teacher that gives its likeliest tokens; of one token it gives one less."""
    ids = np.argsort(-teacher_logprobs(), axis=-1)[..., :K].astype(np.int32)
    top = np.take_along_axis(teacher_logprobs(), ids, -1)
    top[1, 3, K - 1] = -np.inf
    return {"teacher_ids": ids, "teacher_top_logprobs": top}


def loss_by_hand(params, kind, divergence):
    whole, mask = by_rows(STUDENT, params, BATCH), BATCH["mask"]
    student = jax.nn.log_softmax(whole[:, :, :VOCAB])
    pairs = student, jnp.asarray(teacher_logprobs())
    if kind == "top":
        top = top_fields()
        missing = np.isneginf(top["teacher_top_logprobs"])
        own = jnp.take_along_axis(student, top["teacher_ids"], -1)
        given = own, top["teacher_top_logprobs"]
        pairs = [with_tail(jnp.where(missing, -jnp.inf, x)) for x in given]
    compared = jnp.where(mask, divergence(*pairs), 0.0)
    logprobs = chosen(whole, BATCH.tokens)
    policy = jnp.where(mask, plain(logprobs, BATCH["advantages"]), 0.0)
    return (policy.sum() + COEFS["distillation_coef"] * compared.sum()) / mask.sum(), compared


@functools.cache
def expected(kind, divergence):
    top_fields()  # before anything is traced
    run = jax.jit(jax.value_and_grad(loss_by_hand, has_aux=True), static_argnums=(1, 2))
    return jax.device_get(run(draw(STUDENT), kind, divergence))


def learner_on(mesh, kind, divergence, placed, *, rows=2, chunk=24, teacher=TEACHER, loss=plain):
    ranks = batch_shards(mesh)
    run = ForwardConfig(model=Decoder(teacher), logprob_chunk=chunk)
    how = Distillation(divergence=divergence, of_top=kind == "top", teacher=run, vocab=VOCAB)
    return learn(
        STUDENT,
        placed,
        PolicyObjective(loss=loss, distillation=how),
        row_shape(rows * LENGTH * ranks, LENGTH, sequences=12, multiple_of=ranks),
        mesh=mesh,
        logprob_chunk=chunk,
    )


def inputs(mesh, kind):
    """The batch, and the coefficients, with a teacher in them."""
    if kind == "top":
        return BATCH.add(**top_fields()), COEFS
    return BATCH, COEFS | {"teacher": place(draw(TEACHER, 7), TEACHER, mesh)}


@pytest.mark.parametrize(
    ("kind", "divergence", "axes", "rows", "chunk"),
    [
        ("whole", generalized_jsd, EIGHT, 2, 24),
        ("top", forward_kl_divergence, {}, 1, 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("whole", generalized_jsd, {"tensor": 2, "context": 2, "data": 2}, 2, 24),
                ("top", forward_kl_divergence, {"stage": 2, "tensor": 2, "fsdp": 2}, 2, 24),
            )
        ),
    ],
)
def test_neither_meshes_nor_chunks_nor_packing_change_anything(kind, divergence, axes, rows, chunk):
    (loss, compared), gradient = expected(kind, divergence)
    mesh = mesh_of(**axes)
    placed = place(draw(STUDENT), STUDENT, mesh)
    learner = learner_on(mesh, kind, divergence, placed, rows=rows, chunk=chunk)
    got, metrics, _ = updated(learner, placed, *inputs(mesh, kind))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-5)
    assert_same(got, gradient, rtol=1e-3, atol=2e-4)
    on = compared[BATCH["mask"]]
    for name, value in {"mean": on.mean(), "max": on.max(), "min": on.min()}.items():
        np.testing.assert_allclose(metrics[f"divergence/{name}"], value, rtol=1e-3, atol=1e-5)


def test_a_policy_that_is_its_teacher_has_nothing_to_learn():
    """Without a loss of its own."""
    params, coefs = draw(STUDENT), COEFS | {"teacher": draw(STUDENT)}
    how = {"teacher": STUDENT, "loss": None}
    learner = learner_on(mesh_of(), "whole", reverse_kl_divergence, params, **how)
    gradient, metrics, _ = updated(learner, params, BATCH, coefs)
    assert "pg_loss" not in metrics
    np.testing.assert_allclose(metrics["top1_agreement"], 1.0, rtol=1e-5)
    np.testing.assert_allclose([metrics["loss"], metrics["divergence/max"]], 0.0, atol=1e-5)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-5)


def test_a_teachers_likeliest_tokens_are_those_of_its_distributions():
    mesh = mesh_of(**EIGHT)
    ranks, params, mask = batch_shards(mesh), draw(TEACHER, 7), BATCH["mask"]
    shape = row_shape(2 * LENGTH * ranks, LENGTH, sequences=12, multiple_of=ranks)
    model = ForwardConfig(model=Decoder(TEACHER), logprob_chunk=24)
    infer = top_pass(model, shape, mesh, count=K, vocab=VOCAB)
    found = infer(place(params, TEACHER, mesh), BATCH)
    drawn = np.asarray(chosen(teachers_whole(), BATCH.tokens))
    np.testing.assert_allclose(found.pop("logprobs")[mask], drawn[mask], atol=1e-4)
    assert {x.shape for x in found.values()} == {(12, LENGTH, K)}
    likeliest = np.sort(teacher_logprobs(), axis=-1)[..., ::-1][..., :K]
    at_ids = np.take_along_axis(teacher_logprobs(), found["teacher_ids"], -1)
    for logprobs in (likeliest, at_ids):
        np.testing.assert_allclose(found["teacher_top_logprobs"][mask], logprobs[mask], atol=1e-4)
    assert found["teacher_ids"].dtype == np.int32

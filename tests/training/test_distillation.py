"""Distillation in the update: against whole logits, on meshes, cut and packed in any way."""

import dataclasses
import functools
import math
import re

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
from jaxrl_llm.models.lora import combine_params, split_adapter
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.sharding.layout import batch_shards
from jaxrl_llm.training.forward import ForwardConfig, MicroBatch, pack_microbatches
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


def distributions(params, spec, vocab=None):
    """Log-probs of tokens [B T V], of the shared vocabulary if given."""
    logprobs = by_rows(spec, params, BATCH)
    return logprobs if vocab is None else jax.nn.log_softmax(logprobs[:, :, :vocab])


@functools.cache
def teacher_logprobs():
    run = jax.jit(distributions, static_argnums=(1, 2))
    return np.asarray(run(draw(TEACHER, 7), TEACHER, VOCAB))


@functools.cache
def top_fields():
    """The fields of a teacher that gives its likeliest tokens; of one token it gives one less."""
    ids = np.argsort(-teacher_logprobs(), axis=-1)[..., :K].astype(np.int32)
    top = np.take_along_axis(teacher_logprobs(), ids, -1)
    top[1, 3, K - 1] = -np.inf
    return {"teacher_ids": ids, "teacher_top_logprobs": top}


def loss_by_hand(params, kind, divergence, spec=STUDENT):
    student, mask = distributions(params, spec, VOCAB), BATCH["mask"]
    pairs = student, jnp.asarray(teacher_logprobs())
    if kind == "top":
        top = top_fields()
        missing = np.isneginf(top["teacher_top_logprobs"])
        own = jnp.take_along_axis(student, top["teacher_ids"], -1)
        given = own, top["teacher_top_logprobs"]
        pairs = [with_tail(jnp.where(missing, -jnp.inf, x)) for x in given]
    compared = jnp.where(mask, divergence(*pairs), 0.0)
    logprobs = chosen(distributions(params, spec), BATCH.tokens)
    policy = jnp.where(mask, plain(logprobs, BATCH["advantages"]), 0.0)
    return (policy.sum() + COEFS["distillation_coef"] * compared.sum()) / mask.sum(), compared


@functools.cache
def expected(kind, divergence):
    top_fields()  # before anything is traced
    run = jax.jit(jax.value_and_grad(loss_by_hand, has_aux=True), static_argnums=(1, 2))
    return jax.device_get(run(draw(STUDENT), kind, divergence))


def learner_on(
    mesh,
    kind,
    divergence,
    placed,
    *,
    rows=2,
    chunk=24,
    student=STUDENT,
    teacher=TEACHER,
    frozen=None,
    loss=plain,
):
    ranks = batch_shards(mesh)
    run = ForwardConfig(model=Decoder(teacher), logprob_chunk=chunk)
    how = Distillation(divergence=divergence, of_top=kind == "top", teacher=run, vocab=VOCAB)
    learner = learn(
        student,
        placed,
        PolicyObjective(loss=loss, distillation=how),
        row_shape(rows * LENGTH * ranks, LENGTH, sequences=12, multiple_of=ranks),
        mesh=mesh,
        logprob_chunk=chunk,
    )
    return dataclasses.replace(learner, frozen=frozen)


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
                ("whole", reverse_kl_divergence, {}, 6, 64),
                ("top", forward_kl_divergence, EIGHT, 2, 24),
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


def test_an_adapter_beside_a_frozen_model_learns_the_same():
    """Its gradient is what the whole model's gradient is of it."""
    spec = dataclasses.replace(STUDENT, lora=LoraSpec(rank=2, alpha=4.0, targets=("query", "up")))
    adapter, base = split_adapter(draw(spec))

    def loss(adapter):
        return loss_by_hand(combine_params(adapter, base), "whole", generalized_jsd, spec)[0]

    teacher_logprobs()  # before anything is traced
    value, gradient = jax.jit(jax.value_and_grad(loss))(adapter)
    learner = learner_on(mesh_of(), "whole", generalized_jsd, adapter, student=spec, frozen=base)
    got, metrics, _ = updated(learner, adapter, *inputs(mesh_of(), "whole"))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4, atol=1e-5)
    assert_same(got, gradient, rtol=1e-3)


@pytest.mark.parametrize("kind", ["whole", "top"])
def test_a_policy_that_is_its_teacher_has_nothing_to_learn(kind):
    """Without a loss of its own; the teacher is the policy, or its likeliest tokens."""
    params, batch, coefs = draw(STUDENT), BATCH, COEFS | {"teacher": draw(STUDENT)}
    if kind == "top":
        own = np.asarray(distributions(params, STUDENT, VOCAB))
        ids = np.argsort(-own, axis=-1)[..., :K].astype(np.int32)
        top = np.take_along_axis(own, ids, -1)
        batch, coefs = BATCH.add(teacher_ids=ids, teacher_top_logprobs=top), COEFS
    learner = learner_on(mesh_of(), kind, reverse_kl_divergence, params, teacher=STUDENT, loss=None)
    gradient, metrics, _ = updated(learner, params, batch, coefs)
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
    whole = jax.jit(distributions, static_argnums=(1, 2))(params, TEACHER, None)
    drawn = np.asarray(chosen(whole, BATCH.tokens))
    np.testing.assert_allclose(found.pop("logprobs")[mask], drawn[mask], atol=1e-4)
    assert {x.shape for x in found.values()} == {(12, LENGTH, K)}
    likeliest = np.sort(teacher_logprobs(), axis=-1)[..., ::-1][..., :K]
    at_ids = np.take_along_axis(teacher_logprobs(), found["teacher_ids"], -1)
    for logprobs in (likeliest, at_ids):
        np.testing.assert_allclose(found["teacher_top_logprobs"][mask], logprobs[mask], atol=1e-4)
    assert found["teacher_ids"].dtype == np.int32


def test_no_array_of_the_update_has_all_tokens_and_all_words():
    """But where a chunk holds all tokens, which shows that the measure sees them."""
    words = 500
    student, teacher = (dataclasses.replace(s, vocab_size=words) for s in (STUDENT, TEACHER))
    placed, coefs = draw(student), COEFS | {"teacher": draw(teacher, 7)}
    for chunk in (16, 1024):
        learner = learner_on(
            mesh_of(),
            "whole",
            generalized_jsd,
            placed,
            rows=8,
            chunk=chunk,
            student=student,
            teacher=teacher,
        )
        sizes = [learner.shape.sequences, LENGTH]
        names = ("advantages", "weights", "token_weights")
        like = {name: jax.ShapeDtypeStruct(sizes, jnp.float32) for name in names}
        like |= {"mask": jax.ShapeDtypeStruct(sizes, bool)}
        _, micro = next(pack_microbatches(BATCH, (), learner.shape, mesh_of()))
        given = placed, {}, MicroBatch(micro.rows, like), coefs
        text = learner.accumulate.lower(learner.total_like(*given), *given).compile().as_text()
        tokens = micro.rows.tokens.size
        assert tokens == 8 * LENGTH
        shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)
        arrays = [tuple(map(int, shape.split(","))) for shape in set(shapes)]
        is_whole = any(words in a and math.prod(a) >= tokens * words for a in arrays)
        assert is_whole == (chunk > tokens)


def test_a_divergence_that_returns_something_else_is_named():
    def one_number(student_logprobs, teacher_logprobs):
        return jnp.sum(student_logprobs - teacher_logprobs)

    params = draw(STUDENT)
    learner = learner_on(mesh_of(), "top", one_number, params)
    with pytest.raises(TypeError, match="one_number"):
        learner.update(learner.init(params), *inputs(mesh_of(), "top"))

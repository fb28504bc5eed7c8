"""Distillation in the update: against whole logits, on meshes, cut and packed in any way."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.distillation import (
    with_tail,
)
from jaxrl_llm.algorithms.divergences import (
    forward_kl_divergence,
    generalized_jsd,
    reverse_kl_divergence,
)
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.heads import logits
from jaxrl_llm.models.model import model_of
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import forward
from jaxrl_llm.sharding.mesh import batch_shards, make_mesh
from jaxrl_llm.sharding.rules import shardings
from jaxrl_llm.training.distillation import Distillation
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.objective import PolicyObjective
from jaxrl_llm.training.update import Learner
from jaxrl_llm.types import Batch

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


def loss_by_hand(params, kind, divergence):
    batch = make_batch()
    mask = batch["mask"]
    student = distributions(params, STUDENT, batch, VOCAB)
    pairs = student, jnp.asarray(teacher_logprobs())
    if kind == "top":
        top = top_fields()
        missing = np.isneginf(top["teacher_top_logprobs"])
        own = jnp.take_along_axis(student, top["teacher_ids"], -1)
        pairs = [
            with_tail(jnp.where(missing, -jnp.inf, x)) for x in (own, top["teacher_top_logprobs"])
        ]
    compared = jnp.where(mask, divergence(*pairs), 0.0)
    whole = distributions(params, STUDENT, batch)
    chosen = jnp.take_along_axis(whole, batch.tokens[..., None], axis=-1)[..., 0]
    policy = jnp.where(mask, policy_gradient(chosen, batch["advantages"]), 0.0)
    return (policy.sum() + COEFS["distillation_coef"] * compared.sum()) / mask.sum(), compared


@functools.cache
def expected(kind, divergence):
    top_fields()  # before anything is traced
    run = jax.value_and_grad(loss_by_hand, has_aux=True)
    params = draw(STUDENT, 0)
    return jax.device_get(jax.jit(run, static_argnums=(1, 2))(params, kind, divergence))


def learner_on(mesh, kind, divergence, *, rows=2, chunk=24, **changed):
    params = draw(STUDENT, 0)
    placed = jax.device_put(params, shardings(declare(STUDENT), mesh))
    shape = row_shape(
        rows * LENGTH * batch_shards(mesh), LENGTH, sequences=12, multiple_of=batch_shards(mesh)
    )
    teacher = ForwardConfig(model=model_of(TEACHER), logprob_chunk=chunk)
    how = Distillation(
        divergence=divergence, teacher=teacher if kind == "whole" else None, vocab=VOCAB
    )
    objective = {"loss": policy_gradient, "distillation": how} | changed
    return Learner(
        PolicyObjective(**objective),
        ForwardConfig(model=model_of(STUDENT), logprob_chunk=chunk),
        optax.trace(decay=0.0),
        reduce=token_mean,
        shape=shape,
        mesh=mesh,
        params_like=placed,
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
    {"tensor": 4, "context": 2},
    {"stage": 2, "tensor": 2, "fsdp": 2},
]


@pytest.mark.parametrize("kind", ["whole", "top"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_the_mesh_changes_nothing(sizes, kind):
    divergence = forward_kl_divergence if kind == "top" else generalized_jsd
    check(make_mesh(sizes), kind, divergence)


@pytest.mark.parametrize("kind", ["whole", "top"])
@pytest.mark.parametrize(("rows", "chunk"), [(1, 5), (6, 64)])
def test_neither_chunks_nor_microbatches_nor_packing_change_anything(kind, rows, chunk):
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    check(mesh, kind, reverse_kl_divergence, rows=rows, chunk=chunk)

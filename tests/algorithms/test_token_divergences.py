"""A student against a teacher in chunks: against whole logits, plain autodiff and estimators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms.distillation import (
    Comparison,
    TeacherHidden,
    TeacherTop,
    divergence_stats,
    with_tail,
)
from jaxrl_llm.algorithms.divergences import (
    forward_kl_divergence,
    generalized_jsd,
    reverse_kl_divergence,
)
from jaxrl_llm.algorithms.logprobs import HeadProjection

X, D, E, K = 10, 6, 8, 3
OURS, THEIRS, VOCAB = 11, 14, 9  # vocabularies, and the tokens that both have
SOFTCAP = 1.5


def make(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (X, D), (D, OURS), (X, E), (E, THEIRS)
    hidden, head, other, matrix = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return hidden.astype(dtype), head, TeacherHidden(other.astype(dtype), matrix)


def logprobs(hidden, head, softcap=None):
    logits = jnp.matmul(hidden.astype(jnp.float32), head, precision="highest")
    capped = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return jax.nn.log_softmax(capped[:, :VOCAB])


def likeliest(teacher):
    top, ids = jax.lax.top_k(logprobs(*teacher), K)
    return TeacherTop(ids.at[0, 2].set(-1), top.at[1, 1].set(-jnp.inf))  # two are missing


def plain(hidden, head, teacher, divergence):
    """All distributions at once, with jax's own derivative."""
    student = logprobs(hidden, head, SOFTCAP)
    if isinstance(teacher, TeacherHidden):
        return divergence(student, logprobs(*teacher))
    known = (teacher.ids >= 0) & (teacher.logprobs > -jnp.inf)
    own = jnp.take_along_axis(student, jnp.maximum(teacher.ids, 0), -1)
    return divergence(*(with_tail(jnp.where(known, x, -jnp.inf)) for x in (own, teacher.logprobs)))


def comparison(divergence, chunk):
    student = HeadProjection(softcap=SOFTCAP, chunk=chunk)
    return Comparison(divergence=divergence, student=student, vocab=VOCAB)


def weighted(run, tokens=X):
    """The sum of a function's numbers with random weights, and its gradients."""
    weights = jnp.asarray(np.random.default_rng(3).normal(size=tokens), jnp.float32)
    return jax.jit(jax.value_and_grad(lambda *x: (weights * run(*x)).sum(), (0, 1)))


@pytest.mark.parametrize("kind", ["whole", "top"])
@pytest.mark.parametrize(
    ("divergence", "chunk", "dtype"),  # padded, or one
    [
        (forward_kl_divergence, 4, jnp.float32),
        (generalized_jsd, 16, jnp.float32),
        (generalized_jsd, 4, jnp.bfloat16),
    ],
)
def test_chunks_change_neither_value_nor_gradient(divergence, kind, chunk, dtype):
    hidden, head, teacher = make(dtype)
    if dtype == jnp.bfloat16:  # products are taken in it
        head, teacher = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), (head, teacher))
    teacher = likeliest(teacher) if kind == "top" else teacher
    how, needed = comparison(divergence, chunk), jnp.arange(X) % 5 != 2

    def chunked(hidden, head):
        return divergence_stats(how, hidden, head, teacher, needed).divergence

    def whole(hidden, head):
        return jnp.where(needed, plain(hidden, head, teacher, divergence), 0.0)

    (got, ours), (want, true) = (weighted(run)(hidden, head) for run in (chunked, whole))
    assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    rtol, atol = (1e-4, 1e-6) if dtype == jnp.float32 else (2**-7, 2**-7)
    for own, exact in zip(ours, true, strict=True):
        assert own.dtype == exact.dtype
        pair = [x.astype(jnp.float32) for x in (own, exact)]
        assert_allclose(*pair, rtol=rtol, atol=atol * jnp.abs(pair[1]).max())


def test_what_is_said_besides_the_divergence():
    hidden, head, teacher = make()
    student, given = logprobs(hidden, head, SOFTCAP), logprobs(*teacher)
    same = student.argmax(-1) == given.argmax(-1)
    assert same.any() and not same.all()
    whole = divergence_stats(comparison(reverse_kl_divergence, 4), hidden, head, teacher)
    top, ids = jax.lax.top_k(given, K)
    some = divergence_stats(
        comparison(reverse_kl_divergence, 4), hidden, head, TeacherTop(ids, top)
    )
    for stats in (whole, some):
        assert_allclose(stats.agreement, same)
    assert_allclose(whole.student_mass, 1.0)
    assert_allclose(some.teacher_mass, jnp.exp(top).sum(-1), rtol=1e-5)
    own = jnp.take_along_axis(student, ids, -1)
    assert_allclose(some.student_mass, jnp.exp(own).sum(-1), rtol=1e-5)
    assert (some.divergence <= whole.divergence + 1e-5).all()


def test_no_more_than_a_few_chunks_of_logits_live_at_once():
    """Of the student and of the teacher; a chunk of all tokens shows that the measure sees them."""
    tokens, words, chunk = 2048, 4096, 128
    shapes = (tokens, D), (D, words), (tokens, E), (E, words)
    hidden, head, other, matrix = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)

    def scratch(chunk):
        student = HeadProjection(softcap=SOFTCAP, chunk=chunk)
        how = Comparison(divergence=generalized_jsd, student=student, vocab=words)
        run = weighted(
            lambda *x: divergence_stats(how, x[0], x[1], TeacherHidden(*x[2:])).divergence, tokens
        )
        compiled = run.lower(hidden, head, other, matrix).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * words)

    assert scratch(chunk) < 10 * chunk and scratch(tokens) > 2 * tokens

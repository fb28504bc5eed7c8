"""Divergences against float64 and TRL; in chunks against whole logits and plain autodiff."""

import warnings

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

BETAS = [0.0, 0.1, 0.5, 1.0]
ALL = {
    "forward": forward_kl_divergence,
    "reverse": reverse_kl_divergence,
    **{f"jsd {b}": lambda s, t, b=b, **kw: generalized_jsd(s, t, beta=b, **kw) for b in BETAS},
}


def draw(seed, shape=(4, 9), scale=2.0):
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=shape) for _ in range(2)]


def softmax(logits, temperature=1.0):
    weights = np.exp(logits / temperature - (logits / temperature).max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def by_hand(name, s, t):
    """The definitions, on probabilities in float64."""
    if name in ("forward", "jsd 0.0"):
        return kl(t, s)
    if name in ("reverse", "jsd 1.0"):
        return kl(s, t)
    beta = float(name.removeprefix("jsd "))
    m = beta * t + (1 - beta) * s
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def logs(*logits):
    return [jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in logits]


def test_definitions_in_float64():
    student, teacher = draw(0)
    for temperature in (1.0, 2.5):
        s, t = (softmax(x, temperature) for x in (student, teacher))
        for name, divergence in ALL.items():
            got = divergence(*logs(student, teacher), temperature=temperature)
            assert got.dtype == jnp.float32
            want = temperature**2 * by_hand(name, s, t)
            assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=name)


def test_value_and_gradient_are_those_of_trl():
    """TRL has no factor τ²; all else is the same, the ends included."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher = draw(1)
    for beta, temperature in ((0.0, 1.0), (0.1, 2.0), (0.5, 2.0), (1.0, 1.0)):
        how = {"beta": beta, "temperature": temperature}
        theirs = torch.tensor(student, requires_grad=True)
        loss = gkd.GKDTrainer.generalized_jsd_loss(
            theirs, torch.tensor(teacher), reduction="sum", **how
        )
        loss.backward()

        def total(logits, how=how):
            own, given = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(teacher))
            return generalized_jsd(own, given, **how).sum()

        value, gradient = jax.jit(jax.value_and_grad(total))(jnp.asarray(student, jnp.float32))
        assert_allclose(value, temperature**2 * loss.item(), rtol=1e-5)
        assert_allclose(gradient, temperature**2 * theirs.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_probabilities_of_zero(name):
    """What is certain or impossible for one or both of them leaves values and gradients finite."""
    zero = -jnp.inf
    cases = jnp.array(
        [
            [[zero, 0.0, 0.0], [zero, 0.0, 1.0]],  # impossible for both
            [[0.0, 1.0, 2.0], [zero, 0.0, 0.0]],  # for the teacher
            [[zero, 0.0, 0.0], [0.0, 1.0, 2.0]],  # for the student
            [[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]],
        ]
    )

    @jax.jit
    def both(logits, given):
        def total(logits):
            values = ALL[name](*(jax.nn.log_softmax(x) for x in (logits, given)))
            return values.sum(), values

        return jax.grad(total, has_aux=True)(logits)

    logits = cases[:, 0]
    gradient, values = both(logits, cases[:, 1])
    assert np.isfinite(values).all() and np.isfinite(gradient).all()
    s, t = (softmax(np.asarray(x[0, 1:], float)) for x in (logits, cases[:, 1]))
    assert_allclose(values[0], by_hand(name, s, t), rtol=1e-5)
    same, none = both(cases[:, 1], cases[:, 1])  # a student that is its teacher
    assert_allclose(same, 0.0, atol=1e-7)
    assert not np.any(none)


def test_the_tail_is_the_rest_and_has_a_floor():
    probs = jnp.array([[0.5, 0.3], [0.6, 0.4]])
    assert_allclose(jnp.exp(with_tail(jnp.log(probs))), [[0.5, 0.3, 0.2], [0.6, 0.4, 1e-7]], 1e-5)
    missing = with_tail(jnp.array([[jnp.log(0.5), -jnp.inf]]))
    assert_allclose(jnp.exp(missing), [[0.5, 0.0, 0.5]], 1e-5)
    top = jnp.log(jnp.array([0.5, 0.3]))
    slope = jax.grad(lambda x: with_tail(x)[-1])(top)
    assert_allclose(slope, [-0.5 / 0.2, -0.3 / 0.2], rtol=1e-5)


def test_bad_keywords_are_named():
    pair = logs(*draw(4))
    with pytest.raises(ValueError, match="beta"):
        generalized_jsd(*pair, beta=1.5)
    with pytest.raises(ValueError, match="temperature"):
        forward_kl_divergence(*pair, temperature=0.0)


# ----------------------------------------------------------------------------------- in chunks

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


def weighted(run):
    """The sum of a function's numbers with random weights, and its gradients."""
    weights = jnp.asarray(np.random.default_rng(3).normal(size=X), jnp.float32)
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

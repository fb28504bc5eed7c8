"""The advantage of distillation against a loop, and its mean gradient against exact ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms.advantages import grpo, reverse_kl
from jaxrl_llm.training.bind import AdvantageSum

V, LENGTH = 5, 3
SEQUENCES = jnp.array(list(itertools.product(range(V), repeat=LENGTH)))


def loop_reverse_kl(student, teacher, mask, coef, discount):
    out = np.zeros_like(student)
    for i, row in enumerate(mask):
        on = np.flatnonzero(row)
        for place, t in enumerate(on):
            for later in range(place, len(on)):
                s = on[later]
                out[i, t] -= coef * discount ** (later - place) * (student[i, s] - teacher[i, s])
    return out


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_it_is_the_loop_of_the_formula(discount):
    rng = np.random.default_rng(0)
    student, teacher = -rng.exponential(size=(2, 4, 9))
    mask = rng.random((4, 9)) < 0.6
    given = [jnp.asarray(x, jnp.float32) for x in (student, teacher)]
    got = reverse_kl(*given, jnp.asarray(mask), coef=0.3, discount=discount)
    assert_allclose(got, loop_reverse_kl(student, teacher, mask, 0.3, discount), atol=1e-5)


def logprobs_of(table):
    """Return the log-prob [N T] of each token of all sequences; each token depends on the last.

    Args:
        table: logits [T V V] of a token by the token before it.
    """
    before = jnp.pad(SEQUENCES, ((0, 0), (1, 0)))[:, :-1]
    logprobs = jax.nn.log_softmax(table, axis=-1)
    return jnp.stack([logprobs[t, before[:, t], SEQUENCES[:, t]] for t in range(LENGTH)], axis=1)


def per_token_kl(table, teacher, visits):
    """Return the sum of the KLs of the tokens' distributions, at the states that are visited."""
    own, other = jax.nn.log_softmax(table, axis=-1), jax.nn.log_softmax(teacher, axis=-1)
    kl = jnp.sum(jnp.exp(own) * (own - other), axis=-1)
    return jnp.sum(visits * kl)


@pytest.fixture(scope="module")
def tables():
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(key, (LENGTH, V, V)) for key in keys]


def mean_policy_gradient(table, teacher, discount):
    """Return −E[Σ_t A_t ∇ log π(y_t)] over all sequences: the gradient that an update follows."""
    on = jnp.ones(SEQUENCES.shape, bool)
    advantages = reverse_kl(logprobs_of(table), logprobs_of(teacher), on, discount=discount)
    probability = jnp.exp(logprobs_of(table).sum(1))
    return jax.grad(lambda table: -jnp.sum(probability[:, None] * advantages * logprobs_of(table)))(
        table
    )


def test_without_discounted_future_it_is_the_gradient_of_each_tokens_kl(tables):
    table, teacher = tables
    probability = np.exp(np.asarray(logprobs_of(table).sum(1), np.float64))
    before = np.pad(np.asarray(SEQUENCES), ((0, 0), (1, 0)))[:, :-1]
    visits = np.zeros((LENGTH, V))
    for p, row in zip(probability, before, strict=True):
        visits[range(LENGTH), row] += p
    expected = jax.grad(per_token_kl)(table, teacher, jnp.asarray(visits, jnp.float32))
    assert np.abs(expected).max() > 0.05
    assert_allclose(mean_policy_gradient(table, teacher, 0.0), expected, atol=1e-5)


def test_with_the_whole_future_it_is_the_gradient_of_the_sequences_kl(tables):
    table, teacher = tables

    def kl(table):
        own, other = logprobs_of(table).sum(1), logprobs_of(teacher).sum(1)
        return jnp.sum(jnp.exp(own) * (own - other))

    assert_allclose(mean_policy_gradient(table, teacher, 1.0), jax.grad(kl)(table), atol=1e-5)


def test_a_student_that_is_its_teacher_learns_nothing(tables):
    assert_allclose(mean_policy_gradient(tables[0], tables[0], 1.0), 0.0, atol=1e-7)


def both(values, rewards, mask):
    return rewards - values, rewards


def test_a_sum_asks_for_what_its_terms_ask_for_and_weighs_them():
    total = AdvantageSum([(grpo, 1.0), (reverse_kl, 0.5)])
    assert total.__name__ == "grpo + 0.5 reverse_kl"
    scores, ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
    student, teacher = jnp.array([[-1.0, -2.0]] * 2), jnp.array([[-2.0, -2.0]] * 2)
    mask = jnp.ones((2, 2), bool)
    expected = grpo(scores, ids)[:, None] + 0.5 * (teacher - student)
    assert_allclose(total(scores, ids, student, teacher, mask), expected, rtol=1e-6)


def test_a_sum_has_the_returns_of_the_one_term_that_has_some():
    rewards, values, mask = jnp.array([[2.0]]), jnp.array([[0.5]]), jnp.ones((1, 1), bool)
    advantages, returns = AdvantageSum([(both, 2.0)])(values, rewards, mask)
    assert advantages.tolist() == [[3.0]] and returns.tolist() == [[2.0]]
    with pytest.raises(ValueError, match=r"both \+ both: 2 of the terms have returns"):
        AdvantageSum([(both, 1.0), (both, 1.0)])(values, rewards, mask)

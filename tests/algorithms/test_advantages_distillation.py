"""The advantage of distillation: the mean gradient over all answers, and sums with others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms.advantages import grpo, reverse_kl
from jaxrl_llm.training.bind import AdvantageSum

V, LENGTH = 5, 3
SEQUENCES = np.array(list(itertools.product(range(V), repeat=LENGTH)))
BEFORE = np.pad(SEQUENCES, ((0, 0), (1, 0)))[:, :-1]


def logprobs_of(table):
    """Log-probs [N T] of all sequences under logits [T V V] of a token by the token before it."""
    logprobs = jax.nn.log_softmax(table, axis=-1)
    return jnp.stack([logprobs[t, BEFORE[:, t], SEQUENCES[:, t]] for t in range(LENGTH)], axis=1)


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_policy_gradient_is_that_of_the_kl_of_each_token_or_of_the_whole_answer(discount):
    """E[Σ_t A_t ∇ log π(y_t)] over all answers, without and with the rewards of later tokens."""
    table, teacher = (
        jax.random.normal(k, (LENGTH, V, V)) for k in jax.random.split(jax.random.key(0))
    )
    fixed = logprobs_of(table)

    def update(teacher):
        on = jnp.ones(SEQUENCES.shape, bool)
        advantages = reverse_kl(fixed, logprobs_of(teacher), on, discount=discount)
        likely = jnp.exp(fixed.sum(1))[:, None]
        return jax.grad(lambda x: -jnp.sum(likely * advantages * logprobs_of(x)))(table)

    def exact(table):
        if discount == 1:
            own = logprobs_of(table).sum(1)
            return jnp.sum(jnp.exp(own) * (own - logprobs_of(teacher).sum(1)))
        visits = np.zeros((LENGTH, V), np.float32)
        for likely, row in zip(np.exp(np.asarray(fixed).sum(1)), BEFORE, strict=True):
            visits[range(LENGTH), row] += likely
        own, other = (jax.nn.log_softmax(x, axis=-1) for x in (table, teacher))
        return jnp.sum(visits * jnp.sum(jnp.exp(own) * (own - other), axis=-1))

    expected = jax.jit(jax.grad(exact))(table)
    assert np.abs(expected).max() > 0.05
    assert_allclose(jax.jit(update)(teacher), expected, atol=1e-5)
    assert_allclose(jax.jit(update)(table), 0.0, atol=1e-7)  # of a student that is its teacher


def test_a_sum_asks_for_what_its_terms_ask_for_and_weighs_them():
    total = AdvantageSum([(grpo, 1.0), (reverse_kl, 0.5)])
    assert total.__name__ == "grpo + 0.5 reverse_kl"
    scores, ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
    student, teacher = jnp.array([[-1.0, -2.0]] * 2), jnp.array([[-2.0, -2.0]] * 2)
    expected = grpo(scores, ids)[:, None] + 0.5 * (teacher - student)
    got = total(scores, ids, student, teacher, jnp.ones((2, 2), bool))
    assert_allclose(got, expected, rtol=1e-6)


def test_a_sum_has_the_returns_of_the_one_term_that_has_some():
    def both(values, rewards, mask):
        return rewards - values, rewards

    rewards, values, mask = jnp.array([[2.0]]), jnp.array([[0.5]]), jnp.ones((1, 1), bool)
    advantages, returns = AdvantageSum([(both, 2.0)])(values, rewards, mask)
    assert advantages.tolist() == [[3.0]] and returns.tolist() == [[2.0]]
    with pytest.raises(ValueError, match="returns"):
        AdvantageSum([(both, 1.0), (both, 1.0)])(values, rewards, mask)

"""Rematerialisation changes what is stored, and nothing else."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.layers import POLICIES
from tests.decoders import forward


def loss_of(spec, rows, policy):
    def loss(params):
        return jnp.square(forward(params, spec, *rows, remat=policy)).sum()

    return loss


@pytest.fixture(scope="module")
def rows():
    tokens = jax.random.randint(jax.random.key(2), (8, 32), 0, 37)
    positions = jnp.tile(jnp.arange(32), (8, 1))
    return tokens, positions, jnp.where(positions < 30, 1, 0)


def test_gradients_are_the_same(spec, params, rows):
    want = jax.jit(jax.grad(loss_of(spec, rows, "none")))(params)
    close = 1e-5 * max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
    for policy in POLICIES.keys() - {"none"}:
        got = jax.jit(jax.grad(loss_of(spec, rows, policy)))(params)
        chex.assert_trees_all_close(got, want, rtol=1e-7, atol=close)


def test_what_is_stored(spec, draw, rows):
    """The table of `models.layers`, from the residuals that jax keeps of one more layer."""

    def stored(policy, layers):
        deep = dataclasses.replace(spec, layers=layers)
        params = draw(deep)
        residuals = jax.eval_shape(lambda p: jax.vjp(loss_of(deep, rows, policy), p)[1], params)
        return sum(x.size for x in jax.tree.leaves(residuals))

    def weights(layers):
        deep = dataclasses.replace(spec, layers=layers)
        params = draw(deep)
        return sum(x.size for x in jax.tree.leaves(params))

    tokens, d, f = rows[0].size, spec.hidden_size, spec.ff_width
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    per_token = {
        policy: (stored(policy, 4) - stored(policy, 3) - (weights(4) - weights(3))) / tokens
        for policy in POLICIES
    }
    assert per_token["full"] == pytest.approx(d, abs=0.1)
    assert per_token["dots"] == pytest.approx(2 * d + heads + 2 * kv + 2 * f, abs=0.1)
    most = 4 * d + 4 * heads + 3 * kv + 3 * f + spec.heads
    assert per_token["none"] == pytest.approx(most, abs=0.1)

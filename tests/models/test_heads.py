import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder, with_value_head
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.sharding.layout import shardings
from tests.decoders import forward, logits


@pytest.fixture(scope="module")
def critic(spec, params):
    """A critic whose head is not zeros, and its spec."""
    critic, spec = with_value_head(params, spec)
    rng = np.random.default_rng(1)
    head = {
        name: jnp.asarray(rng.normal(size=critic[name].shape), jnp.float32)
        for name in ("score", "score_bias")
    }
    return critic | head, spec


@pytest.fixture(scope="module")
def rows():
    tokens = jax.random.randint(jax.random.key(2), (8, 6), 0, 37)
    return tokens, jnp.tile(jnp.arange(6), (8, 1)), jnp.ones_like(tokens)


def values_of(params, spec, rows, **options):
    return Decoder(spec).token_values(params, forward(params, spec, *rows, **options))


def shapes(tree):
    return jax.tree.map(lambda x: tuple(x.shape), tree)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_by_loops(critic, dtype):
    """A bfloat16 head or sum would be off by 1e-3 and more."""
    params, spec = critic
    hidden = jax.random.normal(jax.random.key(0), (2, 3, spec.hidden_size)).astype(dtype)
    expected = np.zeros((2, 3))
    for r, t in np.ndindex(2, 3):
        expected[r, t] = float(params["score_bias"][0])
        for d in range(spec.hidden_size):
            expected[r, t] += float(hidden[r, t, d]) * float(params["score"][d, 0])
    values = jax.jit(Decoder(spec).token_values)(params, hidden)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)


def test_head_is_used_in_float32(critic, rows):
    params, spec = critic
    dtypes = compute_dtypes(spec, jnp.bfloat16)
    assert dtypes["score"] == dtypes["score_bias"] == jnp.float32
    assert dtypes["embed"] == jnp.bfloat16
    held = jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)
    run = jax.jit(partial(values_of, spec=spec, rows=rows, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(run(held), run(params))


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_becomes_a_critic(spec, params, rows, tied):
    spec = dataclasses.replace(spec, tied_embeddings=tied)
    params = {name: x for name, x in params.items() if name != "head" or not tied}
    critic, critic_spec = with_value_head(params, spec)
    assert critic_spec == dataclasses.replace(spec, value_head=True)
    assert shapes(critic) == shapes(declare(critic_spec))
    for name in ("embed", "layers", "final_norm"):
        assert critic[name] is params[name]
    np.testing.assert_array_equal(values_of(critic, critic_spec, rows), 0.0)


def test_head_takes_the_dtype_of_the_norms(spec, params):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    critic, _ = with_value_head(narrow, spec)
    assert critic["score"].dtype == critic["score_bias"].dtype == jnp.bfloat16


def test_a_zero_head_learns(spec, params, rows):
    """At first only the head has a gradient: its weight's is the sum of the hidden states."""
    critic, critic_spec = with_value_head(params, spec)
    gradient = jax.jit(jax.grad(lambda p: values_of(p, critic_spec, rows).sum()))(critic)
    hidden = np.asarray(forward(params, spec, *rows), np.float64)
    expected = hidden.sum(axis=(0, 1))[:, None]
    np.testing.assert_allclose(gradient["score"], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient["score_bias"], [rows[0].size])
    np.testing.assert_array_equal(gradient["layers"]["up"], 0.0)


def test_the_mesh_does_not_matter(spec, params, critic, rows):
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    plain, critic_spec = critic
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    fresh, _ = with_value_head(placed, spec)
    run = jax.jit(partial(values_of, spec=critic_spec))
    np.testing.assert_array_equal(run(fresh, rows=rows), 0.0)

    layout = shardings(declare(critic_spec), mesh)
    assert layout["score"].spec == jax.P("fsdp", None)
    sharded = jax.device_put(fresh | {k: plain[k] for k in ("score", "score_bias")}, layout)
    batch = jax.device_put(rows, jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
    got, expected = run(sharded, rows=batch), run(plain, rows=rows)
    assert got.sharding.num_devices == 8
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_refuses(critic, params):
    with pytest.raises(ValueError, match="has a value head already; expected a language model"):
        with_value_head(*critic)
    with pytest.raises(ValueError, match="a model with a value head has no logits"):
        logits(*critic, jnp.ones((2, 16)))
    with pytest.raises(KeyError, match="score"):
        Decoder(critic[1]).token_values(params, jnp.ones((1, 2, 16)))

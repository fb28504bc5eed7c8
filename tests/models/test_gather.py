"""Looking tokens up in an embedding of which devices hold parts, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.linear import lookup, split_matrix
from jaxrl_llm.sharding.layout import DEFAULT_RULES, Layout, make_mesh


@pytest.mark.parametrize(
    ("rules", "embed_axes", "vocab_axes"),
    [
        ({}, ("fsdp", "context"), ("tensor",)),
        ({"embed": None, "vocab": None}, (), ()),
        ({"embed": None, "vocab": "fsdp"}, (), ()),
        ({"embed": "context", "vocab": ("fsdp", "tensor")}, ("context",), ("tensor",)),
        ({"embed": "tensor", "vocab": "fsdp"}, (), ()),
    ],
    ids=str,
)
def test_lookup_and_its_gradient_under_any_rules(spec, rules, embed_axes, vocab_axes):
    spec = dataclasses.replace(spec, vocab_size=40)
    mesh = make_mesh({"fsdp": 2, "context": 2, "tensor": 2})
    layout = Layout(mesh, rules=DEFAULT_RULES | rules)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, spec.hidden_size)).astype(np.float32)
    weights = rng.normal(size=(4, 6, spec.hidden_size)).astype(jnp.bfloat16)
    tokens = jnp.asarray(rng.integers(0, 40, (4, 6), np.int32))

    def total(table):
        split = split_matrix({"embed": table}, spec, "embed", layout)
        assert (split.embed_axes, split.vocab_axes) == (embed_axes, vocab_axes)
        x = lookup(split, tokens, layout, dtype=jnp.bfloat16)
        return (x * weights).astype(jnp.float32).sum(), x

    (_, x), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(values)
    np.testing.assert_array_equal(x, values.astype(jnp.bfloat16)[tokens])
    expected = np.zeros((40, spec.hidden_size))
    np.add.at(expected, np.asarray(tokens), weights.astype(np.float64))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)

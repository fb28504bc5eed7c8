"""A decoder's forward pass: meshes, memory, dtypes, heads; tests/parity has its numbers."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder, with_value_head
from jaxrl_llm.models.layers import POLICIES, rms_norm
from jaxrl_llm.models.linear import lookup, split_matrix
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.sharding.layout import DEFAULT_RULES, Layout, make_mesh, shardings
from tests.decoders import forward, head_matrix, logits
from tests.specs import LATENT, draw


@pytest.fixture(scope="module")
def rows():
    """Tokens, positions and segment ids of a row of three sequences and of one; both are padded."""
    tokens = np.random.default_rng(2).integers(0, 32, (2, 12), np.int32)
    counts, alone = [4, 1, 5, 2], np.arange(12, dtype=np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
    segment_ids = np.repeat([1, 2, 3, 0], counts)
    both = tokens, np.array([positions, alone]), np.int32([segment_ids, alone < 7])
    return tuple(map(jnp.asarray, both))


def test_rms_norm_is_computed_in_float32():
    x = jax.random.normal(jax.random.key(0), (64,)).astype(jnp.bfloat16)
    got, wide = rms_norm(x, jnp.full(64, 1.001), eps=1e-6), np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean() + 1e-6) * 1.001
    np.testing.assert_array_equal(got, expected.astype(jnp.bfloat16), strict=True)


def nll_gradient(params, spec, rows, **options):
    tokens, _, segment_ids = rows

    def nll(params):
        hidden = forward(params, spec, *rows, **options)
        scores = jax.nn.log_softmax(logits(params, spec, hidden))
        picked = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        return -jnp.where(segment_ids > 0, picked, 0.0).sum()

    return jax.jit(jax.value_and_grad(nll))(params)


def test_logits_are_in_float32(spec, params):
    """The product's sum and the soft-cap, for hidden states in bfloat16; of either head."""
    hidden = 30 * jax.random.normal(jax.random.key(0), (3, 16)).astype(jnp.bfloat16)
    assert head_matrix(params, spec) is params["head"]
    tied = dataclasses.replace(spec, tied_embeddings=True, logit_softcap=20.0)
    for own, head in ((spec, params["head"]), (tied, params["embed"].T)):
        got = logits(params, own, hidden)
        plain = np.asarray(hidden, np.float64) @ np.asarray(head.astype(jnp.bfloat16), np.float64)
        assert np.abs(plain).max() > 20
        expected = plain if own is spec else 20 * np.tanh(plain / 20)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_norms_over_all_heads_see_those_of_other_devices(spec, rows):
    changes = {"whole_qk_norm": True, "pre_norms": False, "post_norms": True}
    spec = dataclasses.replace(spec, **changes, rotary_layers=(True, False))
    params = draw(spec)
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    assert placed["layers"]["query"].sharding.spec[2] == "tensor"
    batch = jax.device_put(rows, jax.NamedSharding(mesh, jax.P()))
    sharded = nll_gradient(placed, spec, batch, layout=Layout(mesh))
    chex.assert_trees_all_close(sharded, nll_gradient(params, spec, rows), rtol=1e-4, atol=1e-4)


def test_activations_stay_with_their_rows(spec, params, rows):
    """With fully sharded parameters the compiler must gather weights, not copy activations."""
    mesh = make_mesh({"fsdp": 8})
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    tiled = (np.tile(x, (32, 1)) for x in rows)
    batch = jax.device_put(tuple(tiled), jax.NamedSharding(mesh, jax.P("fsdp")))

    def memory(params, batch, **options):
        gradient = jax.grad(lambda p: forward(p, spec, *batch, **options).sum())
        stats = jax.jit(gradient).lower(params).compile().memory_analysis()
        return stats.temp_size_in_bytes

    one_device = memory(params, jax.device_put(batch, jax.devices()[0]))
    assert memory(placed, batch, layout=Layout(mesh)) < one_device / 5


def test_neither_weights_nor_gradients_are_there_twice(spec):
    """A pass copies no layer but the one that it is at; gradients are added to their sum."""
    tokens = jnp.ones((1, 2), jnp.int32)

    def scratch(layers):
        own = dataclasses.replace(spec, hidden_size=128, ff_width=256, layers=layers)
        shapes = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), declare(own))

        def total(params):
            return forward(params, own, tokens, tokens, tokens, remat="full").sum()

        def accumulate(sums, params):
            value, backward = jax.vjp(total, params)
            sums = jax.tree.map(jax.new_ref, sums)
            backward.with_refs(sums)(jnp.ones_like(value))
            return jax.tree.map(jax.freeze, sums)

        run = jax.jit(accumulate, donate_argnums=0)
        programs = jax.jit(total).lower(shapes), run.lower(shapes, shapes)
        size = sum(x.size for x in jax.tree.leaves(shapes)) * 4
        return [p.compile().memory_analysis().temp_size_in_bytes for p in programs], size

    (few, small), (many, larger) = scratch(8), scratch(16)
    grown = [(after - before) / (larger - small) for before, after in zip(few, many, strict=True)]
    assert max(grown) < 0.4, grown


# ------------------------------------------------------------------------------ rematerialisation


def test_what_is_stored(spec, rows):
    """The table of `models.layers`, from the residuals that jax keeps of one more layer."""

    def size(tree):
        return sum(x.size for x in jax.tree.leaves(tree))

    def stored(policy, layers):
        """But for the weights."""
        deep = dataclasses.replace(spec, layers=layers)
        params = draw(deep)

        def loss(params):
            return jnp.square(forward(params, deep, *rows, remat=policy)).sum()

        residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
        return size(residuals) - size(params)

    tokens, d, f = rows[0].size, spec.hidden_size, spec.ff_width
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    per_token = {policy: (stored(policy, 3) - stored(policy, 2)) / tokens for policy in POLICIES}
    assert per_token["full"] == pytest.approx(d, abs=0.1)
    assert per_token["dots"] == pytest.approx(2 * d + heads + 2 * kv + 2 * f, abs=0.1)
    most = 4 * d + 4 * heads + 3 * kv + 3 * f + spec.heads
    assert per_token["none"] == pytest.approx(most, abs=0.1)


# ----------------------------------------------------------------------------- sharded embeddings


@pytest.mark.parametrize(
    ("rules", "embed_axes", "vocab_axes"),
    [
        ({}, ("fsdp", "context"), ("tensor",)),
        ({"embed": "context", "vocab": ("fsdp", "tensor")}, ("context",), ("tensor",)),
    ],
    ids=str,
)
def test_lookup_and_its_gradient_under_any_rules(spec, rules, embed_axes, vocab_axes):
    mesh = make_mesh({"fsdp": 2, "context": 2, "tensor": 2})
    layout = Layout(mesh, rules=DEFAULT_RULES | rules)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(32, spec.hidden_size)).astype(np.float32)
    weights = rng.normal(size=(4, 6, spec.hidden_size)).astype(jnp.bfloat16)
    tokens = jnp.asarray(rng.integers(0, 32, (4, 6), np.int32))

    def total(table):
        split = split_matrix({"embed": table}, spec, "embed", layout)
        assert (split.embed_axes, split.vocab_axes) == (embed_axes, vocab_axes)
        x = lookup(split, tokens, layout, dtype=jnp.bfloat16)
        return (x * weights).astype(jnp.float32).sum(), x

    (_, x), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(values)
    np.testing.assert_array_equal(x, values.astype(jnp.bfloat16)[tokens])
    expected = np.zeros((32, spec.hidden_size))
    np.add.at(expected, np.asarray(tokens), weights.astype(np.float64))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------- latent attention


def test_adapters_of_the_absorbed_matrix_take_part(rows):
    spec = dataclasses.replace(LATENT, lora=LoraSpec(rank=2, alpha=4.0, targets=("kv_b",)))
    params = draw(spec)
    run = jax.jit(forward, static_argnums=1)
    whole = run(params, spec, *rows)
    absorbed = run(params, spec.for_decoding, *rows)
    np.testing.assert_allclose(absorbed, whole, rtol=1e-4, atol=1e-4)
    assert np.abs(whole - run(params, LATENT, *rows)).max() > 0.01


def test_impossible_latent_attention_is_refused():
    for change in ({"kv_rank": 0}, {"query_rank": -1}, {"rope_width": 3}, {"value_width": 7}):
        with pytest.raises(ValueError, match=next(iter(change)).replace("value_width", "values")):
            dataclasses.replace(LATENT.latent, **change)
    for change in ({"kv_heads": 1}, {"head_dim": 8}, {"qk_norm": True}, {"qkv_bias": True}):
        with pytest.raises(ValueError, match="latent"):
            dataclasses.replace(LATENT, **change)


# ---------------------------------------------------------------------------------------- critics


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


def values_of(params, spec, rows, **options):
    return Decoder(spec).token_values(params, forward(params, spec, *rows, **options))


def test_head_is_used_in_float32(critic, rows):
    params, spec = critic
    dtypes = compute_dtypes(spec, jnp.bfloat16)
    assert dtypes["score"] == dtypes["score_bias"] == jnp.float32
    assert dtypes["embed"] == jnp.bfloat16
    held = jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)
    run = jax.jit(partial(values_of, spec=spec, rows=rows, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(run(held), run(params))


def test_a_language_model_becomes_a_critic(spec, params):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    critic, critic_spec = with_value_head(narrow, spec)
    assert critic_spec == dataclasses.replace(spec, value_head=True)
    declared = jax.tree.map(lambda decl: decl.shape, declare(critic_spec))
    assert jax.tree.map(jnp.shape, critic) == declared
    for name in ("embed", "layers", "final_norm"):
        assert critic[name] is narrow[name]
    assert critic["score"].dtype == critic["score_bias"].dtype == jnp.bfloat16


def test_refuses(critic, params):
    with pytest.raises(ValueError, match="head"):
        with_value_head(*critic)
    with pytest.raises(ValueError, match="logits"):
        logits(*critic, jnp.ones((2, 16)))
    with pytest.raises(KeyError, match="score"):
        Decoder(critic[1]).token_values(params, jnp.ones((1, 2, 16)))

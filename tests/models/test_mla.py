"""Latent attention against a loop over tokens and heads, and its two forms against each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import Attending, attend
from jaxrl_llm.models.cache import init_cache
from jaxrl_llm.models.mla import LatentSpec, latent_heads, mixed_values
from jaxrl_llm.models.parameters import declare, init_params
from jaxrl_llm.models.rope import rotation
from jaxrl_llm.models.spec import LoraSpec, ModelSpec
from tests.decoders import extend, forward

LENGTH, WIDTH, HEADS = 6, 7, 3
LATENT = LatentSpec(query_rank=5, kv_rank=8, nope_width=4, rope_width=2, value_width=3)
SPEC = ModelSpec(
    vocab_size=31,
    hidden_size=12,
    layers=2,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=6,
    ff_width=10,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    qk_norm=False,
    max_positions=32,
    latent=LATENT,
)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def matrices(latent):
    shapes = {
        "query": (WIDTH, HEADS, latent.key_width),
        "query_a": (WIDTH, latent.query_rank or 1),
        "query_b": (latent.query_rank or 1, HEADS, latent.key_width),
        "kv_a": (WIDTH, latent.kv_rank + latent.rope_width),
        "kv_b": (latent.kv_rank, HEADS, latent.nope_width + latent.value_width),
    }
    return {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def turn(x, position, theta=1e4):
    """Rotate the neighbours (2i, 2i + 1) of a vector, as the paper writes it."""
    turned = np.zeros_like(x)
    for i in range(len(x) // 2):
        angle = position * theta ** (-2 * i / len(x))
        a, b = x[2 * i], x[2 * i + 1]
        turned[2 * i] = a * np.cos(angle) - b * np.sin(angle)
        turned[2 * i + 1] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def loop(latent, weights, h):
    """Equations 37-47 of DeepSeek-V2, token by token and head by head; norms left out."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    out = np.zeros((LENGTH, HEADS, latent.value_width))
    keys, values = [], []
    for t in range(LENGTH):
        compressed = h[t] @ w["kv_a"]
        c, k_rope = compressed[: latent.kv_rank], turn(compressed[latent.kv_rank :], t)
        expanded = np.einsum("c,cnh->nh", c, w["kv_b"])
        keys.append([np.concatenate([row[: latent.nope_width], k_rope]) for row in expanded])
        values.append([row[latent.nope_width :] for row in expanded])
        if latent.query_rank is None:
            queries = np.einsum("d,dnh->nh", h[t], w["query"])
        else:
            queries = np.einsum("c,cnh->nh", h[t] @ w["query_a"], w["query_b"])
        for n in range(HEADS):
            q_nope, q_rope = np.split(queries[n], [latent.nope_width])
            q = np.concatenate([q_nope, turn(q_rope, t)])
            scores = np.array([q @ keys[s][n] for s in range(t + 1)]) * latent.key_width**-0.5
            weight = np.exp(scores - scores.max())
            weight /= weight.sum()
            out[t, n] = sum(weight[s] * values[s][n] for s in range(t + 1))
    return out


@pytest.mark.parametrize("query_rank", [5, None])
@pytest.mark.parametrize("absorbed", [True, False])
def test_latent_attention_equals_loop(query_rank, absorbed):
    latent = dataclasses.replace(LATENT, query_rank=query_rank, absorbed=absorbed)
    weights, h = matrices(latent), 0.5 * draw(1, LENGTH, WIDTH, seed=9)

    @jax.jit
    def mix(h):
        def linear(name, x):
            return jnp.einsum("rld,d...->rl...", x, weights[name])

        by = rotation(jnp.arange(LENGTH)[None], head_dim=latent.rope_width, theta=1e4)
        kv_b = weights["kv_b"] if absorbed else None
        q, k, v = latent_heads(latent, h, by, linear, lambda name, x: x, kv_b)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == latent.head_dim
        options = Attending(scale=latent.key_width**-0.5)
        mixed = attend(q, k, v, jnp.ones((1, LENGTH), jnp.int32), options)
        return mixed_values(latent, mixed, kv_b)

    ours = mix(h)[0]
    np.testing.assert_allclose(ours, loop(latent, weights, np.asarray(h[0])), rtol=1e-4, atol=1e-4)


def parameters(spec):
    def disturb(leaf):
        return leaf + 0.3 * np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(
        disturb, jax.jit(init_params, static_argnums=0)(spec, key=jax.random.key(0))
    )


def decoded(params, spec, tokens, start):
    """Hidden states by the cache: `start` tokens in one piece, then one after the other."""
    run = jax.jit(extend, static_argnums=1)
    length = tokens.shape[1]
    cache, states = init_cache(spec, 1, length), []
    for piece in np.split(np.arange(length)[None], range(start, length), axis=1):
        hidden, cache = run(params, spec, cache, tokens[:, piece[0]], piece)
        states.append(hidden)
    return jnp.concatenate(states, axis=1)


def test_decoding_in_the_absorbed_form_equals_forward():
    params = parameters(SPEC)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 31, (1, 7)))
    rows = jnp.arange(7)[None], jnp.ones((1, 7), jnp.int32)
    whole = jax.jit(forward, static_argnums=1)(params, SPEC, tokens, *rows)
    cached = decoded(params, SPEC.for_decoding, tokens, start=3)
    np.testing.assert_allclose(cached, whole, rtol=1e-4, atol=1e-4)


def test_absorbed_form_has_the_same_parameters_and_a_small_cache():
    small = SPEC.for_decoding
    assert small.for_decoding is small
    assert jax.tree.map(lambda d: d.shape, declare(small)) == jax.tree.map(
        lambda d: d.shape, declare(SPEC)
    )
    cache = init_cache(small, 2, 5)
    assert cache.keys[1].shape == (2, 1, LATENT.kv_rank + LATENT.rope_width, 5)
    assert cache.values[1].size == 0, "the keys are the values too"
    assert init_cache(SPEC, 2, 5).keys[1].shape == (2, HEADS, LATENT.key_width, 5)
    assert small.score_scale == pytest.approx(SPEC.score_scale)
    plain = dataclasses.replace(SPEC, latent=None)
    assert plain.for_decoding is plain


def test_adapters_of_the_absorbed_matrix_take_part():
    lora = LoraSpec(rank=2, alpha=4.0, targets=("kv_b",))
    spec = dataclasses.replace(SPEC, lora=lora)
    params = parameters(SPEC)
    layers = dict(params["layers"])
    layers["kv_b_lora_a"] = draw(2, LATENT.kv_rank, 2, seed=1)
    layers["kv_b_lora_b"] = draw(2, 2, HEADS, 7, seed=2)
    params = params | {"layers": layers}
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 31, (1, 7)))
    rows = jnp.arange(7)[None], jnp.ones((1, 7), jnp.int32)
    run = jax.jit(forward, static_argnums=1)
    whole = run(params, spec, tokens, *rows)
    np.testing.assert_allclose(
        run(params, spec.for_decoding, tokens, *rows), whole, rtol=1e-4, atol=1e-4
    )
    assert np.abs(whole - run(params, SPEC, tokens, *rows)).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_rank": 0}, "must be positive"),
        ({"query_rank": -1}, "must be positive"),
        ({"rope_width": 3}, "rope_width must be even"),
        ({"value_width": 7}, "may not be wider than keys"),
    ],
    ids=str,
)
def test_impossible_latent_attention_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LATENT, **changes)


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 1}, {"head_dim": 8}, {"qk_norm": True}, {"qkv_bias": True}], ids=str
)
def test_models_that_do_not_fit_their_latent_attention_are_refused(changes):
    with pytest.raises(ValueError, match="this latent attention has"):
        dataclasses.replace(SPEC, **changes)

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.cache import decode_step, init_cache, prefill, take
from jaxrl_llm.models.rope import YarnScaling
from jaxrl_llm.models.transformer import forward, logits

PROMPTS, NEW, SLOTS = np.array([1, 4, 7]), 5, 14


@pytest.fixture(scope="module")
def tokens():
    """Random sequences; row b is a prompt of PROMPTS[b] tokens and NEW more."""
    return jax.random.randint(jax.random.key(5), (3, 12), 0, 37)


@pytest.fixture(scope="module")
def step(params, spec):
    return jax.jit(partial(decode_step, params, spec))


@pytest.fixture(scope="module")
def prefilled(spec, params, tokens):
    """Prefill prompts whose padding holds arbitrary tokens."""
    run = jax.jit(partial(prefill, params, spec, cache_length=SLOTS))
    return run(tokens[:, :7], jnp.array(PROMPTS))


def log_probs(params, spec, hidden):
    return jax.nn.log_softmax(logits(params, spec, hidden))


def test_decoding_equals_the_teacher_forced_forward(spec, params, tokens, prefilled, step):
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    whole = jax.jit(forward, static_argnums=1)(params, spec, tokens, positions, positions * 0 + 1)
    wanted = np.asarray(log_probs(params, spec, whole))
    rows = np.arange(3)

    hidden, cache = prefilled
    got = log_probs(params, spec, hidden)
    np.testing.assert_allclose(got, wanted[rows, PROMPTS - 1], atol=1e-4)
    for done in range(NEW):
        at = PROMPTS + done
        hidden, cache = step(cache, tokens[rows, at], jnp.array(at))
        got = log_probs(params, spec, hidden)
        np.testing.assert_allclose(got, wanted[rows, at], atol=1e-4, err_msg=f"token {done}")


def test_decoding_equals_forward_with_windows_caps_and_two_rotations(spec, params, tokens):
    """Only some layers have a window of 3 tokens, and rotate otherwise; scores are capped."""
    mixed = dataclasses.replace(
        spec,
        window=3,
        windowed_layers=(True, False, True),
        rope_scaling=YarnScaling(factor=4.0, original_positions=16),
        local_rope_theta=50.0,
        rotary_fraction=0.67,
        query_scalar=3.0,
        score_softcap=2.0,
        logit_softcap=3.0,
        unit_offset_norms=True,
        scaled_embeddings=True,
        activation="gelu_tanh",
    )
    assert mixed.rotary_width == 4  # of 6
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    whole = jax.jit(forward, static_argnums=1)(params, mixed, tokens, positions, positions * 0 + 1)
    wanted = np.asarray(log_probs(params, mixed, whole))
    rows, prompts = np.arange(3), jnp.array(PROMPTS)
    fill = jax.jit(partial(prefill, params, mixed, cache_length=SLOTS))
    hidden, cache = fill(tokens[:, :7], prompts)
    got = log_probs(params, mixed, hidden)
    np.testing.assert_allclose(got, wanted[rows, PROMPTS - 1], atol=1e-4)
    step = jax.jit(partial(decode_step, params, mixed))
    for done in range(NEW):
        at = PROMPTS + done
        hidden, cache = step(cache, tokens[rows, at], jnp.array(at))
        got = log_probs(params, mixed, hidden)
        np.testing.assert_allclose(got, wanted[rows, at], atol=1e-4, err_msg=f"token {done}")


def test_decoding_from_nothing_equals_prefill(spec, params, tokens, prefilled, step):
    """An empty cache fed token by token holds what prefill writes."""
    cache = init_cache(spec, 3, SLOTS)
    for position in range(7):
        _, cache = step(cache, tokens[:, position], jnp.full(3, position))
    for row, length in enumerate(PROMPTS):
        for got, wanted in zip(*map(jax.tree.leaves, (cache, prefilled[1])), strict=True):
            np.testing.assert_allclose(got[row, :, :length], wanted[row, :, :length], atol=1e-5)


def test_a_step_writes_one_slot_per_row(prefilled, step):
    _, before = prefilled
    positions = np.array([1, 9, 7])
    _, after = step(before, jnp.array([3, 4, 5]), jnp.array(positions))
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        changed = (np.asarray(old) != np.asarray(new)).any(axis=(1, 3))  # [B, S]
        np.testing.assert_array_equal(changed, np.arange(SLOTS) == positions[:, None])


def test_slots_beyond_the_position_are_not_read(prefilled, step):
    _, cache = prefilled
    later = jnp.arange(SLOTS)[None, None, :, None] > jnp.array(PROMPTS)[:, None, None, None]
    dirty = jax.tree.map(lambda x: jnp.where(later, 1e3, x), cache)
    clean_hidden, _ = step(cache, jnp.array([3, 4, 5]), jnp.array(PROMPTS))
    dirty_hidden, _ = step(dirty, jnp.array([3, 4, 5]), jnp.array(PROMPTS))
    np.testing.assert_array_equal(clean_hidden, dirty_hidden)


def test_beyond_the_cache_nothing_is_written(prefilled, step):
    _, before = prefilled
    hidden, after = step(before, jnp.array([3, 4, 5]), jnp.array([SLOTS, SLOTS + 3, 7]))
    assert jnp.isfinite(hidden).all()
    np.testing.assert_array_equal(before.keys[0][:2], after.keys[0][:2])
    assert not np.array_equal(before.keys[0][2], after.keys[0][2])


def test_rows_share_a_prefill(prefilled, step):
    _, cache = prefilled
    rows = np.array([2, 0, 0, 1])
    shared, _ = step(
        take(cache, jnp.array(rows)), jnp.array([3, 4, 5, 6]), jnp.array(PROMPTS[rows])
    )
    for sample, (row, token) in enumerate(zip(rows, [3, 4, 5, 6], strict=True)):
        alone, _ = step(
            take(cache, jnp.array([row])), jnp.array([token]), jnp.array([PROMPTS[row]])
        )
        np.testing.assert_allclose(shared[sample], alone[0], atol=1e-5)


def test_the_cache_is_updated_in_place(spec, params):
    """The compiled step aliases the donated cache and needs no second copy of it."""
    cache = init_cache(spec, 64, 128)
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    tokens = jnp.zeros(64, jnp.int32)
    step = jax.jit(decode_step, static_argnums=1, donate_argnums=2)
    stats = step.lower(params, spec, cache, tokens, tokens).compile().memory_analysis()
    assert stats.alias_size_in_bytes >= size
    assert stats.temp_size_in_bytes < size


def test_bfloat16_cache(spec, params, tokens, prefilled, step):
    fill = partial(prefill, params, spec, cache_length=SLOTS, dtype=jnp.bfloat16)
    hidden, cache = jax.jit(fill)(tokens[:, :7], jnp.array(PROMPTS))
    assert {x.dtype for x in jax.tree.leaves((hidden, cache))} == {jnp.dtype(jnp.bfloat16)}
    next_tokens = jnp.array([3, 4, 5])
    narrow, after = jax.jit(partial(decode_step, params, spec, dtype=jnp.bfloat16))(
        cache, next_tokens, jnp.array(PROMPTS)
    )
    assert {x.dtype for x in jax.tree.leaves((narrow, after))} == {jnp.dtype(jnp.bfloat16)}
    wide, _ = step(prefilled[1], next_tokens, jnp.array(PROMPTS))
    assert np.abs(np.asarray(narrow, np.float32) - wide).mean() < 0.05


def test_prompts_must_fit(spec, params):
    with pytest.raises(ValueError, match="prompts of 7 tokens do not fit into cache_length=6"):
        prefill(params, spec, jnp.ones((1, 7), jnp.int32), jnp.array([7]), cache_length=6)

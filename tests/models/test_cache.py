from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.cache import decode_step, init_cache, prefill, take
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
    return prefill(params, spec, tokens[:, :7], jnp.array(PROMPTS), cache_length=SLOTS)


def log_probs(params, spec, hidden):
    return jax.nn.log_softmax(logits(params, spec, hidden))


def test_decoding_equals_the_teacher_forced_forward(spec, params, tokens, prefilled, step):
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    whole = forward(params, spec, tokens, positions, jnp.ones_like(tokens))
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


def test_decoding_from_nothing_equals_prefill(spec, params, tokens, prefilled, step):
    """An empty cache fed token by token holds what prefill writes."""
    cache = init_cache(spec, 3, SLOTS)
    for position in range(7):
        _, cache = step(cache, tokens[:, position], jnp.full(3, position))
    for row, length in enumerate(PROMPTS):
        for got, wanted in zip(cache, prefilled[1], strict=True):
            np.testing.assert_allclose(got[:, row, :length], wanted[:, row, :length], atol=1e-5)


def test_a_step_writes_one_slot_per_row(prefilled, step):
    _, before = prefilled
    positions = np.array([1, 9, 7])
    _, after = step(before, jnp.array([3, 4, 5]), jnp.array(positions))
    for old, new in zip(before, after, strict=True):
        changed = (np.asarray(old) != np.asarray(new)).any(axis=(3, 4))  # [layers, B, S]
        written = np.arange(SLOTS) == positions[:, None]
        np.testing.assert_array_equal(changed, np.broadcast_to(written, changed.shape))


def test_slots_beyond_the_position_are_not_read(prefilled, step):
    _, cache = prefilled
    later = jnp.arange(SLOTS)[None, :, None, None] > jnp.array(PROMPTS)[:, None, None, None]
    dirty = jax.tree.map(lambda x: jnp.where(later, 1e3, x), cache)
    clean_hidden, _ = step(cache, jnp.array([3, 4, 5]), jnp.array(PROMPTS))
    dirty_hidden, _ = step(dirty, jnp.array([3, 4, 5]), jnp.array(PROMPTS))
    np.testing.assert_array_equal(clean_hidden, dirty_hidden)


def test_beyond_the_cache_nothing_is_written(prefilled, step):
    _, before = prefilled
    hidden, after = step(before, jnp.array([3, 4, 5]), jnp.array([SLOTS, SLOTS + 3, 7]))
    assert jnp.isfinite(hidden).all()
    np.testing.assert_array_equal(before.keys[:, :2], after.keys[:, :2])
    assert not np.array_equal(before.keys[:, 2], after.keys[:, 2])


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
    size = sum(x.nbytes for x in cache)
    tokens = jnp.zeros(64, jnp.int32)
    step = jax.jit(decode_step, static_argnums=1, donate_argnums=2)
    stats = step.lower(params, spec, cache, tokens, tokens).compile().memory_analysis()
    assert stats.alias_size_in_bytes >= size
    assert stats.temp_size_in_bytes < size


def test_bfloat16_cache(spec, params, tokens, prefilled):
    prompts = tokens[:, :7], jnp.array(PROMPTS)
    hidden, cache = prefill(params, spec, *prompts, cache_length=SLOTS, dtype=jnp.bfloat16)
    assert {hidden.dtype, cache.keys.dtype, cache.values.dtype} == {jnp.dtype(jnp.bfloat16)}
    next_tokens = jnp.array([3, 4, 5])
    narrow, after = decode_step(
        params, spec, cache, next_tokens, jnp.array(PROMPTS), dtype=jnp.bfloat16
    )
    assert {narrow.dtype, after.keys.dtype} == {jnp.dtype(jnp.bfloat16)}
    wide, _ = decode_step(params, spec, prefilled[1], next_tokens, jnp.array(PROMPTS))
    assert np.abs(np.asarray(narrow, np.float32) - wide).mean() < 0.05


def test_prompts_must_fit(spec, params):
    with pytest.raises(ValueError, match="prompts of 7 tokens do not fit into cache_length=6"):
        prefill(params, spec, jnp.ones((1, 7), jnp.int32), jnp.array([7]), cache_length=6)

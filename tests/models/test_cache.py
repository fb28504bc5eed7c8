import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import quantize
from jaxrl_llm.models.cache import init_cache
from jaxrl_llm.models.rope import YarnScaling
from tests.decoders import extend, forward, logits
from tests.specs import DENSE, LATENT

PROMPTS, NEW, SLOTS = np.array([1, 4, 7]), 5, 14

RUN = jax.jit(extend, static_argnums=1, static_argnames="dtype")


@pytest.fixture(scope="module")
def tokens():
    """Random sequences; row b is a prompt of PROMPTS[b] tokens and NEW more."""
    return np.random.default_rng(5).integers(0, 32, (3, 12))


def places(start, lengths, width):
    """Return the positions [B `width`] of pieces, those of what pads them outside the cache."""
    index = np.arange(width)
    return np.where(index < np.array(lengths)[:, None], np.array(start)[:, None] + index, SLOTS)


MIXED = dict(
    window=3,
    windowed_layers=(True, False),
    rope_scaling=YarnScaling(factor=4.0, original_positions=16),
    local_rope_theta=50.0,
    rotary_fraction=0.5,
    query_scalar=3.0,
    score_softcap=2.0,
    logit_softcap=3.0,
    unit_offset_norms=True,
    scaled_embeddings=True,
    activation="gelu_tanh",
)


@pytest.mark.parametrize("changes", [{}, MIXED], ids=["plain", "windows, caps, two rotations"])
def test_decoding_equals_the_teacher_forced_forward(spec, params, tokens, changes):
    spec = dataclasses.replace(spec, **changes)
    positions = np.broadcast_to(np.arange(12), tokens.shape)
    whole = jax.jit(forward, static_argnums=1)(params, spec, tokens, positions, positions * 0 + 1)

    scores = jax.jit(lambda states: jax.nn.log_softmax(logits(params, spec, states)))

    def compare(hidden, at):
        decoded, expected = np.asarray(scores(hidden)), np.asarray(scores(whole))
        for row in range(3):
            real = at[row] < SLOTS
            np.testing.assert_allclose(
                decoded[row, real], expected[row, at[row, real]], atol=1e-4, err_msg=f"{at}"
            )

    at = places(PROMPTS * 0, PROMPTS, 7)
    hidden, cache = RUN(params, spec, init_cache(spec, 3, SLOTS), tokens[:, :7], at)
    compare(hidden, at)
    for done in range(NEW):
        at = PROMPTS[:, None] + done
        following = np.take_along_axis(tokens, at, axis=1)
        hidden, cache = RUN(params, spec, cache, following, at)
        compare(hidden, at)


# ------------------------------------------------------------------------------------------- int8


def test_quantize():
    rng, dtype = np.random.default_rng(0), "bfloat16"
    x = (rng.normal(size=(7, 3, 20)) * 10.0 ** rng.integers(-6, 6, (7, 3, 1))).astype(np.float32)
    x[2, 1, :16] = 0.0
    numbers, scales = map(np.asarray, jax.jit(quantize, static_argnums=(1, 2))(x, (16, 4), dtype))
    assert (numbers.dtype, scales.dtype.name, scales.shape) == (np.int8, dtype, (7, 3, 2))
    assert {int(n) for n in numbers.ravel()} <= set(range(-127, 128))
    for i, j, (g, part) in itertools.product(
        range(7), range(3), enumerate([slice(0, 16), slice(16, 20)])
    ):
        scale = float(scales[i, j, g])
        assert scale == pytest.approx(np.abs(x[i, j, part]).max() / 127, rel=2**-8)
        restored = scale * numbers[i, j, part].astype(float)
        np.testing.assert_allclose(restored, x[i, j, part], atol=scale * 0.5001, rtol=0)
    assert not numbers[2, 1, :16].any()
    _, scales = quantize(jnp.array([[1.0, jnp.nan], [1.0, jnp.inf]]), (2,), jnp.float32)
    assert not jnp.isfinite(scales).any()  # what is not finite is not hidden


def test_a_cache_in_int8_holds_a_byte_a_number_and_the_scales():
    for spec, numbers, scales in (
        (DENSE, 2 * 2 * 4, 2 * 2),
        (LATENT.for_decoding, LATENT.latent.kv_rank + LATENT.latent.rope_width, 2),
    ):
        cache = init_cache(spec, 5, 7, dtype="bfloat16", kv_cache_dtype="int8")
        assert cache.compute_dtype == "bfloat16"
        assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 2 * 5 * 7 * (numbers + 2 * scales)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        init_cache(DENSE, 1, 1, kv_cache_dtype="fp8")

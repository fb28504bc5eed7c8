"""Rotary frequencies against `transformers`, at the sizes of published models."""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxrl_llm.models.hf.family import read_ropes
from jaxrl_llm.models.rope import rotation

LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", original_max_position_embeddings=4096)
DEEPSEEK = dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.707)
PUBLISHED = {
    "Llama 3.1": (128, LLAMA3 | dict(factor=8.0)),
    "Llama 3.2": (64, LLAMA3 | dict(factor=32.0)),
    "YaRN": (128, YARN | dict(rope_theta=1e6, factor=4.0)),
    "YaRN, Olmo 3": (128, YARN | dict(rope_theta=5e5, factor=8.0, attention_factor=1.2)),
    "YaRN, DeepSeek-V3": (64, YARN | DEEPSEEK | dict(rope_theta=1e4, factor=40.0)),
    "YaRN, not truncated": (64, YARN | dict(rope_theta=15e4, factor=32.0, truncate=False)),
    "Gemma 3": (256, dict(rope_type="linear", rope_theta=1e6, factor=8.0)),
    "dynamic": (128, dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
}


def test_frequencies_and_attention_factors_equal(subtests):
    for name, (width, rope) in PUBLISHED.items():
        with subtests.test(name):
            check_frequencies(width, rope)


def check_frequencies(width, rope):
    config = transformers.LlamaConfig(
        hidden_size=width, num_attention_heads=1, max_position_embeddings=1000, rope_parameters=rope
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    theta, scaling, _ = read_ropes(
        {"rope_parameters": rope, "max_position_embeddings": 1000}, theta=None, local_theta=None
    )
    plain = np.float32(theta) ** (-np.arange(0, width, 2, dtype=np.float32) / width)
    assert scaling is not None
    ours, our_factor = scaling.apply(plain, theta=theta)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    assert our_factor == pytest.approx(factor, rel=1e-12)

    angles = 100 * theirs.double().numpy()
    by = rotation(jnp.array([[100]]), head_dim=width, theta=theta, scaling=scaling)
    np.testing.assert_allclose(by.cos[0, 0], np.cos(angles) * factor, atol=3e-5)
    np.testing.assert_allclose(by.sin[0, 0], np.sin(angles) * factor, atol=3e-5)

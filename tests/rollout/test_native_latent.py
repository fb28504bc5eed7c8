"""The engine on latent attention: it decodes over the latents, and holds each of them once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import forward, logits

LATENT = LatentSpec(query_rank=None, kv_rank=6, nope_width=4, rope_width=2, value_width=4)
SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=LATENT.head_dim,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    qk_norm=False,
    max_positions=64,
    latent=LATENT,
)
SLOTS, LENGTH = 4, 24


@pytest.mark.parametrize("kernel", [None, attend_gathered], ids=["rows", "pages"])
def test_answers_and_cache(kernel):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda decl: jnp.asarray(
            0.4 * rng.normal(size=decl.shape) + (decl.axes[-1] == "norm"), jnp.float32
        ),
        declare(SPEC),
    )
    requests = [
        Request(tuple(rng.integers(0, 32, n).tolist()), SamplingParams(7, temperature=1.0), seed=n)
        for n in (1, 5, 9)
    ]
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    settings = EngineSettings(SLOTS, LENGTH)
    engine = NativeEngine(Decoder(SPEC), settings, layout=layout, kernel=kernel)
    try:
        engine.load(params, version=0)
        answers = engine.sample(requests)
        pages = engine.programs.sizes.pages
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner.pool))
    finally:
        engine.close()
    assert pages == SLOTS * 3  # of 16 tokens; one for what others begin with
    assert held == 4 * SPEC.layers * pages * 16 * (LATENT.kv_rank + LATENT.rope_width)
    assert dataclasses.replace(LATENT, absorbed=True) == SPEC.for_decoding.latent
    for request, answer in zip(requests, answers, strict=True):
        row = jnp.array([[*request.prompt, *answer.tokens]])
        hidden = forward(params, SPEC, row, jnp.arange(row.size)[None], jnp.ones_like(row))
        whole = np.asarray(jax.nn.log_softmax(logits(params, SPEC, hidden)))[0]
        start = len(request.prompt) - 1
        expected = whole[np.arange(start, start + 7), answer.tokens]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)

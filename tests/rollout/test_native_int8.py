import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import decoder
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.rollout.native.page_pool import PAGE
from tests.decoders import forward, logits
from tests.guarded import MODEL, NATIVE
from tests.rollout.conftest import MAX_TOKENS, build, opened, weights
from tests.specs import DENSE, LATENT

GROUPED = dataclasses.replace(
    DENSE, head_dim=16, window=9, windowed_layers=(True, False), score_softcap=20.0
)
WIDTHS = dataclasses.replace(LATENT.latent, kv_rank=16, nope_width=8, rope_width=16, value_width=8)
SHARED = dataclasses.replace(LATENT, head_dim=WIDTHS.head_dim, latent=WIDTHS)
STEM = np.random.default_rng(9).integers(0, 32, MAX_TOKENS).tolist()
REQUESTS = [
    Request(
        (*STEM[: length if seed % 2 else length // 2], *range(length - length // 2))[:length],
        SamplingParams(MAX_TOKENS - length, temperature=float(seed % 3 == 2)),
        seed=seed,
    )
    for seed, length in enumerate((1, 2, 15, 16, 17, 30, 7, 24, 16, 9))
]
PIECES = {"PREFILL_LENGTHS": (8,), "PREFILL_TOKENS": (16,), "SHORTEST_ROW": 16}
KERNEL = functools.partial(attend_pages, interpret=True)


def restored(x, first):
    """Return what int8 makes of vectors whose first numbers have a scale of their own."""
    parts = []
    for part in (x[..., :first], x[..., first:]):
        if part.shape[-1]:
            scale = jnp.maximum(jnp.abs(part).max(axis=-1, keepdims=True), 1e-30) / 127
            parts.append(jnp.round(part / scale) * scale)
    return jnp.concatenate(parts, axis=-1)


@functools.partial(jax.jit, static_argnums=2)
def logprobs_of(params, row, spec):
    """Return log-probs [n V] of a forward pass over restored keys and values."""
    first = spec.latent.kv_rank if spec.latent else spec.head_dim

    def attend_restored(q, k, v, *more, **options):
        if spec.latent:  # the values are part of the key, and have its scale
            v = restored(k, first)
        return attend(q, restored(k, first), restored(v, first), *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "attend", attend_restored)
        place, decoding = jnp.arange(MAX_TOKENS)[None], spec.for_decoding
        hidden = forward(params, decoding, row[None], place, jnp.ones_like(place))
        return jax.nn.log_softmax(logits(params, decoding, hidden))[0]


def check(answers, spec):
    """Compare answers with the forward pass; a number may be rounded to its other neighbour."""
    off = []
    for request, answer in zip(REQUESTS, answers, strict=True):
        row = np.zeros(MAX_TOKENS, np.int32)
        row[: len(request.prompt) + len(answer.tokens)] = [*request.prompt, *answer.tokens]
        after = np.asarray(logprobs_of(weights(spec), row, spec))
        after = after[len(request.prompt) - 1 :][: len(answer.tokens)]
        if request.sampling.temperature == 0:
            assert answer.tokens.tolist() == after.argmax(-1).tolist()
        off += np.abs(answer.logprobs - after[np.arange(len(after)), answer.tokens]).tolist()
    assert np.median(off) < 2e-6
    assert max(off) < 0.02


SLOW = [pytest.mark.slow, pytest.mark.guards(*MODEL, *NATIVE)]
slow = functools.partial(pytest.param, marks=SLOW)
ON_MESH = {"devices": 4, "axes": {"data": 2, "tensor": 2}}


@pytest.fixture(scope="module", params=[GROUPED, SHARED], ids=["grouped", "latent"])
def spec(request):
    return request.param


@pytest.mark.parametrize(
    "options",
    [
        {"max_running_sequences": 3, "cache_pages": 7.5, "kernel": attend_gathered},
        slow({"max_running_sequences": 12, "sizes": {"PREFILL_LENGTHS": (256,)}}),
        slow({"max_running_sequences": 12, "kernel": KERNEL}),
        slow({"max_running_sequences": 12} | ON_MESH),
        slow({"max_running_sequences": 12, "kernel": KERNEL} | ON_MESH),
        slow({"max_running_sequences": 3, "cache_pages": 15.0}),
    ],
    ids=["in place", "whole", "interpreted", "mesh", "interpreted on a mesh", "cramped rows"],
)
def test_answers_are_those_of_restored_keys_and_values(spec, options):
    options = {"sizes": PIECES, "steps": 7, "kv_cache_dtype": "int8"} | options
    if pages := options.pop("cache_pages", None):
        with contextlib.closing(build(model=spec, kv_cache_dtype="int8")) as plain:
            options["cache_gb"] = pages * plain.programs.page_bytes() / 1e9
    with opened(spec, **options) as engine:
        for _ in range(2):  # at the second time prompts are cached
            check(engine.sample(REQUESTS), spec)
        assert (engine.stats().preemptions > 0) == bool(pages)
        assert engine.stats().reused_tokens > 0


def test_as_many_bytes_hold_about_twice_the_tokens():
    spec = dataclasses.replace(DENSE, layers=1, kv_heads=1, head_dim=64, max_positions=2048)
    settings = {"max_running_sequences": 512, "max_tokens": 2048, "cache_gb": 4e-3}
    for dtype, kernel, times in (("bfloat16", None, 1.93), ("float32", attend_gathered, 3.76)):
        tokens = []
        for kind in ("int8", "auto"):
            made = build(model=spec, kernel=kernel, dtype=dtype, kv_cache_dtype=kind, **settings)
            made.close()
            held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made.shapes()[1][0]))
            pages = made.programs.sizes.pages
            room = 2e6 if kernel is None else 4e6  # as much again for rows
            assert held == pages * made.programs.page_bytes() <= room
            assert held + made.programs.page_bytes() > room
            tokens.append(pages * PAGE)
        assert tokens[0] / tokens[1] == pytest.approx(times, rel=0.02)

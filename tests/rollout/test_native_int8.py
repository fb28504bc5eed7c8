"""The engine with keys and values in int8, against a forward pass over what int8 restores."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import decoder
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native import page_pool
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.native.page_pool import PAGE
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import forward, logits
from tests.guarded import MODEL, NATIVE
from tests.specs import tiny_spec

LONGEST = 40
GROUPED = tiny_spec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=64,
    window=9,
    windowed_layers=(True, False),
    score_softcap=20.0,
)
LATENT = LatentSpec(query_rank=None, kv_rank=16, nope_width=8, rope_width=16, value_width=8)
SHARED = tiny_spec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=LATENT.head_dim,
    max_positions=64,
    qk_norm=False,
    latent=LATENT,
)
STEM = np.random.default_rng(9).integers(0, 32, LONGEST).tolist()
REQUESTS = [
    Request(
        (*STEM[: length if seed % 2 else length // 2], *range(length - length // 2))[:length],
        SamplingParams(LONGEST - length, temperature=float(seed % 3 == 2)),
        seed=seed,
    )
    for seed, length in enumerate((1, 2, 15, 16, 17, 30, 7, 24, 16, 9))
]


def drawn(spec):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda d: jnp.asarray(
            0.4 * rng.normal(size=d.shape) + (d.axes[-1] in ("norm", "head_dim")), jnp.float32
        ),
        declare(spec),
    )


def engine_of(spec, patched, *, devices=1, axes=None, dtype="float32", kernel=None, **options):
    """Return an engine in int8 whose programs have shapes of their own."""
    layout = Layout(make_mesh(axes or {}, jax.devices()[:devices]))
    settings = EngineSettings(
        **{"max_running_sequences": 12, "max_tokens": LONGEST, "dtype": dtype} | options,
        kv_cache_dtype="int8",
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items():
            patch.setattr(page_pool, name, value)
        engine = NativeEngine(Decoder(spec), settings, layout=layout, steps=7, kernel=kernel)
    engine.load(drawn(spec), version=0)
    return engine


def restored(x, first):
    """Return what int8 makes of vectors whose first numbers have a scale of their own."""
    parts = []
    for part in (x[..., :first], x[..., first:]):
        if part.shape[-1]:
            scale = jnp.maximum(jnp.abs(part).max(axis=-1, keepdims=True), 1e-30) / 127
            parts.append(jnp.round(part / scale) * scale)
    return jnp.concatenate(parts, axis=-1)


@pytest.fixture(scope="module", params=[GROUPED, SHARED], ids=["grouped", "latent"])
def spec(request):
    return request.param


@pytest.fixture(scope="module")
def logprobs(spec):
    """(row of tokens) -> log-probs [n V] of a forward pass over restored keys and values."""
    first = LATENT.kv_rank if spec.latent else spec.head_dim
    params = drawn(spec)

    def attend_restored(q, k, v, *more, **options):
        if spec.latent:  # the values are part of the key, and have its scale
            v = restored(k, first)
        return attend(q, restored(k, first), restored(v, first), *more, **options)

    @jax.jit
    def run(row):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "attend", attend_restored)
            positions = jnp.arange(LONGEST)[None]
            ones = jnp.ones_like(positions)
            decoding = spec.for_decoding
            hidden = forward(params, decoding, row[None], positions, ones)
            return jax.nn.log_softmax(logits(params, decoding, hidden))[0]

    def of(tokens):
        row = np.zeros(LONGEST, np.int32)
        row[: len(tokens)] = tokens
        return np.asarray(run(row))[: len(tokens)]

    return of


def check(answers, logprobs):
    """Compare answers with the forward pass; a number may be rounded to its other neighbour."""
    off = []
    for request, answer in zip(REQUESTS, answers, strict=True):
        after = logprobs([*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
        if request.sampling.temperature == 0:
            assert answer.tokens.tolist() == after.argmax(-1).tolist()
        off += np.abs(answer.logprobs - after[np.arange(len(after)), answer.tokens]).tolist()
    assert np.median(off) < 2e-6
    assert max(off) < 0.02


WHOLE = {"PREFILL_LENGTHS": (256,), "PREFILL_TOKENS": (1024,)}
PIECES = {"PREFILL_LENGTHS": (8,), "PREFILL_TOKENS": (16,), "SHORTEST_ROW": 16}
KERNEL = functools.partial(attend_pages, interpret=True)


def test_answers_are_those_of_restored_keys_and_values(spec, logprobs):
    """Prompts at once, or in small pieces by few; pages gathered, or read where they lie."""
    engine = engine_of(spec, WHOLE)
    try:
        expected = engine.sample(REQUESTS)
        page = engine.programs.page_bytes()
    finally:
        engine.close()
    check(expected, logprobs)
    cramped = {"max_running_sequences": 3, "cache_gb": 7.5 * page / 1e9}
    engine = engine_of(spec, PIECES, kernel=attend_gathered, **cramped)
    try:
        for _ in range(2):  # at the second time prompts are cached
            answers = engine.sample(REQUESTS)
            check(answers, logprobs)
            for answer, want in zip(answers, expected, strict=True):
                assert answer.tokens.tolist() == want.tokens.tolist()
        assert engine.stats().preemptions > 0
        assert engine.stats().reused_tokens > 0
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel": KERNEL},
        {"devices": 4, "axes": {"data": 2, "tensor": 2}},
        {"devices": 4, "axes": {"data": 2, "tensor": 2}, "kernel": KERNEL},
        {"max_running_sequences": 3, "cache_gb": 2.2e-5},
    ],
    ids=["interpreted", "a mesh", "interpreted on a mesh", "cramped rows"],
)
def test_answers_in_other_ways(spec, logprobs, options):
    engine = engine_of(spec, PIECES, **options)
    try:
        for _ in range(2):
            check(engine.sample(REQUESTS), logprobs)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE)
def test_answers_do_not_depend_on_when_they_are_asked_for(spec, logprobs):
    async def arrive(engine):
        async def one(request, delay):
            await asyncio.sleep(delay)
            return await engine.generate(request)

        delays = np.random.default_rng(1).uniform(0, 0.2, len(REQUESTS))
        tasks = [one(*each) for each in zip(REQUESTS, delays, strict=True)]
        return await asyncio.gather(*tasks)

    engine = engine_of(spec, PIECES, max_running_sequences=4)
    try:
        check(asyncio.run(arrive(engine)), logprobs)
    finally:
        engine.close()


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 1.93), ("float32", 3.76)])
@pytest.mark.parametrize("kernel", [None, attend_gathered], ids=["rows", "pages"])
def test_as_many_bytes_hold_about_twice_the_tokens(dtype, times, kernel):
    spec = tiny_spec(heads=2, kv_heads=1, head_dim=64, max_positions=2048)

    def engine(kv_cache_dtype):
        settings = EngineSettings(512, 2048, 4e-3, dtype, kv_cache_dtype=kv_cache_dtype)
        layout = Layout(make_mesh({}, jax.devices()[:1]))
        made = NativeEngine(Decoder(spec), settings, layout=layout, kernel=kernel)
        made.close()
        return made

    tokens = {}
    for kind in ("auto", "int8"):
        made = engine(kind)
        arrays = made.shapes()[1][0]
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
        pages = made.programs.sizes.pages
        room = 2e6 if kernel is None else 4e6  # as much again for rows
        assert held == pages * made.programs.page_bytes() <= room
        assert held + made.programs.page_bytes() > room
        tokens[kind] = pages * PAGE
    assert tokens["int8"] / tokens["auto"] == pytest.approx(times, rel=0.02)

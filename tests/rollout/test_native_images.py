"""The engine on prompts with images: it draws what the trainer's forward pass does."""

import dataclasses
import functools
import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import PackedTokens
from jaxrl_llm.models.model import model_of
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.transformer import forward_rows
from jaxrl_llm.models.vision.inputs import Visual, VisualTokens
from jaxrl_llm.models.vision.positions import rotary_positions
from jaxrl_llm.models.vision.rows import patch_rows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import encode
from jaxrl_llm.rollout.engine import EngineError, Stop
from jaxrl_llm.rollout.native import sizes
from jaxrl_llm.rollout.native.visuals import read_prompt
from jaxrl_llm.rollout.types import LEAST_LOGPROB, Request, SamplingParams
from tests.guarded import MODEL, NATIVE
from tests.rollout.conftest import HYBRID, MAX_TOKENS, SPEC
from tests.waiting import wait_until

WORDS, IMAGE, VIDEO, START, END = 26, 27, 28, 29, 30
VISION = VisionSpec(
    kind="qwen3",
    layers=2,
    hidden_size=8,
    heads=2,
    ff_width=12,
    patch=2,
    frames_per_patch=2,
    merge=2,
    out_size=16,
    position_side=4,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    image_id=IMAGE,
    video_id=VIDEO,
    marks=(START, END),
)
ROTARY = {"head_dim": 8, "mrope_sections": (2, 1, 1), "mrope_interleaved": True}
SPECS = {
    "deep": dataclasses.replace(
        SPEC, vision=dataclasses.replace(VISION, deep_layers=(0, 1)), **ROTARY
    ),
    "hybrid": dataclasses.replace(HYBRID, vision=VISION, **ROTARY),
}
PATCHES = MAX_TOKENS * VISION.group
ANSWER = SamplingParams(6)


def draw_visual(*grid, seed=0, seconds=()):
    rng = np.random.default_rng(seed)
    patches = rng.integers(0, 256, (int(np.prod(grid)), VISION.patch_width), np.uint8)
    return Visual(patches, grid, 2, hashlib.sha256(patches).digest(), seconds)


LARGE, SMALL, OTHER = draw_visual(1, 4, 6), draw_visual(1, 2, 4, seed=1), draw_visual(1, 4, 6, seed=2)
FILM = draw_visual(2, 2, 4, seed=3, seconds=(0.0, 0.5))


def ask(*parts, sampling=ANSWER, seed=0):
    """Return a request of token ids and visuals, as the family's processor writes them."""
    tokens = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        for number in range(part.grid[0]):
            pads = [VIDEO if part.is_video else IMAGE] * (part.tokens // part.grid[0])
            tokens += [*([number] if part.is_video else []), START, *pads, END]
    visuals = tuple(part for part in parts if isinstance(part, Visual))
    return Request(tuple(tokens), sampling, seed, visuals=visuals)


MIXED = [
    ask(*range(3, 21), seed=1),
    ask(3, 5, LARGE, 6, 9, 4, seed=2),
    ask(SMALL, 20, 21, LARGE, 7, seed=3),
    ask(3, FILM, 5, LARGE, 9, seed=4),
]


@pytest.fixture(scope="module")
def weights(draw_params):
    """(model) -> two sets of parameters."""
    return functools.cache(lambda name: [draw_params(seed, SPECS[name]) for seed in range(2)])


@pytest.fixture(scope="module")
def engines(build, weights):
    """(model) -> an engine, compiled once: over rows, or in place and cramped."""
    made = {}

    def get(name):
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sizes, "PREFILL_LENGTHS", (8,))
                patch.setattr(sizes, "PREFILL_TOKENS", (32,))
                patch.setattr(sizes, "PATCH_LENGTHS", (64,))
                options = {"steps": 5}
                if name == "hybrid":
                    options |= {"kernel": attend_gathered, "cache_gb": 28e3 / 1e9}
                made[name] = build(model=SPECS[name], **options)
        made[name].load(weights(name)[0], version=0)
        return made[name]

    yield get
    for engine in made.values():
        engine.close()


@pytest.fixture(params=SPECS)
def name(request):
    return request.param


@pytest.fixture
def engine(name, engines):
    """An engine that remembers nothing."""
    engine = engines(name)
    yield engine

    def is_free():
        pools = engine._runner.scheduler.pages
        return all((p.available, p.available_slots) == (p.count, p.slots) for p in pools)

    wait_until(is_free)


@functools.partial(jax.jit, static_argnums=1)
def forward(params, spec, tokens, index, rotary, patches):
    """Return logits of a row by the trainer's forward pass, its images encoded by themselves."""
    visual = VisualTokens(index, encode(params["vision"], spec.vision, patches))
    positions = jnp.arange(MAX_TOKENS)[None]
    rows = PackedTokens(tokens, positions, jnp.ones_like(positions), None, visual, rotary)
    return Decoder(spec).logits(params, forward_rows(params, spec, rows)[0])[0]


def check(request, answer, params, spec):
    """Compare an answer with the trainer's forward pass."""
    tokens = np.array([*request.prompt, *answer.tokens])
    rotary, _ = rotary_positions(spec.vision, tokens, request.visuals)
    after = np.full(MAX_TOKENS - len(tokens), 5)
    row = np.concatenate([tokens, after])
    index = np.where(np.isin(row, (IMAGE, VIDEO)), np.cumsum(np.isin(row, (IMAGE, VIDEO))) - 1, -1)
    rotary = np.concatenate([rotary, np.zeros((len(after), 3), np.int32)])
    patches = patch_rows(spec.vision, [request.visuals], PATCHES)
    logits = np.asarray(forward(params, spec, row[None], index[None], rotary[None], patches))
    after = logits[len(request.prompt) - 1 : len(tokens) - 1, :].astype(np.float64)
    after[:, [IMAGE, VIDEO, START, END]] = -np.inf
    after = after - np.log(np.exp(after).sum(-1, keepdims=True))
    expected = after[np.arange(len(answer.tokens)), answer.tokens]
    np.testing.assert_allclose(answer.logprobs, expected, atol=2e-3)
    if request.sampling.temperature == 0:
        assert answer.tokens.tolist() == after.argmax(-1).tolist()


@pytest.fixture
def counted(engine, name, weights, monkeypatch):
    """(requests, version) -> answers, compared; tokens read and reused, and images encoded."""
    encoded, run = [], engine.programs.encode

    def encode_and_count(params, held, patches, slots):
        encoded.append(int(np.unique(np.asarray(patches.frames)[patches.frames > 0]).size))
        return run(params, held, patches, slots)

    monkeypatch.setattr(engine.programs, "encode", encode_and_count)

    def sample(requests, version=0):
        before, seen = engine.stats(), sum(encoded)
        answers = engine.sample(requests)
        after = engine.stats()
        for request, answer in zip(requests, answers, strict=True):
            check(request, answer, weights(name)[version], SPECS[name])
        read = after.prompt_tokens - before.prompt_tokens
        return answers, read, after.reused_tokens - before.reused_tokens, sum(encoded) - seen

    return sample


def test_text_and_images_together(counted):
    greedy = dataclasses.replace(ANSWER, temperature=0.0)
    few = dataclasses.replace(ANSWER, top_k=5, temperature=1.3)
    counted([*MIXED, dataclasses.replace(MIXED[1], sampling=greedy)])
    answers = counted([dataclasses.replace(MIXED[2], sampling=few, temperature=1.0)]) if 0 else None
    assert answers is None

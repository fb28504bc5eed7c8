"""The engine on prompts with images: it draws what the trainer's forward pass does."""

import contextlib
import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import RowInputs, Visual, VisualTokens, patch_rows
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.vision.tower import encode, placeholders, rotary_positions
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, EngineError, Request, SamplingParams, Stop
from jaxrl_llm.rollout.native.engine import FeatureSlots
from jaxrl_llm.rollout.native.images import read_prompt
from jaxrl_llm.rollout.native.programs import DecodeState, PrefillChunk
from jaxrl_llm.rollout.native.sampler import BatchSamplingParams
from tests.decoders import PackedTokens, forward_rows
from tests.guarded import MODEL, NATIVE
from tests.rollout.conftest import MAX_TOKENS, build, log_softmax, opened, weights
from tests.specs import DELTA, DENSE, MOE, tiny_vision
from tests.waiting import wait_until

IMAGE, VIDEO, START, END = 27, 28, 29, 30
VISION = tiny_vision(
    layers=2, ff_width=12, out_size=16, image_id=IMAGE, video_id=VIDEO, marks=(START, END)
)
ROTARY = {"head_dim": 8, "mrope_sections": (2, 1, 1), "mrope_interleaved": True}
SIGLIP = dataclasses.replace(VISION, kind="siglip", frames_per_patch=1, video_id=None)
DEEP = dataclasses.replace(DENSE, vision=dataclasses.replace(VISION, deep_layers=(0, 1)), **ROTARY)
SPECS = {"deep": DEEP, "hybrid": dataclasses.replace(DELTA, vision=VISION, **ROTARY)}
GEMMA = dataclasses.replace(DENSE, vision=SIGLIP, window=7, windowed_layers=(True, False))
PATCHES = MAX_TOKENS * VISION.group
ANSWER = SamplingParams(6)
SIZES = {"PREFILL_LENGTHS": (8,), "PREFILL_TOKENS": (32,)}
SIZES |= {"PATCH_LENGTHS": (64,), "SHORT_FRAME": 16}
opened = functools.partial(opened, sizes=SIZES, steps=5)


def draw_visual(*grid, seed=0, seconds=(), vision=VISION):
    rng = np.random.default_rng(seed)
    patches = rng.integers(0, 256, (int(np.prod(grid)), vision.patch_width), np.uint8)
    digest = hashlib.sha256(repr((grid, seconds)).encode() + patches.tobytes()).digest()
    return Visual(patches, grid, 2, digest, seconds)


LARGE, OTHER = (draw_visual(1, 4, 6, seed=seed) for seed in (0, 2))
SMALL = draw_visual(1, 2, 4, seed=1)
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
def engines():
    """(model) -> an engine, compiled once: over rows, or in place and cramped."""
    cramped = {"kernel": attend_gathered, "cache_gb": 40.6e3 / 1e9}
    with contextlib.ExitStack() as stack:

        @functools.cache
        def made(name):
            return stack.enter_context(opened(SPECS[name], **cramped if name == "deep" else {}))

        def get(name):
            made(name).load(weights(SPECS[name]), version=0)
            return made(name)

        yield get


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
    inputs = RowInputs(None, visual, rotary)
    rows = PackedTokens(tokens, positions, jnp.ones_like(positions), inputs)
    return Decoder(spec).logits(params, forward_rows(params, spec, rows)[0])[0]


def check(requests, answers, spec, version=0, atol=2e-3):
    """Compare answers with the trainer's forward pass."""
    params = weights(spec, version)
    for request, answer in zip(requests, answers, strict=True):
        tokens = np.array([*request.prompt, *answer.tokens])
        row = np.concatenate([tokens, np.full(MAX_TOKENS - len(tokens), 5)])
        is_visual = np.isin(row, placeholders(spec.vision))
        index = np.where(is_visual, np.cumsum(is_visual) - 1, -1)
        rotary = None
        if spec.mrope_sections:
            rotary = rotary_positions(spec.vision, row, request.visuals)[0][None]
        patches = patch_rows(spec.vision, [request.visuals], PATCHES)
        logits = np.array(forward(params, spec, row[None], index[None], rotary, patches))
        logits[:, spec.vision.never_sampled] = -np.inf
        after = log_softmax(logits)[len(request.prompt) - 1 : len(tokens) - 1]
        expected = after[np.arange(len(answer.tokens)), answer.tokens]
        np.testing.assert_allclose(answer.logprobs, expected, atol=atol)
        if request.sampling.temperature == 0:
            assert answer.tokens.tolist() == after.argmax(-1).tolist()


@pytest.fixture
def counted(engine, name, monkeypatch):
    """(requests, version) -> answers, compared; tokens read and reused, and images encoded."""
    encoded, program = [], engine.programs.encode

    def encode_and_count(*size):
        def run(params, held, patches, *rest):
            encoded.append(int(np.unique(np.asarray(patches.frames)[patches.frames > 0]).size))
            return program(*size)(params, held, patches, *rest)

        return run

    monkeypatch.setattr(engine.programs, "encode", encode_and_count)

    def sample(requests, version=0):
        before, seen = engine.stats(), sum(encoded)
        answers = engine.sample(requests)
        after = engine.stats()
        check(requests, answers, SPECS[name], version)
        read = after.prompt_tokens - before.prompt_tokens
        return answers, read, after.reused_tokens - before.reused_tokens, sum(encoded) - seen

    return sample


def test_text_and_images_together(counted):
    greedy = dataclasses.replace(ANSWER, temperature=0.0)
    few = dataclasses.replace(ANSWER, top_k=3, top_p=0.8)
    others = [dataclasses.replace(MIXED[1], sampling=sampling) for sampling in (greedy, few)]
    answers, _, _, encoded = counted([*MIXED, *others])
    assert encoded == len({LARGE.key, SMALL.key}) + FILM.grid[0]
    assert not {*np.concatenate([a.tokens for a in answers])} & {*VISION.never_sampled}


def test_equal_ids_with_other_images_share_no_pages(counted):
    one, other = (ask(3, 5, image, *range(10, 16)) for image in (LARGE, OTHER))
    assert one.prompt == other.prompt
    (first, second), _, reused, encoded = counted([one, other])
    assert reused <= 2 * 3  # what is before the image
    assert encoded == 2
    assert first.logprobs.tolist() != second.logprobs.tolist()
    (again,), _, reused, encoded = counted([one])
    assert (reused, encoded) == (len(one.prompt) - 1, 0)
    assert again.tokens.tolist() == first.tokens.tolist()


def test_groups_later_turns_and_new_weights(engine, counted, name):
    group = [dataclasses.replace(MIXED[2], seed=seed) for seed in range(3)]
    _, read, reused, encoded = counted(group)
    length = len(group[0].prompt) - 1
    assert (read, reused, encoded) == (length, 2 * length, 2), "it reads its prompt once"
    first = ask(3, OTHER, 7, 8)
    (answer,), _, _, _ = counted([first])
    talk = (*first.prompt, *answer.tokens.tolist(), *ask(SMALL, 11).prompt)
    second = dataclasses.replace(first, prompt=talk, visuals=(OTHER, SMALL))
    _, _, reused, encoded = counted([second])
    assert reused >= len(first.prompt) + len(answer.tokens) - 1
    assert encoded <= 1
    engine.load(weights(SPECS[name], 1), version=1)
    assert counted(MIXED[1:2], version=1)[2:] == (0, 1), "new weights encode anew"


def test_who_gives_its_pages_back_keeps_its_positions(engines):
    engine = engines("deep")
    requests = [
        ask(3, image, 7, seed=i, sampling=SamplingParams(24))
        for i, image in enumerate((LARGE, OTHER, LARGE, OTHER))
    ]
    assert engine.programs.sizes.pages < 4 * 3  # of 16 tokens
    before = engine.stats().preemptions
    check(requests, engine.sample(requests), DEEP)
    assert engine.stats().preemptions > before


def test_an_answer_that_was_left_goes_on(engine, counted):
    request = ask(3, LARGE, 7, sampling=SamplingParams(20))
    (part,) = engine.sample_until([request], 1, Stop(turns=2))
    assert 0 < len(part.tokens) < 20
    drawn = dataclasses.replace(request, drawn=part)
    engine.sleep()
    engine.wake()
    (answer,), read, reused, encoded = counted([drawn])
    assert answer.tokens[: len(part.tokens)].tolist() == part.tokens.tolist()
    assert (reused, encoded) == (0, 1)
    assert read == len(request.prompt) + len(part.tokens) - 1


def test_no_slot_is_of_two_images():
    rng, slots, taken = np.random.default_rng(0), FeatureSlots(20), {}
    for _ in range(300):
        number = int(rng.integers(9))
        key, kept = b"%d" % number, {b"%d" % each for each in rng.integers(9, size=2)}
        if key in slots:
            np.testing.assert_array_equal(slots[key], taken[key])
            continue
        if slots.take(key, number + 1, kept):
            gone = {each for each in taken if each not in slots}
            assert not gone & kept
            taken = {each: own for each, own in taken.items() if each not in gone}
            taken[key] = slots[key]
        else:
            assert sum(len(own) for each, own in taken.items() if each in kept) + number + 1 > 20
        used = np.concatenate(list(taken.values()))
        assert len({*used}) == len(used) and used.max() < 20
    slots = FeatureSlots(4)
    assert slots.take(b"asked for again", 2, ()) and slots.take(b"not", 2, ())
    assert b"asked for again" in slots and slots.take(b"new", 2, ())
    assert b"asked for again" in slots and b"not" not in slots


def test_images_wait_for_room(engine, counted, monkeypatch):
    """Three images of six tokens, in slots for ten."""
    slots = [type(each)(10) for each in engine._runner._features._slots]
    monkeypatch.setattr(engine._runner._features, "_slots", slots)
    requests = [ask(image, 4, image, seed=i) for i, image in enumerate((LARGE, OTHER))]
    _, _, _, encoded = counted([*requests, ask(3, LARGE, OTHER, 9)])
    assert encoded >= 2


SECONDS = ask(3, draw_visual(2, 2, 4, seconds=(0.0, 1.0)), 3)
REFUSED = {
    "no images": ("images", dataclasses.replace(MIXED[1], visuals=())),
    "in another order": ("images", dataclasses.replace(MIXED[1], visuals=(SMALL, LARGE))),
    "no video": ("images", dataclasses.replace(SECONDS, visuals=(draw_visual(2, 2, 4),))),
    "patches": ("patches", ask(dataclasses.replace(LARGE, patches=LARGE.patches[:, :12]), 3)),
    "too large": ("max_pixels", ask(draw_visual(1, 6, 12), 3)),
    "cut": ("image", dataclasses.replace(MIXED[1], prompt=MIXED[1].prompt[:9])),
    "raised": (
        "logit_bias",
        ask(3, LARGE, 4, sampling=dataclasses.replace(ANSWER, logit_bias=((IMAGE, 99.0),))),
    ),
    "apart": (
        "next",
        dataclasses.replace(ask(3, LARGE), prompt=(*[IMAGE] * 3, 5, *[IMAGE] * 3, 5)),
    ),
}


def test_requests_are_refused(engines, shared_engine, subtests):
    engine = engines("deep")
    for name, (word, request) in REFUSED.items():
        with subtests.test(name), pytest.raises(EngineError, match=word):
            engine.sample([request])
    with pytest.raises(EngineError, match="vision"):
        shared_engine.sample([dataclasses.replace(ask(3, LARGE, 4), prompt=(3, 4, 5))])
    scored = engine.score_tokens([3, START, 5, 6])
    assert scored.logprobs[1] == LEAST_LOGPROB < scored.logprobs[2]
    with pytest.raises(EngineError, match="placeholder"):
        engine.score_tokens([3, START, IMAGE, END])


def test_programs_of_text_are_given_nothing_of_images(shared_engine):
    programs = shared_engine.programs
    held, pool = (len(jax.tree.leaves(shapes)) for shapes in programs.shapes())
    prefill = programs.trace("prefill", *programs.sizes.prefill_shapes[0], 3)
    assert len(prefill.jaxpr.in_avals) == held + pool + len(PrefillChunk._fields[:5])
    decode = programs.trace("decode", *programs.sizes.largest, False)
    state = len(DecodeState._fields[:5]) + len(BatchSamplingParams._fields)
    assert len(decode.jaxpr.in_avals) == held + 2 * pool + state + 1


def test_a_piece_holds_images_whole_and_times_tell_pages():
    model = Decoder(DEEP)
    slow = draw_visual(2, 2, 4, seed=3, seconds=(0.0, 3.0))
    keys = [read_prompt(model, ask(3, film, 5)).keys for film in (FILM, FILM, slow)]
    assert keys[0] == keys[1] != keys[2]
    assert {key for key in keys[0] if key >= 0} == {3, 0, 1, 5, START, END}
    where = read_prompt(model, ask(3, LARGE, 4, SMALL, 5))
    assert where.whole_until(0, 4) == 4
    where = dataclasses.replace(where, whole=True)
    assert where.number.tolist() == [-1, -1, *[0] * 6, -1, -1, -1, 1, 1, -1, -1]
    ends = [where.whole_until(0, end) for end in range(1, 16)]
    assert ends == [1, 2, 2, 2, 2, 2, 2, 8, 9, 10, 11, 11, 13, 14, 15]


def test_images_whose_tokens_attend_to_each_other():
    """Pieces of eight tokens, and pages that end within an image."""
    one, other = (draw_visual(1, 4, 4, seed=seed, vision=SIGLIP) for seed in (5, 6))
    stem = (*range(3, 7), one, *range(7, 11), other)
    requests = [ask(*stem, *rest, seed=i) for i, rest in enumerate([(5,), (5,), (9, 6)])]
    requests += [ask(*range(3, 15), one, 5, seed=3), ask(2, one, other, 5, other, 4, seed=4)]
    with opened(GEMMA) as engine:
        for _ in range(2):
            check(requests, engine.sample(requests), GEMMA)
        (pages,) = engine._runner.scheduler.pages
        assert requests[3].prompt[15:17] == (IMAGE, IMAGE)  # of two pages
        for node in [node for node in pages._idle if not node.children]:
            pages._drop(node)
        reused = engine.stats().reused_tokens
        check(requests[3:4], engine.sample(requests[3:4]), GEMMA)
        assert engine.stats().reused_tokens - reused == 16


def test_features_have_room(hollow):
    size = 16 * 3 * 4
    for gb, tokens in ((None, 4 * MAX_TOKENS), (1.0, 4 * MAX_TOKENS), (1e-4, 65), (4.2e-5, 40)):
        engine = hollow(model=DEEP, cache_gb=gb)
        sizes = engine.programs.sizes
        assert (sizes.visual_tokens, engine.programs.feature_bytes()) == (tokens, size)
        keys = [key for key in engine.programs._keys(4) if key[0] in ("features", "encode")]
        assert keys == [("features",), ("encode", PATCHES, PATCHES)]
        held = jax.tree.leaves(engine.shapes()[1][-1])
        assert sum(x.size * x.dtype.itemsize for x in held) == tokens * size
        pages = 2 * sizes.pages * engine.programs.page_bytes()
        assert gb is None or pages + tokens * size <= gb * 1e9
    with pytest.raises(ValueError, match="images"):
        build(model=DEEP, cache_gb=1e-6)


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE)
@pytest.mark.parametrize(
    ("spec", "options", "atol"),
    [
        (DEEP, {"devices": 4, "axes": {"data": 2, "tensor": 2}}, 2e-3),
        (
            SPECS["hybrid"],
            {"devices": 4, "axes": {"data": 2, "tensor": 2}, "kernel": attend_gathered},
            2e-3,
        ),
        (DEEP, {"kv_cache_dtype": "int8"}, 0.02),
        (DEEP, {"quantization": "fp8"}, 0.4),
        (dataclasses.replace(DEEP, moe=MOE.moe), {"record_routes": True}, 2e-3),
    ],
    ids=["mesh", "hybrid mesh", "int8", "fp8", "recorded experts"],
)
def test_images_on_a_mesh_in_narrow_types_and_with_experts(spec, options, atol):
    requests = [*MIXED, *MIXED, ask(3, OTHER, 4)]
    with opened(spec, **options) as engine:
        for _ in range(2):
            answers = engine.sample(requests)
            check(requests, answers, spec, atol=atol)
        for request, answer in zip(requests, answers, strict=True) if spec.moe else ():
            assert len(answer.routes) == len(request.prompt) + len(answer.tokens) - 1

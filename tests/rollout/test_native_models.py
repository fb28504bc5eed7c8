"""The engine on layers that have a state and on prompts with images, against a forward pass."""

import contextlib
import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import NO_INPUTS, RowInputs, Visual, VisualTokens, patch_rows
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.vision.tower import encode, placeholders, rotary_positions
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, EngineError, Request, SamplingParams, Stop
from jaxrl_llm.rollout.native.engine import FeatureSlots
from tests.decoders import PackedTokens, forward_rows
from tests.guarded import MODEL, NATIVE
from tests.rollout.conftest import MAX_TOKENS, draw_prompt, log_softmax, opened, weights
from tests.rollout.test_requests import LETTERS, Letters
from tests.specs import DELTA, DENSE, tiny_vision
from tests.waiting import wait_until

IMAGE, VIDEO, START, END = 27, 28, 29, 30
IDS = {"image_id": IMAGE, "video_id": VIDEO, "marks": (START, END)}
VISION = tiny_vision(layers=2, ff_width=12, out_size=16, **IDS)
ROTARY = {"head_dim": 8, "mrope_sections": (2, 1, 1), "mrope_interleaved": True}
SIGLIP = dataclasses.replace(VISION, kind="siglip", frames_per_patch=1, video_id=None)
DEEP = dataclasses.replace(DENSE, vision=dataclasses.replace(VISION, deep_layers=(0, 1)), **ROTARY)
HYBRID = dataclasses.replace(DELTA, vision=VISION, **ROTARY)
GEMMA = dataclasses.replace(DENSE, vision=SIGLIP, window=7, windowed_layers=(True, False))
PATCHES = MAX_TOKENS * VISION.group
SIZES = {"PREFILL_LENGTHS": (8,), "PREFILL_TOKENS": (32,)}
SIZES |= {"PATCH_LENGTHS": (64,), "SHORT_FRAME": 16}
opened = functools.partial(opened, sizes=SIZES, steps=5)
MODELS = {
    "states in place": (DELTA, {"steps": 4, "kernel": attend_gathered, "cache_gb": 20e-6}),
    "images in place": (DEEP, {"kernel": attend_gathered, "cache_gb": 40.6e-6}),
    "images and states": (HYBRID, {}),
}
ANSWER = SamplingParams(6)


def draw_visual(*grid, seed=0, seconds=(), vision=VISION):
    rng = np.random.default_rng(seed)
    patches = rng.integers(0, 256, (int(np.prod(grid)), vision.patch_width), np.uint8)
    digest = hashlib.sha256(repr((grid, seconds)).encode() + patches.tobytes()).digest()
    return Visual(patches, grid, 2, digest, seconds)


LARGE, OTHER = (draw_visual(1, 4, 6, seed=seed) for seed in (0, 2))
SMALL = draw_visual(1, 2, 4, seed=1)
FILM = draw_visual(2, 2, 4, seed=3, seconds=(0.0, 0.5))


def words(length, seed=0):
    """Return token ids that are of no image."""
    return tuple(token % 26 for token in draw_prompt(length, seed))


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
    """(name) -> an engine, compiled once, that remembers nothing."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def made(name):
            return stack.enter_context(opened(MODELS[name][0], **MODELS[name][1]))

        def get(name):
            made(name).load(weights(MODELS[name][0]), version=0)
            return made(name)

        yield get


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def spec(name):
    return MODELS[name][0]


@pytest.fixture
def engine(name, engines):
    engine = engines(name)
    yield engine

    def is_free():
        pools = engine._runner.scheduler.pages
        return all((p.available, p.available_slots) == (p.count, p.slots) for p in pools)

    wait_until(is_free)


@functools.partial(jax.jit, static_argnums=1)
def forward(params, spec, tokens, index, rotary, patches):
    """Return logits of a row by the trainer's forward pass, its images encoded by themselves."""
    positions, inputs = jnp.arange(MAX_TOKENS)[None], NO_INPUTS
    if spec.vision:
        visual = VisualTokens(index, encode(params["vision"], spec.vision, patches))
        inputs = RowInputs(None, visual, rotary)
    rows = PackedTokens(tokens, positions, jnp.ones_like(positions), inputs)
    return Decoder(spec).logits(params, forward_rows(params, spec, rows)[0])[0]


def check(requests, answers, spec, version=0):
    """Compare answers with the trainer's forward pass; a norm of states magnifies small outputs."""
    params = weights(spec, version)
    for request, answer in zip(requests, answers, strict=True):
        tokens = np.array([*request.prompt, *answer.tokens])
        row = np.concatenate([tokens, np.full(MAX_TOKENS - len(tokens), 5)])
        index = rotary = patches = None
        if spec.vision:
            is_visual = np.isin(row, placeholders(spec.vision))
            index = np.where(is_visual, np.cumsum(is_visual) - 1, -1)[None]
            patches = patch_rows(spec.vision, [request.visuals], PATCHES)
            if spec.mrope_sections:
                rotary = rotary_positions(spec.vision, row, request.visuals)[0][None]
        logits = np.array(forward(params, spec, row[None], index, rotary, patches))
        if spec.vision:
            logits[:, spec.vision.never_sampled] = -np.inf
        after = log_softmax(logits)[len(request.prompt) - 1 : len(tokens) - 1]
        expected = after[np.arange(len(answer.tokens)), answer.tokens]
        np.testing.assert_allclose(answer.logprobs, expected, atol=2e-3)
        if request.sampling.temperature == 0:
            assert answer.tokens.tolist() == after.argmax(-1).tolist()


@pytest.fixture
def counted(engine, spec, monkeypatch):
    """(requests, version) -> answers, compared; tokens read and reused, and images encoded."""
    encoded = []

    def encode_and_count(*size):
        def run(params, held, patches, *rest):
            encoded.append(int(np.unique(np.asarray(patches.frames)[patches.frames > 0]).size))
            return program(*size)(params, held, patches, *rest)

        return run

    program = engine.programs.encode
    monkeypatch.setattr(engine.programs, "encode", encode_and_count)

    def sample(requests, version=0):
        before, seen = engine.stats(), sum(encoded)
        answers = engine.sample(requests)
        after = engine.stats()
        check(requests, answers, spec, version)
        read = after.prompt_tokens - before.prompt_tokens
        return answers, read, after.reused_tokens - before.reused_tokens, sum(encoded) - seen

    return sample


def test_a_group_reads_and_encodes_its_prompt_once(counted, spec):
    groups = [(ask(*words(n, 1)), 0) for n in (20, 17, 2)]  # ends of pages
    groups += [(MIXED[2], 2)] if spec.vision else []
    for request, images in groups:
        ways = [dataclasses.replace(ANSWER, temperature=t) for t in (0.0, 1.0, 1.0)]
        group = [dataclasses.replace(request, sampling=w, seed=s) for s, w in enumerate(ways)]
        answers, read, reused, encoded = counted(group)
        length = len(request.prompt) - 1
        assert (read, reused, encoded) == (length, 2 * length, images)
        assert answers[1].tokens.tolist() != answers[2].tokens.tolist()
    counted([ask(token, seed=token) for token in (3, 3, 4)])


def test_a_later_turn_reads_what_is_new_and_new_weights_read_all(engine, counted, spec):
    first = ask(*words(9, 7), *[OTHER, 7, 8] * (spec.vision is not None))
    (answer,), *_ = counted([first])
    talk = (*first.prompt, *answer.tokens.tolist())
    turns = [ask(5, 9, 2), ask(5, 9, 2), ask(6, 1, 1)]  # in the end they branch off
    turns += [ask(SMALL, 11)] if spec.vision else []
    for new in turns:
        visuals = (*first.visuals, *new.visuals)
        second = dataclasses.replace(first, prompt=(*talk, *new.prompt), visuals=visuals)
        _, read, reused, encoded = counted([second])
        assert read + reused == len(second.prompt) - 1
        assert reused >= len(talk) - 1 and encoded == len(new.visuals)
    engine.load(weights(spec, 1), version=1)
    _, read, _, encoded = counted([second], version=1)
    assert (read, encoded) == (len(second.prompt) - 1, len(second.visuals))


@pytest.mark.parametrize("name", ["states in place", "images in place"])
def test_who_gives_its_pages_back_goes_on_as_if_it_had_not(engine, counted, spec):
    length, sampling = (1, SamplingParams(24)) if spec.vision else (7, SamplingParams(33))
    rests = [(LARGE, 7), (OTHER, 7)] * 2 if spec.vision else [()] * 4
    prompts = [(*words(length, seed), *rest) for seed, rest in enumerate(rests)]
    requests = [ask(*one, seed=seed, sampling=sampling) for seed, one in enumerate(prompts)]
    assert engine.programs.sizes.pages < 4 * 3  # of 16 tokens
    before = engine.stats().preemptions
    counted(requests)
    assert engine.stats().preemptions > before


def test_an_answer_that_was_left_goes_on_from_where_it_was(engine, counted, spec):
    prompt = (*words(8, 5), *[LARGE, 7] * (spec.vision is not None))
    requests = [ask(*prompt, seed=seed, sampling=SamplingParams(20)) for seed in range(2)]
    parts = engine.sample_until(requests, 1, Stop(turns=2))
    assert all(0 < len(part.tokens) < 20 for part in parts)
    drawn = [dataclasses.replace(r, drawn=p) for r, p in zip(requests, parts, strict=True)]
    before = engine.stats()
    engine.load(weights(spec, 1), version=1, keep=True)
    answers, after = engine.sample(drawn), engine.stats()
    assert after.prompt_tokens == before.prompt_tokens
    known = sum(len(requests[0].prompt) - 1 + len(part.tokens) for part in parts)
    assert after.reused_tokens - before.reused_tokens == known
    engine.load(weights(spec), version=0)
    whole, *_ = counted(requests)
    for part, answer, unchanged in zip(parts, answers, whole, strict=True):
        count = len(part.tokens)
        assert answer.tokens[:count].tolist() == unchanged.tokens[:count].tolist()
        assert answer.versions.tolist() == [0] * count + [1] * (20 - count)
    again = engine.sample(drawn)  # of other weights: nothing is kept
    assert again[0].tokens.tolist() == whole[0].tokens.tolist()


@pytest.mark.parametrize("name", ["states in place", "images and states"])
def test_an_answer_that_stops_within_a_chunk_is_gone_on_with(engine, counted, spec, monkeypatch):
    request = Request(words(10, 4), SamplingParams(12, temperature=0.0), 0)
    (whole,) = engine.sample([request])
    for part in (engine, engine._runner):
        monkeypatch.setattr(part, "_tokenizer", Letters)
    # a state that a text has cut has seen more than is left of it: it begins where the prompt ends
    stop = int(whole.tokens[1])
    for stops, expected in (({"stop_ids": (stop,)}, 2), ({"stop": (LETTERS[stop],)}, 4)):
        engine.load(weights(spec), version=0)
        sampling = dataclasses.replace(request.sampling, **stops)
        (answer,) = engine.sample([dataclasses.replace(request, sampling=sampling)])
        assert len(answer.tokens) == 2  # of chunks of four and of five
        second = Request((*request.prompt, *answer.tokens.tolist(), 8, 8), SamplingParams(5), 0)
        assert counted([second])[1] == expected


def test_a_failure_and_a_sleep_leave_nothing_behind(engine, spec, monkeypatch):
    requests = [Request(words(12, seed), SamplingParams(20), seed) for seed in range(2)]

    def fail(*_):
        raise RuntimeError("out_of_memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_append", fail)
        with pytest.raises(RuntimeError, match="out_of_memory"):
            engine.sample(requests)
    check(requests, engine.sample(requests), spec)
    engine.sleep()
    engine.wake()
    check(requests, engine.sample(requests), spec)


TAIL, MEMORY = 2 * (2 * 6 + 2 * 5) * 3 * 4, 4 * 6 * 5 * 4
STATE, PAGE_BYTES = 2 * (TAIL + MEMORY), 16 * 2 * 2 * 4 * 4  # of two layers, and of one


def test_room_is_shared_by_pages_and_states(hollow):
    for options, slots, pages in (
        ({"cached_sequences": 12}, 4 + 2, 16),  # as pages: for those that run
        ({"cached_sequences": 12, "cache_gb": 1.0}, 12 + 2, 48),
        ({"cache_gb": 2 * (8 * PAGE_BYTES + 3 * STATE) / 1e9}, 3, 8),  # half of it
        ({"cache_gb": 2 * (4 * PAGE_BYTES + 2 * STATE) / 1e9}, 2, 4),  # the least
    ):
        shapes = hollow(model=DELTA, **options).programs.sizes
        assert (shapes.slots, shapes.pages) == (slots, pages)
    with pytest.raises(ValueError, match="cache"):
        hollow(model=DELTA, cache_gb=2 * 4 * PAGE_BYTES / 1e9)


with_images = pytest.mark.parametrize("name", ["images in place", "images and states"])


@with_images
def test_text_and_images_together(counted):
    greedy = dataclasses.replace(ANSWER, temperature=0.0)
    few = dataclasses.replace(ANSWER, top_k=3, top_p=0.8)
    others = [dataclasses.replace(MIXED[1], sampling=sampling) for sampling in (greedy, few)]
    answers, _, _, encoded = counted([*MIXED, *others])
    assert encoded == len({LARGE.key, SMALL.key}) + FILM.grid[0]
    assert not {*np.concatenate([a.tokens for a in answers])} & {*VISION.never_sampled}


@with_images
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


APART = [IMAGE] * 3
RAISED = SamplingParams(6, logit_bias=((IMAGE, 9),))
REFUSED = {
    "images": dataclasses.replace(MIXED[1], visuals=()),
    "patches": ask(dataclasses.replace(LARGE, patches=LARGE.patches[:, :12]), 3),
    "max_pixels": ask(draw_visual(1, 6, 12), 3),
    "logit_bias": ask(3, LARGE, 4, sampling=RAISED),
    "next": dataclasses.replace(ask(3, LARGE), prompt=(*APART, 5, *APART, 5)),
}


def test_requests_are_refused(engines, subtests):
    engine = engines("images in place")
    for word, request in REFUSED.items():
        with subtests.test(word), pytest.raises(EngineError, match=word):
            engine.sample([request])
    scored = engine.score_tokens([3, START, 5, 6])
    assert scored.logprobs[1] == LEAST_LOGPROB < scored.logprobs[2]
    with pytest.raises(EngineError, match="placeholder"):
        engine.score_tokens([3, START, IMAGE, END])


def test_images_whose_tokens_attend_to_each_other():
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


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE)
@pytest.mark.parametrize(
    ("spec", "kernel"), [(DEEP, None), (HYBRID, attend_gathered)], ids=["images", "hybrid"]
)
def test_images_on_a_mesh(spec, kernel):
    requests = [*MIXED, *MIXED, ask(3, OTHER, 4)]
    with opened(spec, devices=4, axes={"data": 2, "tensor": 2}, kernel=kernel) as engine:
        for _ in range(2):
            check(requests, engine.sample(requests), spec)

import asyncio
import contextlib
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from jaxrl_llm import kernel_choice
from jaxrl_llm.kernel_choice import choose_cache_kernel
from jaxrl_llm.models.kernels import KernelChoice
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.rollout.engine import Completion, Request, SamplingParams
from jaxrl_llm.rollout.native import programs
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.guarded import MODEL, NATIVE
from tests.rollout import conftest
from tests.rollout.conftest import build, check_logprobs, check_same, draw_prompt, opened, weights
from tests.specs import DENSE, GPT_OSS, SPECS
from tests.waiting import wait_until

pytestmark = pytest.mark.guards(*MODEL, *NATIVE)


def greedy(new=8, **options):
    return SamplingParams(max_new_tokens=new, temperature=0.0, **options)


def mixed():
    """Greedy and seeded ones; prompts of all lengths, some of which begin alike."""
    rng = np.random.default_rng(5)
    ways = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05, "stop_ids": (3, 9)},
        {"temperature": 0.0, "repetition_penalty": 1.3, "top_logprobs": 2},
        {"temperature": 1.0, "logit_bias": ((4, 2.0), (7, -100.0))},
    ]
    requests = []
    for seed in range(28):
        length = int(rng.choice([1, 2, 7, 15, 16, 17, 24, 30]))
        new = int(rng.integers(1, 41 - length))
        start = draw_prompt(30)[:length] if seed % 3 else draw_prompt(length, seed)
        requests.append(Request(start, SamplingParams(new, **ways[seed % len(ways)]), seed))
    return requests


MIXED = mixed()
SHORT = [request for request in MIXED if len(request.prompt) <= 16]


@pytest.fixture(scope="module")
def expected(shared_engine):
    """The answers of an engine with room for all."""
    shared_engine.load(weights(), version=0)
    return shared_engine.sample(MIXED)


def test_answers_are_those_of_the_forward_pass(expected):
    ranks = []
    for request, answer in zip(MIXED, expected, strict=True):
        check_logprobs(weights(), request, answer)
        assert (answer.tokens.dtype, answer.logprobs.dtype) == (np.int32, np.float32)
        assert answer.finish == "stop" or len(answer.tokens) == request.sampling.max_new_tokens
        after = conftest.drawn_from(weights(), request, answer)
        if request.sampling.top_k:
            ranks += (after > np.take_along_axis(after, answer.tokens[:, None], 1)).sum(1).tolist()
    assert {a.finish for a in expected} == {"stop", "length"}
    assert 0 < max(ranks) < 5


def test_sampling_follows_the_policy(engine):
    start, count = draw_prompt(5), 600
    answers = engine.sample([Request(start, SamplingParams(1), seed) for seed in range(count)])
    frequencies = np.bincount([int(a.tokens[0]) for a in answers], minlength=32) / count
    p = np.exp(conftest.log_softmax(conftest.next_logits(weights(), start)[-1]))
    assert np.all(np.abs(frequencies - p) <= 4.5 * np.sqrt(p * (1 - p) / count) + 1e-3)
    seeded = [Request(start, SamplingParams(16), seed) for seed in (3, 3, 2**32 - 1)]
    same, again, other = engine.sample(seeded)
    assert same.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()


def test_stop_tokens_end_an_answer_and_belong_to_it(engine):
    start = draw_prompt(5)
    (whole,) = engine.sample([Request(start, greedy(16), 0)])
    tokens = whole.tokens.tolist()
    late = next(i for i in range(3, 16) if tokens[i] not in tokens[:i])
    unused = next(v for v in range(32) if v not in tokens)
    expected = {
        (unused, tokens[late], *[unused] * 6): (late + 1, "stop"),
        (unused,): (16, "length"),
        (tokens[0],): (1, "stop"),
    }
    answers = engine.sample([Request(start, greedy(16, stop_ids=stop), 0) for stop in expected])
    for answer, (length, finish) in zip(answers, expected.values(), strict=True):
        assert answer.tokens.tolist() == tokens[:length]
        np.testing.assert_allclose(answer.logprobs, whole.logprobs[:length], atol=1e-6)
        assert answer.finish == finish
    exact = Request(start, greedy(late + 1, stop_ids=(tokens[late],)), 0)
    assert engine.sample([exact])[0].finish == "stop", "also where it is the last that fits"


def gb_of(pages):
    """Return the GB that hold so many pages of the dense model, and rows."""
    with contextlib.closing(build()) as engine:
        return (pages + 0.5) * 2 * engine.programs.page_bytes() / 1e9


@pytest.fixture(scope="module")
def variant():
    """(name) -> an engine, compiled once, that differs from the shared one."""
    pieces = {"PREFILL_LENGTHS": (8,), "PREFILL_TOKENS": (16,), "SHORTEST_ROW": 16}
    cramped = {"steps": 7, "max_running_sequences": 6, "cache_gb": gb_of(7)}
    cramped["sizes"] = {"FEWEST_ROWS": 3, "PREFILL_LENGTHS": (16,)}
    variants = {
        "pieces": {"steps": 1, "max_running_sequences": 3, "sizes": pieces},
        "cramped": cramped,
        "in place": cramped | {"cache_gb": cramped["cache_gb"] / 2, "kernel": attend_gathered},
    }
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(opened(**variants[name])))


VARIANTS = pytest.mark.parametrize("name", ["cramped", "pieces", "in place"])


@VARIANTS
def test_answers_depend_on_nothing_but_the_request(variant, expected, name):
    engine = variant(name)

    async def arrive():
        return await asyncio.gather(*(engine.generate(request) for request in MIXED))

    check_same(asyncio.run(arrive()), expected)
    after = engine.stats()
    assert (after.running, after.waiting, after.cached_tokens) == (0, 0, 0)
    check_same(engine.sample(MIXED[::-1])[::-1], expected)  # most prompts are cached


@pytest.mark.parametrize("name", ["cramped", "in place"])
def test_who_gives_its_pages_back_goes_on_as_if_it_had_not(variant, engine, name):
    requests = [Request(draw_prompt(7, seed), SamplingParams(33), seed) for seed in range(3)]
    variant(name).load(weights(), version=0)
    before = variant(name).stats().preemptions
    check_same(variant(name).sample(requests), engine.sample(requests))
    assert variant(name).stats().preemptions > before


async def listen(engine, request, most):
    """Return an answer from its stream, which is left after so many pieces."""
    pieces = []
    async with contextlib.aclosing(engine.stream(request)) as stream:
        async for piece in stream:
            pieces.append(piece)
            if len(pieces) == most:
                break
    whole = [np.concatenate([piece[i] for piece in pieces]) for i in range(3)]
    return Completion(*whole, *pieces[-1][3:])


def test_nothing_is_lost_and_nothing_hangs_whatever_is_done_meanwhile(variant):
    engine, over = variant("cramped"), threading.Event()
    engine.load(weights(), version=0)
    asked = [dataclasses.replace(request, seed=n) for n, request in enumerate(MIXED * 4)]

    async def ask(number, request):
        if number % 5 == 0:  # given up
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.generate(request), 0.05)
        if number % 2:
            return await engine.generate(request)
        return await listen(engine, request, 1 if number % 3 else 99)

    async def meddle():
        version = 0
        while not over.is_set():
            for stop, go_on in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
                await asyncio.to_thread(stop)
                go_on()
            version += 1
            params = weights(seed=version % 2)
            await asyncio.to_thread(engine.load, params, version, recompute=True)
            await asyncio.sleep(0.02)

    async def story():
        meddling = asyncio.create_task(meddle())
        answers = await asyncio.gather(*(ask(*each) for each in enumerate(asked)))
        over.set()
        await meddling
        return answers

    for request, answer in zip(asked, asyncio.run(asyncio.wait_for(story(), 300)), strict=True):
        versions = answer.versions.tolist()
        assert versions == sorted(versions)
        assert answer.finish != "length" or len(versions) == request.sampling.max_new_tokens
        for version in {*versions}:
            expected = conftest.expected_logprobs(weights(seed=version % 2), request, answer)
            mine = answer.versions == version
            np.testing.assert_allclose(answer.logprobs[mine], expected[mine], atol=5e-5)
    (pages,) = engine._runner.scheduler.pages
    wait_until(lambda: pages.available == pages.count)  # the step that drops those who left


def test_the_variants_are_what_they_are_called(variant):
    pieces, cramped = variant("pieces").programs.sizes, variant("cramped").programs.sizes
    assert (pieces.rows, pieces.widths, pieces.prefill_shapes) == ((3,), (32, 48), ((2, 8),))
    assert (cramped.rows, cramped.pages, pieces.steps, cramped.steps) == ((3, 6), 7, 1, 7)
    assert variant("in place").programs.sizes == cramped._replace(has_rows=False)


@VARIANTS
def test_a_second_turn_reads_what_is_new(variant, engine, name):
    shared, engine = engine, variant(name)
    engine.load(weights(), version=0)
    first = Request(draw_prompt(13, 7), SamplingParams(9), 3)
    (answer,) = engine.sample([first])
    talk = (*first.prompt, *answer.tokens.tolist())
    second = Request((*talk, 5, 9, 2), SamplingParams(8), 4)
    before = engine.stats()
    (completion,) = engine.sample([second])
    after = engine.stats()
    # the newest token of an answer is in no cache, and the last of a prompt is decoded
    assert after.reused_tokens - before.reused_tokens == len(talk) - 1
    assert after.prompt_tokens - before.prompt_tokens == 3
    check_logprobs(weights(), second, completion)
    check_same([completion], shared.sample([second]))
    # it went on in pages that the first has written, which are still the first's
    check_same(engine.sample([first]), [answer])
    engine.load(weights(seed=1), version=1)
    (renewed,) = engine.sample([second])
    assert engine.stats().prompt_tokens - after.prompt_tokens == len(second.prompt) - 1
    check_logprobs(weights(seed=1), second, renewed)
    assert renewed.versions.tolist() == [1] * 8
    engine.load(weights(), version=0)


def test_a_cache_without_room_for_the_longest_sequence_is_refused():
    with pytest.raises(ValueError, match="cache"):
        build(cache_gb=gb_of(3))
    build(cache_gb=gb_of(4)).close()


KERNEL = functools.partial(attend_pages, interpret=True)
WIDE = dataclasses.replace(GPT_OSS, head_dim=16, moe=None, score_softcap=20.0)
ON_MESH = {"devices": 4, "axes": {"data": 2, "tensor": 2}}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("latent", {}),
        ("latent", {"kernel": attend_gathered}),
        ("gpt-oss", {"kernel": attend_gathered}),
        *(slow("sigmoid", {}), slow("delta", ON_MESH)),
        slow("delta", {"kernel": attend_gathered} | ON_MESH),
        slow(WIDE, {"kernel": KERNEL}),
        slow(WIDE, {"kernel": attend_gathered} | ON_MESH),
        slow(WIDE, {"kernel": KERNEL} | ON_MESH),
    ],
)
def test_families_over_rows_and_in_place(model, options):
    requests = [Request(draw_prompt(n), SamplingParams(7), seed=n) for n in (1, 5, 19, 30)]
    few = {"PREFILL_LENGTHS": (16,), "PREFILL_TOKENS": (64,)}
    atol = 2e-3 if model == "delta" else 1e-4
    with opened(model, sizes=few, steps=5, **options) as engine:
        for _ in range(2):  # at the second time prompts are cached
            for request, answer in zip(requests, engine.sample(requests), strict=True):
                check_logprobs(weights(model), request, answer, model, atol=atol)
        pages = engine.programs.sizes.pages
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner.pool))
    if model == "latent":
        spec, widths = SPECS[model], SPECS[model].latent
        assert spec.for_decoding.latent.absorbed
        assert held == 4 * spec.layers * pages * 16 * (widths.kv_rank + widths.rope_width)


@functools.cache
def on_mesh(model, axes):
    """Return answers, where weights and cache are, and the checksum."""
    options = {"devices": 8, "axes": dict(axes)} if axes else {"axes": {"data": 1}}
    options |= {"max_running_sequences": 8, "steps": 8}
    with contextlib.closing(build(model=model, **options)) as engine:
        receipt = engine.load(weights(model), version=3)
        answers = engine.sample(SHORT)
        held = engine._params["embed"].sharding, engine._runner.pool.keys[0].sharding
        return answers, *held, receipt.checksum


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        *(("dense", {"data": 8}), ("dense", {"data": 4, "tensor": 2})),
        *(slow("dense", {"fsdp": 8}), slow("dense", {"fsdp": 2, "tensor": 4})),
        *(slow("dense", {"tensor": 8}), slow("moe", {"data": 8}), slow("moe", {"expert": 8})),
        slow("moe", {"expert": 2, "data": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_answers(model, axes):
    answers, embed, cache, checksum = on_mesh(model, tuple(axes.items()))
    expected, _, _, wanted_checksum = on_mesh(model, ())
    assert checksum == wanted_checksum
    check_same(answers, expected, atol=2e-5)
    tensor = axes.get("tensor", 1)
    held = 32 // tensor, 16 // axes.get("fsdp", 1) // axes.get("expert", 1)
    assert embed.shard_shape((32, 16)) == held
    own, _, heads, _, _ = cache.shard_shape((8 // tensor, 4, 2, 4, 16))
    assert (own, heads) == (1, 1 if tensor == 2 else 2)


def test_pages_are_read_in_place_where_every_process_can(monkeypatch):
    def choose(asked="auto"):
        monkeypatch.setattr(kernel_choice, "_DECIDED", {})
        return choose_cache_kernel(asked, DENSE, layout, "float32")

    layout = Layout(make_mesh({}, jax.devices()[:1]))
    assert {(choose(asked).name, choose(asked)[2]) for asked in ("auto", "xla")} == {("xla", None)}
    can = KernelChoice("triton", "it agrees", attend_gathered)
    monkeypatch.setattr(kernel_choice, "choose_paged_kernel", lambda *_, **__: can)
    assert choose() == can
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, ("xla", "no memory")])
    assert choose() == ("xla", "no memory", None)


def test_scores_are_those_of_a_forward_pass(monkeypatch, hollow):
    monkeypatch.setattr(programs, "READ_AT_ONCE", 8)
    engine = hollow(devices=2)  # a row of each part is read
    engine.load(weights(), version=0)
    for length in (1, 2, 19, 39):
        tokens = np.random.default_rng(length).integers(0, 32, length).tolist()
        scored = engine.score_tokens(tokens)
        logprobs = conftest.log_softmax(conftest.next_logits(weights(), tokens))[:-1]
        assert scored.logprobs.shape == (length,) and scored.logprobs[0] == 0
        drawn = logprobs[np.arange(length - 1), tokens[1:]]
        np.testing.assert_allclose(scored.logprobs[1:], drawn, atol=1e-5)
        best = np.sort(logprobs, axis=1)[:, ::-1][:, : scored.top_ids.shape[1]]
        np.testing.assert_allclose(scored.top_logprobs[1:], best, atol=1e-5)
        at = np.take_along_axis(logprobs, scored.top_ids[1:], axis=1)
        np.testing.assert_allclose(scored.top_logprobs[1:], at, atol=1e-5)

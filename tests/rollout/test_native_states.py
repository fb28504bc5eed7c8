"""The engine on layers that have a state: it draws what a forward pass does, and reads no more."""

import asyncio
import contextlib
import dataclasses
import functools
from types import MappingProxyType

import jax
import numpy as np
import pytest

from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.rollout.engine import Request, SamplingParams, Stop
from tests.guarded import MODEL, NATIVE
from tests.rollout.conftest import check_logprobs, draw_prompt, opened, weights
from tests.waiting import wait_until

ATOL = 2e-3  # 5e-4 is what one bit of the weights can change: a norm magnifies small outputs


@pytest.fixture(scope="module")
def engines():
    """(name) -> an engine, compiled once: with room for all or cramped, over rows or in place."""
    sizes = {"PREFILL_LENGTHS": (16,), "PREFILL_TOKENS": (64,)}
    options = {
        "rows": {"steps": 5},
        "in place": {"steps": 4, "kernel": attend_gathered, "cache_gb": 20e3 / 1e9},
    }
    with contextlib.ExitStack() as stack:

        @functools.cache
        def made(name):
            return stack.enter_context(opened("delta", sizes=sizes, **options[name]))

        def get(name):
            made(name).load(weights("delta"), version=0)
            return made(name)

        yield get


@pytest.fixture(params=["rows", "in place"])
def engine(request, engines):
    """An engine that remembers nothing."""
    engine = engines(request.param)
    yield engine
    wait_until(functools.partial(is_free, engine))


def is_free(engine):
    pools = engine._runner.scheduler.pages
    return all((p.available, p.available_slots) == (p.count, p.slots) for p in pools)


def check(requests, answers, version=0):
    for request, answer in zip(requests, answers, strict=True):
        check_logprobs(weights("delta", version), request, answer, "delta", atol=ATOL)


def counted(engine, requests):
    """Return the answers, and how many tokens were read and found for them."""
    before = engine.stats()
    answers = engine.sample(requests)
    after = engine.stats()
    read = after.prompt_tokens - before.prompt_tokens
    return answers, read, after.reused_tokens - before.reused_tokens


def test_a_group_reads_its_prompt_once(engine):
    for length in (20, 17, 2):  # it ends in a page, with one, and before the first ends
        group = [
            Request(draw_prompt(length, 1), SamplingParams(9, temperature=t), s)
            for s, t in enumerate((0.0, 1.0, 1.0))
        ]
        answers, read, reused = counted(engine, group)
        check(group, answers)
        assert (read, reused) == (length - 1, 2 * (length - 1))
        assert answers[1].tokens.tolist() != answers[2].tokens.tolist()
    requests = [Request((token,), SamplingParams(7), token) for token in (3, 3, 4)]
    check(requests, counted(engine, requests)[0])


def test_a_second_turn_reads_what_is_new(engine):
    first = Request(draw_prompt(13, 7), SamplingParams(9), 3)
    (answer,), _, _ = counted(engine, [first])
    talk = (*first.prompt, *answer.tokens.tolist())
    for new in ((5, 9, 2), (5, 9, 2), (6, 1, 1)):  # in the end they branch off
        second = Request((*talk, *new), SamplingParams(8), 4)
        answers, read, reused = counted(engine, [second])
        check([second], answers)
        assert read + reused == len(second.prompt) - 1
        assert reused >= len(talk) - 1
    engine.load(weights("delta", 1), version=1)
    answers, read, _ = counted(engine, [second])
    assert read == len(second.prompt) - 1
    check([second], answers, 1)


def test_an_answer_that_stops_within_a_chunk_is_gone_on_with(engine, monkeypatch):
    request = Request(draw_prompt(10, 4), SamplingParams(12, temperature=0.0), 0)
    (whole,) = engine.sample([request])
    words = [chr(ord("A") + token) for token in range(32)]

    class Letters:
        added_tokens_decoder = MappingProxyType({})

        def decode(self, ids, **_):
            return "".join(words[i] for i in ids)

    for part in (engine, engine._runner):
        monkeypatch.setattr(part, "_tokenizer", Letters)
    by_text = {"stop": (words[whole.tokens[1]],)}
    # a state that a text has cut has seen more than is left of it: it begins where the prompt ends
    for stops, expected in (({"stop_ids": (int(whole.tokens[1]),)}, 2), (by_text, 4)):
        engine.load(weights("delta"), version=0)
        sampling = dataclasses.replace(request.sampling, **stops)
        (answer,) = engine.sample([dataclasses.replace(request, sampling=sampling)])
        assert len(answer.tokens) == 2  # of chunks of four and of five
        second = Request((*request.prompt, *answer.tokens.tolist(), 8, 8), SamplingParams(5), 0)
        answers, read, _ = counted(engine, [second])
        check([second], answers)
        assert read == expected


STEM = draw_prompt(30)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([STEM[:21], STEM[:24]], [0, 20]),
        ([STEM[:21], STEM[:20]], [0, 0]),
        ([STEM[:9], STEM[:21]], [0, 8]),
        # the second leaves a state at the end of the page that it shares
        ([(*STEM[:18], last, 1) for last in (1, 2, 3)], [0, 0, 16]),
    ],
)
def test_it_goes_on_only_from_where_a_state_is(engine, starts, expected):
    reuse = []
    for start in starts:
        request = Request(start, SamplingParams(3, temperature=0.0), 1)
        answers, _, reused = counted(engine, [request])
        check([request], answers)
        reuse.append(reused)
    assert reuse == expected


def test_who_gives_its_pages_back_goes_on_as_if_it_had_not(engines):
    engine = engines("in place")
    requests = [Request(draw_prompt(7, seed), SamplingParams(33), seed) for seed in range(4)]
    assert engine.programs.sizes.pages < 4 * 3  # of 16 tokens
    before = engine.stats().preemptions
    check(requests, engine.sample(requests))
    assert engine.stats().preemptions > before
    wait_until(functools.partial(is_free, engine))


def test_an_answer_that_was_left_goes_on_from_its_state(engine):
    requests = [Request(draw_prompt(18, 5), SamplingParams(20), seed) for seed in range(2)]
    parts = engine.sample_until(requests, 1, Stop(turns=2))
    assert all(0 < len(part.tokens) < 20 for part in parts)
    drawn = [
        dataclasses.replace(request, drawn=part)
        for request, part in zip(requests, parts, strict=True)
    ]
    engine.load(weights("delta", 1), version=1, keep=True)
    answers, read, reused = counted(engine, drawn)
    assert (read, reused) == (0, sum(17 + len(part.tokens) for part in parts))
    engine.load(weights("delta"), version=0)
    whole = engine.sample(requests)
    for part, answer, unchanged in zip(parts, answers, whole, strict=True):
        count = len(part.tokens)
        assert answer.tokens[:count].tolist() == unchanged.tokens[:count].tolist()
        assert answer.versions.tolist() == [0] * count + [1] * (20 - count)
    check(requests, whole)
    answers, read, reused = counted(engine, drawn)  # of other weights: nothing is kept
    assert answers[0].tokens.tolist() == whole[0].tokens.tolist()


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_in_the_middle_of_an_answer(engine, recompute):
    request = Request(draw_prompt(11, 6), SamplingParams(24), 7)

    async def interrupted():
        pieces = engine.stream(request)
        received = [await anext(pieces)]
        await asyncio.to_thread(engine.load, weights("delta", 1), 1, recompute=recompute)
        return received + [piece async for piece in pieces]

    pieces = asyncio.run(asyncio.wait_for(interrupted(), 60))
    tokens, logprobs, versions = (np.concatenate([p[i] for p in pieces]) for i in range(3))
    count = int((versions == 0).sum())
    assert versions.tolist() == [0] * count + [1] * (24 - count)
    before, after = (
        pieces[-1]._replace(tokens=tokens[part], logprobs=logprobs[part])
        for part in (slice(count), slice(count, None))
    )
    check([request], [before])
    if count < 24:
        rest = dataclasses.replace(request, prompt=(*request.prompt, *before.tokens.tolist()))
        stale = contextlib.nullcontext() if recompute else pytest.raises(AssertionError)
        with stale:
            check([rest], [after], 1)


def test_sleep_failures_and_who_gives_up_leave_nothing_behind(engine, monkeypatch):
    requests = [Request(draw_prompt(12, seed), SamplingParams(20), seed) for seed in range(3)]
    expected = engine.sample(requests)

    async def race():
        others = [asyncio.ensure_future(engine.generate(r)) for r in requests[1:]]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(requests[0]), timeout=0.001)
        await asyncio.to_thread(engine.sleep)
        assert engine._runner.pool is None
        engine.wake()
        return await asyncio.gather(*others)

    answers = asyncio.run(asyncio.wait_for(race(), 60))
    for answer, want in zip(answers, expected[1:], strict=True):
        assert answer.tokens.tolist() == want.tokens.tolist()
    check(requests[1:], answers)

    def fail(*_):
        raise RuntimeError("out_of_memory")

    engine.load(weights("delta"), version=0)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_append", fail)
        with pytest.raises(RuntimeError, match="out_of_memory"):
            engine.sample(requests)
    check(requests, engine.sample(requests))


# ---------------------------------------------------------------------------------------- memory

TAIL, MEMORY = 2 * (2 * 6 + 2 * 5) * 3 * 4, 4 * 6 * 5 * 4
STATE, PAGE_BYTES = 2 * (TAIL + MEMORY), 16 * 2 * 2 * 4 * 4  # of two layers, and of one


def bytes_of(arrays):
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


@pytest.mark.parametrize("name", ["rows", "in place"])
def test_what_it_holds_is_what_it_says(engines, name):
    engine = engines(name)
    engine.sample([Request(draw_prompt(5), SamplingParams(2), 0)])
    shapes, runner = engine.programs.sizes, engine._runner
    assert bytes_of(runner.pool) == shapes.pages * PAGE_BYTES + shapes.slots * STATE
    held = [runner.pool]
    if shapes.has_rows:
        held.append(runner.rows)
        assert bytes_of(runner.rows) == 4 * (3 * PAGE_BYTES + STATE)
    _, told = engine.shapes()
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(told)) == bytes_of(held)
    assert engine.stats().cache_states == shapes.slots


def test_room_is_shared_by_pages_and_states(hollow):
    for options, slots, pages in (
        ({}, 4 + 2, 16),
        ({"cached_sequences": 12}, 4 + 2, 16),  # as pages: for those that run
        ({"cached_sequences": 12, "cache_gb": 1.0}, 12 + 2, 48),
        ({"cache_gb": 2 * (8 * PAGE_BYTES + 3 * STATE) / 1e9}, 3, 8),  # half of it
        ({"cache_gb": 2 * (4 * PAGE_BYTES + 2 * STATE) / 1e9}, 2, 4),  # the least
    ):
        shapes = hollow(model="delta", **options).programs.sizes
        assert (shapes.slots, shapes.pages) == (slots, pages)
    with pytest.raises(ValueError, match="cache"):
        hollow(model="delta", cache_gb=2 * 4 * PAGE_BYTES / 1e9)


# ---------------------------------------------------------------------------------------- meshes


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE)
@pytest.mark.parametrize(
    "options",
    [{"devices": 4}, {"devices": 4, "kernel": attend_gathered}, {"kv_cache_dtype": "int8"}],
    ids=["rows on a mesh", "in place on a mesh", "int8"],
)
def test_answers_do_not_depend_on_how_it_is_split_or_kept(options):
    is_mesh = "devices" in options
    options = options | ({"axes": {"data": 2, "tensor": 2}} if is_mesh else {})
    requests = [
        Request(start, SamplingParams(40 - len(start)), seed)
        for seed, start in enumerate([STEM[:1], *[STEM[:20]] * 3, STEM[:16], STEM, STEM[:21]])
    ]
    with opened("delta", steps=5, **options) as engine:
        answers = [engine.sample(requests) for _ in range(2)]
        assert engine.stats().reused_tokens > 2 * 19
        slots, pages = engine.programs.slot_bytes(), engine.programs.page_bytes()
        states, count = engine._runner.pool.states, engine.programs.sizes.slots
    for again, answer in zip(*answers, strict=True):
        np.testing.assert_array_equal(again.tokens, answer.tokens)
        np.testing.assert_allclose(again.logprobs, answer.logprobs, atol=ATOL)
    if is_mesh:
        check(requests, answers[0])
        assert (slots, pages) == (STATE // 2, PAGE_BYTES // 2)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(states))
        assert held == count * slots

"""What must not change an answer: company, slots, chunks, pieces, arrival, preemption, reuse."""

import asyncio

import numpy as np
import pytest

from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.rollout.native import page_pool


def prompt(length, seed=0):
    return tuple(np.random.default_rng(100 * length + seed).integers(0, 32, length).tolist())


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
        start = prompt(30)[:length] if seed % 3 else prompt(length, seed)
        requests.append(Request(start, SamplingParams(new, **ways[seed % len(ways)]), seed))
    return requests


MIXED = mixed()


@pytest.fixture(scope="module")
def expected(shared_engine, params):
    """The answers of an engine with room for all."""
    shared_engine.load(params, version=0)
    return shared_engine.sample(MIXED)


@pytest.fixture(scope="module")
def small_cache(shared_engine):
    """Pages -> GB that hold so many."""
    return lambda pages: (pages + 0.5) * 2 * shared_engine.programs.page_bytes() / 1e9


@pytest.fixture(scope="module")
def variant(build, params, small_cache):
    """(name) -> an engine, compiled once, that differs from the shared one."""
    pieces = {"PREFILL_LENGTHS": (8,), "PREFILL_TOKENS": (16,), "SHORTEST_ROW": 16}
    variants = {
        "pieces": ({"steps": 1, "max_running_sequences": 3}, pieces),
        "cramped": (
            {"steps": 7, "max_running_sequences": 6, "cache_gb": small_cache(7)},
            {"FEWEST_ROWS": 3, "PREFILL_LENGTHS": (16,)},
        ),
        "in place": (
            {
                "steps": 7,
                "max_running_sequences": 6,
                "cache_gb": small_cache(7) / 2,
                "kernel": attend_gathered,
            },
            {"FEWEST_ROWS": 3, "PREFILL_LENGTHS": (16,)},
        ),
    }
    made = {}

    def get(name):
        if name not in made:
            options, constants = variants[name]
            with pytest.MonkeyPatch.context() as patch:
                for constant, value in constants.items():
                    patch.setattr(page_pool, constant, value)
                made[name] = build(**options)
            made[name].load(params, version=0)
        return made[name]

    yield get
    for engine in made.values():
        engine.close()


async def arrive(engine, requests, rng):
    """Ask for each at a random time, in a random order; return the answers in the requests'."""

    async def one(request, delay):
        await asyncio.sleep(delay)
        return await engine.generate(request)

    order = rng.permutation(len(requests))
    tasks = {int(i): asyncio.create_task(one(requests[i], rng.uniform(0, 0.1))) for i in order}
    return [await tasks[i] for i in range(len(requests))]


def assert_same(answers, expected):
    for i, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens.tolist() == want.tokens.tolist(), i
        np.testing.assert_allclose(answer.logprobs, want.logprobs, atol=1e-5)
        assert (answer.finish, answer.stopped_by) == (want.finish, want.stopped_by)


def assert_logprobs(params, next_logits, request, answer):
    n, temperature = len(answer.tokens), request.sampling.temperature or 1.0
    after = next_logits(params, [*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
    after = np.asarray(after, np.float64) / temperature
    expected = after - np.log(np.exp(after).sum(-1, keepdims=True))
    np.testing.assert_allclose(answer.logprobs, expected[np.arange(n), answer.tokens], atol=1e-5)


def test_the_answers_compared_with_are_those_of_the_forward_pass(params, next_logits, expected):
    for request, answer in zip(MIXED, expected, strict=True):
        assert_logprobs(params, next_logits, request, answer)
        if request.sampling.temperature == 0 and request.sampling.repetition_penalty == 1:
            after = next_logits(params, [*request.prompt, *answer.tokens])
            best = after[len(request.prompt) - 1 : -1].argmax(-1)
            assert answer.tokens.tolist() == best.tolist()
    assert {a.finish for a in expected} == {"stop", "length"}


@pytest.mark.parametrize("name", ["cramped", "pieces", "in place"])
@pytest.mark.parametrize("seed", [0, 1])
def test_answers_depend_on_nothing_but_the_request(variant, params, expected, name, seed):
    engine = variant(name)
    engine.load(params, version=0)
    assert_same(asyncio.run(arrive(engine, MIXED, np.random.default_rng(seed))), expected)
    after = engine.stats()
    assert (after.running, after.waiting, after.cached_tokens) == (0, 0, 0)


@pytest.mark.parametrize("name", ["cramped", "in place"])
def test_who_gives_its_pages_back_goes_on_as_if_it_had_not(variant, shared_engine, params, name):
    """Three that grow to three pages each, where there are seven."""
    engine = variant(name)
    requests = [Request(prompt(7, seed), SamplingParams(33), seed) for seed in range(3)]
    for each in (engine, shared_engine):
        each.load(params, version=0)
    before = engine.stats().preemptions
    assert_same(engine.sample(requests), shared_engine.sample(requests))
    assert engine.stats().preemptions > before


def test_the_variants_are_what_they_are_called(variant):
    pieces, cramped = variant("pieces").programs.sizes, variant("cramped").programs.sizes
    assert (pieces.rows, pieces.widths, pieces.prefill_shapes) == ((3,), (32, 48), ((2, 8),))
    assert (cramped.rows, cramped.pages, pieces.steps, cramped.steps) == ((3, 6), 7, 1, 7)
    assert variant("in place").programs.sizes == cramped._replace(has_rows=False)
    names = {key[0] for key in variant("in place").programs._programs}
    assert names == {"pool", "copy", "prefill", "decode"}


def test_the_whole_batch_at_once_is_the_same(variant, expected):
    """Twice: the second time most prompts are cached."""
    for name in ("cramped", "pieces", "in place"):
        for _ in range(2):
            assert_same(variant(name).sample(MIXED[::-1])[::-1], expected)


@pytest.mark.parametrize("name", ["cramped", "pieces", "in place"])
def test_a_second_turn_reads_what_is_new(
    variant, shared_engine, params, other_params, next_logits, name
):
    engine = variant(name)
    engine.load(params, version=0)
    first = Request(prompt(13, 7), SamplingParams(9, temperature=1.0), 3)
    (answer,) = engine.sample([first])
    talk = (*first.prompt, *answer.tokens.tolist())
    second = Request((*talk, 5, 9, 2), SamplingParams(8, temperature=1.0), 4)
    before = engine.stats()
    (completion,) = engine.sample([second])
    after = engine.stats()
    # the newest token of an answer is in no cache, and the last of a prompt is decoded
    assert after.reused_tokens - before.reused_tokens == len(talk) - 1
    assert after.prompt_tokens - before.prompt_tokens == 3
    assert_logprobs(params, next_logits, second, completion)
    shared_engine.load(params, version=0)
    assert_same([completion], shared_engine.sample([second]))
    # it went on in pages that the first has written, which are still the first's
    assert_same(engine.sample([first]), [answer])
    engine.load(other_params, version=1)
    (renewed,) = engine.sample([second])
    last = engine.stats()
    assert last.prompt_tokens - after.prompt_tokens == len(second.prompt) - 1
    assert_logprobs(other_params, next_logits, second, renewed)
    engine.load(params, version=0)


def test_branches_of_one_conversation_do_not_touch_each_other(variant, params, next_logits):
    """Prompts that leave a cached one in the middle of a page, at once and one after another."""
    engine = variant("cramped")
    engine.load(params, version=0)
    stem = prompt(24, 3)
    branches = [
        Request((*stem[:cut], *prompt(4, cut)), SamplingParams(6), cut)
        for cut in (24, 9, 20, 9, 1, 17)
    ]
    engine.sample([Request(stem, SamplingParams(2), 0)])
    answers = engine.sample(branches)
    for request, answer in zip(branches, answers, strict=True):
        assert_logprobs(params, next_logits, request, answer)
        assert_same(engine.sample([request]), [answer])


def test_a_cache_without_room_for_the_longest_sequence_is_refused(build, small_cache):
    with pytest.raises(ValueError, match=r"^a cache of .* GB holds 48 tokens: expected at least"):
        build(cache_gb=small_cache(3))
    build(cache_gb=small_cache(4)).close()

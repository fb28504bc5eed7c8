"""The engine's answers against full forward passes."""

import asyncio

import jax
import numpy as np
import pytest

from jaxrl_llm.rollout.engine import Request, SamplingParams
from tests.guarded import MODEL, NATIVE

pytestmark = pytest.mark.guards(*MODEL, *NATIVE)


def prompt(length, seed=0):
    return tuple(np.random.default_rng(100 * length + seed).integers(0, 32, length).tolist())


def greedy(new=8, **options):
    return SamplingParams(max_new_tokens=new, temperature=0.0, **options)


RAGGED = [
    Request(prompt(1), SamplingParams(16, temperature=1.0), seed=1),
    Request(prompt(24), SamplingParams(16, temperature=0.7), seed=2),  # fills a row
    Request(prompt(7), SamplingParams(11, temperature=1.5), seed=3),
    Request(prompt(16), SamplingParams(1, temperature=1.0), seed=4),
    Request(prompt(17), greedy(13), seed=5),
    Request(prompt(7), SamplingParams(16, temperature=1.0, top_k=4), seed=6),
    Request(prompt(3), SamplingParams(6, temperature=1.0, top_p=0.7), seed=7),
    Request(
        prompt(2), SamplingParams(16, temperature=1.2, stop_ids=tuple(range(0, 24, 3))), seed=8
    ),
    Request(prompt(24), SamplingParams(4, temperature=0.3), seed=9),
    Request(prompt(16, 1), greedy(16), seed=10),
]


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_logprobs(params, next_logits, request, answer):
    """Compare the reported log-probs with one pass over prompt and answer."""
    n, temperature = len(answer.tokens), request.sampling.temperature or 1.0
    after = next_logits(params, [*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
    expected = log_softmax(after / temperature)[np.arange(n), answer.tokens]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
    return after


def test_logprobs_are_those_of_the_forward_pass(engine, params, next_logits):
    """Ragged prompts and ragged answers, more of them than slots."""
    answers = engine.sample(RAGGED)
    for request, answer in zip(RAGGED, answers, strict=True):
        after = assert_logprobs(params, next_logits, request, answer)
        ranks = (after > np.take_along_axis(after, answer.tokens[:, None], 1)).sum(1)
        if request.sampling.top_k:
            assert ranks.max() < request.sampling.top_k
            assert ranks.max() > 0, "it samples"
        if request.sampling.temperature == 0:
            assert ranks.max() == 0
        assert answer.tokens.dtype == np.int32
        assert answer.logprobs.dtype == np.float32
        assert len(answer.logprobs) == len(answer.tokens)
    assert [len(a.tokens) for a in answers[:7]] == [16, 16, 11, 1, 13, 16, 6]


def test_greedy_is_argmax_step_by_step(engine, params, next_logits):
    requests = [Request(prompt(n), greedy(6), seed=n) for n in (1, 5, 16, 20, 24)]
    for request, answer in zip(requests, engine.sample(requests), strict=True):
        tokens = list(request.prompt)
        for _ in range(6):
            tokens.append(int(next_logits(params, tokens)[-1].argmax()))
        assert answer.tokens.tolist() == tokens[len(request.prompt) :]
        assert answer.finish == "length"


def test_sampling_follows_the_policy(engine, params, next_logits):
    """The first token of 600 answers has the forward pass's frequencies."""
    start = prompt(5)
    count = 600
    answers = engine.sample([Request(start, SamplingParams(1), seed) for seed in range(count)])
    frequencies = np.bincount([int(a.tokens[0]) for a in answers], minlength=32) / count
    p = np.exp(log_softmax(next_logits(params, start)[-1]))
    assert np.all(np.abs(frequencies - p) <= 4.5 * np.sqrt(p * (1 - p) / count) + 1e-3)


def test_an_answer_does_not_depend_on_its_company(engine):
    together = engine.sample(RAGGED)
    reversed_order = engine.sample(RAGGED[::-1])[::-1]
    for request, first, second in zip(RAGGED, together, reversed_order, strict=True):
        (alone,) = engine.sample([request])
        for other in (first, second):
            assert other.tokens.tolist() == alone.tokens.tolist()
            np.testing.assert_allclose(other.logprobs, alone.logprobs, atol=1e-5)
            assert other.finish == alone.finish


def test_the_seed_decides(engine):
    same, again, other = engine.sample(
        [Request(prompt(4), SamplingParams(16), seed) for seed in (3, 3, 2**32 - 1)]
    )
    assert same.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()


def test_stop_tokens_end_an_answer_and_belong_to_it(engine):
    (whole,) = engine.sample([Request(prompt(5), greedy(16), 0)])
    tokens = whole.tokens.tolist()
    late = next(i for i in range(3, 16) if tokens[i] not in tokens[:i])
    unused = next(v for v in range(32) if v not in tokens)
    expected = {
        (tokens[late],): (late + 1, "stop"),
        (unused, tokens[late], *[unused] * 6): (late + 1, "stop"),
        (unused,): (16, "length"),
        (): (16, "length"),
        (tokens[0],): (1, "stop"),
    }
    answers = engine.sample([Request(prompt(5), greedy(16, stop_ids=stop), 0) for stop in expected])
    for answer, (length, finish) in zip(answers, expected.values(), strict=True):
        assert answer.tokens.tolist() == tokens[:length]
        np.testing.assert_allclose(answer.logprobs, whole.logprobs[:length], atol=1e-6)
        assert answer.finish == finish
    exact = Request(prompt(5), greedy(late + 1, stop_ids=(tokens[late],)), 0)
    assert engine.sample([exact])[0].finish == "stop", "also where it is the last that fits"


def test_a_prompt_may_hold_stop_tokens(engine):
    start = prompt(5)
    (answer,) = engine.sample([Request(start, greedy(2, stop_ids=(start[-1],)), 0)])
    assert len(answer.tokens) >= 1


@pytest.mark.parametrize(
    ("prompts", "read"),
    [([3, 3, 3, 3], 2), ([3, 5, 3, 5], 6), ([3, 5, 7, 9], 20), ([20] * 6 + [5], 23)],
)
def test_equal_prompts_are_read_once(engine, prompts, read):
    """The last token of a prompt is not read: it is the first that is decoded."""
    requests = [Request(prompt(n), SamplingParams(2), seed) for seed, n in enumerate(prompts)]
    before = engine.stats().prompt_tokens
    engine.sample(requests)
    assert engine.stats().prompt_tokens - before == read


def test_answers_carry_the_version_of_their_weights(engine, other_params, next_logits):
    request = Request(prompt(6), greedy(5), 0)
    (before,) = engine.sample([request])
    engine.load(other_params, version=41)
    (after,) = engine.sample([request])
    assert before.versions.tolist() == [0] * 5
    assert after.versions.tolist() == [41] * 5
    assert_logprobs(other_params, next_logits, request, after)
    assert before.tokens.tolist() != after.tokens.tolist()


def test_many_concurrent_requests(engine):
    async def gather():
        return await asyncio.gather(*(engine.generate(r) for r in RAGGED * 3))

    for answer, expected in zip(asyncio.run(gather()), engine.sample(RAGGED) * 3, strict=True):
        assert answer.tokens.tolist() == expected.tokens.tolist()
        assert answer.finish == expected.finish


SHORT = [request for request in RAGGED if len(request.prompt) <= 16]


@pytest.fixture(scope="module")
def answers_on(build, draw_params):
    """(model, axes of the mesh) -> answers, where weights and cache are, and their checksum."""
    completions = {}

    def run(model, axes):
        key = model, tuple(axes.items())
        if key not in completions:
            engine = build(
                devices=8 if axes else 1,
                axes=axes or {"data": 1},
                model=model,
                max_running_sequences=8,
                steps=8,
            )
            try:
                receipt = engine.load(draw_params(0, model), version=3)
                answers = engine.sample(SHORT)
                layouts = jax.tree.map(lambda leaf: leaf.sharding, engine._params)
                completions[key] = (
                    answers,
                    layouts,
                    engine._runner.pool.keys[0].sharding,
                    receipt.checksum,
                )
            finally:
                engine.close()
        return completions[key]

    return run


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("dense", {"data": 8}),
        ("dense", {"data": 4, "tensor": 2}),
        pytest.param("dense", {"fsdp": 8}, marks=pytest.mark.slow),
        pytest.param("dense", {"fsdp": 2, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param("dense", {"tensor": 8}, marks=pytest.mark.slow),
        pytest.param("moe", {"data": 8}, marks=pytest.mark.slow),
        pytest.param("moe", {"expert": 8}, marks=pytest.mark.slow),
        pytest.param("moe", {"expert": 2, "data": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda x: " ".join(f"{axis}={n}" for axis, n in x.items()) if isinstance(x, dict) else None,
)
def test_every_mesh_gives_the_same_answers(answers_on, model, axes):
    """Greedy ones and sampled ones, of prompts of all lengths."""
    answers, layouts, cache, checksum = answers_on(model, axes)
    expected, _, _, wanted_checksum = answers_on(model, {})
    assert checksum == wanted_checksum
    for answer, want in zip(answers, expected, strict=True):
        assert answer.tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(answer.logprobs, want.logprobs, atol=2e-5)
    held = layouts["embed"].shard_shape((32, 16))
    assert held == (32 // axes.get("tensor", 1), 16 // axes.get("fsdp", 1) // axes.get("expert", 1))
    parts = 8 // axes.get("tensor", 1) if axes else 1
    own, _, heads, _, _ = cache.shard_shape((parts, 4, 2, 4, 16))
    assert own == 1
    assert heads == (1 if axes.get("tensor") == 2 else 2)

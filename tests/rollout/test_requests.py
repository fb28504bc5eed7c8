"""What a request may ask for, through the engine: processors, top tokens, texts, streams."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.data.token_bytes import CONTEXT_TOKENS
from jaxrl_llm.rollout.engine import EngineError, Request, SamplingParams, results_of
from jaxrl_llm.rollout.native import page_pool

PROMPT = (4, 8, 15, 16, 23)
LETTERS = "abcdefghijklmnopqrstuvwxyz012345"


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def ask(engine, *seeds, new=12, prompt=PROMPT, **options):
    return engine.sample([Request(prompt, SamplingParams(new, **options), seed) for seed in seeds])


def after(next_logits, params, answer):
    """Return the logits of which each token was drawn."""
    return next_logits(params, [*PROMPT, *answer.tokens])[len(PROMPT) - 1 : -1]


class Letters:
    """A tokenizer whose tokens are letters; `special` ones have no text."""

    words, special = list(LETTERS), {}

    @property
    def added_tokens_decoder(self):
        return {n: SimpleNamespace(content=t, special=True) for n, t in self.special.items()}

    def decode(self, ids, **_):
        text = "".join(self.words[i] for i in ids if i not in self.special)
        return text.removeprefix(" ")  # as SentencePiece's


TOKENIZER = Letters()


@pytest.fixture(scope="module")
def texts(build, params):
    """An engine of few steps whose tokens are letters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_pool, "PREFILL_LENGTHS", (32,))  # compile less
        engine = build(steps=3, tokenizer=lambda: TOKENIZER)
    engine.load(params, version=0)
    yield engine
    engine.close()


def test_answers_that_no_one_waits_for_any_more_are_given_up():
    class Interrupted(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    futures = [Interrupted(), Future()]
    with pytest.raises(KeyboardInterrupt):
        results_of(futures)
    assert all(future.cancelled() for future in futures)


# ------------------------------------------------------------------------------------ processors


def test_a_bias_forces_a_token_and_bans_one(texts, params, next_logits):
    (forced,) = ask(texts, 1, logit_bias=((7, 100.0),))
    assert forced.tokens.tolist() == [7] * 12
    expected = log_softmax(after(next_logits, params, forced))[:, 7]
    np.testing.assert_allclose(forced.logprobs, expected, atol=1e-5)  # the model's own
    free = ask(texts, *range(30))
    common = int(np.bincount(np.concatenate([a.tokens for a in free])).argmax())
    banned = ask(texts, *range(30), logit_bias=((common, -100.0), (3, 1.0)))
    assert all(common not in a.tokens for a in banned)


@pytest.mark.parametrize("penalty", [1.7, 0.5])
def test_a_repetition_penalty_counts_prompt_and_answer(texts, params, next_logits, penalty):
    (answer,) = ask(texts, 0, new=16, temperature=0.0, repetition_penalty=penalty)
    tokens = list(PROMPT)
    for token, given in zip(answer.tokens, after(next_logits, params, answer), strict=True):
        logits = given.copy()
        for seen in set(tokens):
            logits[seen] *= 1 / penalty if logits[seen] > 0 else penalty
        assert token == logits.argmax()
        tokens.append(int(token))


def test_min_p_bans_what_is_unlikely(texts, params, next_logits):
    cut = ask(texts, *range(40), min_p=0.3)
    free = ask(texts, *range(40))
    for answers, holds in ((cut, True), (free, False)):
        shares = []
        for answer in answers:
            p = np.exp(log_softmax(after(next_logits, params, answer)))
            shares += (p[np.arange(12), answer.tokens] / p.max(1)).tolist()
        assert (min(shares) >= 0.3) == holds
        assert min(shares) < 1, "it samples"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_the_likeliest_tokens_are_those_of_the_forward_pass(
    texts, params, next_logits, temperature
):
    answers = texts.sample(
        [
            Request(PROMPT, SamplingParams(12, temperature=temperature, top_logprobs=n), n)
            for n in (0, 1, 5, 20)
        ]
    )
    assert answers[0].top is None
    for n, answer in zip((1, 5, 20), answers[1:], strict=True):
        expected = log_softmax(after(next_logits, params, answer) / (temperature or 1.0))
        order = np.argsort(-expected, axis=1)[:, :n]
        ids, logprobs = answer.top
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_allclose(logprobs, np.take_along_axis(expected, order, 1), atol=2e-5)


def test_processors_change_nobody_elses_answer(texts):
    (alone,) = ask(texts, 5)
    request = Request(PROMPT, SamplingParams(12), 5)
    odd = Request(PROMPT, SamplingParams(12, logit_bias=((7, 100.0),), repetition_penalty=2.0), 5)
    for answer in texts.sample([odd, request, odd])[1::2]:
        assert answer.tokens.tolist() == alone.tokens.tolist()


def test_samples_of_one_prompt_differ_by_their_seeds(texts):
    before = texts.stats()
    prompt = tuple(range(20))
    answers = ask(texts, *range(8), prompt=prompt)
    assert len({tuple(a.tokens.tolist()) for a in answers}) > 6
    assert texts.stats().prompt_tokens - before.prompt_tokens == 19  # read once


# ----------------------------------------------------------------------------------------- texts


def spell(answer):
    return "".join(LETTERS[i] for i in answer.tokens)


async def listen(engine, request):
    return [piece async for piece in engine.stream(request)]


@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 2), (3, 6), (4, 8), (2, 11), (11, 12)])
def test_a_text_ends_the_answer_with_the_token_that_completes_it(texts, start, end):
    """Within a chunk of three tokens, over its border, over several, and at the very end."""
    (whole,) = ask(texts, 3)
    stop = spell(whole)[start:end]
    end = spell(whole).index(stop) + len(stop)  # it may have come earlier
    sampling = SamplingParams(12, stop=("never there", stop), top_logprobs=2)
    request = Request(PROMPT, sampling, 3)
    (answer,) = texts.sample([request])
    assert answer.tokens.tolist() == whole.tokens[:end].tolist()
    np.testing.assert_allclose(answer.logprobs, whole.logprobs[:end], atol=1e-5)
    assert (answer.finish, answer.stopped_by) == ("stop", stop)
    assert len(answer.versions) == len(answer.top[0]) == len(answer.top[1]) == end
    pieces = asyncio.run(listen(texts, request))
    assert "".join(spell(piece) for piece in pieces) == spell(answer)
    assert [piece.finish for piece in pieces] == [""] * (len(pieces) - 1) + ["stop"]
    assert pieces[-1].stopped_by == stop


def test_what_comes_first_ends_the_answer(texts):
    (whole,) = ask(texts, 3)
    text, tokens = spell(whole), whole.tokens.tolist()
    late = next(i for i in range(5, 12) if tokens[i] not in tokens[:i])
    early = text[1:3]
    by_text, by_token = texts.sample(
        [
            Request(PROMPT, SamplingParams(12, stop=(early,), stop_ids=(tokens[late],)), 3),
            Request(
                PROMPT, SamplingParams(12, stop=(text[late - 1 :],), stop_ids=(tokens[late],)), 3
            ),
        ]
    )
    assert (by_text.stopped_by, spell(by_text)) == (early, text[: text.index(early) + 2])
    assert by_token.stopped_by in (tokens[late], text[late - 1 :])
    assert len(by_token.tokens) == late + 1


def test_a_prompt_may_hold_a_text_that_stops(texts):
    (whole,) = ask(texts, 3)
    absent = "".join(LETTERS[i] for i in PROMPT)
    assert absent not in spell(whole)
    (answer,) = ask(texts, 3, stop=(absent,))
    assert (spell(answer), answer.finish, answer.stopped_by) == (spell(whole), "length", None)


def test_a_stop_text_that_is_a_special_token_stops_at_it(texts, monkeypatch):
    (whole,) = ask(texts, 3)
    tokens = whole.tokens.tolist()
    place = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    monkeypatch.setattr(Letters, "special", {tokens[place]: "<end>"})
    (answer,) = ask(texts, 3, stop=("never there", "<end>"))
    assert answer.tokens.tolist() == tokens[: place + 1]
    assert (answer.finish, answer.stopped_by) == ("stop", tokens[place])
    for stop in ("a<end>", "<end>\n"):
        with pytest.raises(EngineError, match="holds the special token '<end>'"):
            ask(texts, 3, stop=(stop,))
    earlier = texts.sample(
        [Request(PROMPT, SamplingParams(12, stop=("<end>", spell(whole)[1])), 3)]
    )
    assert earlier[0].stopped_by == spell(whole)[1]


def test_a_stop_text_is_read_after_the_prompt(texts, monkeypatch):
    """Decoded alone, an answer would lose the space that it begins with."""
    (whole,) = ask(texts, 3)
    monkeypatch.setattr(Letters, "words", [f" {letter}" for letter in LETTERS])
    (answer,) = ask(texts, 3, stop=(f" {spell(whole)[0]}",))
    assert (len(answer.tokens), answer.finish) == (1, "stop")


def test_stop_texts_cost_each_token_a_window(texts, monkeypatch):
    decode, sizes = Letters.decode, []

    def counted(self, ids, **options):
        sizes.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Letters, "decode", counted)
    ask(texts, 3, new=30)
    assert sizes == []  # nothing is decoded where no text stops the answer
    ask(texts, 3, new=30, stop=("never there",))
    assert max(sizes) <= CONTEXT_TOKENS + 2 * 3
    assert len(sizes) <= 2 * 10 + 4  # of ten chunks


def test_who_continues_a_stopped_answer_gets_what_a_fresh_engine_gives(texts, params, next_logits):
    """The cache holds tokens that were drawn and dropped; they are not taken for others."""
    (whole,) = ask(texts, 3, new=20)
    (cut,) = ask(texts, 3, new=20, stop=(spell(whole)[9:11],))
    prompt = (*PROMPT, *cut.tokens.tolist(), 1, 2)
    (answer,) = ask(texts, 4, prompt=prompt, new=4)
    logits = next_logits(params, [*prompt, *answer.tokens])[len(prompt) - 1 : -1]
    expected = log_softmax(logits)[np.arange(4), answer.tokens]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


# --------------------------------------------------------------------------------------- streams


def test_a_stream_has_a_piece_for_each_chunk(texts):
    request = Request(PROMPT, SamplingParams(11, top_logprobs=3), 9)
    (whole,) = texts.sample([request])
    pieces = asyncio.run(listen(texts, request))
    assert [len(piece.tokens) for piece in pieces] == [3, 3, 3, 2]
    assert [piece.finish for piece in pieces] == ["", "", "", "length"]
    for i in range(3):
        np.testing.assert_array_equal(np.concatenate([p[i] for p in pieces]), whole[i])
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([p.top[i] for p in pieces]), whole.top[i])


def test_who_gives_up_frees_its_pages_and_harms_nobody(texts, monkeypatch):
    """One by leaving its stream, one by cancelling its coroutine, while both run."""
    others = [Request(PROMPT, SamplingParams(30), seed) for seed in (1, 2)]
    expected = [a.tokens.tolist() for a in texts.sample(others)]

    paused, decode = threading.Event(), texts._runner._decode

    def decode_once(*arguments):
        drawn = decode(*arguments)
        monkeypatch.undo()
        with texts._state:
            texts._paused = True
        paused.set()
        return drawn

    async def leave():
        texts.pause()
        stream = texts.stream(Request((9, 9, 9), SamplingParams(37), 5))
        first = asyncio.create_task(anext(stream))
        task = asyncio.create_task(texts.generate(Request((8, 8, 8), SamplingParams(37), 5)))
        staying = [asyncio.create_task(texts.generate(other)) for other in others]
        await asyncio.sleep(0)  # all have asked
        monkeypatch.setattr(texts._runner, "_decode", decode_once)
        texts.resume()
        assert len((await first).tokens) == 3
        assert await asyncio.to_thread(paused.wait, 30)
        assert texts.stats().running == 4
        await stream.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        texts.resume()
        return [a.tokens.tolist() for a in await asyncio.gather(*staying)]

    before = texts.stats().generated_tokens
    assert asyncio.run(asyncio.wait_for(leave(), 60)) == expected
    assert texts.stats().generated_tokens - before == 2 * 30 + 2 * 3, "who left got no more"
    texts.sample([others[0]])
    stats = texts.stats()
    assert (stats.running, stats.waiting, stats.cached_tokens) == (0, 0, 0)

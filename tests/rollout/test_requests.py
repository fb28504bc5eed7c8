import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.rollout.engine import Completion, EngineError, Request, SamplingParams
from tests.rollout.conftest import check_logprobs, drawn_from, log_softmax, opened, weights

PROMPT = (4, 8, 15, 16, 23)
LETTERS = "abcdefghijklmnopqrstuvwxyz012345"


def asks(*seeds, new=12, prompt=PROMPT, **options):
    return [Request(prompt, SamplingParams(new, **options), seed) for seed in seeds]


def after(answer):
    """Return the logits of which each token was drawn."""
    return drawn_from(weights(), asks(0)[0], answer)


class Letters:
    """A tokenizer whose tokens are letters; `special` ones have no text."""

    words, special = list(LETTERS), {}

    @property
    def added_tokens_decoder(self):
        return {n: SimpleNamespace(content=t, special=True) for n, t in self.special.items()}

    def decode(self, ids, **_):
        text = "".join(self.words[i] for i in ids if i not in self.special)
        return text.removeprefix(" ")  # as SentencePiece's


@pytest.fixture(scope="module")
def texts():
    """An engine of few steps whose tokens are letters."""
    with opened(steps=3, tokenizer=Letters, sizes={"PREFILL_LENGTHS": (32,)}) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(texts):
    return texts.sample(asks(3))[0]


def test_a_bias_forces_a_token_and_bans_one(texts):
    (forced,) = texts.sample(asks(1, logit_bias=((7, 100.0),)))
    assert forced.tokens.tolist() == [7] * 12
    check_logprobs(weights(), asks(1)[0], forced)  # the model's own
    free = texts.sample(asks(*range(30)))
    common = int(np.bincount(np.concatenate([a.tokens for a in free])).argmax())
    banned = texts.sample(asks(*range(30), logit_bias=((common, -100.0), (3, 1.0))))
    assert all(common not in a.tokens for a in banned)


def test_a_repetition_penalty_counts_prompt_and_answer(texts):
    for penalty in (1.7, 0.5):
        options = {"temperature": 0.0, "repetition_penalty": penalty}
        (answer,) = texts.sample(asks(0, new=16, **options))
        tokens = list(PROMPT)
        for token, logits in zip(answer.tokens, after(answer).copy(), strict=True):
            for seen in set(tokens):
                logits[seen] *= 1 / penalty if logits[seen] > 0 else penalty
            assert token == logits.argmax()
            tokens.append(int(token))


def test_the_likeliest_tokens_are_those_of_the_forward_pass(texts):
    for temperature in (0.0, 0.6):
        requests = [
            Request(PROMPT, SamplingParams(12, temperature=temperature, top_logprobs=n), n)
            for n in (0, 1, 5, 20)
        ]
        answers = texts.sample(requests)
        assert answers[0].top is None
        for n, answer in zip((1, 5, 20), answers[1:], strict=True):
            expected = log_softmax(after(answer) / (temperature or 1.0))
            order = np.argsort(-expected, axis=1)[:, :n]
            np.testing.assert_array_equal(answer.top[0], order)
            best = np.take_along_axis(expected, order, 1)
            np.testing.assert_allclose(answer.top[1], best, atol=2e-5)


def spell(answer):
    return "".join(LETTERS[i] for i in answer.tokens)


async def listen(engine, request):
    return [piece async for piece in engine.stream(request)]


def test_a_text_ends_the_answer_with_the_token_that_completes_it(texts, whole):
    for part in (slice(0, 1), slice(1, 2), slice(3, 6), slice(2, 11), slice(11, 12)):
        stop = spell(whole)[part]
        end = spell(whole).index(stop) + len(stop)  # it may have come earlier
        (request,) = asks(3, stop=("never there", stop), top_logprobs=2)
        (answer,) = texts.sample([request])
        assert answer.tokens.tolist() == whole.tokens[:end].tolist()
        np.testing.assert_allclose(answer.logprobs, whole.logprobs[:end], atol=1e-5)
        assert (answer.finish, answer.stopped_by) == ("stop", stop)
        assert len(answer.versions) == len(answer.top[0]) == len(answer.top[1]) == end
        pieces = asyncio.run(listen(texts, request))
        assert "".join(spell(piece) for piece in pieces) == spell(answer)
        assert [piece.finish for piece in pieces] == [""] * (len(pieces) - 1) + ["stop"]
        assert pieces[-1].stopped_by == stop


def test_what_comes_first_ends_the_answer(texts, whole):
    text, tokens = spell(whole), whole.tokens.tolist()
    late = next(i for i in range(5, 12) if tokens[i] not in tokens[:i])
    for stop, size in ((text[1:3], text.index(text[1:3]) + 2), (text[late - 1 :], late + 1)):
        (answer,) = texts.sample(asks(3, stop=(stop,), stop_ids=(tokens[late],)))
        assert answer.stopped_by in (stop, tokens[late])
        assert len(answer.tokens) == size


def test_a_stop_text_that_is_a_special_token_stops_at_it(texts, whole, monkeypatch):
    tokens = whole.tokens.tolist()
    place = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    monkeypatch.setattr(Letters, "special", {tokens[place]: "<end>"})
    (answer,) = texts.sample(asks(3, stop=("never there", "<end>")))
    assert answer.tokens.tolist() == tokens[: place + 1]
    assert (answer.finish, answer.stopped_by) == ("stop", tokens[place])
    for stop in ("a<end>", "<end>\n"):
        with pytest.raises(EngineError, match="<end>"):
            texts.sample(asks(3, stop=(stop,)))


def test_stop_texts_are_read_after_the_prompt(texts, whole, monkeypatch):
    monkeypatch.setattr(Letters, "words", [f" {letter}" for letter in LETTERS])
    (answer,) = texts.sample(asks(3, stop=(f" {spell(whole)[0]}",)))
    assert (len(answer.tokens), answer.finish) == (1, "stop")


def test_a_stopped_answer_is_gone_on_with_and_one_that_was_left_stops(texts):
    (long,) = texts.sample(asks(3, new=20))
    stop = spell(long)[9:11]
    (cut,) = texts.sample(asks(3, new=20, stop=(stop,)))
    # the cache holds tokens that were drawn and dropped; they are not taken for others
    (request,) = asks(4, prompt=(*PROMPT, *cut.tokens.tolist(), 1, 2), new=4)
    check_logprobs(weights(), request, texts.sample([request])[0])
    size = len(cut.tokens) - 1  # with the stop's first letter
    begun = Completion(*(part[:size] for part in long[:3]), "")
    (whole,) = texts.sample([replace(asks(3, new=20, stop=(stop,))[0], drawn=begun)])
    assert (spell(whole), whole.stopped_by) == (spell(cut), stop)


def test_a_stream_has_a_piece_for_each_chunk(texts):
    (request,) = asks(9, new=11, top_logprobs=3)
    (answer,) = texts.sample([request])
    pieces = asyncio.run(listen(texts, request))
    assert [len(piece.tokens) for piece in pieces] == [3, 3, 3, 2]
    assert [piece.finish for piece in pieces] == ["", "", "", "length"]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([p[i] for p in pieces]), answer[i])
        np.testing.assert_array_equal(np.concatenate([p.top[i] for p in pieces]), answer.top[i])

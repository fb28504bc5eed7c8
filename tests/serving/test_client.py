"""The client that scores given tokens: a server that is whole, slow, broken, or of other tokens."""

import asyncio
import itertools
import threading
import time

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_llm.rollout.openai_api.client import SAMPLE, ScoringClient, ScoringError, parse_scores
from jaxrl_llm.workers import retries

QUICK = {"concurrency": 4, "timeout_s": 0.3, "retries": 2}


def logprob(before, token):
    """Return a made-up log-prob, by which a token that is out of place is seen."""
    return -1.0 - ((7 * before + 3 * token) % 11) / 8


class Teacher:
    """A stand-in for a server. `behave` sees each request, and may answer in its place.

    A text has the tokens of `encode`.
    """

    def __init__(self):
        self.behave, self.asked, self.running, self.most = lambda body: None, [], 0, 0
        self.encode = lambda text: list(text.encode())
        self.model = {"id": "tiny", "max_model_len": 512}

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self.behave(body)
            answer = await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self.running -= 1
        return answer or JSONResponse(self.answer(body))

    def answer(self, body):
        tokens = body["prompt"]
        tokens = self.encode(tokens) if isinstance(tokens, str) else tokens
        entries = [None]
        for before, token in itertools.pairwise(tokens):
            top = {300 + i: {"logprob": -0.5 - i / 100} for i in range(body["prompt_logprobs"])}
            entry = top | {token: {"logprob": logprob(before, token), "rank": 9}}
            entries.append({str(token): told for token, told in entry.items()})
        return {"choices": [{"text": "", "prompt_logprobs": entries}]}

    async def models(self, request):
        return JSONResponse({"data": [self.model]})

    def app(self):
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
            ]
        )


@pytest.fixture
def teacher():
    return Teacher()


@pytest.fixture
def connect(teacher, serving, monkeypatch):
    """(limits) -> a client of the stand-in."""
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    made = []
    with serving(teacher.app()) as address:

        def run(**limits):
            made.append(ScoringClient(f"{address}/v1", **(QUICK | limits)))
            made[-1].open()
            return made[-1]

        yield run
        for client in made:
            client.close()


def expected(tokens):
    return [0.0, *(logprob(a, b) for a, b in itertools.pairwise(tokens))]


@pytest.mark.parametrize("top", [0, 3])
def test_tokens_get_their_log_probs_in_order(teacher, connect, top):
    sequences = [[5, 9, 2], [1], [4, 4, 4, 8], *([i, 2, i] for i in range(20))]
    teacher.behave = lambda body: asyncio.sleep(0.01)
    scored = connect().score(sequences, top)
    for tokens, scores in zip(sequences, scored, strict=True):
        np.testing.assert_allclose(scores.logprobs, expected(tokens), rtol=1e-6)
        assert scores.top_ids.shape == scores.top_logprobs.shape == (len(tokens), top)
        assert (scores.top_ids[1:] == 300 + np.arange(top)).all()
    assert 1 < teacher.most <= QUICK["concurrency"]
    assert teacher.asked[0] == {
        "model": "tiny",
        "prompt": [5, 9, 2],
        "max_tokens": 1,
        "prompt_logprobs": top,
    }


def failing(teacher, times, make):
    """Let the first requests for each prompt fail."""
    seen = {}

    def behave(body):
        key = str(body["prompt"])
        seen[key] = seen.get(key, 0) + 1
        return make(body) if seen[key] <= times else None

    teacher.behave = behave


async def hang(body):
    await asyncio.sleep(1)


BROKEN = {
    "500": lambda body: JSONResponse({"error": {"message": "out of memory"}}, 500),
    "429": lambda body: Response("busy", 429, {"Retry-After": "0"}),
    "no answer in 0.3 s": hang,
    "no JSON": lambda body: Response("<html>", 200),
}


@pytest.mark.parametrize("failure", BROKEN)
def test_what_passes_is_tried_again(teacher, connect, failure):
    failing(teacher, 2, BROKEN[failure])
    scored = connect().score([[5, 9, 2], [3, 1]])
    np.testing.assert_allclose(scored[0].logprobs, expected([5, 9, 2]), rtol=1e-6)
    assert len(teacher.asked) == 6


@pytest.mark.parametrize("failure", BROKEN)
def test_what_does_not_pass_is_an_error_and_nothing_hangs(teacher, connect, failure):
    client = connect()
    teacher.behave = lambda body: BROKEN[failure](body) if 66 in body["prompt"] else hang(body)
    begun = time.monotonic()
    with pytest.raises(ScoringError, match=rf"has not answered in 3 tries; the last: .*{failure}"):
        client.score([[1, 2], [66, 1], *([[3, 4]] * 9)])
    assert time.monotonic() - begun < 5


def test_a_refusal_is_not_tried_again(teacher, connect):
    refusal = {"error": {"message": "Requested prompt logprobs of 64, max 20"}}
    teacher.behave = lambda body: JSONResponse(refusal, 400)
    with pytest.raises(ScoringError, match="refused a request, status 400: Requested prompt log"):
        connect().score([[5, 9]], 64)
    assert len(teacher.asked) == 1


def test_a_server_that_dies_midway_is_an_error(serving, teacher):
    with serving(teacher.app()) as address:
        client = ScoringClient(f"{address}/v1", **(QUICK | {"retries": 1}))
        client.open()
        assert len(client.score([[1, 2]])) == 1
    with pytest.raises(ScoringError, match=r"has not answered in 2 tries; the last: ConnectError"):
        client.score([[1, 2], [3, 4]])
    client.close()
    client.close()  # a second time is none


def test_closing_gives_up_what_is_asked_for(teacher, connect):
    client = connect(timeout_s=30)
    teacher.behave = hang
    future = client.submit([[1, 2]])
    while not teacher.running:
        time.sleep(0.01)
    client.close()
    assert future.cancelled() or future.exception() is not None
    assert "scoring" not in {thread.name for thread in threading.enumerate()}


def answered(entries):
    return {"choices": [{"prompt_logprobs": entries}]}


GOOD = {"7": {"logprob": -2.5}, "3": {"logprob": -0.25}}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"choices": [{"text": "a"}]}, "without prompt_logprobs"),
        ({"choices": []}, "without prompt_logprobs"),
        (answered(None), "got None, expected one for each of 2"),
        (answered([None]), "got 1 entries, expected one for each of 2"),
        (answered([None, GOOD, GOOD]), "got 3 entries, expected one for each of 2"),
        (answered([GOOD, GOOD]), "expected null: nothing stands before"),
        (answered([None, None]), "entry 1 is None"),
        (answered([None, {"7": {"logprob": None}, "3": {"logprob": -1}}]), "entry 1 is"),
        (answered([None, {"8": {"logprob": -1}, "3": {"logprob": -1}}]), "expected token 7"),
        (answered([None, {"7": {"logprob": -2.5}}]), "has 1 tokens, expected the 2 likeliest"),
        (answered([None, GOOD | {"3": {"logprob": 0.5}}]), "at most 0"),
        (answered([None, GOOD | {"3": {"logprob": float("nan")}}]), "finite"),
    ],
)
def test_an_answer_that_is_not_of_the_tokens_is_refused(reply, message):
    with pytest.raises(ScoringError, match=message):
        parse_scores(reply, [1, 7], 2)
    assert parse_scores(answered([None, GOOD]), [1, 7], 2).top_ids.tolist() == [[0, 0], [3, 7]]


def test_answers_that_are_off_by_one_are_refused(teacher, connect):
    def shift(body):
        answer = teacher.answer(body)
        entries = answer["choices"][0]["prompt_logprobs"]
        entries[1:] = [*entries[2:], {"1": {"logprob": -1.0}}]
        return JSONResponse(answer)

    teacher.behave = shift
    with pytest.raises(ScoringError, match=r"entry 1 is of the tokens .* expected token 9"):
        connect().score([[5, 9, 2]])


def test_another_vocabulary_is_found_by_a_known_text(teacher, connect):
    client = connect()

    def encode(text):
        return list(text.encode())

    client.check_tokens(encode, longest=512, top=2)
    assert teacher.asked[0]["prompt"] == SAMPLE
    client.check_tokens(encode, longest=24, top=0)  # the text is cut to what has room
    teacher.encode = lambda text: [byte + 1 for byte in text.encode()]
    with pytest.raises(ScoringError, match=r"other tokens than these ids.*teacher\.tokenizer"):
        client.check_tokens(encode, longest=512, top=0)
    teacher.encode = lambda text: list(text.encode())[::2]
    with pytest.raises(ScoringError, match=r"other tokens than these ids.*teacher\.tokenizer"):
        client.check_tokens(encode, longest=512, top=0)


def test_a_server_that_scores_ids_otherwise_than_their_text_is_refused(teacher, connect):
    def doubled(body):
        answer = teacher.answer(body)
        if not isinstance(body["prompt"], str):
            for entry in answer["choices"][0]["prompt_logprobs"][1:]:
                for told in entry.values():
                    told["logprob"] *= 2
        return JSONResponse(answer)

    teacher.behave = doubled
    with pytest.raises(ScoringError, match=r"differ by 2\.25 nats"):
        connect().check_tokens(lambda text: list(text.encode()), longest=None, top=0)


def test_a_model_that_is_not_there_is_named(teacher, connect):
    client = connect()
    assert (client.model, client.open()) == ("tiny", 512)
    client.model = "large"
    with pytest.raises(ScoringError, match="has the models tiny, expected large"):
        client.open()


@pytest.mark.parametrize("address", ["localhost:8000/v1", "http://[::1/v1"])
def test_an_address_that_is_none_is_refused(address):
    client = ScoringClient(address, **(QUICK | {"timeout_s": 9.0}))
    with pytest.raises(ScoringError, match="is no address"):
        client.open()
    client.close()

import asyncio
import itertools
import threading

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_llm.rollout.openai_api.client import SAMPLE, ScoringClient, ScoringError, parse_scores
from jaxrl_llm.workers import retries
from tests.listening import listening
from tests.waiting import wait_until

ENDING = threading.Event()
QUICK = {"concurrency": 4, "timeout_s": 60.0, "retries": 2}


def logprob(before, token):
    """Return a made-up log-prob, by which a token that is out of place is seen."""
    return -1.0 - ((7 * before + 3 * token) % 11) / 8


class Teacher:
    """A stand-in for a server. `behave` sees each request, and may answer in its place."""

    def __init__(self):
        self.behave, self.asked, self.running, self.most = lambda body: None, [], 0, 0
        self.encode = lambda text: list(text.encode())

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        answer = self.behave(body)
        answer = await answer if asyncio.iscoroutine(answer) else answer
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


@pytest.fixture
def teacher():
    return Teacher()


@pytest.fixture
def connect(teacher, monkeypatch):
    """(limits) -> a client of the stand-in."""
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    made, models = [], JSONResponse({"data": [{"id": "tiny", "max_model_len": 512}]})
    ENDING.clear()
    routes = [Route("/v1/completions", teacher.complete, methods=["POST"])]
    with listening(Starlette(routes=[*routes, Route("/v1/models", lambda _: models)])) as address:

        def run(**limits):
            made.append(ScoringClient(f"{address}/v1", **(QUICK | limits)))
            made[-1].open()
            return made[-1]

        yield run
        for client in made:
            client.close()
        ENDING.set()


def expected(tokens):
    return [0.0, *(logprob(a, b) for a, b in itertools.pairwise(tokens))]


def test_tokens_get_their_log_probs_in_order(teacher, connect):
    sequences = [[5, 9, 2], [1], [4, 4, 4, 8], *([i, 2, i] for i in range(20))]
    teacher.behave = lambda body: asyncio.sleep(0.01)
    for top in (0, 3):
        scored = connect().score(sequences, top)
        for tokens, scores in zip(sequences, scored, strict=True):
            np.testing.assert_allclose(scores.logprobs, expected(tokens), rtol=1e-6)
            assert scores.top_ids.shape == scores.top_logprobs.shape == (len(tokens), top)
            assert (scores.top_ids[1:] == 300 + np.arange(top)).all()
    assert 1 < teacher.most <= QUICK["concurrency"]
    asked = {"model": "tiny", "prompt": [5, 9, 2], "max_tokens": 1, "prompt_logprobs": 0}
    assert teacher.asked[0] == asked


async def hang(body):
    while not ENDING.is_set():
        await asyncio.sleep(0.01)


BROKEN = {
    "500": lambda body: JSONResponse({"error": {"message": "out of memory"}}, 500),
    "429": lambda body: Response("busy", 429, {"Retry-After": "0"}),
    "no answer in 0.3 s": hang,
    "no JSON": lambda body: Response("<html>", 200),
}


def test_what_passes_is_tried_again_and_what_does_not_is_an_error(teacher, connect):
    for failure, broken in BROKEN.items():
        teacher.asked.clear()
        teacher.behave = lambda body, b=broken: b(body) if len(teacher.asked) < 3 else None
        if broken is not hang:  # within 0.3 s a loaded machine may not answer
            (scored,) = connect().score([[5, 9, 2]])
            np.testing.assert_allclose(scored.logprobs, expected([5, 9, 2]), rtol=1e-6)
            assert len(teacher.asked) == 3, failure
        client = connect(timeout_s=0.3 if broken is hang else 60.0)
        teacher.behave = lambda body, b=broken: b(body) if 66 in body["prompt"] else hang(body)
        with pytest.raises(ScoringError, match=rf"3 tries.*{failure}"):
            client.score([[1, 2], [66, 1], *([[3, 4]] * 9)])


def test_a_refusal_is_not_tried_again_and_a_server_that_is_gone_is(teacher, connect):
    teacher.behave = lambda body: JSONResponse({"error": {"message": "max 20"}}, 400)
    client = connect()
    with pytest.raises(ScoringError, match="400"):
        client.score([[5, 9]], 64)
    assert len(teacher.asked) == 1
    client.url = "http://127.0.0.1:9/v1"
    with pytest.raises(ScoringError, match="3 tries"):
        client.score([[1, 2], [3, 4]])


def test_closing_gives_up_what_is_asked_for(teacher, connect):
    client = connect(timeout_s=590)
    teacher.behave = hang
    future = client.submit([[1, 2]])
    wait_until(lambda: teacher.running)
    client.close()
    assert future.cancelled() or future.exception() is not None


def answered(entries):
    return {"choices": [{"prompt_logprobs": entries}]}


GOOD = {"7": {"logprob": -2.5}, "3": {"logprob": -0.25}}


def test_an_answer_that_is_not_of_the_tokens_is_refused():
    one = {"logprob": -1}
    for reply in [
        *({"choices": []}, answered(None), answered([None]), answered([None, GOOD, GOOD])),
        *(answered([GOOD, GOOD]), answered([None, None])),
        answered([None, {"7": {"logprob": None}, "3": one}]),
        *(answered([None, {"8": one, "3": one}]), answered([None, {"7": {"logprob": -2.5}}])),
        *(answered([None, GOOD | {"3": {"logprob": p}}]) for p in (0.5, float("nan"))),
    ]:
        with pytest.raises(ScoringError):
            parse_scores(reply, [1, 7], 2)
    assert parse_scores(answered([None, GOOD]), [1, 7], 2).top_ids.tolist() == [[0, 0], [3, 7]]


def test_another_vocabulary_is_found_by_a_known_text(teacher, connect):
    client, encode = connect(), teacher.encode

    def doubled(body):
        answer = teacher.answer(body)
        for entry in answer["choices"][0]["prompt_logprobs"][1:]:
            for told in entry.values():
                told["logprob"] *= 1 if isinstance(body["prompt"], str) else 2
        return JSONResponse(answer)

    client.check_tokens(encode, longest=512, top=2)
    assert teacher.asked[0]["prompt"] == SAMPLE
    client.check_tokens(encode, longest=24, top=0)  # the text is cut to what has room
    for other in (lambda text: [b + 1 for b in encode(text)], lambda text: encode(text)[::2]):
        teacher.encode = other
        with pytest.raises(ScoringError, match=r"teacher\.tokenizer"):
            client.check_tokens(encode, longest=512, top=0)
    teacher.encode, teacher.behave = encode, doubled  # ids are scored otherwise than their text
    with pytest.raises(ScoringError, match=r"2\.25"):
        client.check_tokens(encode, longest=None, top=0)


def test_a_model_or_an_address_that_is_none_is_named(teacher, connect):
    client = connect()
    assert (client.model, client.open()) == ("tiny", 512)
    client.model = "large"
    with pytest.raises(ScoringError, match="large"):
        client.open()
    client.url = "localhost:8000/v1"
    with pytest.raises(ScoringError, match="address"):
        client.open()

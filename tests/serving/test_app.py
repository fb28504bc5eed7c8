import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request

import openai
import pytest

from jaxrl_llm.serving import app
from tests.waiting import wait_until

CLIENT = {"api_key": "none", "max_retries": 0, "timeout": 120}
TEXT = "Grüße, 世界: 🙂 one two three"
HI = [{"role": "user", "content": "Hi"}]
ASK = {"model": "tiny", "max_tokens": 200}


@pytest.fixture
def connect(start):
    """(options) -> an openai client of a new server."""
    with contextlib.ExitStack() as stack:

        def run(**limits):
            address = start(**limits)
            made = stack.enter_context(openai.OpenAI(base_url=f"{address}/v1", **CLIENT))
            made.address = address
            return made

        yield run


def post(address, body, path="/v1/completions", **headers):
    """Post bytes and return status, headers and JSON."""
    headers = {"Content-Type": "application/json"} | headers
    asked = urllib.request.Request(address + path, body, headers)
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, json.load(error)


def begun(address, body=b"{", length=None, head=""):
    """Return a socket on which a request has begun, whose body may end later, or never."""
    host = address.removeprefix("http://")
    raw = socket.create_connection(tuple(host.split(":")))
    length = f"Content-Length: {length or len(body)}\r\n"
    start = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{start}{head or length}\r\n".encode() + body)
    return raw


def ask_for(prompt, *, stream=False):
    return json.dumps({"prompt": prompt, "max_tokens": 9, "stream": stream}).encode()


def get(address, path):
    with urllib.request.urlopen(address + path, timeout=120) as answer:
        return answer.read().decode()


def samples(address):
    lines = get(address, "/metrics").splitlines()
    return {k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize("stream", [False, True])
def test_both_apis_give_the_text_before_the_stop(connect, stream):
    client = connect()
    for stop, text, reason in [
        *((None, TEXT, 257), ("one", TEXT[: TEXT.index("one")], "one")),
        *((["界: 🙂 o", "zzz"], "Grüße, 世", "界: 🙂 o"), ("threes", TEXT, 257), ("Gr", "", "Gr")),
    ]:
        more = ASK | {"stop": stop, "stream": stream}
        plain = client.completions.create(prompt="Hi", **more)
        chat = client.chat.completions.create(messages=HI, **more)
        if not stream:
            assert plain.choices[0].text == chat.choices[0].message.content == text
            assert chat.choices[0].message.role == "assistant"
            ends = [plain.choices[0], chat.choices[0]]
        else:
            plain, chat = list(plain), list(chat)
            assert "".join(c.choices[0].text for c in plain) == text
            assert "".join(c.choices[0].delta.content or "" for c in chat) == text
            roles = [c.choices[0].delta.role for c in chat]
            assert roles == ["assistant"] + [None] * (len(chat) - 1)
            assert all(c.choices[0].finish_reason is None for c in [*plain[:-1], *chat[:-1]])
            ends = [plain[-1].choices[0], chat[-1].choices[0]]
            assert stop is not None or len(plain) > 5
        assert [(c.finish_reason, c.stop_reason) for c in ends] == [("stop", reason)] * 2


def test_an_answer_ends_where_it_is_cut_or_with_a_stop_token(connect, engine):
    client = connect()
    answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Gr\ufffd", "length")
    assert answer.usage.total_tokens == 5
    (letter,) = engine.tokenizer("o", add_special_tokens=False)["input_ids"]
    more = ASK | {"extra_body": {"stop_token_ids": [letter], "return_token_ids": True}}
    choice = client.completions.create(prompt="Hi", **more).choices[0]
    assert (choice.text, choice.stop_reason) == (TEXT[: TEXT.index("o")], letter)
    assert choice.token_ids[-1] == letter  # it is among the tokens, but not in the text


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_and_samples_keep_their_places(connect, engine, stream):
    more = ASK | {"n": 2, "seed": 3, "extra_body": {"return_token_ids": True}}
    if stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = connect().completions.create(prompt=["A", "BC", [32]], **more)
    chunks = list(answer) if stream else [answer]
    usage = chunks.pop().usage if stream else answer.usage
    tokens, prompts = [[] for _ in range(6)], {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        tokens[choice.index] += choice.token_ids
        if (ids := getattr(choice, "prompt_token_ids", None)) is not None:
            assert choice.index not in prompts
            prompts[choice.index] = ids
    whole = [*engine.tokenizer(TEXT, add_special_tokens=False)["input_ids"], 257]
    assert tokens == [whole] * 6
    assert [prompts[i] for i in range(6)] == [[32], [32], [33, 34], [33, 34], [32], [32]]
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 6 * len(whole))


def test_logprobs_of_completions(connect):
    ask = ASK | {"prompt": "Hi", "logprobs": 2, "stop": "ß"}
    chunks = list(connect().completions.create(stream=True, **ask))
    parts = [c.choices[0].logprobs for c in chunks]
    tokens = [token for part in parts for token in part.tokens]
    assert tokens == ["G", "r", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3", "bytes:\\x9f"]
    assert [o for part in parts for o in part.text_offset] == [0, 1, 2, 2, 3, 3]
    values = [value for part in parts for value in part.token_logprobs]
    assert values[:5] == [-0.25, -0.5, -0.75, -1.0, -1.25]
    assert [set(top) for part in parts for top in part.top_logprobs][:2] == [{"G", "I"}, {"r", "I"}]
    assert "".join(c.choices[0].text for c in chunks) == "Grü"


def test_a_chat_shows_token_ids_and_logprobs(connect):
    client = connect()
    more = ASK | {"logprobs": True, "top_logprobs": 2, "stop": "ß", "messages": HI}
    more["extra_body"] = {"return_token_ids": True}
    answer = client.chat.completions.create(**more)
    chunks = list(client.chat.completions.create(stream=True, **more))
    assert answer.prompt_token_ids == chunks[0].prompt_token_ids  # as of vLLM
    assert answer.choices[0].token_ids == [t for c in chunks for t in c.choices[0].token_ids]
    whole = answer.choices[0].logprobs.content
    parts = [entry for c in chunks for entry in c.choices[0].logprobs.content]
    assert [e.model_dump() for e in parts] == [e.model_dump() for e in whole]
    assert bytes(b for entry in whole for b in entry.bytes).decode() == "Grüß"
    assert [t.token for t in whole[0].top_logprobs] == ["G", "I"]


def test_models_health_and_metrics(connect):
    client = connect()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    client.completions.create(prompt="Hi", **ASK)
    assert json.loads(get(client.address, "/health")) == {"status": "ok"}
    metrics = samples(client.address)
    assert metrics['jaxrl_llm_responses_total{path="/v1/completions",status="200"}'] == 1
    assert metrics["jaxrl_llm_engine_generated_tokens_total"] == 7
    assert post(client.address, b"{}", "/v2")[0] == 404


def test_errors_have_openais_format(connect):
    client = connect()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="Hi", extra_body={"best_of": 3}, **ASK)
    assert "best_of" in caught.value.body.pop("message")
    expected = {"type": "invalid_request_error", "param": "best_of", "code": None}
    assert caught.value.body == expected
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="!"):
            client.completions.create(prompt=["Hi", "Hi!", "Hi?"], stream=stream, **ASK)
    for wrong in (b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a", "user": NaN}'):
        assert post(client.address, wrong)[0] == 400
    assert post(client.address, b"{}", **{"Content-Type": "text/plain"})[0] == 415


def test_the_api_key_is_asked_for(connect):
    client = connect(api_key="secret")
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert get(client.address, "/health")
    for given, status in [
        *((f"{scheme} secret", 200) for scheme in ("Bearer", "bearer", "BEARER ")),
        *(("bearer Secret", 401), ("Bearer ", 401), ("secret", 401), ("Basic secret", 401)),
    ]:
        assert post(client.address, ask_for("Hi"), Authorization=given)[0] == status, given


def test_a_body_that_is_too_large_or_too_late_is_refused(connect):
    address = connect(max_body_mb=0.001).address
    body = json.dumps({"prompt": "a" * 2000}).encode()
    assert post(address, body)[0] == 413
    with begun(address, b"7d0\r\n" + b"a" * 2000, head="Transfer-Encoding: chunked\r\n") as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    with begun(connect(timeout_s=0.2).address, length=9) as raw:  # it never comes
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_given_up(connect, engine, stream):
    client = connect(timeout_s=0.5)
    with pytest.raises(openai.APIError) as caught:
        list(client.completions.create(prompt="Hi?", stream=stream, **ASK))
    assert stream or caught.value.status_code == 504
    wait_until(lambda: len(engine.given_up) == len(engine.requests))


def test_while_a_request_is_read_others_are_answered_and_a_full_gate_reads_none(
    connect, monkeypatch
):
    parse, bodies, answers, go_on = app.parse_body, [], [], threading.Event()

    def wait_and_parse(body):
        bodies.append(body)
        assert go_on.wait(120)
        return parse(body)

    monkeypatch.setattr(app, "parse_body", wait_and_parse)
    address = connect(max_running=1, max_waiting=0).address
    thread = threading.Thread(target=lambda: answers.append(post(address, ask_for("first"))))
    thread.start()
    try:
        wait_until(lambda: bodies)
        assert get(address, "/health")
        for stream in (False, True):
            status, headers, answer = post(address, ask_for("second", stream=stream))
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
            assert headers["Retry-After"] == "1"
    finally:
        go_on.set()
        thread.join(120)
    assert (answers[0][0], len(bodies)) == (200, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_request_along(connect, engine, stream):
    client, prompts = connect(), ["Hi?", "Hi?"]
    if stream:
        pieces = client.completions.create(prompt=prompts, stream=True, **ASK)
        next(pieces)
        pieces.close()
    else:
        with begun(client.address, json.dumps(ASK | {"prompt": prompts}).encode()):
            wait_until(lambda: len(engine.requests) == 2)
    wait_until(lambda: len(engine.given_up) == 2)
    wait_until(lambda: samples(client.address)["jaxrl_llm_requests_running"] == 0)

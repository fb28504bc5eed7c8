"""A reward model behind a server: what is asked, and which scores are believed."""

import contextlib
import http.server
import json
import math
import threading

import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rewards import reward_server as module
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.reward_server import ServerError, classify
from jaxrl_llm.rewards.worker import RewardItem

PROMPT = [{"role": "user", "content": "1+1="}]


class Server(http.server.ThreadingHTTPServer):
    """Scores the number of letters, less 3; `knows` are the keys that turn the sigmoid off."""

    daemon_threads = True

    def __init__(self, *, knows=("use_activation",), shift=-3.0, failures=(), reply=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.knows, self.shift, self.reply = knows, shift, reply
        self.failures, self.bodies = list(failures), []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def score(self, body):
        text = body.get("input") or body["messages"][-1]["content"]
        score = self.shift + 0.1 * len(text)
        is_off = any(body.get(name) is False for name in self.knows)
        return score if is_off else 1 / (1 + math.exp(-score))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status = self.server.failures.pop(0) if self.server.failures else 200
        entry = {"index": 0, "probs": [self.server.score(body)], "num_classes": 1}
        text = self.server.reply or json.dumps({"data": [entry]})
        self.send_response(status if self.path == "/classify" else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(**keywords):
    with Server(**keywords) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def ask(server, text="22", info=None, **keywords):
    info = {"prompt": PROMPT} if info is None else info
    return classify("", text, None, info, url=server.url, model="rm", **keywords)


def test_the_chat_is_scored_without_a_sigmoid():
    with serving() as server:
        assert [ask(server), ask(server, "4444")] == pytest.approx([-2.8, -2.6])
        probes = [body for body in server.bodies if "input" in body]
        assert len(probes) == 2  # once for a server, not once for a reply
        asked = server.bodies[-1]
    answer = {"role": "assistant", "content": "4444"}
    assert asked == {"model": "rm", "messages": [*PROMPT, answer], "use_activation": False}


def test_an_episode_is_the_chat_that_it_was():
    chat = [*PROMPT, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "2"}]
    with serving() as server:
        ask(server, "all of it", {"prompt": PROMPT, "messages": chat})
        assert server.bodies[-1]["messages"] == chat


@pytest.mark.parametrize("shift", [-3.0, 0.3])
def test_an_older_servers_name_for_the_key_is_found(shift):
    """Also where scores lie between 0 and 1, as those of a sigmoid do."""
    with serving(knows=("activation",), shift=shift) as server:
        assert ask(server) == pytest.approx(shift + 0.2)
        assert "use_activation" not in server.bodies[-1]


def test_a_server_that_applies_a_sigmoid_is_refused():
    with serving(knows=()) as server, pytest.raises(ServerError, match="may apply a sigmoid"):
        ask(server)


def test_what_may_pass_is_asked_again():
    with serving() as server:
        ask(server)
        server.failures = [429, 503]
        assert ask(server) == pytest.approx(-2.8) and not server.failures
        before, server.failures = len(server.bodies), [500] * 9
        with pytest.raises(ServerError, match="status 500"):
            ask(server)
        assert len(server.bodies) - before == module.TRIES


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"failures": [400] * 9}, "status 400"),
        ({"reply": "no json"}, "JSONDecodeError"),
        ({"reply": '{"data": []}'}, "expected one item with one number"),
        ({"reply": '{"data": [{"probs": [0.2, 0.8]}]}'}, "which a model of one label gives, got"),
    ],
)
def test_other_answers_are_errors(keywords, message):
    with serving(**keywords) as server:
        with pytest.raises(ServerError, match=message):
            ask(server)
        assert len(server.bodies) == 1


def test_a_server_that_is_gone_is_a_failure_of_each_reply():
    with serving() as server:
        url = server.url
    spec = FunctionSpec("classify", {"url": url, "model": "rm"})
    item = RewardItem("sums", "22", "2", {"prompt": PROMPT})
    with RewardPool(spec, workers=0, timeout_s=5, on_error=-1.0) as pool:
        (score,) = pool.score([item])
    assert score.score == -1.0 and "Connection refused" in score.error


def test_a_prompt_without_messages_is_refused():
    with serving() as server, pytest.raises(ValueError, match="has no messages as 'prompt'"):
        ask(server, info={})

import asyncio
import contextlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import RewardConfig, ScoringConfig
from jaxrl_llm.rewards import remote as module
from jaxrl_llm.rewards.remote import classify
from jaxrl_llm.rewards.runner import RewardPool
from jaxrl_llm.rewards.scoring import check_scoring
from jaxrl_llm.rewards.worker import RewardItem
from jaxrl_llm.rollout.servers import ServerError
from jaxrl_llm.workers import retries
from tests.listening import listening
from tests.refusals import refuses

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
PROMPT = [{"role": "user", "content": "1+1="}]


@contextlib.contextmanager
def serving(*, knows=("use_activation",), shift=-3.0, failures=(), reply=None):
    """Score the number of letters, less 3; `knows` are the keys that turn the sigmoid off."""
    server = SimpleNamespace(failures=list(failures), bodies=[])

    async def score(request):
        body = await request.json()
        server.bodies.append(body)
        text = body.get("input") or body["messages"][-1]["content"]
        scored = shift + 0.1 * len(text)
        if not any(body.get(name) is False for name in knows):
            scored = 1 / (1 + math.exp(-scored))
        made = {"data": [{"index": 0, "probs": [scored], "num_classes": 1}]}
        status = server.failures.pop(0) if server.failures else 200
        return Response(reply or json.dumps(made), status)

    app = Starlette(routes=[Route("/classify", score, methods=["POST"])])
    with listening(app) as address:
        server.url = f"{address}/"
        yield server


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Know no server by its port, and wait for none."""
    monkeypatch.setattr(module, "_SWITCHES_SEEN", {})
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.0)


def ask(server, *texts, info=None, **keywords):
    """Return the scores of texts that are asked about at once; of one alone, its score."""
    info = {"prompt": PROMPT} if info is None else info
    keywords = {"url": server.url, "model": "rm"} | keywords

    async def ask_all():
        asked = [classify("", text, None, info, **keywords) for text in texts or ("22",)]
        return await asyncio.gather(*asked)

    scores = asyncio.run(ask_all())
    return scores if texts[1:] else scores[0]


def pooled(url, *texts, **options):
    spec = FunctionSpec("classify", {"url": url, "model": "rm"})
    options = {"workers": 0, "on_error": "unscored", "concurrency": 4, "retries": 2} | options
    with RewardPool(spec, ScoringConfig(timeout_s=600, **options)) as pool:
        return pool.score([RewardItem("sums", t, "2", {"prompt": PROMPT}) for t in texts])


def test_the_chat_is_scored_without_a_sigmoid():
    with serving() as server:
        assert ask(server, "22", "4444", "7") == pytest.approx([-2.8, -2.6, -2.9])
        assert ask(server, "4444") == pytest.approx(-2.6)
        probes = [body for body in server.bodies if "input" in body]
        assert len(probes) == 2  # once for a server, not once for a reply
        asked = server.bodies[-1]
    answer = {"role": "assistant", "content": "4444"}
    assert asked == {"model": "rm", "messages": [*PROMPT, answer], "use_activation": False}


def test_an_episode_is_the_chat_that_it_was():
    chat = [*PROMPT, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "2"}]
    with serving() as server:
        ask(server, "all of it", info={"prompt": PROMPT, "messages": chat})
        assert server.bodies[-1]["messages"] == chat
        with pytest.raises(ValueError, match="prompt"):
            ask(server, info={})


def test_a_tokenizer_makes_token_ids():
    tokenizer = transformers.AutoTokenizer.from_pretrained(QUICKSTART)
    chat = [*PROMPT, {"role": "assistant", "content": "22"}]
    with serving() as server:
        ask(server, "22", "4444", tokenizer=str(QUICKSTART))
        asked = [body["input"] for body in server.bodies if isinstance(body.get("input"), list)]
    assert len(asked) == 2
    assert tokenizer.apply_chat_template(chat, return_dict=False) in asked


def test_an_older_servers_name_for_the_key_is_found():
    """Also where scores lie between 0 and 1, as those of a sigmoid do."""
    for shift in (-3.0, 0.3):
        with serving(knows=("activation",), shift=shift) as server:
            assert ask(server) == pytest.approx(shift + 0.2)
            assert "use_activation" not in server.bodies[-1]
    with serving(knows=()) as server, pytest.raises(ValueError, match="sigmoid"):
        ask(server)


def test_what_may_pass_is_asked_again():
    with serving(failures=[429, 503]) as server:
        assert pooled(server.url, "22")[0].score == pytest.approx(-2.8) and not server.failures
        before, server.failures, url = len(server.bodies), [500] * 9, server.url
        (score,) = pooled(url, "22")
        assert score.is_unscored and score.has_failed and "500" in score.error
        assert len(server.bodies) - before == 3
    (score,) = pooled(url, "22")  # it is gone
    assert score.has_failed and score.error.endswith("(try 3)")


def test_other_answers_are_errors():
    items = ("", '{"probs": [0.2, 0.8]}', '{"probs": [null]}')
    replies = ["no json", *(f'{{"data": [{item}]}}' for item in items)]
    for keywords in ({"failures": [400] * 9}, *({"reply": reply} for reply in replies)):
        with serving(**keywords) as server:
            with pytest.raises(ServerError):
                ask(server)
            assert len(server.bodies) == 1


def test_failures_that_would_be_scores_are_refused(monkeypatch):
    spec = FunctionSpec("classify", {"url": "http://localhost:8000", "model": "rm"})
    with refuses("reward.on_error"):
        check_scoring(RewardConfig(), spec)
    monkeypatch.setattr("jaxrl_llm.rollout.servers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="httpx2"):
        check_scoring(RewardConfig(on_error="unscored"), spec)

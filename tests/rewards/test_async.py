import asyncio
import datetime
from concurrent.futures import ThreadPoolExecutor
from email.utils import format_datetime
from types import SimpleNamespace

import pytest

from jaxrl_llm.rewards.runner import RewardError, Score
from jaxrl_llm.rewards.worker import RewardItem
from jaxrl_llm.workers import retries
from jaxrl_llm.workers.retries import MAX_WAIT_S, wait_before_retry
from tests.waiting import wait_until

FUNCTIONS = """
import asyncio, os, sys, time
from jaxrl_llm.rewards import Unscored

class Refused(Exception):
    def __init__(self, status): self.status_code = status

running = most = 0

async def act(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0.0):
    global running, most
    running += 1
    most = max(most, running)
    try:
        return await _act(solution_str, extra_info, bonus)
    finally:
        running -= 1

async def _act(word, extra_info, bonus):
    file = extra_info.get("file")
    if file:
        with open(file, "a") as marks: print(word, file=marks)
    if word == "raise": raise KeyError("no such key")
    if word == "refuse": raise Refused(503)
    if word == "exit": sys.exit(3)
    if word == "hang": await asyncio.sleep(600)
    if word == "stubborn":
        while True:
            try: await asyncio.sleep(600)
            except asyncio.CancelledError: pass
    if word == "cancel": raise asyncio.CancelledError
    if word == "block": time.sleep(600)
    if word == "die": os._exit(3)
    if word == "unscored": raise Unscored("nobody knows")
    if word == "none": return None
    if word.startswith("meet"):
        while most < int(word[4:]): await asyncio.sleep(0.01)
        return {"score": 1.0, "most": most}
    return bonus + float(word)

class Act:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info): return 2.0

instance = Act()

def sync(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "unscored": raise Unscored("nobody knows")
    return float(solution_str)
"""


def items(*replies, **extra_info):
    return [RewardItem("test", reply, "truth", extra_info) for reply in replies]


@pytest.mark.parametrize("workers", [0, 2])
def test_scores_come_in_order(make, workers):
    scores = make(workers, bonus=0.5).score(items(*map(str, range(100))))
    assert scores == [Score(number + 0.5, {}, None) for number in range(100)]
    (score,) = make(0, name="instance").score(items("1"))
    assert score.score == 2.0


def test_as_many_calls_run_at_once_as_may(make):
    for workers, concurrency in ((0, 5), (1, 5), (2, 6)):
        met = concurrency if workers < 2 else 2  # in one process
        scores = make(workers, calls=(concurrency, 0)).score(items(*[f"meet{met}"] * 30))
        most = max(score.extra["most"] for score in scores)
        assert met <= most <= concurrency


def test_a_notebooks_event_loop_is_left_alone(make):
    async def cell():
        return make(0).score(items("1", "2"))

    assert [score.score for score in asyncio.run(cell())] == [1.0, 2.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_one_failure_costs_one_reply(make, workers):
    failures = {
        **{"raise": "exception", "exit": "exception", "hang": "timeout", "stubborn": "timeout"},
        **{"cancel": "exception", "none": "invalid"},
    }
    pool = make(workers, timeout_s=0.5)  # which strikes none of the others: they wait for nothing
    scores = pool.score(items("1", *failures, "2"))
    assert [score.score for score in scores] == [1.0, *[-1.0] * 6, 2.0]
    assert [score.error.split(":")[0] for score in scores[1:-1]] == [*failures.values()]
    assert pool.counts == {"exception": 3, "timeout": 2, "died": 0, "invalid": 1}


@pytest.mark.parametrize(("word", "kind"), [("die", "died"), ("block", "timeout")])
def test_the_call_is_blamed_that_ends_or_stops_its_process(make, impatient, word, kind):
    """The others ran in the same process, and have their scores."""
    impatient(lambda pending: word == "block" and 2 in pending)
    pool = make(1)
    scores = pool.score(items("1", "meet1", word, "meet1", "2"))
    assert [score.score for score in scores] == [1.0, 1.0, -1.0, 1.0, 2.0]
    assert pool.counts[kind] == 1 and scores[2].error.startswith(f"{kind}: ")


@pytest.mark.parametrize("workers", [0, 1])
def test_calls_are_tried_again_where_it_may_help(make, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.0)
    replies = items("refuse", "hang", "raise", "unscored", file=str(tmp_path / "tries"))
    scores = make(workers, calls=(8, 1), timeout_s=0.5).score(replies)
    tries = (tmp_path / "tries").read_text().split()
    assert sorted(tries) == sorted(["refuse", "hang"] * 2 + ["raise", "unscored"])
    assert [score.error.endswith("(try 2)") for score in scores] == [True, True, False, False]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_closed_pool_waits_for_ends(make, workers, tmp_path):
    pool, file = make(workers), tmp_path / "tries"
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(pool.score, items(*["hang"] * 4, file=str(file)))
        wait_until(lambda: file.exists() and file.read_text())
        pool.close()
        with pytest.raises(RewardError, match="closed"):
            future.result(timeout=60)


def test_after_an_error_that_stops_the_run_nothing_runs_on(make):
    pool = make(1, on_error=None)
    with pytest.raises(RewardError, match="KeyError"):
        pool.score(items("hang", "raise"))
    assert pool.score(items("1"))[0].score == 1.0


@pytest.mark.parametrize(("name", "workers"), [("act", 0), ("sync", 1)])
def test_a_function_may_leave_a_reply_unscored(make, workers, name):
    pool = make(workers, name=name, on_error=None)  # it is no failure that stops a run
    scores = pool.score(items("1", "unscored"))
    assert scores[0] == Score(1.0, {}, None)
    assert scores[1].is_unscored and scores[1].error == "unscored: nobody knows"
    assert not scores[1].has_failed and set(pool.counts.values()) == {0}
    if name == "act":  # failures are unscored, too, where the config says so
        scores = make(workers, on_error="unscored").score(items("raise", "2"))
        assert scores[0].is_unscored and scores[0].has_failed and scores[1].score == 2.0


def refused(status, **headers):
    error = Exception("refused")
    error.response = SimpleNamespace(status_code=status, headers=headers)
    return error


def test_the_wait_doubles_and_differs():
    for doublings in range(8):
        waits = [wait_before_retry(TimeoutError(), doublings + 1) for _ in range(99)]
        least, most = 0.25 * 2**doublings, min(0.75 * 2**doublings, MAX_WAIT_S)
        assert least <= min(waits) < max(waits) <= most
    assert wait_before_retry(TimeoutError(), 10**4) == MAX_WAIT_S


def test_a_server_may_ask_for_a_wait():
    import httpx2

    later = format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=3000))
    for asked, wait in (("7", 7.0), (later, MAX_WAIT_S), ("86400", MAX_WAIT_S)):
        assert wait_before_retry(refused(429, **{"retry-after": asked}), 1) == wait
    assert wait_before_retry(refused(429, **{"retry-after": "soon"}), 1) < 1.0
    request = httpx2.Request("POST", "http://h")
    with pytest.raises(httpx2.HTTPStatusError) as error:
        httpx2.Response(503, headers={"Retry-After": "9"}, request=request).raise_for_status()
    assert wait_before_retry(error.value, 1) == 9.0
    for status in (400, 401, 403, 404, 422):  # what will not pass is not tried again
        assert wait_before_retry(refused(status), 1) is None


def test_lost_connections_of_the_usual_clients_are_tried_again():
    import aiohttp
    import httpx2
    import openai

    lost = openai.APIConnectionError(request=httpx2.Request("GET", "http://h"))
    errors = [httpx2.ReadTimeout("x"), httpx2.RemoteProtocolError("x"), lost, TimeoutError()]
    errors += [aiohttp.ServerDisconnectedError(), ConnectionRefusedError()]
    assert all(wait_before_retry(error, 1) for error in errors)
    assert not wait_before_retry(FileNotFoundError(), 1)

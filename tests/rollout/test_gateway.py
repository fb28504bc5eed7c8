"""Programs with an OpenAI client that lead episodes: their tokens, their ends and their order."""

import asyncio
import collections
import os
import re
import resource
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.agents.sampler import load_agent
from jaxrl_llm.rollout.engine import SamplingParams
from jaxrl_llm.rollout.rollouts import begin_episodes, lay_out
from tests.episodes import STOPS, TOKENIZER, Scripted, config, picture, prompt, same, sampler
from tests.waiting import wait_until

pytest.importorskip("openai")

PROGRAMS = Path(__file__).with_name("programs_of_tests.py")
SAMPLING = SamplingParams(max_new_tokens=60, stop_ids=STOPS)
PASSED = {"pass_env": ["GATEWAY_TEST_FILE"]}
LIMITS = {"broken_share": 1.0, "turns": 4}
DOES = ("once", "score", "turns", "tools", "streams", "rewrites", "branches", "parallel")
DOES += ("refused", "elsewhere", "endless", "stubborn", "raises", "wrong", "dies", "silent")
DOES += ("short", "fills", "responses", "spaces", "another", "forges")


class Recording(Scripted):
    """An engine that knows what it has drawn, and after what."""

    def __init__(self, respond, seconds=0.0):
        super().__init__(respond)
        self.drawn, self.seconds = collections.defaultdict(list), seconds

    def sample(self, requests):
        time.sleep(self.seconds)
        return super().sample(requests)

    def answer(self, request):
        if request.drawn is not None:
            assert not len(request.drawn.tokens)
        completion = super().answer(request)
        stop = next(iter(request.sampling.stop), None)
        text = TOKENIZER.decode(completion.tokens)
        if stop and stop in text:
            end = 1 + next(
                i
                for i in range(len(completion.tokens))
                if stop in TOKENIZER.decode(completion.tokens[: i + 1])
            )
            tokens, logprobs, versions = (part[:end] for part in completion[:3])
            completion = completion._replace(
                tokens=tokens, logprobs=logprobs, versions=versions, stopped_by=stop
            )
        self.drawn[request.prompt].append(completion)
        return completion


def respond(text, seed):
    """Call a tool for `tools`, tell what it said, and else answer a number or two."""
    if text.startswith("<|user|>tools"):
        if "<|tool|>" in text:
            return text.rsplit("<|tool|>", 1)[1].split("<|end|>")[0]
        return f"[add(a={seed % 7}, b=2)]"
    if text.startswith("<|user|>short"):
        return "a!b" if "on<|end|>" in text else "abc"
    if text.startswith("<|user|>spaces"):
        return "the same"
    return "9" * 40 if text.startswith("<|user|>fills") else str(seed % 1000)


def agent(name="main", **keywords):
    return FunctionSpec("openai_program", {"run": f"{PROGRAMS}:{name}", **keywords})


def sample(episodes, engine, does, **keys):
    """Return the rollouts of programs that do this, and the episode of each."""
    prompts = [prompt(do[:12], number, do=do) for number, do in enumerate(does)]
    keys = {"samples": 1, "seed": (0, 1)} | keys
    rollouts = episodes.sample(engine, prompts, SAMPLING, **keys)
    return rollouts, dict(zip(does, rollouts.episodes, strict=False))


@pytest.fixture(scope="module")
def programs():
    made = sampler(config(agent=agent(scale=2.0), limits=LIMITS))
    yield made
    made.close()


@pytest.fixture(scope="module")
def played(programs):
    """All programs, at once: the engine, the rollouts, and the episodes by what they do."""
    engine = Recording(respond)
    return engine, *sample(programs, engine, DOES)


def assert_as_drawn(engine, episode):
    """Check that each drawn piece is one that the engine drew after exactly what precedes it."""
    streams = {0: list(episode.prompt)}
    for piece in episode.pieces:
        stream = streams.setdefault(piece.chain, [])
        if piece.drawn:
            drawn = engine.drawn[tuple(stream)]
            (match,) = [
                one
                for one in drawn
                if np.array_equal(one.tokens, piece.tokens)
                and np.array_equal(one.logprobs, piece.logprobs)
            ]
            drawn.remove(match)
        stream += piece.tokens.tolist()


def test_what_is_trained_is_what_the_engine_drew_and_all_of_it(played):
    engine, _, episodes = played
    for episode in episodes.values():
        assert_as_drawn(engine, episode)
    assert not any(engine.drawn.values())


def test_an_answer_that_is_echoed_in_another_way_is_gone_on_from(played):
    _, _, episodes = played
    for do in ("tools", "responses"):
        call, told, answer = picture(episodes[do])
        assert call.startswith("[add(a=") and told == f"<<|tool|>{answer[0]}<|end|><|assistant|>>"
        assert episodes[do].score == 2.0 * float(answer[0])
    assert [m["role"] for m in episodes["tools"].messages] == [
        *("user", "assistant", "tool", "assistant")
    ]
    assert episodes["turns"].turns == 3 and episodes["turns"].chains == 1


def test_a_history_that_is_rewritten_or_branches_off_begins_a_chain(played):
    _, rollouts, episodes = played
    rewritten, branched = episodes["rewrites"], episodes["branches"]
    assert (rewritten.chains, branched.chains) == (2, 2)
    assert picture(rewritten)[1].startswith("<<|user|>rewrites<|end|><|assistant|>not ")
    assert rollouts.metrics["gateway/unmatched"] == 1
    drawn = sum(len(piece.tokens) for piece in branched.pieces if piece.drawn)
    second = next(piece for piece in branched.pieces if piece.chain == 1)
    short, long = sorted(map(TOKENIZER.decode, (branched.prompt, second.tokens)), key=len)
    assert short == "<|user|>branches<|end|><|assistant|>" and long.startswith(short)
    assert branched.turns == 3 and drawn == branched.drawn.sum()
    assert [m["content"] for chat in branched.chats for m in chat if m["role"] == "user"] == [
        *("branches", "left", "branches", "right")
    ]
    batch = lay_out(rollouts, samples=1, max_tokens=160)
    assert (batch["mask"].sum(1) == [e.drawn.sum() * e.usable for e in rollouts.episodes]).all()


def test_what_the_client_says_is_compared_to_the_letter(played):
    spaces = played[2]["spaces"]
    assert (spaces.turns, spaces.chains) == (4, 2)
    said = [m["content"] for chat in spaces.chats for m in chat if m["role"] == "user"]
    assert sorted(said) == ["on", "on", "spaces", "spaces "]


def test_requests_at_once_have_seeds_of_their_own(played):
    _, _, episodes = played
    assert episodes["parallel"].score == 2.0 and episodes["parallel"].turns == 3


def test_the_run_decides_how_answers_are_drawn(played):
    engine, _, episodes = played
    for batch in engine.batches:
        for request in batch:
            assert request.sampling.temperature == 1.0 and request.sampling.top_p == 1.0
    assert episodes["refused"].score == 2.0 * 6
    assert episodes["short"].score == 2.0 * 3
    assert picture(episodes["short"])[0] == "ab"


def test_a_stream_has_the_same_answer(played):
    _, _, episodes = played
    assert episodes["streams"].score == 2.0 * episodes["streams"].drawn.sum()


def test_a_body_that_nothing_can_be_done_with_is_refused_in_one_line(programs, caplog):
    _, episodes = sample(programs, Recording(respond), ["rubbish"])
    assert episodes["rubbish"].score == 2.0 * 5
    assert "Traceback" not in caplog.text and "failed" not in caplog.text


def test_addresses_are_secret(played):
    assert played[2]["elsewhere"].score == 2.0 * 3


def test_a_limit_is_told_and_ends_the_episode_with_its_name(played):
    _, _, episodes = played
    for do in ("endless", "stubborn"):
        assert (episodes[do].finish, episodes[do].turns, episodes[do].error) == ("turns", 4, None)
    assert episodes["stubborn"].score == 2.0
    fills = episodes["fills"]
    assert (fills.finish, fills.score, len(fills.tokens)) == ("length", 2.0, 60)


@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("raises", r"main: KeyError: 'no such thing' \(.*programs_of_tests.py:\d+\)"),
        ("wrong", "returned nan, expected None or a finite number"),
        ("another", r"returned \{'score': 1.0\}, expected None or a finite number"),
        ("forges", "ended without a result"),
        ("dies", "ended with exit code 3"),
        ("silent", "no turn was drawn"),
    ],
)
def test_a_program_that_fails_breaks_its_episode_alone(played, do, error):
    episode = played[2][do]
    assert episode.finish == "broken" and re.search(error, episode.error)
    others = {do: e.error for do, e in played[2].items() if e.error is None}
    assert len(others) == len(DOES) - 6


def test_an_answer_that_a_client_has_given_up_is_not_drawn_again(programs):
    engine = Recording(respond, seconds=1.0)
    rollouts, episodes = sample(programs, engine, ["retries"])
    (piece,) = episodes["retries"].pieces
    assert rollouts.metrics["gateway/retries"] >= 1
    assert sum(map(len, engine.drawn.values())) == 1
    assert 2.0 * float(TOKENIZER.decode(piece.tokens[:-1])) == episodes["retries"].score


def test_in_lockstep_the_engine_is_asked_the_same_whatever_time_programs_take(programs):
    engines = [Recording(respond) for _ in range(2)]
    one, other = (sample(programs, engine, ["pauses"] * 3, samples=2)[0] for engine in engines)
    assert engines[0].batches == engines[1].batches
    assert same(one, other) and all(episode.turns == 3 for episode in one.episodes)


def test_turns_that_are_there_are_not_drawn_again(programs):
    prompts = [prompt("turns", do="turns")]

    def drawn(states, engine):
        programs.sample_states(engine, states, SAMPLING, journal=lambda _: None)
        return programs.as_rollouts(states)

    whole, first = begin_episodes(prompts, 1, (0, 1)), Recording(respond)
    before = drawn(whole, first)
    begun, second = begin_episodes(prompts, 1, (0, 1)), Recording(respond)
    begun[0].turns, begun[0].seeds = whole[0].turns[:2], whole[0].seeds[:2]
    after = drawn(begun, second)
    assert same(before, after) and [len(batch) for batch in second.batches] == [1]
    changed, third = begin_episodes(prompts, 1, (0, 1)), Recording(respond)
    changed[0].turns, changed[0].seeds = whole[0].turns[:2], [1, 2]  # of other prompts
    assert same(before, drawn(changed, third)) and len(third.batches) == 3


def test_more_programs_run_at_once_than_there_are_descriptors_at_first():
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, usual[1]))
    try:
        made = sampler(config(agent=agent(), limits={"turns": 4}))
        rollouts, _ = sample(made, Recording(respond), ["once"], samples=100)
        made.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert {episode.finish for episode in rollouts.episodes} == {"stop"}


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Return the processes that programs have said to have."""
    file = tmp_path / "pids"
    monkeypatch.setenv("GATEWAY_TEST_FILE", str(file))
    return lambda: [int(pid) for pid in file.read_text().split()] if file.exists() else []


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_program_that_is_left_is_killed_with_what_it_has_started(pids):
    class Failing(Recording):
        async def generate(self, request):
            if TOKENIZER.decode(request.prompt).startswith("<|user|>once"):
                await asyncio.to_thread(wait_until, pids, 60)
                raise RuntimeError("the engine is gone")
            return await super().generate(request)

    made = sampler(config(agent=agent(), limits=LIMITS, tool_process=PASSED, order="free"))
    try:
        with pytest.raises(RuntimeError, match="the engine is gone"):
            sample(made, Failing(respond), ["once", "hangs"])
        assert len(pids()) == 2
        wait_until(lambda: not any(map(is_there, pids())), 10)
    finally:
        made.close()


def test_a_program_that_does_nothing_for_long_is_killed(pids):
    made = sampler(config(agent=agent(idle_s=2.0), limits=LIMITS, tool_process=PASSED))
    try:
        with pytest.raises(RunError, match="main: did nothing for 2 s"):
            sample(made, Recording(respond), ["hangs"])
        wait_until(lambda: not any(map(is_there, pids())), 10)
    finally:
        made.close()


COMMAND = """
import json, os, sys
import openai
given = json.load(sys.stdin)
if given["extra_info"]["do"] == "fail":
    sys.exit("no luck")
answer = openai.OpenAI().chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=given["messages"])
"""


def test_a_command_leads_an_episode_by_variables_of_its_environment():
    spec = FunctionSpec("openai_program", {"command": [sys.executable, "-c", COMMAND]})
    made = sampler(config(agent=spec, limits=LIMITS, order="free"))
    try:
        engine = Recording(respond)
        _, episodes = sample(made, engine, ["ask", "fail"])
    finally:
        made.close()
    assert_as_drawn(engine, episodes["ask"])
    assert (episodes["ask"].turns, episodes["ask"].error) == (1, None)
    assert "ended with exit code 1: no luck" in episodes["fail"].error


BARE = """
import asyncio, json, urllib.request

async def main(base_url, ground_truth, rng, *, word):
    try:
        import jaxrl_llm
    except ImportError:
        pass
    else:
        raise AssertionError("it is there")
    await asyncio.sleep(0)
    body = json.dumps({"messages": [{"role": "user", "content": word}]}).encode()
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", body, kind)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["usage"]["completion_tokens"] + int(ground_truth)
"""


def test_a_program_may_have_an_environment_without_this_library(tmp_path):
    python, program = tmp_path / "python", tmp_path / "bare.py"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    program.write_text(textwrap.dedent(BARE))
    keywords = {"run": f"{program}:main", "python": str(python), "word": "hey"}
    made = sampler(config(agent=FunctionSpec("openai_program", keywords), limits=LIMITS))
    try:
        _, episodes = sample(made, Recording(respond), ["x"])
    finally:
        made.close()
    episode = episodes["x"]
    assert TOKENIZER.decode(episode.prompt) == "<|user|>hey<|end|><|assistant|>"
    assert episode.score == len(episode.tokens) + 7 and episode.error is None


def test_a_program_that_cannot_be_loaded_stops_the_run(tmp_path):
    file = tmp_path / "needs_more.py"
    file.write_text("def main(colour): ...\n")
    program = FunctionSpec("openai_program", {"run": f"{file}:main"})
    made = sampler(config(agent=program, limits=LIMITS))
    try:
        with pytest.raises(RunError, match="can't be loaded: TypeError: main asks for 'colour'"):
            sample(made, Recording(respond), ["once"])
    finally:
        made.close()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "either run: .* or command"),
        ({"run": "a.py:main", "command": ["x"]}, "either run: .* or command"),
        ({"run": "no_such_file.py:main"}, "no file"),
        ({"run": f"{PROGRAMS}:mian"}, "no function 'mian'.*did you mean 'main'"),
        ({"run": "main"}, "expected my_agent.py:main"),
        ({"command": "python x.py"}, "expected a list of words"),
        ({"command": ["env"], "depth": 3}, "takes no depth"),
        ({"command": ["no-such-program"]}, "command: no program 'no-such-program'"),
        ({"run": f"{PROGRAMS}:main", "python": "/nowhere/python"}, "no program '/nowhere/python'"),
        ({"run": f"{PROGRAMS}:main", "host": "192.0.2.1"}, "can't listen on '192.0.2.1'"),
        ({"run": f"{PROGRAMS}:main", "idle_s": 0}, "expected seconds above 0, got 0"),
        ({"run": f"{PROGRAMS}:main", "scael": 1}, "takes no 'scael'; did you mean 'scale'"),
    ],
)
def test_what_is_no_program_is_refused_before_anything_is_loaded(keywords, message):
    with pytest.raises(ConfigError, match=message):
        load_agent(config(agent=FunctionSpec("openai_program", keywords)))

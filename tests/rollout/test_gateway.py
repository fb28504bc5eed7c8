import asyncio
import collections
import contextlib
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.agents.sampler import load_agent
from jaxrl_llm.rollout.engine import Completion, SamplingParams
from jaxrl_llm.rollout.rollouts import begin_episodes, lay_out
from tests.episodes import STOPS, TOKENIZER, Scripted, config, picture, prompt, same, sampler
from tests.refusals import refuses
from tests.waiting import ended, wait_until

pytest.importorskip("openai")

PROGRAMS = Path(__file__).with_name("programs_of_tests.py")
SAMPLING = SamplingParams(max_new_tokens=60, stop_ids=STOPS)
PASSED = {"pass_env": ["GATEWAY_TEST_FILE"]}
LIMITS = {"broken_share": 1.0, "turns": 4}
DOES = ("once", "turns", "tools", "streams", "rewrites", "branches", "parallel")
DOES += ("refused", "elsewhere", "endless", "stubborn", "raises", "wrong", "silent")
DOES += ("short", "fills", "responses", "forges")


class Recording(Scripted):
    """An engine that knows what it has drawn, and after what."""

    def __init__(self, respond, seconds=0.0):
        super().__init__(respond)
        self.drawn, self.seconds = collections.defaultdict(list), seconds

    def sample(self, requests):
        time.sleep(self.seconds)
        return super().sample(requests)

    def answer(self, request):
        completion = super().answer(request)
        stop, ends = next(iter(request.sampling.stop), None), range(1, len(completion.tokens) + 1)
        cuts = [end for end in ends if stop and stop in TOKENIZER.decode(completion.tokens[:end])]
        if cuts:
            parts = (part[: cuts[0]] for part in completion[:3])
            completion = Completion(*parts, "stop", stop)
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
    return "9" * 40 if text.startswith("<|user|>fills") else str(seed % 1000)


def agent(name="main", **keywords):
    return FunctionSpec("openai_program", {"run": f"{PROGRAMS}:{name}", **keywords})


def sample(episodes, engine, does, **keys):
    """Return the rollouts of programs that do this, and the episode of each."""
    prompts = [prompt(do[:12], number, do=do) for number, do in enumerate(does)]
    keys = {"samples": 1, "seed": (0, 1)} | keys
    rollouts = episodes.sample(engine, prompts, SAMPLING, **keys)
    return rollouts, dict(zip(does, rollouts.episodes, strict=False))


@contextlib.contextmanager
def opened(spec, **keys):
    with contextlib.closing(sampler(config(agent=spec, limits=LIMITS, **keys))) as made:
        yield made


@pytest.fixture(scope="module")
def programs():
    with opened(agent(scale=2.0)) as made:
        yield made


@pytest.fixture(scope="module")
def played(programs):
    """All programs, at once: the engine, the rollouts, and the episodes by what they do."""
    engine = Recording(respond)
    return engine, *sample(programs, engine, DOES)


def assert_as_drawn(engine, episode):
    """Check that each drawn piece is one that the engine drew after exactly what precedes it."""
    streams = {0: list(episode.prompt)}
    for piece in episode.pieces:
        stream, piece_ids = streams.setdefault(piece.chain, []), piece.tokens.tolist()
        if piece.drawn:
            drawn = engine.drawn[tuple(stream)]
            own = piece_ids, piece.logprobs.tolist()
            drawn.pop([(d.tokens.tolist(), d.logprobs.tolist()) for d in drawn].index(own))
        stream += piece_ids


def test_what_is_trained_is_what_the_engine_drew_and_all_of_it(played):
    engine, rollouts, episodes = played
    for episode in episodes.values():
        assert_as_drawn(engine, episode)
    assert not any(engine.drawn.values())
    batch = lay_out(rollouts, samples=1, max_tokens=160)
    assert (batch["mask"].sum(1) == [e.drawn.sum() * e.usable for e in rollouts.episodes]).all()


def test_an_answer_that_is_echoed_is_gone_on_from_and_another_begins_a_chain(played):
    _, rollouts, episodes = played
    for do in ("tools", "responses"):
        call, told, answer = picture(episodes[do])
        assert call.startswith("[add(a=") and told == f"<<|tool|>{answer[0]}<|end|><|assistant|>>"
        assert episodes[do].score == 2.0 * float(answer[0])
    roles = [m["role"] for m in episodes["tools"].messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert episodes["turns"].turns == 3 and episodes["turns"].chains == 1
    rewritten, branched = episodes["rewrites"], episodes["branches"]
    assert (rewritten.chains, branched.chains, branched.turns) == (2, 2, 3)
    assert picture(rewritten)[1].startswith("<<|user|>rewrites<|end|><|assistant|>not ")
    assert rollouts.metrics["gateway/unmatched"] == 1
    said = [m["content"] for chat in branched.chats for m in chat if m["role"] == "user"]
    assert said == ["branches", "left", "branches", "right"]


def test_the_run_decides_how_answers_are_drawn(played):
    engine, _, episodes = played
    for request in (request for batch in engine.batches for request in batch):
        assert request.sampling.temperature == 1.0 and request.sampling.top_p == 1.0
    scores = {"parallel": 2.0, "refused": 10.0, "short": 6.0, "elsewhere": 2.0}
    assert {do: episodes[do].score for do in scores} == scores
    assert episodes["parallel"].turns == 3 and picture(episodes["short"])[0] == "ab"
    assert episodes["streams"].score == 2.0 * episodes["streams"].drawn.sum()


def test_a_limit_is_told_and_ends_the_episode_with_its_name(played):
    _, _, episodes = played
    for do in ("endless", "stubborn"):
        assert (episodes[do].finish, episodes[do].turns, episodes[do].error) == ("turns", 4, None)
    assert episodes["stubborn"].score == 2.0
    fills = episodes["fills"]
    assert (fills.finish, fills.score, len(fills.tokens)) == ("length", 2.0, 60)


def test_a_program_that_fails_breaks_its_episode_alone(played):
    failures = {"raises": "no such thing", "wrong": "nan", "silent": "turn"}
    failures["forges"] = "result"
    for do, word in failures.items():
        assert played[2][do].finish == "broken" and word in played[2][do].error
    assert {do for do, e in played[2].items() if e.error is not None} == failures.keys()


def test_an_answer_that_a_client_has_given_up_is_not_drawn_again(programs):
    engine = Recording(respond, seconds=1.0)
    rollouts, episodes = sample(programs, engine, ["retries"])
    (piece,) = episodes["retries"].pieces
    assert rollouts.metrics["gateway/retries"] >= 1
    assert sum(map(len, engine.drawn.values())) == 1
    assert 2.0 * float(TOKENIZER.decode(piece.tokens[:-1])) == episodes["retries"].score


def test_in_lockstep_the_engine_is_asked_the_same_whatever_time_programs_take(programs):
    engines = [Recording(respond) for _ in range(2)]
    one, other = (sample(programs, engine, ["turns"] * 3, samples=2)[0] for engine in engines)
    assert engines[0].batches == engines[1].batches
    assert same(one, other) and all(episode.turns == 3 for episode in one.episodes)


def test_turns_that_are_there_are_not_drawn_again(programs):
    def drawn(turns=(), seeds=()):
        engine = Recording(respond)
        (state,) = begin_episodes([prompt("turns", do="turns")], 1, (0, 1))
        state.turns, state.seeds = [*turns], [*seeds]
        programs.sample_states(engine, [state], SAMPLING, journal=lambda _: None)
        return state, programs.as_rollouts([state]), engine

    whole, before, _ = drawn()
    _, after, engine = drawn(whole.turns[:2], whole.seeds[:2])
    assert same(before, after) and [len(batch) for batch in engine.batches] == [1]
    _, after, engine = drawn(whole.turns[:2], [1, 2])  # of other prompts
    assert same(before, after) and len(engine.batches) == 3


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Return the processes that programs have said to have."""
    file = tmp_path / "pids"
    monkeypatch.setenv("GATEWAY_TEST_FILE", str(file))
    return lambda: [int(pid) for pid in file.read_text().split()] if file.exists() else []


def test_a_program_that_is_left_or_does_nothing_is_killed_with_what_it_has_started(pids):
    class Failing(Recording):
        async def generate(self, request):
            if TOKENIZER.decode(request.prompt).startswith("<|user|>once"):
                await asyncio.to_thread(wait_until, pids, 60)
                raise RuntimeError("gone")
            return await super().generate(request)

    with opened(agent(), tool_process=PASSED, order="free") as made:
        with pytest.raises(RuntimeError, match="gone"):
            sample(made, Failing(respond), ["once", "hangs"])
        assert len(pids()) == 2
        wait_until(lambda: all(map(ended, pids())))
    with opened(agent(idle_s=2.0), tool_process=PASSED) as made:
        with pytest.raises(RunError, match="nothing"):
            sample(made, Recording(respond), ["hangs"])
        wait_until(lambda: all(map(ended, pids())))


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
    command, engine = [sys.executable, "-c", COMMAND], Recording(respond)
    with opened(FunctionSpec("openai_program", {"command": command}), order="free") as made:
        _, episodes = sample(made, engine, ["ask", "fail"])
    assert_as_drawn(engine, episodes["ask"])
    assert (episodes["ask"].turns, episodes["ask"].error) == (1, None)
    assert "no luck" in episodes["fail"].error


BARE = """
import importlib.util, json, urllib.request

async def main(base_url, ground_truth, rng, *, word):
    assert importlib.util.find_spec("jaxrl_llm") is None
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
    program.write_text(BARE)
    keywords = {"run": f"{program}:main", "python": str(python), "word": "hey"}
    with opened(FunctionSpec("openai_program", keywords)) as made:
        _, episodes = sample(made, Recording(respond), ["x"])
    assert TOKENIZER.decode(episodes["x"].prompt) == "<|user|>hey<|end|><|assistant|>"
    assert episodes["x"].score == len(episodes["x"].tokens) + 7


def test_what_is_no_program_is_refused_before_anything_is_loaded(tmp_path, subtests):
    run = {"run": f"{PROGRAMS}:main"}
    for key, keywords in (
        *(("", {}), ("", run | {"command": ["x"]}), ("", run | {"scael": 1})),
        *(("run", {"run": "no_such_file.py:main"}), ("run", {"run": f"{PROGRAMS}:mian"})),
        *(("command", {"command": "python x.py"}), ("command", {"command": ["no-such-program"]})),
        *(("python", run | {"python": "/nowhere"}), ("host", run | {"host": "192.0.2.1"})),
        ("idle_s", run | {"idle_s": 0}),
    ):
        with subtests.test(keywords=keywords), refuses(f"rollout.agent.{key}".rstrip(".")):
            load_agent(config(agent=FunctionSpec("openai_program", keywords)))
    file = tmp_path / "needs_more.py"
    file.write_text("def main(colour): ...\n")
    program = FunctionSpec("openai_program", {"run": f"{file}:main"})
    with opened(program) as made, pytest.raises(RunError, match="colour"):
        sample(made, Recording(respond), ["once"])

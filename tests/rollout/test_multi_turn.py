import asyncio
import contextlib
import functools
import random
import time

import numpy as np
import pytest

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.rollout.agents.agents import one_answer
from jaxrl_llm.rollout.engine import Completion, SamplingParams
from jaxrl_llm.rollout.observation import BrokenTool, Observation
from jaxrl_llm.rollout.rollouts import begin_episodes, lay_out, sample
from jaxrl_llm.rollout.tools.tool import tool_schema
from tests import episodes
from tests.episodes import STOPS, Scripted, config, ids, picture, play, prompt, same, sampler
from tests.refusals import refuses


def add(a: int, b: int) -> str:
    """Add two numbers.\n\nArgs:\n    a: the first.\n    b: the second."""
    time.sleep(pause())
    return str(a + b)


def pause():
    return 0.0


def broken(a: int) -> str:
    """Need a server that is down.\n\nArgs:\n    a: a number."""
    raise BrokenTool(f"no server for {a}")


def says(text):
    """Return an engine that answers each turn with a text."""
    return Scripted(lambda *_: text)


def adds_once(text, seed):
    """Call `add` in the first turn, and answer with what it said in the second."""
    if "<|tool|>" not in text:
        return f"[add(a={seed % 7}, b=2)]"
    return text.rsplit("<|tool|>", 1)[1].split("<|end|>")[0]


def counts(ground_truth, *, stop=3):
    """Answer each turn with its number, and end with the number of turns."""
    answer = yield Observation("go")
    for number in range(1, stop):
        answer = yield Observation(f"{number}{answer}", reward=0.5)
    return float(len(answer))


ANY_BROKEN = {"broken_share": 1.0}


def test_the_stream_holds_what_was_drawn_and_what_was_told():
    async def cell():  # an event loop runs, as in a notebook
        return play(Scripted(adds_once), [prompt("2+2=")], tools=[add])

    (episode,) = asyncio.run(cell()).episodes
    call, told, answer = picture(episode)
    assert call.startswith("[add(a=") and told == f"<<|tool|>{answer[0]}<|end|><|assistant|>>"
    assert episode.finish == "stop" and episode.stopped_by == STOPS[0]
    assert episode.turn_ids.tolist() == [0] * len(ids(call)) + [-1] * 4 + [1] * 2
    assert (episode.logprobs[episode.drawn] < 0).all()
    assert (episode.logprobs[~episode.drawn] == 0).all()
    assert episode.last_answer == answer.removesuffix("<|end|>")
    assert [record[:2] for record in episode.tool_records] == [("add", None)]


def test_a_batch_has_no_gradient_on_told_tokens():
    rollouts = play(Scripted(adds_once), [prompt("2+2="), prompt("3=")], samples=2, tools=[add])
    batch = lay_out(rollouts, samples=2, max_tokens=80)
    for row, episode in enumerate(rollouts.episodes):
        own = slice(len(episode.prompt), batch.sequence_lengths[row])
        assert batch.tokens[row, own].tolist() == episode.tokens.tolist()
        assert batch["mask"][row].sum() == episode.drawn.sum()
        assert batch["mask"][row, own].tolist() == episode.drawn.tolist()
        assert batch["turn_ids"][row, own].tolist() == episode.turn_ids.tolist()
    assert batch["turns"].tolist() == [2] * 4 and batch["usable"].all()
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]


def test_an_agent_of_one_turn_samples_what_plain_answers_are():
    prompts, sampling = [prompt("1="), prompt("2=")], SamplingParams(8, stop_ids=STOPS)
    decode = functools.partial(episodes.TOKENIZER.decode, skip_special_tokens=True)
    plain_engine, engine = (Scripted(lambda text, seed: f"{seed % 1000}") for _ in range(2))
    plain = sample(plain_engine, prompts, sampling, samples=3, seed=(0, 1), decode=decode)
    drawn = play(engine, prompts, samples=3, tokens=8, agent=one_answer)
    assert plain_engine.batches == engine.batches
    assert plain.prompts == [prompts[0]] * 3 + [prompts[1]] * 3
    seeds = [request.seed for (batch,) in [engine.batches] for request in batch]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**32 for seed in seeds)
    assert plain.texts == drawn.texts
    for one, other in zip(plain.episodes, drawn.episodes, strict=True):
        for name in ("tokens", "logprobs", "versions", "turn_ids", "finish", "stopped_by"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_an_environment_speaks_first_rewards_turns_and_ends():
    rollouts = play(says("ab"), [prompt("x")], environment=counts)
    (episode,) = rollouts.episodes
    begin = "<|user|>x<|end|><|user|>go<|end|><|assistant|>"
    assert episodes.TOKENIZER.decode(episode.prompt) == begin
    told = [f"<<|user|>{number}ab<|end|><|assistant|>>" for number in (1, 2)]
    assert picture(episode) == ["ab<|end|>", told[0], "ab<|end|>", told[1], "ab<|end|>"]
    assert (episode.rewards, episode.score, episode.finish) == ((0.5, 0.5, 0.0), 2.0, "end")
    batch = lay_out(rollouts, samples=1, max_tokens=60)
    last = [np.flatnonzero(batch["turn_ids"][0] == turn)[-1] for turn in range(3)]
    assert np.flatnonzero(batch["rewards"][0]).tolist() == last[:2]
    assert batch["rewards"][0, last[:2]].tolist() == [0.5, 0.5]


async def waits(chat):
    """Wait longer than an episode may take, after a turn."""
    await chat.generate()
    await asyncio.sleep(600)


def test_limits_end_an_episode_and_say_so():
    for keys, finish, turns in (
        ({"limits": {"turns": 2}}, "turns", 2),
        ({"tokens": 14}, "length", 2),
        ({"tokens": 10}, "length", 1),  # what was told leaves no token for a turn
        ({"limits": {"turn_tokens": 1}, "tokens": 60}, "end", 3),
        ({}, "end", 3),
    ):
        (episode,) = play(says("abc"), [prompt("x")], environment=counts, **keys).episodes
        assert (episode.finish, episode.turns) == (finish, turns)
        assert len(episode.tokens) <= keys.get("tokens", 60)
        assert episode.pieces[-1].drawn, "what is told last is of no use"
    limits = {"turn_tokens": 2, "turns": 2}  # a turn that was cut is closed by what is told
    (episode,) = play(says("abc"), [prompt("x")], environment=counts, limits=limits).episodes
    assert picture(episode)[:2] == ["ab", "<<|end|><|user|>1ab<|end|><|assistant|>>"]
    limits = {"timeout_s": 0.5}
    (episode,) = play(says("a"), [prompt("x")], agent=waits, limits=limits).episodes
    assert (episode.finish, episode.usable) == ("timeout", True)


def test_calls_run_side_by_side_the_surplus_is_refused_and_failures_are_told():
    calls = "[add(a=1, b=1), add(a=2, b=2)]"
    engine = Scripted(lambda text, seed: "done" if "<|tool|>" in text else calls)
    (episode,) = play(engine, [prompt("x")], tools=[add]).episodes
    assert picture(episode)[1] == "<<|tool|>2<|end|><|tool|>4<|end|><|assistant|>>"
    keys = {"tools": [add], "tokens": 400}
    (episode,) = play(engine, [prompt("x")], limits={"parallel_calls": 1}, **keys).episodes
    assert "<|tool|>2<|end|><|tool|>error: " in picture(episode)[1]
    for wrong in ("add(a='one', b=2)", "akt(a=1, b=2)", "add(a=1, b=2, row=3)", "add(1"):
        engine = Scripted(lambda text, seed, w=wrong: "ok" if "error" in text else f"[{w}]")
        (episode,) = play(engine, [prompt("x")], **keys).episodes
        assert episode.usable and episode.last_answer == "ok"
        assert [record.failure for record in episode.tool_records] == ["failed"]


def test_an_episode_whose_tool_is_broken_is_no_part_of_its_group():
    engine = Scripted(lambda text, seed: "fine" if seed % 2 else "[broken(a=1)]")
    prompts = [prompt("x"), prompt("y")]
    rollouts = play(engine, prompts, samples=4, tools=[broken], limits=ANY_BROKEN)
    usable = np.array([episode.usable for episode in rollouts.episodes])
    assert 0 < usable.sum() < 8
    assert all(("no server for 1" in (e.error or "")) != e.usable for e in rollouts.episodes)
    batch = lay_out(rollouts, samples=4, max_tokens=80)
    for row in range(8):
        others = usable[row // 4 * 4 : row // 4 * 4 + 4].sum()
        counted = usable[row] and others > 1
        assert batch["usable"][row] == counted
        assert batch["group_ids"][row] == (row // 4 if counted else 8 + row)
        assert batch["mask"][row].any() == counted
        assert (batch["rollout_logprobs"][row] != 0).any() == counted
    with pytest.raises(RunError, match="broken"):
        play(says("[broken(a=1)]"), prompts, tools=[broken], limits=ANY_BROKEN)

    async def raises(chat):
        if int((await chat.generate()).text) % 2:
            raise KeyError("mine")

    engine = Scripted(lambda text, seed: f"{seed % 10}")
    for episode in play(engine, prompts, samples=4, agent=raises, limits=ANY_BROKEN).episodes:
        assert episode.usable == (int(episode.last_answer) % 2 == 0) == (episode.error is None)


def test_an_engine_that_fails_ends_the_run_whatever_agents_catch():
    class Failing(Scripted):
        def sample(self, requests):
            raise RuntimeError("lost")

        async def generate(self, request):
            raise RuntimeError("lost")

    for order in ("lockstep", "free"):
        with pytest.raises(RuntimeError, match="lost") as raised:
            play(Failing(adds_once), [prompt("x")], samples=2, tools=[add], order=order)
        assert "no running event loop" not in str(raised.getrepr(chain=True))


def test_lockstep_is_the_same_whatever_time_tools_take(monkeypatch):
    def run(**keys):
        engine, prompts = Scripted(adds_once), [prompt(f"{i}=") for i in range(4)]
        return engine, play(engine, prompts, samples=4, tools=[add], **keys)

    engine, expected = run()
    assert [len(batch) for batch in engine.batches] == [16, 16]
    monkeypatch.setattr(f"{__name__}.pause", episodes.shuffled)
    slow_engine, slow = run()
    assert same(slow, expected) and slow_engine.batches == engine.batches
    assert same(run(order="free")[1], expected)


def lottery(n: int) -> str:
    """Draw a number that nobody knows.\n\nArgs:\n    n: how large."""
    lottery.drawn += 1
    return str(random.SystemRandom().randint(0, 10**n))


class Leaving(Scripted):
    """An engine that returns what is not needed in part."""

    def sample_until(self, requests, needed, stop=None, listener=None):
        answers, wholes = [], self.sample(requests)
        for number, (request, whole) in enumerate(zip(requests, wholes, strict=True)):
            size = (request.seed + len(self.batches)) % len(whole.tokens)
            if request.drawn is not None:
                before = request.drawn.tokens
                size = max(size, len(before))
                assert whole.tokens[: len(before)].tolist() == list(before)
            part = Completion(*(array[:size] for array in whole[:3]), "")
            answers.append(whole if number < needed else part)
        return answers


@pytest.mark.parametrize("order", ["lockstep", "free"])
def test_episodes_that_were_left_go_on_as_if_nothing_had_happened(order, tmp_path):
    def respond(text, seed):
        turns = text.count("<|tool|>")
        return f"[lottery(n={5 + seed % 3})]" if turns < 1 + seed % 3 else "a" * (1 + seed % 9)

    def draw(wants):
        states = begin_episodes([prompt(f"{i}=") for i in range(4)], 4, (0, 1))
        engine, sampling = Leaving(respond), SamplingParams(max_new_tokens=150, stop_ids=STOPS)
        with contextlib.closing(sampler(config(tools=[lottery], order=order))) as made:
            for needed in wants:
                journal = {"journal": lambda _: tmp_path / "journal"}
                made.sample_states(engine, states, sampling, needed=needed, **journal)
                assert all(state.episode is not None for state in states[:needed])
            return made.as_rollouts(states)

    lottery.drawn = 0
    parts = draw([4, 8, 9, 16])
    played = lottery.drawn
    assert played == sum(episode.turns - 1 for episode in parts.episodes)
    assert same(draw([16]), parts)
    assert lottery.drawn == played, "the journal has all that was told"


def test_what_does_not_fit_is_refused_at_the_start():
    async def asks_for_more(chat, sandbox):
        """Ask for what there is not."""

    for key, keys in (
        *(("rollout.agent", {"agent": agent}) for agent in (asks_for_more, lambda chat: None)),
        ("rollout.tools", {"agent": one_answer, "tools": [add]}),
        ("rollout.environment", {"agent": one_answer, "environment": counts}),
        ("rollout.tools", {"tools": [add], "call_format": "hermess"}),
    ):
        with refuses(key):
            sampler(config(**keys))

    def talks(row):
        yield Observation("a" * 60)

    with pytest.raises(RunError, match="prompt"):
        play(Scripted(adds_once), [prompt("x")], environment=talks, limits=ANY_BROKEN)


def test_an_agent_that_does_what_no_episode_allows_is_told():
    async def twice(chat):
        await chat.generate()
        await chat.generate()

    async def at_once(chat):
        await asyncio.gather(chat.generate(), chat.generate())

    async def rewards(chat):
        await chat.generate()
        chat.reward(float("nan"))

    async def scores(chat):
        await chat.generate()
        chat.score = 10**5000

    for agent, word in (
        *((twice, "append"), (at_once, "append|second"), (rewards, "nan"), (scores, "score")),
    ):
        with pytest.raises(RunError, match=word):
            play(says("a"), [prompt("x")], agent=agent)


def test_a_rows_tools_are_those_of_the_run_or_none():
    schema = tool_schema(add, "add", key="rollout.tools")
    with contextlib.closing(sampler(config(tools=[add]))) as made:
        messages = prompt("2+2=").messages
        assert made.opening(messages, [schema]) == made.opening(messages)
        with pytest.raises(ValueError, match="tools"):
            made.opening(messages, [{"type": "function", "function": {"name": "other"}}])

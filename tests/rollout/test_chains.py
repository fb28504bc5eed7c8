"""Episodes of several chains: what is drawn, told and kept, and with which seeds."""

import numpy as np
import pytest

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.rewards.scoring import about
from tests.episodes import STOPS, Scripted, ids, picture, play, prompt, same


def echo(text, seed):
    """Answer with the length of the stream and the seed."""
    return f"{len(text)} {seed % 97}"


async def compacts(chat):
    """Begin with a shorter history after the second turn."""
    await chat.generate()
    chat.append("more")
    await chat.generate()
    chat.reward(0.5)
    short = chat.new([*chat.prompt.messages, {"role": "user", "content": "so far: 3"}])
    await short.generate()
    short.append("and?")
    await short.generate()


async def asks_another(chat):
    """Ask a sub-agent between two turns."""
    await chat.generate()
    other = chat.new("what is 1+1?")
    answer = await other.generate()
    chat.append(answer.text)
    await chat.generate()


async def appends(chat, *, turns=3):
    """Draw turns of one chain."""
    await chat.generate()
    for turn in range(1, turns):
        chat.append(f"turn {turn}")
        await chat.generate()


async def begins_anew(chat, *, turns=3):
    """Draw the same turns, each in a chain that begins with the whole history."""
    await chat.generate()
    for turn in range(1, turns):
        told = chat._template.following(  # what `chat.append` would tell
            [{"role": "user", "content": f"turn {turn}"}], calls=(), closed=True, stop=STOPS[0]
        )
        stream, chat = [*chat.tokens, *told], chat.new()
        await chat.generate_after(stream)


def test_a_compacted_history_is_another_chain_of_one_stream():
    episode = play(Scripted(echo), [prompt("7?")], agent=compacts).episodes[0]
    assert episode.chains == 2
    assert [piece.chain for piece in episode.pieces] == [0, 0, 0, 1, 1, 1, 1]
    assert [piece.drawn for piece in episode.pieces] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert episode.turns == 4
    assert episode.rewards == (0.0, 0.5, 0.0, 0.0)
    opening = tuple(episode.pieces[3].tokens.tolist())
    last = episode.last_chain
    assert last.prompt == opening
    assert picture(last) == picture(episode)[4:]
    assert np.array_equal(last.tokens, episode.tokens[episode.chain_ids == 1][len(opening) :])
    assert [len(chat) for chat in episode.chats] == [4, 5]
    assert episode.messages == episode.chats[1]
    assert about(episode)["chats"][0][-1]["role"] == "assistant"


def test_the_engine_reads_only_the_chain():
    engine = Scripted(echo)
    episode = play(engine, [prompt("7?")], agent=asks_another).episodes[0]
    first, second, third = (batch[0].prompt for batch in engine.batches)
    assert second == tuple(episode.pieces[1].tokens.tolist())
    assert third[: len(first)] == first
    assert not set(ids("1+1?")) <= set(third)  # the sub-agent's question is not in it
    assert episode.last_chain.prompt == first
    assert [piece.chain for piece in episode.pieces] == [0, 1, 1, 0, 0]
    assert len({batch[0].seed for batch in engine.batches}) == 3


def test_chains_that_rewrite_nothing_draw_what_one_chain_does():
    prompts = [prompt("7?"), prompt("8?", 1)]
    kept = play(Scripted(echo), prompts, agent=appends, samples=2)
    anew = play(Scripted(echo), prompts, agent=begins_anew, samples=2)
    assert [episode.chains for episode in anew.episodes] == [3] * 4
    for one, other in zip(kept.episodes, anew.episodes, strict=True):
        for name in ("tokens", "logprobs"):
            drawn = [getattr(e, name)[e.drawn] for e in (one, other)]
            assert np.array_equal(*drawn)
        whole = (*one.prompt, *one.tokens.tolist())
        assert (*other.last_chain.prompt, *other.last_chain.tokens.tolist()) == whole
        # each token is drawn once: what a chain repeats is its prompt
        assert other.drawn.sum() == one.drawn.sum()
        assert other.last_chain.drawn.sum() == len(one.pieces[-1].tokens)


def test_order_and_company_change_nothing():
    prompts = [prompt("7?"), prompt("8?", 1), prompt("9?", 2)]
    rounds = play(Scripted(echo), prompts, agent=compacts, samples=2, order="lockstep")
    freely = play(Scripted(echo), prompts, agent=compacts, samples=2, order="free")
    assert same(rounds, freely)


def test_limits_of_chains_and_of_the_episode():
    limits = {"turns": 3}
    episode = play(Scripted(echo), [prompt("7?")], agent=compacts, limits=limits).episodes[0]
    assert (episode.turns, episode.finish) == (3, "turns")

    async def reads_much(chat):
        await chat.generate()
        long = chat.new()
        assert long.left == 20
        await long.generate_after([5] * 55)

    episode = play(Scripted(echo), [prompt("7?")], agent=reads_much, tokens=20).episodes[0]
    assert len(episode.pieces[-1].tokens) == 5  # 40 + 20 less the prompt of 55


async def begins_with_nothing(chat):
    await chat.new().generate()


def test_a_chain_without_a_beginning_is_told():
    with pytest.raises(RunError, match=r"expected some from chat.new or chat.append"):
        play(Scripted(echo), [prompt("7?")], agent=begins_with_nothing)

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import grpo
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import about
from jaxrl_llm.rollout.agents.agents import one_answer
from jaxrl_llm.rollout.rollouts import lay_out
from jaxrl_llm.training.buffer import check_chains
from jaxrl_llm.training.experience import ScoreError, with_scores
from jaxrl_llm.training.forward import cut_chains
from tests.episodes import Scripted, picture, play, prompt


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


def test_a_compacted_history_is_another_chain_of_one_stream():
    episode = play(Scripted(echo), [prompt("7?")], agent=compacts).episodes[0]
    assert (episode.chains, episode.turns) == (2, 4)
    assert [piece.chain for piece in episode.pieces] == [0, 0, 0, 1, 1, 1, 1]
    assert episode.rewards == (0.0, 0.5, 0.0, 0.0)
    opening, last = tuple(episode.pieces[3].tokens.tolist()), episode.last_chain
    assert last.prompt == opening
    assert picture(last) == picture(episode)[4:]
    assert np.array_equal(last.tokens, episode.tokens[episode.chain_ids == 1][len(opening) :])
    assert [len(chat) for chat in episode.chats] == [4, 5]
    assert episode.messages == episode.chats[1]
    assert about(episode)["chats"][0][-1]["role"] == "assistant"


def test_a_history_that_is_too_long_is_summarized():
    def counts(text, seed):
        """Call the calculator until a summary is asked for; with the summary, answer."""
        if text.endswith("<|user|>Summarize.<|end|><|assistant|>"):
            return "it was 2"
        return "3" if "it was 2" in text else "[calculator(expression='1+1')]"

    agent = FunctionSpec("with_compaction", {"share": 0.1, "request": "Summarize."})
    keys = {"tools": [FunctionSpec("calculator")], "tokens": 400, "limits": {"turns": 12}}
    rollouts = play(Scripted(counts), [prompt("1+1?")], agent=agent, **keys)
    (episode,) = rollouts.episodes
    assert (episode.finish, episode.chains) == ("stop", 2)
    assert episode.messages[0]["content"] == "1+1?\n\nit was 2"
    assert rollouts.texts == ["3"]
    calls = [len(turn.get("tool_calls", ())) for turn in episode.chats[0]]
    assert sum(calls) == len(episode.tool_records) > 1
    assert episode.chats[0][-2]["content"] == "Summarize."


@pytest.fixture(scope="module")
def rollouts():
    """Two prompts with two episodes of two chains each."""
    prompts = [prompt("7?"), prompt("8?", 1)]
    return play(Scripted(echo), prompts, agent=asks_another, samples=2)


def test_an_episode_is_one_sequence_for_the_algorithm(rollouts):
    batch = lay_out(rollouts, samples=2, max_tokens=32)
    widest = max(len(e.prompt) + len(e.tokens) for e in rollouts.episodes)
    assert 32 < widest <= batch.tokens.shape[1] == 64
    assert lay_out(rollouts, samples=2, max_tokens=100).tokens.shape[1] == 100
    scored = with_scores(batch, [Score(s, {}, None) for s in (1.0, 0.0, 3.0, 1.0)], samples=2)
    for row, episode in enumerate(rollouts.episodes):
        first, end = len(episode.prompt), len(episode.prompt) + len(episode.tokens)
        assert batch.tokens[row, first:end].tolist() == episode.tokens.tolist()
        assert batch["mask"][row, first:end].tolist() == episode.drawn.tolist()
        chains = [*[0] * first, *episode.chain_ids, *[-1] * (64 - end)]
        assert batch["chain_ids"][row].tolist() == chains
        assert scored["rewards"][row].nonzero()[0].tolist() in ([], [end - 1])
    assert scored["turns"].tolist() == [3] * 4
    advantages = grpo(*map(jnp.asarray, (scored["scores"], scored["group_ids"])))
    expected = [0.5**0.5, -(0.5**0.5)] * 2  # two episodes of each group, whatever their chains
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_a_model_reads_each_chain_as_the_policy_did(rollouts):
    batch = lay_out(rollouts, samples=2, max_tokens=32)
    cut = cut_chains(batch, ["rollout_logprobs", "usable", "turn_ids"], 32)
    assert len(cut.tokens) == 8
    for row in range(8):
        episode, chain = rollouts.episodes[row // 2], row % 2
        own = [p for p in episode.pieces if p.chain == chain]
        stream = [*(episode.prompt if chain == 0 else ()), *np.concatenate([p.tokens for p in own])]
        size = cut.sequence_lengths[row]
        assert cut.tokens[row, :size].tolist() == stream
        drawn = np.concatenate([p.logprobs for p in own if p.drawn])
        assert np.array_equal(cut["rollout_logprobs"][row, :size][cut["mask"][row, :size]], drawn)
        assert set(cut["turn_ids"][row, :size]) == ({-1, 0, 2}, {-1, 1})[chain]
    assert cut["mask"].sum() == batch["mask"].sum()
    assert check_chains(batch, []) is batch
    with pytest.raises(ScoreError, match="pairs"):
        check_chains(batch, ["algorithm.pairs", "teacher"])
    plain = play(Scripted(echo), [prompt("7?")], agent=one_answer)
    plain = lay_out(plain, samples=1, max_tokens=100)
    assert cut_chains(plain, ["turn_ids"], 100) is check_chains(plain, ["algorithm.pairs"]) is plain

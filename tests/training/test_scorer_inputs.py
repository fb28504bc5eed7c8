"""What a reward model is given of prompts and episodes."""

import numpy as np
import pytest

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.episode import Episode, EpisodePiece
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.training.scorer_inputs import (
    TextEncoder,
    Unreadable,
    last_turn,
    policy_tokens,
    scorer_batch,
    whole_chat,
)
from tests.training.test_process_reward_model import Letters

USER = {"role": "user", "content": "q"}
TOOL = {"role": "tool", "content": "7"}


def said(text):
    return {"role": "assistant", "content": text}


def rollouts_of(messages=(), *, prompt=(USER,)):
    tokens = np.array([5, 6], np.int32)
    piece = EpisodePiece(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), drawn=True)
    episode = Episode((1, 2), (piece,), "stop", 6, messages=tuple(messages))
    given = Prompt(index=0, tokens=(1, 2), messages=list(prompt))
    return Rollouts([given], [episode], ["an answer"])


def test_a_plain_answer_is_the_assistants_message():
    rollouts = rollouts_of()
    assert whole_chat(rollouts, 0) == [USER, said("an answer")]
    assert last_turn(rollouts, 0) == ([USER], "an answer")
    assert policy_tokens(rollouts, 0).tokens == (1, 2, 5, 6)


def test_an_episode_is_the_chat_that_it_was():
    chat = [USER, said("call"), TOOL, said("end")]
    assert whole_chat(rollouts_of(chat), 0) == chat
    assert last_turn(rollouts_of(chat), 0) == (chat[:3], "end")


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        (
            rollouts_of([USER, said("call"), TOOL]),
            "ends with a message of 'tool', not the policy's",
        ),
        (rollouts_of(prompt=()), "its prompt has no messages, only tokens"),
    ],
)
def test_what_can_not_be_read_is_a_failure(rollouts, message):
    with pytest.raises(Unreadable, match=message):
        last_turn(rollouts, 0)
    encoder = TextEncoder(Letters(), {})
    given = scorer_batch(rollouts, encoder.answer, width=20)
    assert list(given.failures) == [0] and given.inputs == [None]
    assert given.batch.sequence_lengths.tolist() == [1]


def test_what_is_too_long_is_a_failure_and_not_cut():
    encoder = TextEncoder(Letters(), {})
    assert scorer_batch(rollouts_of(), encoder.answer, width=11).failures == {}
    assert scorer_batch(rollouts_of(), encoder.answer, width=10).failures == {
        0: "11 tokens of the reward model, more than its 10: raise reward.max_tokens"
    }

"""What a reward model is given of prompts and episodes."""

from functools import partial

import numpy as np
import pytest

from jaxrl_llm.data.chat import ChatTemplate, load_tokenizer
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts
from jaxrl_llm.training.reward_model import (
    Unreadable,
    answer_input,
    chat_input,
    policy_tokens,
    scorer_batch,
    steps_input,
    whole_chat,
)
from tests.data.real_templates import build

TOKENIZER = load_tokenizer("configs/quickstart")
TEMPLATE = ChatTemplate(TOKENIZER)
USER = {"role": "user", "content": "q"}
TOOL = {"role": "tool", "content": "7"}


def said(text):
    return {"role": "assistant", "content": text}


def rollouts_of(messages=(), *, prompt=(USER,), tools=()):
    tokens = np.array([5, 6], np.int32)
    piece = Completion(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "")
    episode = Episode((1, 2), (piece,), "stop", 6, messages=tuple(messages))
    given = Prompt(index=0, tokens=(1, 2), messages=list(prompt), tools=list(tools))
    return Rollouts([given], [episode], ["an answer"])


def test_a_plain_answer_is_the_assistants_message():
    rollouts = rollouts_of()
    assert whole_chat(rollouts, 0) == [USER, said("an answer")]
    read = answer_input(TEMPLATE, rollouts, 0)
    assert TOKENIZER.decode(read.tokens) == "<|user|>q<|end|><|assistant|>an answer<|end|>"
    assert policy_tokens(rollouts, 0).tokens == (1, 2, 5, 6)


def test_an_episode_is_the_chat_that_it_was():
    chat = [USER, said("call"), TOOL, said("end")]
    assert whole_chat(rollouts_of(chat), 0) == chat
    read = answer_input(TEMPLATE, rollouts_of(chat), 0)
    assert TOKENIZER.decode(read.tokens).endswith("<|tool|>7<|end|><|assistant|>end<|end|>")


def test_what_an_agent_gave_as_tokens_is_read_as_text():
    chat = [USER | {"as_tokens": True}, said("end")]
    read = answer_input(TEMPLATE, rollouts_of(chat), 0)
    assert TOKENIZER.decode(read.tokens) == "<|user|>q<|end|><|assistant|>end<|end|>"


def test_the_tools_of_a_row_are_read_or_the_answer_is_not():
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    rollouts = rollouts_of(tools=[tool])
    shows, _ = build("mistral")
    steps = partial(steps_input, separator="\n", splits_at="\n", decode=shows.decode)
    for encode in (answer_input, chat_input, steps):
        assert "look_up" in shows.decode(encode(ChatTemplate(shows), rollouts, 0).tokens)
    with pytest.raises(Unreadable, match="tools"):
        answer_input(TEMPLATE, rollouts, 0)


def test_reasoning_that_a_reward_models_template_has_no_place_for_stands_in_the_text():
    chat = [USER, said("4") | {"reasoning_content": "2+2"}]
    for encode in (answer_input, chat_input):
        text = TOKENIZER.decode(encode(TEMPLATE, rollouts_of(chat), 0).tokens)
        assert text.endswith("<|assistant|><think>\n2+2\n</think>\n\n4<|end|>")


def test_what_can_not_be_read_is_a_failure():
    """A chat that ends with a tool's message, and a prompt that has tokens alone."""
    for rollouts in (rollouts_of([USER, said("call"), TOOL]), rollouts_of(prompt=())):
        with pytest.raises(Unreadable):
            answer_input(TEMPLATE, rollouts, 0)
        batch, inputs, failures = scorer_batch(rollouts, partial(answer_input, TEMPLATE), width=20)
        assert list(failures) == [0] and inputs == [None]
        assert batch.sequence_lengths.tolist() == [1]


def test_what_is_too_long_is_a_failure_and_not_cut():
    encode = partial(answer_input, TEMPLATE)
    assert scorer_batch(rollouts_of(), encode, width=14)[-1] == {}
    (told,) = scorer_batch(rollouts_of(), encode, width=13)[-1].values()
    assert "reward.max_tokens" in told

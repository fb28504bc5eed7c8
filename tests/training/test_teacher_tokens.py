"""Answers in the tokens of a teacher with another tokenizer, of the kinds that models have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.token_bytes import UNALIGNED
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode
from jaxrl_llm.training.teachers import Retokenizer
from tests.training.tokenizers import WORDS, byte_fallback, byte_level

CHAT = [{"role": "user", "content": "What is 12 + 3?"}]
MADE = {
    "small": lambda: byte_level(300),
    "large": lambda: byte_level(420, "<|begin|>", "<|eot|>"),
    "sentencepiece": lambda: byte_fallback(200),
}
PAIRS = [("small", "sentencepiece"), ("sentencepiece", "large"), ("large", "small")]


def tokens_of(name):
    tokenizer = MADE[name]()
    return PolicyTokens(tokenizer, (tokenizer.eos_token_id,))


def ask(tokenizer, **variables):
    ids = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False, **variables
    )
    return Prompt(index=0, tokens=tuple(ids), messages=CHAT)


def answer(tokens, stopped_by=None):
    tokens = np.array(tokens, np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    finish = "length" if stopped_by is None else "stop"
    return Episode.of((0,), Completion(tokens, zeros, zeros.astype(np.int32), finish, stopped_by))


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@given(text=st.lists(st.sampled_from([*WORDS, "  ", "", "Ω", "<|im_end|>"]), max_size=8))
def test_every_token_of_a_text_is_aligned(names, text):
    policy, teacher = map(tokens_of, names)
    text = " ".join(text)
    drawn = [*encode_plain(policy.tokenizer, text), policy.stops[0]]
    sequence = Retokenizer(policy, teacher)(
        ask(policy.tokenizer), answer(drawn, stopped_by=policy.stops[0])
    )
    assert sequence.prompt == tuple(ask(teacher.tokenizer).tokens)
    assert sequence.answer == (*encode_plain(teacher.tokenizer, text), teacher.stops[0])
    left, right = sequence.alignment
    assert UNALIGNED not in left and UNALIGNED not in right
    assert left[-1] == right[-1] and (left == left[-1]).sum() == 1  # the turn's end
    seen = [
        "".join(policy.tokenizer.decode(np.array(drawn)[left == span])) for span in set(left[:-1])
    ]
    told = [
        "".join(teacher.tokenizer.decode(np.array(sequence.answer)[right == span]))
        for span in set(left[:-1])
    ]
    whole = [(a, b) for a, b in zip(seen, told, strict=True) if "\ufffd" not in a + b]
    assert all(a.strip(" ") == b.strip(" ") for a, b in whole)


def encode_plain(tokenizer, text):
    if not text:
        return []
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_a_cut_character_and_what_follows_a_special_token_are_left_out():
    policy, teacher = tokens_of("small"), tokens_of("large")
    retokenize, prompt = Retokenizer(policy, teacher), ask(policy.tokenizer)
    cut = encode(policy.tokenizer, "ab Ω")[:-1]  # a byte of the last character is missing
    sequence = retokenize(prompt, answer(cut))
    assert teacher.tokenizer.decode(sequence.answer) == "ab "
    assert sequence.alignment.left[-1] == UNALIGNED != sequence.alignment.left[-2]
    opening = policy.tokenizer.convert_tokens_to_ids("<|im_start|>")
    first, second = encode(policy.tokenizer, "ab"), encode(policy.tokenizer, "cd")
    drawn = [*first, opening, *second, policy.stops[0]]
    sequence = retokenize(prompt, answer(drawn, stopped_by=policy.stops[0]))
    assert teacher.tokenizer.decode(sequence.answer) == "ab"
    is_left = sequence.alignment.left != UNALIGNED
    assert is_left.tolist() == [True] * len(first) + [False] * (len(drawn) - len(first))


@pytest.mark.parametrize("names", [("small", "large"), ("sentencepiece", "small")], ids="-".join)
def test_a_prompt_that_opens_the_reasoning_is_told_to_a_teacher_that_does_not(names):
    policy, teacher = map(tokens_of, names)
    prompt = ask(policy.tokenizer, thinking=True)
    drawn = encode(policy.tokenizer, "two\n</think>\n12")
    sequence = Retokenizer(policy, teacher)(prompt, answer(drawn))
    assert teacher.tokenizer.decode(sequence.answer) == "<think>\ntwo\n</think>\n12"
    left, right = sequence.alignment
    assert right[0] == UNALIGNED != right[-1]
    assert (left != UNALIGNED).sum() >= len(drawn) - 1


def test_a_teacher_that_opens_the_reasoning_is_not_told_to_open_it():
    policy, teacher = tokens_of("small"), tokens_of("large")
    retokenize = Retokenizer(policy, teacher, {"thinking": True})
    prompt, stop = ask(policy.tokenizer), policy.stops[0]
    drawn = [*encode(policy.tokenizer, "<think>\ntwo</think>12"), stop]
    sequence = retokenize(prompt, answer(drawn, stopped_by=stop))
    assert teacher.tokenizer.decode(sequence.prompt).endswith("<think>\n")
    assert teacher.tokenizer.decode(sequence.answer) == "two</think>12<|eot|>"
    assert UNALIGNED in sequence.alignment.left and sequence.alignment.left[-1] != UNALIGNED
    direct = [*encode(policy.tokenizer, "12"), stop]  # which the teacher would take for reasoning
    sequence = retokenize(prompt, answer(direct, stopped_by=stop))
    assert sequence.answer == () and set(sequence.alignment.left) == {UNALIGNED}


def test_the_same_vocabulary_keeps_what_was_drawn():
    policy = tokens_of("small")
    drawn = [encode(policy.tokenizer, letter)[0] for letter in "numbers"]
    assert drawn != encode(policy.tokenizer, "numbers")
    sequence = Retokenizer(policy, policy)(ask(policy.tokenizer), answer(drawn))
    assert list(sequence.answer) == drawn
    assert sequence.alignment.left.tolist() == list(range(len(drawn)))


def test_a_prompt_without_messages_is_refused():
    policy, teacher = tokens_of("small"), tokens_of("large")
    with pytest.raises(ValueError, match="messages"):
        Retokenizer(policy, teacher)(Prompt(index=4, tokens=(1, 2)), answer([3]))

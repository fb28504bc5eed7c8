"""Answers in the tokens of a teacher, and what it says of them at the policy's own tokens."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.token_bytes import UNALIGNED
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, Completion, ScoredTokens
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.training.teachers import Retokenizer, SequenceTeacher, Teachers, UnalignedError
from tests.training.tokenizers import WORDS, byte_fallback, byte_level

CHAT = [{"role": "user", "content": "What is 12 + 3?"}]
WIDTH = 96
MADE = {
    "small": byte_level(300),
    "large": byte_level(420, "<|begin|>", "<|eot|>"),
    "sentencepiece": byte_fallback(200),
}
SMALL, LARGE, PIECES = (PolicyTokens(x, (x.eos_token_id,)) for x in MADE.values())


def ask(tokens, **more):
    chat = tokens.tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False, **more
    )
    return Prompt(index=0, tokens=tuple(chat), messages=CHAT)


def episode(drawn, prompt=(0,), stop=None):
    """Return an answer, each token with a log-prob that tells its place."""
    logprobs = -np.arange(1, len(drawn) + 1, dtype=np.float32) / 4
    stopped_by = stop if drawn[-1] == stop else None
    finish = "length" if stopped_by is None else "stop"
    arrays = np.array(drawn, np.int32), logprobs, np.zeros(len(drawn), np.int32)
    return Episode.of(prompt, Completion(*arrays, finish, stopped_by))


def encode(tokens, text):
    """Return the tokens of a text, in which no special token is seen."""
    if not text:
        return []
    return tokens.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


# ------------------------------------------------------------------------------- the same text


@pytest.mark.parametrize(
    ("policy", "teacher"), [(SMALL, PIECES), (PIECES, LARGE), (LARGE, SMALL)], ids=["1", "2", "3"]
)
@given(text=st.lists(st.sampled_from([*WORDS, "  ", "", "Ω", "<|im_end|>"]), max_size=8))
def test_every_token_of_a_text_is_aligned(policy, teacher, text):
    text, stop = " ".join(text), policy.stops[0]
    drawn = [*encode(policy, text), stop]
    sequence = Retokenizer(policy, teacher)(ask(policy), episode(drawn, stop=stop))
    assert sequence.prompt == tuple(ask(teacher).tokens)
    assert sequence.answer == (*encode(teacher, text), teacher.stops[0])
    left, right = sequence.alignment
    assert UNALIGNED not in left and UNALIGNED not in right
    assert left[-1] == right[-1] and (left == left[-1]).sum() == 1  # the turn's end
    for span in set(left[:-1]):
        seen = policy.tokenizer.decode(np.array(drawn)[left == span])
        told = teacher.tokenizer.decode(np.array(sequence.answer)[right == span])
        assert seen.strip(" ") == told.strip(" ") or "\ufffd" in seen + told


def test_a_cut_character_and_what_follows_a_special_token_are_left_out():
    retokenize, prompt, stop = Retokenizer(SMALL, LARGE), ask(SMALL), SMALL.stops[0]
    cut = encode(SMALL, "ab Ω")[:-1]  # a byte of the last character is missing
    sequence = retokenize(prompt, episode(cut))
    assert LARGE.tokenizer.decode(sequence.answer) == "ab "
    assert sequence.alignment.left[-1] == UNALIGNED != sequence.alignment.left[-2]
    opening = SMALL.tokenizer.convert_tokens_to_ids("<|im_start|>")
    first, second = encode(SMALL, "ab"), encode(SMALL, "cd")
    drawn = [*first, opening, *second, stop]
    sequence = retokenize(prompt, episode(drawn, stop=stop))
    assert LARGE.tokenizer.decode(sequence.answer) == "ab"
    is_left = sequence.alignment.left != UNALIGNED
    assert is_left.tolist() == [True] * len(first) + [False] * (len(drawn) - len(first))


def test_a_prompt_that_opens_the_reasoning_is_told_to_a_teacher_that_does_not():
    drawn = encode(PIECES, "two\n</think>\n12")
    sequence = Retokenizer(PIECES, SMALL)(ask(PIECES, thinking=True), episode(drawn))
    assert SMALL.tokenizer.decode(sequence.answer) == "<think>\ntwo\n</think>\n12"
    left, right = sequence.alignment
    assert right[0] == UNALIGNED != right[-1]
    assert (left != UNALIGNED).sum() >= len(drawn) - 1


def test_a_teacher_that_opens_the_reasoning_is_not_told_to_open_it():
    retokenize, stop = Retokenizer(SMALL, LARGE, {"thinking": True}), SMALL.stops[0]
    drawn = [*encode(SMALL, "<think>\ntwo</think>12"), stop]
    sequence = retokenize(ask(SMALL), episode(drawn, stop=stop))
    assert LARGE.tokenizer.decode(sequence.prompt).endswith("<think>\n")
    assert LARGE.tokenizer.decode(sequence.answer) == "two</think>12<|eot|>"
    assert UNALIGNED in sequence.alignment.left and sequence.alignment.left[-1] != UNALIGNED
    direct = [*encode(SMALL, "12"), stop]  # which the teacher would take for reasoning
    sequence = retokenize(ask(SMALL), episode(direct, stop=stop))
    assert sequence.answer == () and set(sequence.alignment.left) == {UNALIGNED}


def test_the_same_vocabulary_keeps_what_was_drawn_and_a_prompt_needs_messages():
    drawn = [encode(SMALL, letter)[0] for letter in "numbers"]
    assert drawn != encode(SMALL, "numbers")
    sequence = Retokenizer(SMALL, SMALL)(ask(SMALL), episode(drawn))
    assert list(sequence.answer) == drawn
    assert sequence.alignment.left.tolist() == list(range(len(drawn)))
    with pytest.raises(ValueError, match="messages"):
        Retokenizer(SMALL, LARGE)(Prompt(index=4, tokens=(1, 2)), episode([3]))


# ------------------------------------------------------------------------ what is said of tokens


def answers(prompt, drawn, stop=None):
    episodes = [episode(tokens, prompt.tokens, stop) for tokens in drawn]
    rollouts = Rollouts([prompt] * len(drawn), episodes, [""] * len(drawn))
    return lay_out(rollouts, samples=1, max_tokens=WIDTH), rollouts


def telling(of_token, top=0):
    """Return a stand-in that scores each token alone, and the sequences that it was given."""
    given = []

    def score(tokens):
        places = np.arange(len(tokens), dtype=np.int32)[:, None] * 10 + np.arange(top)
        logprobs = np.float32([of_token(token) for token in tokens])
        return ScoredTokens(logprobs, places, -places.astype(np.float32))

    def submit(sequences):
        given.extend(sequences)
        return lambda: [score(tokens) for tokens in sequences]

    return submit, given


def test_the_policys_tokens_keep_their_places():
    batch, rollouts = answers(Prompt(0, (9, 8)), [[5, 6, 7], [6], [7, 5]])
    submit, given = telling(lambda token: -float(token), top=2)
    fields = SequenceTeacher(name="t", submit=submit, top=2).begin(batch, rollouts)()
    assert given == [(9, 8, 5, 6, 7), (9, 8, 6), (9, 8, 7, 5)]
    assert (fields["teacher_mask"] == batch["mask"]).all()
    kept = batch["mask"]
    np.testing.assert_allclose(fields["teacher_logprobs"][kept], -batch.tokens[kept])
    assert fields["teacher_ids"][0, 2:5].tolist() == [[20, 21], [30, 31], [40, 41]]
    assert fields["teacher_top_logprobs"][2, 2:4].tolist() == [[-20, -21], [-30, -31]]
    assert fields["teacher_top_logprobs"].shape == (3, WIDTH, 2)


def test_neither_impossible_tokens_nor_unusable_answers_are_told():
    batch, rollouts = answers(Prompt(0, (9,)), [[5, 6, 7], [7, 5]])
    batch = batch.add(mask=batch["mask"] & np.array([[True], [False]]))
    submit, given = telling(lambda token: LEAST_LOGPROB if token == 6 else -1.0)
    fields = SequenceTeacher(name="t", submit=submit).begin(batch, rollouts)()
    assert given == [(9, 5, 6, 7)]
    assert fields["teacher_mask"][:, 1:4].tolist() == [[True, False, True], [False] * 3]
    assert fields["teacher_logprobs"][0, 1:4].tolist() == [-1, -0.5, -1]  # the policy's own


def nats(token):
    """Return -1/8 for each byte that a teacher's token stands for, -3 for the end of a turn."""
    piece = PIECES.tokenizer.convert_ids_to_tokens(token)
    if token == PIECES.stops[0]:
        return -3.0
    size = len(piece.encode().replace("▁".encode(), b" "))
    return -0.125 * (1 if piece.startswith("<0x") else size)


def test_sums_are_those_of_the_teachers_tokens():
    text, stop = "x  the sum 世界 Ω naïve 12 != zy 3", SMALL.stops[0]
    retokenize, prompt = Retokenizer(SMALL, PIECES), ask(SMALL)
    drawn, first = encode(SMALL, text), len(prompt.tokens)
    batch, rollouts = answers(prompt, [[*drawn, stop], drawn], stop)
    submit, given = telling(nats)
    made = SequenceTeacher(name="t", submit=submit, retokenize=retokenize)
    fields = made.begin(batch, rollouts)()
    chat = ask(PIECES).tokens
    assert given[0][: len(chat)] == chat and given[0][-1] == PIECES.stops[0]
    assert (fields["teacher_mask"] == batch["mask"]).all()
    one, two = fields["teacher_logprobs"][:, first : first + len(drawn) + 1]
    space = 1  # the teacher's first token has one that is no part of the text
    total = -0.125 * (len(text.encode()) + space)
    assert one.sum() == pytest.approx(total - 3) and two[:-1].sum() == pytest.approx(total)
    assert one[-1] == pytest.approx(-3)
    sizes = np.array([len(SMALL.tokenizer.convert_ids_to_tokens(t)) for t in drawn])  # in bytes
    spans = retokenize(rollouts.prompts[1], rollouts.episodes[1]).alignment.left
    assert len(set(spans)) > 8
    for span in set(spans):
        expected = -0.125 * (sizes[spans == span].sum() + space * (span == 0))
        assert one[:-1][spans == span].sum() == pytest.approx(expected)


def test_what_is_cut_is_left_out_and_nothing_at_all_is_an_error():
    """But not where another teacher tells something."""
    drawn, chat = encode(SMALL, "the sum of two numbers"), ask(SMALL).tokens
    prompts = [Prompt(i, chat, data_source=name, messages=CHAT) for i, name in enumerate("ab")]
    batch, rollouts = answers(prompts[0], [drawn, drawn])
    rollouts = rollouts._replace(prompts=prompts)
    submit, given = telling(lambda token: -1.0)
    teacher = functools.partial(
        SequenceTeacher, submit=submit, retokenize=Retokenizer(SMALL, PIECES)
    )
    teacher(name="t").begin(batch, rollouts)()
    longest = len(given[0]) - 3
    fields = teacher(name="t", longest=longest).begin(batch, rollouts)()
    assert len(given[-1]) == longest
    left_out, own = batch["mask"] & ~fields["teacher_mask"], batch["rollout_logprobs"]
    assert 0 < left_out.sum() < batch["mask"].sum()
    assert (fields["teacher_logprobs"][left_out] == own[left_out]).all()
    asked, none = len(given), teacher(name="absent", longest=4)
    with pytest.raises(UnalignedError, match="absent"):
        Teachers({"*": none}).add_logprobs(batch, rollouts)
    assert len(given) == asked
    told, metrics = Teachers({"a": teacher(name="a"), "b": none}).add_logprobs(batch, rollouts)
    assert told["teacher_mask"].any(1).tolist() == [True, False]
    assert 0.5 <= metrics["teacher/left_out"] < 1 and "teacher/reverse_kl/b" not in metrics

"""What a teacher says of its own tokens comes to the drawn ones that they stand for."""

import functools

import numpy as np
import pytest

from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, Completion, ScoredTokens
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.training.teachers import Retokenizer, SequenceTeacher, Teachers, UnalignedError
from tests.training.tokenizers import byte_fallback, byte_level

CHAT = [{"role": "user", "content": "What is 12 + 3?"}]
WIDTH = 96


def answers(prompt, drawn, stop=None):
    """Lay answers out, each token with a log-prob that tells its place."""
    episodes = []
    for tokens in drawn:
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 4
        stopped_by = stop if tokens[-1] == stop else None
        finish = "length" if stopped_by is None else "stop"
        whole = np.array(tokens, np.int32), logprobs, np.zeros(len(tokens), np.int32)
        episodes.append(Episode.of(prompt.tokens, Completion(*whole, finish, stopped_by)))
    rollouts = Rollouts([prompt] * len(drawn), episodes, [""] * len(drawn))
    return lay_out(rollouts, samples=1, max_tokens=WIDTH), rollouts


def telling(of_token, top=0):
    """Return a stand-in that scores each token alone, and the sequences that it was given."""
    given = []

    def submit(sequences):
        given.extend(sequences)

        def scores():
            scored = []
            for tokens in sequences:
                places = np.arange(len(tokens), dtype=np.int32)[:, None] * 10 + np.arange(top)
                logprobs = np.float32([of_token(token) for token in tokens])
                scored.append(ScoredTokens(logprobs, places, -places.astype(np.float32)))
            return scored

        return scores

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


def tokens_of(tokenizer):
    return PolicyTokens(tokenizer, (tokenizer.eos_token_id,))


POLICY, TEACHER = byte_level(300), byte_fallback(200)
RETOKENIZE = Retokenizer(tokens_of(POLICY), tokens_of(TEACHER))
CHAT_OF_POLICY, CHAT_OF_TEACHER = (
    tuple(x.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))
    for x in (POLICY, TEACHER)
)


def encode(text):
    return POLICY(text, add_special_tokens=False)["input_ids"]


def per_byte(tokenizer, end):
    """Return -1/8 nats for each byte that a token stands for, -3 for the end of a turn."""

    def of_token(token):
        piece = tokenizer.convert_ids_to_tokens(token)
        if token == end:
            return -3.0
        return -0.125 * (
            1 if piece.startswith("<0x") else len(piece.encode().replace("▁".encode(), b" "))
        )

    return of_token


def test_sums_are_those_of_the_teachers_tokens():
    text, stop = "x  the sum 世界 Ω naïve 12 != zy 3", POLICY.eos_token_id
    drawn, first = encode(text), len(CHAT_OF_POLICY)
    prompt = Prompt(0, CHAT_OF_POLICY, messages=CHAT)
    batch, rollouts = answers(prompt, [[*drawn, stop], drawn], stop)
    submit, given = telling(per_byte(TEACHER, TEACHER.eos_token_id))
    made = SequenceTeacher(name="t", submit=submit, retokenize=RETOKENIZE)
    fields = made.begin(batch, rollouts)()
    assert given[0][: len(CHAT_OF_TEACHER)] == CHAT_OF_TEACHER
    assert given[0][-1] == TEACHER.eos_token_id
    assert (fields["teacher_mask"] == batch["mask"]).all()
    one, two = fields["teacher_logprobs"][:, first : first + len(drawn) + 1]
    space = 1  # the teacher's first token has one that is no part of the text
    total = -0.125 * (len(text.encode()) + space)
    assert one.sum() == pytest.approx(total - 3) and two[:-1].sum() == pytest.approx(total)
    assert one[-1] == pytest.approx(-3)
    sizes = np.array([len(POLICY.convert_ids_to_tokens(token)) for token in drawn])  # in bytes
    spans = RETOKENIZE(rollouts.prompts[1], rollouts.episodes[1]).alignment.left
    assert len(set(spans)) > 8
    for span in set(spans):
        expected = -0.125 * (sizes[spans == span].sum() + space * (span == 0))
        assert one[:-1][spans == span].sum() == pytest.approx(expected)


def test_what_is_cut_is_left_out_and_nothing_at_all_is_an_error():
    """But not where another teacher tells something."""
    drawn = encode("the sum of two numbers")
    prompts = [
        Prompt(i, CHAT_OF_POLICY, data_source=name, messages=CHAT) for i, name in enumerate("ab")
    ]
    batch, rollouts = answers(prompts[0], [drawn, drawn])
    rollouts = rollouts._replace(prompts=prompts)
    submit, given = telling(lambda token: -1.0)
    teacher = functools.partial(SequenceTeacher, submit=submit, retokenize=RETOKENIZE)
    teacher(name="t").begin(batch, rollouts)()
    longest = len(given[0]) - 3
    fields = teacher(name="t", longest=longest).begin(batch, rollouts)()
    assert len(given[-1]) == longest
    left_out, own = batch["mask"] & ~fields["teacher_mask"], batch["rollout_logprobs"]
    assert 0 < left_out.sum() < batch["mask"].sum()
    assert (fields["teacher_logprobs"][left_out] == own[left_out]).all()
    asked, none = len(given), teacher(name="the teacher", longest=4)
    with pytest.raises(UnalignedError, match="the teacher"):
        Teachers({"*": none}).add_logprobs(batch, rollouts)
    assert len(given) == asked
    told, metrics = Teachers({"a": teacher(name="a"), "b": none}).add_logprobs(batch, rollouts)
    assert told["teacher_mask"].any(1).tolist() == [True, False]
    assert 0.5 <= metrics["teacher/left_out"] < 1 and "teacher/reverse_kl/b" not in metrics

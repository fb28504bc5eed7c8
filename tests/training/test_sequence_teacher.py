"""What a teacher says of its own tokens comes to the drawn ones that they stand for."""

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


def test_a_token_without_probability_is_left_out():
    batch, rollouts = answers(Prompt(0, (9,)), [[5, 6, 7]])
    submit, _ = telling(lambda token: LEAST_LOGPROB if token == 6 else -1.0)
    fields = SequenceTeacher(name="t", submit=submit).begin(batch, rollouts)()
    assert fields["teacher_mask"][0, 1:4].tolist() == [True, False, True]
    assert fields["teacher_logprobs"][0, 1:4].tolist() == [-1, -0.5, -1]  # the policy's own


def test_answers_that_are_not_usable_are_not_asked_for():
    batch, rollouts = answers(Prompt(0, (9,)), [[5, 6], [7]])
    batch = batch.add(mask=batch["mask"] & np.array([[False], [True]]))
    submit, given = telling(lambda token: -1.0)
    fields = SequenceTeacher(name="t", submit=submit).begin(batch, rollouts)()
    assert given == [(9, 7)] and fields["teacher_mask"].sum() == 1


@pytest.fixture(scope="module")
def other():
    """Tokenizers of a policy and of a teacher, and what writes answers for the latter."""
    policy, teacher = byte_level(300), byte_fallback(200)
    tokens = [PolicyTokens(tokenizer, (tokenizer.eos_token_id,)) for tokenizer in (policy, teacher)]
    return policy, teacher, Retokenizer(*tokens)


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


def test_sums_are_those_of_the_teachers_tokens(other):
    policy, teacher, retokenize = other
    ids = policy.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    text, stop = "x  the sum 世界 Ω naïve 12 != zy 3", policy.eos_token_id
    drawn = policy(text, add_special_tokens=False)["input_ids"]
    batch, rollouts = answers(Prompt(0, tuple(ids), messages=CHAT), [[*drawn, stop], drawn], stop)
    submit, given = telling(per_byte(teacher, teacher.eos_token_id))
    made = SequenceTeacher(name="t", submit=submit, retokenize=retokenize)
    fields = made.begin(batch, rollouts)()
    chat = teacher.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(given[0])[: len(chat)] == chat and given[0][-1] == teacher.eos_token_id
    assert (fields["teacher_mask"] == batch["mask"]).all()
    first = len(ids)
    one, two = fields["teacher_logprobs"][:, first : first + len(drawn) + 1]
    space = 1  # the teacher's first token has one that is no part of the text
    total = -0.125 * (len(text.encode()) + space)
    assert one.sum() == pytest.approx(total - 3) and two[:-1].sum() == pytest.approx(total)
    assert one[-1] == pytest.approx(-3)
    sizes = np.array([len(policy.convert_ids_to_tokens(token)) for token in drawn])  # in bytes
    spans = retokenize(rollouts.prompts[1], rollouts.episodes[1]).alignment.left
    assert len(set(spans)) > 8
    for span in set(spans):
        expected = -0.125 * (sizes[spans == span].sum() + space * (span == 0))
        assert one[:-1][spans == span].sum() == pytest.approx(expected)


def test_what_is_cut_is_left_out_and_nothing_at_all_is_an_error(other):
    policy, _, retokenize = other
    ids = policy.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    drawn = policy("the sum of two numbers", add_special_tokens=False)["input_ids"]
    batch, rollouts = answers(Prompt(0, tuple(ids), messages=CHAT), [drawn])
    submit, given = telling(lambda token: -1.0)
    whole = SequenceTeacher(name="t", submit=submit, retokenize=retokenize)
    whole.begin(batch, rollouts)()
    longest = len(given[0]) - 3
    cut = SequenceTeacher(name="t", submit=submit, retokenize=retokenize, longest=longest)
    fields = cut.begin(batch, rollouts)()
    assert len(given[1]) == longest
    left_out = batch["mask"] & ~fields["teacher_mask"]
    assert 0 < left_out.sum() < batch["mask"].sum()
    own = batch["rollout_logprobs"]
    assert (fields["teacher_logprobs"][left_out] == own[left_out]).all()
    none = SequenceTeacher(name="the teacher", submit=submit, retokenize=retokenize, longest=4)
    alone = Teachers({"*": none})
    with pytest.raises(UnalignedError, match=r"the teacher: not one of .* tokens of the answers"):
        alone.add_logprobs(batch, rollouts)
    assert len(given) == 2  # nothing was asked for


def test_one_of_several_teachers_may_tell_nothing(other):
    policy, _, retokenize = other
    ids = policy.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    drawn = policy("the sum of two numbers", add_special_tokens=False)["input_ids"]
    prompts = [
        Prompt(i, tuple(ids), data_source=name, messages=CHAT) for i, name in enumerate("ab")
    ]
    batch, rollouts = answers(prompts[0], [drawn, drawn])
    submit, _ = telling(lambda token: -1.0)
    teachers = {
        "a": SequenceTeacher(name="a", submit=submit, retokenize=retokenize),
        "b": SequenceTeacher(name="b", submit=submit, retokenize=retokenize, longest=4),
    }
    both = Teachers(teachers)
    told, metrics = both.add_logprobs(batch, rollouts._replace(prompts=prompts))
    assert told["teacher_mask"].any(1).tolist() == [True, False]
    assert 0.5 <= metrics["teacher/left_out"] < 1 and "teacher/reverse_kl/b" not in metrics


def test_servers_are_asked_before_other_passes_each_for_its_sources_answers():
    prompts = [Prompt(i, (9, 8), data_source=name) for i, name in enumerate("abab")]
    batch, rollouts = answers(prompts[0], [[5, 6, 7], [6], [7, 5], [5, 5]])
    rollouts = rollouts._replace(prompts=prompts)
    submits = {source: telling(lambda token, cost=cost: -cost) for source, cost in COSTS.items()}
    teachers = {
        source: SequenceTeacher(name=source, submit=submit)
        for source, (submit, _) in submits.items()
    }
    opened = Teachers(teachers)
    opened.begin(batch, rollouts)
    given = {source: asked for source, (_, asked) in submits.items()}
    expected = {"a": [(9, 8, 5, 6, 7), (9, 8, 7, 5)], "b": [(9, 8, 6), (9, 8, 5, 5)]}
    assert given == expected
    told, metrics = opened.add_logprobs(batch, rollouts)
    assert given == expected  # nobody was asked twice
    costs = np.array([[COSTS[prompt.data_source]] for prompt in prompts])
    np.testing.assert_allclose(told["teacher_logprobs"][:, 2:5], -costs * batch["mask"][:, 2:5])
    apart = (batch["rollout_logprobs"] + costs)[batch["mask"]]
    assert metrics["teacher/reverse_kl"] == pytest.approx(apart.mean())
    opened.add_logprobs(batch, rollouts)  # as canaries and notebooks may, without a beginning
    assert given["a"] == 2 * expected["a"]


COSTS = {"a": 2.0, "b": 3.0}

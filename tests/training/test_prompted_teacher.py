"""Prompts for a teacher: who gets which, and where what the teacher says of an answer belongs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import reverse_kl
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.teacher_prompts import (
    ScoredAnswer,
    with_demonstration,
    with_feedback,
    with_successful_sibling,
)
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.teachers import TeacherPromptError, TeacherPrompts, add_prompted_logprobs
from tests.refusals import refuses

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+{2}="}]


def answers(count, samples, broken=()):
    """Return answers of 1, 2, 3, … tokens to prompts of two."""
    episodes = []
    for number in range(count):
        size = number % 3 + 1
        completion = Completion(
            np.arange(1, size + 1) + 10 * number,
            -np.arange(1, size + 1, dtype=np.float32),
            np.zeros(size, int),
            "length",
        )
        error = "died" if number in broken else None
        episode = Episode.of((1, 2), completion)
        episodes.append(Episode(episode.prompt, episode.pieces, "length", error=error))
    prompts = [
        Prompt(7, (1, 2), "sums", "3", {"solution": "is 3"}, messages=CHAT) for _ in range(count)
    ]
    rollouts = Rollouts(prompts, episodes, [f"text {i}" for i in range(count)])
    return rollouts, lay_out(rollouts, samples=samples, max_tokens=6, compares=False)


def prompts_by(function, *, longest=9, samples=4):
    """Write prompts by a function; a prompt has as many tokens as its last text says."""

    def encode(messages):
        return [5] * int(messages[-1]["content"])

    return TeacherPrompts(
        function=function, encode=encode, samples=samples, max_prompt_tokens=longest, max_tokens=14
    )


def test_a_function_gets_what_it_asks_for():
    seen = []

    def write(messages, data_source, ground_truth, extra_info, text, score, feedback, siblings):
        assert (messages, data_source, ground_truth) == (CHAT, "sums", "3")
        assert extra_info == {"solution": "is 3"}
        messages[0]["content"] = "changed"
        seen.append((text, score, feedback, [s.text for s in siblings]))

    rollouts, batch = answers(8, 4, broken=[2])
    scores = [Score(float(i), {"of": i}, None) for i in range(8)]
    scores[5] = Score(9.0, {}, "timeout: no answer")
    rows, _, metrics = prompts_by(write)(batch, rollouts, scores)
    assert rows == []
    assert metrics == {"teacher/no_prompt": 7.0, "teacher/too_long": 0.0}
    others = [[1, 3], [0, 3], [0, 1], [6, 7], [4, 6, 7], [4, 7], [4, 6]]
    rows = [0, 1, 3, 4, 5, 6, 7]
    assert seen == [
        (f"text {i}", scores[i].score, scores[i].extra, [f"text {j}" for j in there])
        for i, there in zip(rows, others, strict=True)
    ]
    assert CHAT[0]["content"] == "Add."


def test_the_teachers_words_stand_at_the_answers_places():
    """Also where answers have other lengths than prompts, and some have no teacher."""

    def write(text):  # prompts of 4, 5, … tokens; none for the second and sixth
        number = int(text.removeprefix("text "))
        return None if number in (1, 5) else [{"role": "user", "content": str(4 + number)}]

    def teach(batch, rollouts):
        told = np.where(batch["mask"], batch.tokens / 100, 7.0).astype(np.float32)
        top = np.stack([batch.tokens, -batch.tokens], -1)
        assert [list(p.tokens) for p in rollouts.prompts] == [[5] * n for n in (4, 6, 7, 8)]
        fields = {"teacher_logprobs": told, "teacher_mask": batch["mask"], "teacher_ids": top}
        return batch.add(**fields), {"teacher/reverse_kl": 1.5}

    rollouts, batch = answers(8, 4, broken=[7])
    scores = [Score(0.0, {}, None)] * 8
    prompts = prompts_by(write, longest=8)
    after, metrics = add_prompted_logprobs(batch, rollouts, scores, prompts, teach)
    has = np.isin(np.arange(8), [0, 2, 3, 4])[:, None] & batch["mask"]
    own = np.where(batch["mask"], batch["rollout_logprobs"], 0)
    expected = np.where(has, batch.tokens / 100, own)
    np.testing.assert_allclose(after["teacher_logprobs"], expected, rtol=1e-6)
    np.testing.assert_array_equal(after["teacher_mask"], has)
    np.testing.assert_array_equal(after["teacher_ids"][has], [[t, -t] for t in batch.tokens[has]])
    assert metrics == pytest.approx(
        {
            "teacher/reverse_kl": 1.5,
            "teacher/no_prompt": 2,
            "teacher/too_long": 1,  # that of the seventh has 10 tokens
            "teacher/left_out": 1 - has.sum() / batch["mask"].sum(),
        }
    )
    fields = (jnp.asarray(after[name]) for name in ("rollout_logprobs", "teacher_logprobs", "mask"))
    advantages = np.asarray(reverse_kl(*fields))
    assert np.all(advantages[batch["mask"] & ~has] == 0) and np.all(advantages[has] != 0)


def test_what_a_function_must_not_do():
    rollouts, batch = answers(4, 4)
    for write, named in (
        (lambda text: [{"role": "user", "content": "10"}], "9"),  # none is short enough
        (lambda text: "a text", "messages"),
        (lambda text: [{"role": "user"}], "messages"),
        (lambda text: {}["key"], "row 7"),
        (lambda text: [{"role": "user", "content": "x"}], "row 7"),
    ):
        with pytest.raises(TeacherPromptError, match=named):
            prompts_by(write)(batch, rollouts, [Score(0.0, {}, None)] * 4)


def test_what_the_librarys_functions_write():
    failure, success = (ScoredAnswer(t, s, {}) for t, s in (("{no}", 0.5), ("{yes}", 1.0)))
    told = with_successful_sibling(CHAT, [failure, success, failure])
    assert told[0] == CHAT[0] and told[1]["role"] == "user"
    assert told[1]["content"].startswith("1+{2}=\n") and "{yes}" in told[1]["content"]
    assert with_successful_sibling(CHAT, [failure]) is None
    assert "{no}" in with_successful_sibling(CHAT, [failure, success], threshold=0.5)[1]["content"]
    assert "is 3" in with_demonstration(CHAT, "3", {"how": "is 3"}, column="how")[1]["content"]
    assert with_demonstration(CHAT, None, {}) is None
    assert with_demonstration(CHAT, 0, {}) is not None
    told = with_feedback(CHAT, "{4}", {"stderr": "too large"}, name="stderr")
    assert "{4}" in told[1]["content"] and "too large" in told[1]["content"]
    assert with_feedback(CHAT, "4", {"feedback": ""}) is None
    for chat, extra, keywords in (
        (CHAT, {"how": "is 3"}, {"column": "hwo"}),
        (CHAT, {}, {"template": "{prompt} {answer}"}),
        (CHAT[:1], {}, {}),  # no message of a user
    ):
        with pytest.raises(ValueError, match=keywords.get("column", "demonstration|system")):
            with_demonstration(chat, "3", extra, **keywords)


SELF = {"teacher.weights": "ema"}
SHOWN = {"teacher.prompt": "with_demonstration"}
WRONG = [
    ({"teacher.weights": "live"}, "teacher.weights"),
    ({"teacher.path": "t"} | SELF, "teacher.path"),
    ({"teacher.path": "t", "teacher.ema": 0.1}, "teacher.ema"),
    ({"teacher.max_prompt_tokens": 9} | SELF, "teacher.max_prompt_tokens"),
    (SELF | SHOWN | {"rollout.tools": ["python"]}, "teacher.prompt"),
    (SELF | SHOWN | {"teacher.max_prompt_tokens": 10**6}, "batch.max_tokens_per_device"),
    (SHOWN | {"teacher.weights": "live", "offload.teacher": True}, "offload.teacher"),
    (SELF | {"algorithm.distillation": "forward_kl_divergence"}, "teacher.weights"),
    (SELF | {"mesh.teacher": {}, "model.lora": {}}, "mesh.teacher"),
]


def test_what_contradicts_itself_names_its_key(subtests):
    for keys, key in WRONG:
        given = {"algorithm.advantage": "reverse_kl", "model.warm_start": None, **keys}
        with subtests.test(str(keys)), refuses(key):
            resolve_functions(load(TrainConfig, "quickstart", given))

"""Prompts for a teacher: who gets which, and where what the teacher says of an answer belongs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import reverse_kl
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree
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


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda text: [{"role": "user", "content": "10"}], "each of the 4 prompts .* than 9 token"),
        (lambda text: "a text", "returned 'a text', expected messages"),
        (lambda text: [{"role": "user"}], r"returned \[.*\], expected messages, each with role"),
        (lambda text: {}["key"], r"'<lambda>' failed on an answer to row 7: .*KeyError: 'key'"),
        (
            lambda text: [{"role": "user", "content": "x"}],
            r"teacher\.prompt: an answer to row 7: invalid",
        ),
    ],
)
def test_what_a_function_must_not_do(write, message):
    rollouts, batch = answers(4, 4)
    with pytest.raises(TeacherPromptError, match=message):
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
    with pytest.raises(ValueError, match="extra_info has no 'hwo'; did you mean 'how'"):
        with_demonstration(CHAT, "3", {"how": "is 3"}, column="hwo")
    with pytest.raises(ValueError, match=r"expected the names \{prompt\}, \{demonstration\}, and"):
        with_demonstration(CHAT, "3", {}, template="{prompt} {answer}")
    with pytest.raises(ValueError, match=r"a text of the user .* messages of \['system'\]"):
        with_demonstration(CHAT[:1], "3", {})


SELF = {"weights": "ema"}
SHOWN = {"prompt": "with_demonstration"}
WRONG = [
    ({"weights": "live"}, {}, r"teacher\.weights=live without teacher\.prompt is the policy"),
    ({"path": "t"} | SELF, {}, r"teacher\.path is set, but teacher\.weights=ema"),
    ({"path": "t", "ema": 0.1}, {}, r"teacher\.ema=0\.1, but teacher\.weights=given"),
    ({"max_prompt_tokens": 9} | SELF, {}, r"max_prompt_tokens is set, but teacher\.prompt is null"),
    (SELF | {"prompt": "with_demonstratoin"}, {}, "did you mean 'with_demonstration'"),
    (SELF | {"prompt": {"fn": "with_feedback", "nam": "x"}}, {}, "takes no 'nam'; did you mean"),
    (SELF | {"prompt": "jaxrl_llm.data.chat:load_tokenizer"}, {}, "asks for 'directory', which"),
    (SELF | SHOWN, {"rollout": {"tools": ["python"]}}, r"rollout has tools, an environment or an"),
    (
        SELF | SHOWN | {"max_prompt_tokens": 200},
        {"batch": {"max_tokens_per_device": 128}, "data": {"train": "t", "max_prompt_tokens": 8}},
        r"max_tokens_per_device=128 can't hold .* = 216",
    ),
    (SHOWN | {"weights": "live"}, {"offload": {"teacher": True}}, r"offload\.teacher is set, but"),
    (
        SELF,
        {"algorithm": {"advantage": "reverse_kl", "distillation": "forward_kl_divergence"}},
        r"weights=ema gives log-probs of the drawn tokens alone, but algorithm\.dist",
    ),
    (SELF, {"mesh": {"teacher": {}}, "model": {"path": "m", "lora": {}}}, r"mesh\.teacher is set"),
]


@pytest.mark.parametrize(("teacher", "tree", "message"), WRONG)
def test_what_is_refused(teacher, tree, message):
    base = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"max_new_tokens": 16},
        "algorithm": {"advantage": "reverse_kl"},
        "teacher": teacher,
    }
    with pytest.raises(ConfigError, match=message):
        resolve_functions(from_tree(TrainConfig, base | tree))

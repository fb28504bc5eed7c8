"""Validation metrics against a loop that counts on its fingers."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.training.validation import headline, validation_metrics


def prompt(source):
    return Prompt(index=0, tokens=(1, 2), data_source=source, ground_truth="1")


def naive(prompts, scores, k):
    """Compute the metrics again, one answer at a time."""
    metrics = {}
    for source in {p.data_source for p in prompts}:
        mine = [s for p, s in zip(prompts, scores, strict=True) if p.data_source == source]
        groups = [mine[first : first + k] for first in range(0, len(mine), k)]
        good = [s for s in mine if s.error is None]
        name = "acc" if good and all("acc" in s.extra for s in good) else "reward"
        prefix = f"val-core/{source}/{name}"
        metrics[f"{prefix}/mean@{k}"] = sum(value_of(s, name) for s in mine) / len(mine)
        if k == 1:
            continue
        best = [max(value_of(s, name) for s in group) for group in groups]
        metrics[f"{prefix}/best@{k}"] = sum(best) / len(groups)
        if good and all("pred" in s.extra for s in good):
            major = [value_of(winner(group), name) for group in groups]
            metrics[f"{prefix}/maj@{k}"] = sum(major) / len(groups)
    return metrics


def value_of(score, name):
    if name == "reward":
        return score.score
    return 0.0 if score.error else float(score.extra["acc"])


def winner(group):
    """Return the first answer that has the most equals, among those that are one."""
    group = [s for s in group if not s.error and s.extra["pred"] is not None] or group[:1]
    answers = [str(s.extra.get("pred")) for s in group]
    votes = [answers.count(answer) for answer in answers]
    return group[votes.index(max(votes))]


@st.composite
def validations(draw):
    k = draw(st.sampled_from([1, 2, 3, 5]))
    sources = draw(st.lists(st.sampled_from(["gsm8k", "math", "a/b"]), min_size=1, max_size=6))
    extras = st.fixed_dictionaries(
        {}, optional={"acc": st.sampled_from([0.0, 1.0, True, 1]), "pred": st.sampled_from("abc")}
    )
    if draw(st.booleans()):  # every answer has both, as from the library's own functions
        extras = st.fixed_dictionaries(
            {"acc": st.sampled_from([0.0, 1.0]), "pred": st.sampled_from(["a", "b", "c", None])}
        )
    values = st.sampled_from([-1.0, 0.0, 0.1, 1.0])
    failed = st.just(Score(-1.0, {}, "TimeoutError: no answer within 1 s"))
    scores = st.builds(Score, values, extras, st.none()) | failed
    answers = draw(st.lists(scores, min_size=len(sources) * k, max_size=len(sources) * k))
    return sources, answers, k


@given(validations())
def test_metrics_equal_a_naive_loop(validation):
    sources, scores, k = validation
    prompts = [prompt(source) for source in sources for _ in range(k)]
    metrics = validation_metrics(prompts, scores, samples=k)
    assert metrics == pytest.approx(naive(prompts, scores, k), abs=1e-12)
    assert all(type(value) is float for value in metrics.values())


def scores_of(*answers):
    return [Score(acc, {"acc": acc, "pred": pred}, None) for pred, acc in answers]


def test_metrics_by_hand_where_unscored_answers_are_left_out():
    unscored = Score(math.nan, {}, "unscored: no verdict")
    gsm8k, math_ = scores_of(("4", 0.0), ("4", 1.0), ("5", 1.0), ("5", 1.0)), [unscored] * 2
    gsm8k[2] = unscored
    prompts = [prompt("gsm8k")] * 4 + [prompt("math")] * 2
    assert validation_metrics(prompts, gsm8k + math_, samples=2) == pytest.approx(
        {
            "val-core/gsm8k/acc/mean@2": 2 / 3,
            "val-core/gsm8k/acc/best@2": 1.0,  # of the only prompt with two
            "val-core/gsm8k/acc/maj@2": 0.0,
            "val-aux/gsm8k/unscored": 1.0,
            "val-aux/math/unscored": 2.0,  # of which nothing is known
        }
    )


def test_ties_go_to_the_answer_that_came_first():
    for answers, majority in (
        ([("b", 0.0), ("a", 1.0)], 0.0),  # one each: the first
        ([("c", 0.0), ("a", 1.0), ("b", 0.0), ("b", 0.0), ("a", 1.0)], 1.0),  # a came before b
        ([(1, 1.0), ("1", 1.0), ("2", 0.0)], 1.0),  # a number and its text are one answer
        ([(None, 0.5), (None, 0.0)], 0.5),  # nobody votes: the first
        ([("None", 0.0), ("None", 0.0), ("2", 1.0)], 0.0),  # a text is an answer
    ):
        k = len(answers)
        metrics = validation_metrics([prompt("s")] * k, scores_of(*answers), samples=k)
        assert metrics[f"val-core/s/acc/maj@{k}"] == majority, answers


def test_the_headline_is_the_mean_over_sources():
    metrics = {"val-core/a/acc/mean@2": 0.2, "val-core/b/reward/mean@2": 0.8}
    assert headline(metrics | {"val-core/a/acc/best@2": 9.0, "x": 7.0}) == pytest.approx(0.5)

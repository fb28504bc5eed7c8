"""What a step's batch tells trackers."""

import math

import numpy as np
import pytest

from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.training.trainer import extra_metrics, step_histograms
from jaxrl_llm.types import Batch

MASK = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
ENGINE = np.array([[0, -1, -2, 0], [0, 0, -3, -4], [0, 0, 0, 0]], np.float32)
SCORES = [Score(1.0, {}, None), Score(0.25, {}, None), Score(9.0, {}, "failed")]


@pytest.fixture
def batch():
    """A batch of two usable answers, and one that is broken."""
    return Batch(
        np.zeros((3, 4), np.int32),
        np.array([3, 4, 2], np.int32),
        {
            "mask": MASK,
            "usable": np.array([True, True, False]),
            "response_lengths": np.array([2, 2, 0], np.int32),
            "advantages": np.array([[9, 1, 2, 9], [9, 9, -1, -2], [9, 9, 9, 9]], np.float32),
            "rollout_logprobs": ENGINE,
        },
    )


def test_histograms_have_usable_answers_and_drawn_tokens_only(batch):
    values = step_histograms(batch.add(old_logprobs=ENGINE + 0.5 * MASK), SCORES)
    assert {name: array.tolist() for name, array in values.items()} == {
        "score": [1.0, 0.25],
        "response_length": [2, 2],
        "advantages": [1.0, 2.0, -1.0, -2.0],
        "logprob_diff": [0.5, 0.5, 0.5, 0.5],
    }


def test_where_no_pass_computes_log_probs_there_is_no_difference_to_show(batch):
    assert "logprob_diff" not in step_histograms(batch, SCORES)
    assert "logprob_diff" not in step_histograms(batch.add(old_logprobs=ENGINE), SCORES)


def test_extra_numbers_count_where_they_are_numbers():
    """A model's digits may be an int that no float can hold, and a ratio of nothing is NaN."""
    given = [1.0, True, 4, math.nan, -math.inf, None, 10**400, 1e39, "5", [6.0]]
    metrics = extra_metrics([Score(0.0, {"form": value, "no": math.nan}, None) for value in given])
    assert metrics == {"reward/form/mean": 2.0}

"""The estimators against brute force and published formulas; the interval against simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.training.validation import best_at, interval, majority_at, mean_of_each, read_scores

VALUES = arrays(
    float, st.sampled_from([(1, 1), (2, 3), (3, 6)]), elements=st.floats(-2, 2, width=16)
)


@given(VALUES, st.integers(1, 6))
def test_best_at_k_is_the_mean_over_all_choices(values, k):
    k = min(k, values.shape[1])
    expected = [np.mean([max(some) for some in itertools.combinations(row, k)]) for row in values]
    np.testing.assert_allclose(best_at(values, k), expected, atol=1e-12)


def test_best_at_k_of_right_and_wrong_answers_is_pass_at_k():
    n = 200
    for correct, k in itertools.product((0, 1, 7, 199, 200), (1, 2, 100, 200)):
        values = np.zeros((1, n))
        values[0, :correct] = 1
        chen = 1 - math.comb(n - correct, k) / math.comb(n, k)
        np.testing.assert_allclose(best_at(values, k), [chen], atol=1e-12)
    for k in (0, n + 1):
        with pytest.raises(ValueError, match="k="):
            best_at(values, k)


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_majority_at_k_is_a_vote_of_each_block(data, k, blocks):
    n = k * blocks + data.draw(st.integers(0, k - 1))
    votes = data.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=n, max_size=n))
    values = np.array([data.draw(st.floats(0, 1, width=16)) for _ in range(n)])
    winners = []
    for first in range(0, blocks * k, k):
        block = list(range(first, first + k))
        block = [i for i in block if votes[i] is not None] or block[:1]  # None is no vote
        counts = [sum(votes[j] == votes[i] for j in block) for i in block]
        winners.append(values[block[counts.index(max(counts))]])
    (estimate,) = majority_at(values[None], [votes], k)
    assert estimate == pytest.approx(np.mean(winners))


def test_majority_at_k_is_unbiased():
    rng, chances = np.random.default_rng(0), (0.5, 0.3, 0.2)
    draws = rng.choice(3, (20000, 7), p=chances)  # three answers, the first is right
    exact = 0.0
    for picked in itertools.product(range(3), repeat=3):
        right = picked.count(0) >= 2 or (len({*picked}) == 3 and picked[0] == 0)
        exact += right * np.prod([chances[i] for i in picked])
    votes = [[str(i) for i in row] for row in draws]
    estimates = majority_at((draws == 0).astype(float), votes, 3)
    assert estimates.mean() == pytest.approx(exact, abs=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Prompts differ in how hard they are: their chances are a draw of a beta distribution."""
    for prompts, samples, hard, mean, least in (
        (15, 4, 8.0, 0.8, 0.935),
        (50, 1, 1.0, 0.8, 0.935),
        (200, 8, 0.3, 0.8, 0.935),
        (30, 8, 0.5, 0.95, 0.86),  # a few prompts that are always wrong are often not drawn
    ):
        rng, runs, hits = np.random.default_rng(1), 2000, 0
        chances = rng.beta(mean * hard, (1 - mean) * hard, (runs, prompts))
        for run in chances:
            low, high = interval(rng.binomial(samples, run) / samples)
            hits += low <= mean <= high
        assert least < hits / runs < 0.975, prompts


def test_the_interval_of_other_scores_is_that_of_the_mean_and_wilsons_where_a_prompt_is_a_draw():
    """Against scipy, and values of Newcombe 1998, table I, within what t for z and n-1 change."""
    scipy_stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).normal(3.0, 2.0, 12)
    expected = scipy_stats.t.interval(0.95, 11, values.mean(), scipy_stats.sem(values))
    np.testing.assert_allclose(interval(values), expected)
    values = np.zeros(263)
    values[:81] = 1
    np.testing.assert_allclose(interval(values), (0.2553, 0.3662), atol=5e-4)


def test_without_a_spread_the_interval_counts_prompts_and_stays_within_bounds():
    for value in (0.0, 1 / 3, 1.0):
        low, high = interval(np.full(30, value))
        assert 0 <= low <= value <= high <= 1
        assert 0.1 < high - low < 0.4
    assert interval(np.array([0.5])) is None


def test_failed_and_unscored_answers_have_no_vote_and_what_is_no_number_no_value():
    right, failed = Score(1.0, {"acc": True, "pred": 4}, None), Score(-1.0, {}, "died")
    unscored = Score(math.nan, {}, "unscored: no verdict")
    quantity, values, votes = read_scores([[right, failed, unscored]])
    assert quantity == "acc" and votes == [["4", None, None]]
    np.testing.assert_array_equal(values, [[1.0, 0.0, np.nan]])
    assert np.isnan(read_scores([[unscored]])[1]).all()
    assert read_scores([[Score(0.5, {}, None)]])[-1] is None
    extras = [{"acc": 0.0, "pred": None}] * 3 + [{"acc": 1.0, "pred": "4"}]
    extras += [{"acc": acc, "pred": "5"} for acc in (10**400, math.nan, None, "right")]
    _, values, votes = read_scores([[Score(0.0, extra, None) for extra in extras]])
    np.testing.assert_array_equal(values, [[0, 0, 0, 1, *[np.nan] * 4]])
    assert votes == [[None] * 3 + ["4"] + ["5"] * 4]
    assert majority_at(values, votes, 4) == [1.0]


@given(VALUES, st.integers(0, 3), st.integers(0, 10**6))
def test_unscored_answers_change_no_estimate(values, unscored, seed):
    """Each is that of the other answers, wherever the unscored ones lie."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation([*row, *[np.nan] * unscored]) for row in values]
    shuffled = np.array(rows)
    rest = np.array([row[~np.isnan(row)] for row in rows])
    votes = [[None if np.isnan(v) else str(v) for v in row] for row in rows]
    for k in range(1, values.shape[1] + 1):
        np.testing.assert_allclose(best_at(shuffled, k), best_at(rest, k))
        left = [[vote for vote in row if vote is not None] for row in votes]
        np.testing.assert_allclose(majority_at(shuffled, votes, k), majority_at(rest, left, k))
    np.testing.assert_allclose(mean_of_each(shuffled), rest.mean(1))
    if unscored:
        assert np.isnan(best_at(shuffled, values.shape[1] + 1)).all()
        assert np.isnan(majority_at(shuffled, votes, values.shape[1] + 1)).all()

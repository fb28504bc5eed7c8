"""Penalties, filters and pairs of scored answers, against loops."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import pairs, shaping
from tests.algorithms.fields import make_fields, run


def loop_penalty(length, longest, buffer):
    """DAPO, eq. 13, case by case."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize(("longest", "buffer"), [(20480, 4096), (40, 40), (30, 1), (20, 0)])
def test_the_penalty_is_the_papers(longest, buffer):
    """At 16384 tokens that are expected, and 4096 more that are the buffer, and elsewhere."""
    lengths = np.array([0, 1, 29, 30, 31, 40, 16384, 16385, 18432, 20480, 30000])
    penalty = partial(shaping.overlong_penalty, max_tokens=longest, buffer=buffer, factor=0.5)
    got = run(penalty, {"response_lengths": lengths})
    want = [0.5 * loop_penalty(length, longest, buffer) for length in lengths]
    assert_allclose(got, want, rtol=1e-6)
    assert not np.signbit(got[lengths <= longest - buffer]).any()


def test_what_is_impossible_is_named():
    lengths, fields = {"response_lengths": np.array([1])}, make_fields()
    for keywords, name in (
        ({"max_tokens": 4, "buffer": 5}, "buffer"),
        ({"max_tokens": 4, "buffer": -1}, "buffer"),
        ({"max_tokens": 4, "buffer": 2, "factor": -1.0}, "factor"),
    ):
        with pytest.raises(ValueError, match=name):
            run(partial(shaping.overlong_penalty, **keywords), lengths)
    with pytest.raises(ValueError, match="low"):
        run(partial(shaping.mean_between, low=0.9, high=0.1), fields)


SCORED = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(-2, 2)), min_size=8, max_size=8
)
spread, between, all_pairs, best_and_worst = map(
    jax.jit, (shaping.with_spread, shaping.mean_between, pairs.all_pairs, pairs.best_and_worst)
)
best = jax.jit(shaping.best_of_group, static_argnames="threshold")


@hypothesis.given(SCORED, st.sampled_from([None, 0.5, 1.0]))
def test_filters_and_pairs_are_their_loops(scored, threshold):
    scores, ids = map(np.array, zip(*scored, strict=True))
    scores = scores.astype(np.float32)
    differ, medium, high, wanted = np.zeros(8, bool), np.zeros(8, bool), np.zeros(8, bool), []
    for group in {*ids.tolist()}:
        own = np.flatnonzero(ids == group)
        differ[own] = len({*scores[own].tolist()}) > 1
        medium[own] = 0.2 <= scores[own].sum() / len(own) <= 0.8
        first, last = own[scores[own].argmax()], own[scores[own].argmin()]
        is_high = scores[first] > scores[last] if threshold is None else scores[first] >= threshold
        high[first] = is_high
        wanted += [(first, last)] * bool(scores[first] > scores[last])
    assert_array_equal(spread(scores, ids), differ)
    assert_array_equal(between(scores, ids), medium)
    assert_array_equal(best(scores, ids, threshold=threshold), high)

    def made(function):
        chosen, rejected, valid = map(np.asarray, function(scores, ids))
        return sorted(zip(chosen[valid].tolist(), rejected[valid].tolist(), strict=True))

    assert made(best_and_worst) == sorted(wanted)
    every = [(i, j) for i in range(8) for j in range(8) if scores[i] > scores[j]]
    assert made(all_pairs) == [pair for pair in every if ids[pair[0]] == ids[pair[1]]]


def test_the_bounds_of_a_mean_belong_to_it():
    scores, ids = np.array([1, 0, 0, 0, 0, 1, 1, 1, 1, 0], np.float32), np.arange(10) // 5
    assert between(scores, ids).all()
    fields = {"scores": scores, "group_ids": np.arange(10) % 7}
    assert run(partial(shaping.mean_between, low=0.0, high=1.0), fields).all()

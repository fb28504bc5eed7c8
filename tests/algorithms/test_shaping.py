"""Penalties and filters of scores against loops written from the papers."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import shaping

FILTERS = [shaping.with_spread, shaping.mean_between]


def loop_penalty(length, longest, buffer):
    """DAPO, eq. 13, case by case."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@hypothesis.given(
    st.lists(st.integers(0, 60), min_size=6, max_size=6), st.integers(1, 40), st.integers(0, 40)
)
def test_overlong_penalty_matches_the_loop(lengths, longest, buffer):
    buffer = min(buffer, longest)
    got = shaping.overlong_penalty(
        jnp.array(lengths), max_tokens=longest, buffer=buffer, factor=0.5
    )
    want = [0.5 * loop_penalty(length, longest, buffer) for length in lengths]
    assert_allclose(got, want, rtol=1e-6)
    assert not np.signbit(np.asarray(got)[np.array(lengths) <= longest - buffer]).any()
    order = np.argsort(lengths)
    assert (np.diff(np.asarray(got)[order]) <= 0).all()  # never less for a longer answer


def test_overlong_penalty_by_hand():
    """The paper's numbers: 16384 tokens are expected, 4096 more are the buffer."""
    lengths = jnp.array([1, 16384, 16385, 18432, 20480, 30000])
    got = shaping.overlong_penalty(lengths, max_tokens=20480, buffer=4096)
    assert_allclose(got, [0, 0, -1 / 4096, -0.5, -1, -1])
    step = shaping.overlong_penalty(jnp.array([4, 5, 6]), max_tokens=5, buffer=0, factor=2.0)
    assert_array_equal(step, [0, 0, -2])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_tokens": 4, "buffer": 5}, "buffer 5 and max_tokens 4"),
        ({"max_tokens": 4, "buffer": -1}, "buffer -1"),
        ({"max_tokens": 4, "buffer": 2, "factor": -1.0}, "factor: got -1.0"),
    ],
)
def test_impossible_penalties_are_named(keywords, message):
    with pytest.raises(ValueError, match=message):
        shaping.overlong_penalty(jnp.array([1]), **keywords)


def test_bounds_of_the_mean_in_the_wrong_order_are_named(fields):
    with pytest.raises(ValueError, match=r"low 0.9 and high 0.1"):
        shaping.mean_between(fields["scores"], fields["group_ids"], low=0.9, high=0.1)


eighths = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=8, max_size=8)
ids8 = st.lists(st.integers(-2, 2), min_size=8, max_size=8)
spread, between = map(jax.jit, FILTERS)


@hypothesis.given(eighths, ids8, st.permutations(range(8)))
def test_filters_match_the_loop_whatever_the_order(scores, ids, order):
    scores, ids, order = np.array(scores, np.float32), np.array(ids), np.array(order)
    differ, medium = np.zeros(8, bool), np.zeros(8, bool)
    for i in range(8):
        group = [scores[j] for j in range(8) if ids[j] == ids[i]]
        differ[i] = len({*group}) > 1
        medium[i] = 0.2 <= sum(group) / len(group) <= 0.8
    assert_array_equal(spread(scores, ids), differ)
    assert_array_equal(between(scores, ids), medium)
    assert_array_equal(spread(scores[order], ids[order]), differ[order])
    assert_array_equal(between(scores[order], ids[order]), medium[order])


def test_filters_by_hand():
    """Groups: all right, all wrong, one of five right (on the bound), alone."""
    scores = jnp.array([1.0, 1, 0, 0, 1, 0, 0, 0, 0, 0.5])
    ids = jnp.array([0, 0, 1, 1, 2, 2, 2, 2, 2, 3])
    assert_array_equal(shaping.with_spread(scores, ids), [0, 0, 0, 0, 1, 1, 1, 1, 1, 0])
    assert_array_equal(shaping.mean_between(scores, ids), [0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    four = shaping.mean_between(1 - scores, ids)  # the other bound
    assert_array_equal(four, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    assert_array_equal(shaping.mean_between(scores, ids, low=0.0, high=1.0), np.ones(10))


@pytest.mark.parametrize("function", FILTERS, ids=lambda f: f.__name__)
def test_filters_under_jit_vmap_and_bfloat16(function, fields, other_fields):
    scores, ids = (
        jnp.stack([f[k] for f in (fields, other_fields)]) for k in ("scores", "group_ids")
    )
    eager = jnp.stack([function(s, i) for s, i in zip(scores, ids, strict=True)])
    assert eager.dtype == bool
    assert_array_equal(jax.jit(jax.vmap(function))(scores, ids), eager)
    low = scores[0].astype(jnp.bfloat16)
    assert_array_equal(function(low, ids[0]), function(low.astype(jnp.float32), ids[0]))


def test_overlong_penalty_under_jit_and_vmap():
    lengths = jnp.array([[1, 7, 9], [8, 10, 12]])

    def call(x):
        return shaping.overlong_penalty(x, max_tokens=10, buffer=4)

    eager = jnp.stack([call(x) for x in lengths])
    assert_array_equal(jax.jit(jax.vmap(call))(lengths), eager)
    assert eager.dtype == jnp.float32


# ----------------------------------------------------------------------------- filters of answers


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(-2, 2)), min_size=8, max_size=8
    ),
    st.sampled_from([None, 0.5, 1.0]),
)
def test_the_best_of_a_group_is_the_first_of_its_best(scored, threshold):
    wanted = [False] * len(scored)
    for group in {group for _, group in scored}:
        own = [i for i, (_, other) in enumerate(scored) if other == group]
        best = max(own, key=lambda i: (scored[i][0], -i))
        least = min(scored[i][0] for i in own)
        high = scored[best][0]
        wanted[best] = high > least if threshold is None else high >= threshold
    scores, groups = zip(*scored, strict=True)
    arrays = jnp.array(scores), jnp.array(groups)
    got = jax.jit(shaping.best_of_group, static_argnames="threshold")(*arrays, threshold=threshold)
    assert got.tolist() == wanted

"""Pairs of scored answers against loops over all of them."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.pairs import all_pairs, best_and_worst

SIZE = 9
SCORED = st.lists(
    st.tuples(st.sampled_from([-0.5, 0.0, 0.25, 1.0]), st.integers(-2, 2)),
    min_size=SIZE,
    max_size=SIZE,
)


def made(function, scored):
    scores, groups = zip(*scored, strict=True)
    pairs = jax.jit(function)(jnp.array(scores), jnp.array(groups))
    return [
        (int(chosen), int(rejected))
        for chosen, rejected, valid in zip(*map(np.asarray, pairs), strict=True)
        if valid
    ]


@hypothesis.given(SCORED)
def test_the_best_meets_the_worst_of_each_group_once(scored):
    wanted = []
    for group in {group for _, group in scored}:
        own = [i for i, (_, other) in enumerate(scored) if other == group]
        best = max(own, key=lambda i: (scored[i][0], -i))
        worst = min(own, key=lambda i: (scored[i][0], i))
        if scored[best][0] > scored[worst][0]:
            wanted.append((best, worst))
    assert sorted(made(best_and_worst, scored)) == sorted(wanted)


@hypothesis.given(SCORED)
def test_all_pairs_are_those_of_a_group_that_differ_in_score(scored):
    wanted = [
        (i, j)
        for i, (better, group) in enumerate(scored)
        for j, (worse, other) in enumerate(scored)
        if group == other and better > worse
    ]
    assert sorted(made(all_pairs, scored)) == sorted(wanted)

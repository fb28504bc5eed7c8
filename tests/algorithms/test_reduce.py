"""Weights of tokens: by hand, and that empty rows and empty masks count for nothing."""

from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms import reduce
from tests.algorithms.fields import run

MASK = np.array([[1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
LOSS = np.array([[1.0, 2, 3, 99], [99, 99, 10, 99], [99, 99, 99, 99]])
CASES = {
    reduce.token_mean: (1 + 2 + 3 + 10) / 4,
    reduce.token_sum: 1 + 2 + 3 + 10,
    reduce.sequence_mean_token_sum: (6 + 10) / 2,
    reduce.sequence_mean_token_mean: (2 + 10) / 2,
    partial(reduce.sequence_mean_token_sum_norm, horizon=4.0): (6 + 10) / 2 / 4,
}


def test_weighted_sums_are_those_by_hand():
    for function, want in CASES.items():
        weights = run(function, {"mask": MASK})
        assert_allclose((weights * LOSS).sum(), want, rtol=1e-6)
        assert not weights[~MASK].any()
        more = run(function, {"mask": np.pad(MASK, [(0, 3), (0, 2)])})
        assert_allclose(more, np.pad(weights, [(0, 3), (0, 2)]), rtol=1e-6)
        assert not run(function, {"mask": np.zeros((3, 4), bool)}).any()
    with pytest.raises(ValueError, match="horizon"):
        run(partial(reduce.sequence_mean_token_sum_norm, horizon=0.0), {"mask": MASK})

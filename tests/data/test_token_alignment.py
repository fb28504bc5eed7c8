import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data.token_bytes import UNALIGNED, align_bytes, spread_logprobs

TEXTS = st.text("ab é世🙂", max_size=8).map(str.encode)


@st.composite
def cut_twice(draw):
    """A text, cut anywhere into two lists of pieces, of which some are empty."""
    data = draw(TEXTS)

    def pieces():
        ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
        return [data[a:b] for a, b in itertools.pairwise([0, *ends, len(data)])]

    return pieces(), pieces()


def of_span(pieces, numbers, span):
    return b"".join(p for p, number in zip(pieces, numbers, strict=True) if number == span)


@given(cut_twice())
def test_spans_cover_the_same_bytes_with_the_same_sums_and_are_the_shortest(both):
    left, right = both
    alignment = align_bytes(left, right)
    ends = [set(itertools.accumulate(map(len, side))) - {0} for side in both]
    assert alignment.spans == len(ends[0] & ends[1])  # as many borders as can be
    own, told = (np.float32(np.random.default_rng(0).normal(size=len(side))) for side in both)
    spread = spread_logprobs(own, told, alignment)
    for span in range(alignment.spans):
        covered = of_span(left, alignment.left, span)
        assert covered == of_span(right, alignment.right, span) != b""
        mine, theirs = alignment.left == span, alignment.right == span
        np.testing.assert_allclose(spread[mine].sum(), told[theirs].sum(), atol=1e-4)
        np.testing.assert_allclose(np.ptp((own - spread)[mine]), 0, atol=1e-5)  # equal shares
    if b"".join(left):
        assert UNALIGNED not in alignment.left
    assert (np.diff(alignment.left) >= 0).all()


def test_what_follows_a_difference_has_no_span():
    alignment = align_bytes([b"ab", b"c", b"de"], [b"a", b"b", b"xd", b"e"])
    assert alignment.left.tolist() == [0, -1, -1]
    assert alignment.right.tolist() == [0, 0, -1, -1]
    both = np.float32([-1, -2, -3]), np.float32([-0.5, -0.25, -7, -9])
    assert spread_logprobs(*both, alignment).tolist() == [-0.75, 0, 0]

"""Tokens of two tokenizers that cover the same bytes, and log-probs compared over these."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

UNALIGNED = -1
"""The span of a token that no tokens of the other tokenizer stand against."""


class Alignment(NamedTuple):
    """Which tokens of two tokenizers cover the same bytes.

    A span is as short as it can be: no two tokens end together inside of it. Its tokens stand side
    by side.

    Attributes:
        left: number of the span of each token, from 0; `UNALIGNED` where there is none.
        right: the same of the other tokenizer's tokens.
    """

    left: Int[np.ndarray, " n"]
    right: Int[np.ndarray, " m"]

    @property
    def spans(self) -> int:
        """Return the number of spans."""
        return int(self.left.max(initial=UNALIGNED)) + 1

    def join(self) -> "Alignment":
        """Return the same with a token more on each side, which stand against each other."""
        return Alignment(np.append(self.left, self.spans), np.append(self.right, self.spans))

    def without(self, dropped: Int[np.ndarray, " k"]) -> "Alignment":
        """Return the same with some spans taken away, by number; the others keep theirs."""
        left, right = (
            np.where(np.isin(side, dropped), UNALIGNED, side).astype(np.int32) for side in self
        )
        return Alignment(left, right)


def align_bytes(left: Sequence[bytes], right: Sequence[bytes]) -> Alignment:
    """Find the shortest spans of tokens that cover the same bytes.

    Two tokens that end after the same number of bytes end a span, so tokens may split a character.
    From where the bytes differ on, no token has a span.

    Args:
        left: what each token stands for.
        right: the same of the other tokenizer.

    >>> align_bytes([b"un", b"known"], [b"unk", b"no", b"wn"]).left.tolist()
    [0, 0]
    >>> align_bytes([b"a ", b"cat"], [b"a", b" ", b"cat"]).right.tolist()
    [0, 0, 1]
    """
    ends, others = (
        np.cumsum([len(token) for token in side], dtype=np.int64) for side in (left, right)
    )
    shared = np.intersect1d(ends, others)
    shared = shared[(shared > 0) & (shared <= _count_equal(b"".join(left), b"".join(right)))]

    def number(end: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        spans = np.searchsorted(shared, end)
        return np.where(spans < len(shared), spans, UNALIGNED).astype(np.int32)

    return Alignment(number(ends), number(others))


def _count_equal(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts begin alike with."""
    size = min(len(one), len(other))
    unequal = np.flatnonzero(
        np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    )
    return int(unequal[0]) if unequal.size else size


def spread_logprobs(
    left: Float32[np.ndarray, " n"], right: Float32[np.ndarray, " m"], alignment: Alignment
) -> Float32[np.ndarray, " n"]:
    r"""Return the log-probs on the right as ones of the tokens on the left, span by span.

    A span of n tokens on the left with the sums $\Sigma_l$ and $\Sigma_r$ of log-probs gives its
    token i

    $$\log \pi_{l,i} - (\Sigma_l - \Sigma_r) / n$$

    so the tokens of a span share its difference equally, and the sum over them is $\Sigma_r$. One
    number alone is no log-prob: it may be above 0.

    Args:
        left: log-probs of the tokens on the left, in nats.
        right: the same on the right.
        alignment: of the tokens.

    Returns:
        In nats; 0 on tokens without a span.

    >>> both = align_bytes([b"un", b"known"], [b"unk", b"no", b"wn"])
    >>> given = np.float32([-1, -2]), np.float32([-0.5, -0.25, -0.25])
    >>> spread_logprobs(*given, both).tolist()
    [0.0, -1.0]
    """
    spans, aligned = alignment.spans, alignment.left != UNALIGNED
    if spans == 0:
        return np.zeros(len(left), np.float32)
    inside = alignment.right != UNALIGNED
    sums = np.bincount(alignment.left[aligned], left[aligned].astype(np.float64), spans)
    others = np.bincount(alignment.right[inside], right[inside].astype(np.float64), spans)
    sizes = np.bincount(alignment.left[aligned], minlength=spans)
    shares = (sums - others) / np.maximum(sizes, 1)
    spread = left - shares[np.where(aligned, alignment.left, 0)]
    return np.where(aligned, spread, 0.0).astype(np.float32)

"""What k answers to each of P prompts say of a model, and how sure that is.

Estimators give one number for each prompt; the prompts are the independent draws. Values are the
answers' scores, 0 or 1 where answers are right or wrong.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_llm.rewards.runner import Score

LEVEL = 0.95
"""Of the intervals."""


class Answers(NamedTuple):
    """Scores of n answers to each of P prompts.

    Attributes:
        quantity: "acc" where every reward function that did not fail reports one, else "reward".
        values: of the answers; 0 for the `acc` of one whose reward function failed.
        votes: what was answered, None where the reward function failed; no array without `pred`s.
    """

    quantity: str
    values: Float[np.ndarray, "P n"]
    votes: list[list[str | None]] | None


def read_scores(groups: Sequence[Sequence[Score]]) -> Answers:
    """Return what reward functions report of n answers to each prompt, as numbers and votes.

    >>> read_scores([[Score(1.0, {"acc": 1.0, "pred": "4"}, None), Score(0.0, {}, "timeout")]])
    Answers(quantity='acc', values=array([[1., 0.]]), votes=[['4', None]])
    """
    scored = [s for group in groups for s in group if s.error is None]
    name = "acc" if scored and all("acc" in s.extra for s in scored) else "reward"
    values = np.array([[_value(s, name) for s in group] for group in groups], float)
    if not scored or not all("pred" in s.extra for s in scored):
        return Answers(name, values, None)
    votes = [[str(s.extra["pred"]) if s.error is None else None for s in g] for g in groups]
    return Answers(name, values, votes)


def _value(score: Score, name: str) -> float:
    if name == "reward":
        return score.score
    return float(score.extra["acc"]) if score.error is None else 0.0


def best_at(values: Float[np.ndarray, "P n"], k: int) -> Float[np.ndarray, " P"]:
    """Estimate the expected best of k answers from n ≥ k, without bias.

    It is the mean over all choices of k of the n answers. With v₁ ≤ … ≤ vₙ,
    Σᵢ vᵢ C(i-1, k-1) / C(n, k), since vᵢ is the best of so many choices. For c values of 1 and n-c
    of 0 this is pass@k = 1 - C(n-c, k) / C(n, k): Chen et al. 2021, eq. 1,
    https://arxiv.org/abs/2107.03374.

    Args:
        values: of the answers.
        k: answers that one has, 1 to n.

    Returns:
        An estimate for each prompt.

    Raises:
        ValueError: k is not in 1 to n.

    >>> best_at(np.array([[1.0, 0.0, 0.0, 0.0]]), 2)  # 3 of the 6 pairs
    array([0.5])
    """
    n = _check(values, k)
    weights = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return np.sort(values, 1) @ np.array(weights)


def majority_at(
    values: Float[np.ndarray, "P n"], votes: Sequence[Sequence[str | None]], k: int
) -> Float[np.ndarray, " P"]:
    """Estimate the expected value of the answer that most of k agree on (self-consistency).

    Wang et al. 2022, https://arxiv.org/abs/2203.11171. Each run of k of the n answers, one after
    another without overlap, takes one vote; their values are averaged. On a tie the answer that
    came first wins. Votes of None count together.

    Args:
        values: of the answers.
        votes: what was answered.
        k: answers that vote, 1 to n.

    Returns:
        An estimate for each prompt.

    Raises:
        ValueError: k is not in 1 to n.

    >>> majority_at(np.array([[0.0, 1.0, 1.0]]), [["5", "4", "4"]], 3)
    array([1.])
    """
    n = _check(values, k)
    best = np.zeros((len(values), n // k))
    for row, answers in enumerate(votes):
        for block in range(n // k):
            voters = answers[block * k : (block + 1) * k]
            winner = voters.index(Counter(voters).most_common(1)[0][0])
            best[row, block] = values[row, block * k + winner]
    return best.mean(1)


def _check(values: np.ndarray, k: int) -> int:
    n = values.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"got k={k} for {n} answers to each prompt, expected 1 to {n}")
    return n


def interval(values: Float[np.ndarray, " P"]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean over the prompts of which these are a draw.

    Answers to one prompt are no independent draws, so the standard error is that of the prompts'
    values, s = sd(v) / √P (Miller 2024, https://arxiv.org/abs/2411.00640), and the quantile t is
    Student's with P-1 degrees of freedom. For values in 0 to 1 the interval is Wilson's, for the
    number of draws that would have this standard error, m(1-m) / s² (Franco et al. 2019,
    https://doi.org/10.1093/jssam/smy019): it stays within 0 to 1, and is of use where m is near one
    of them. For other values it is m ± t·s.

    Args:
        values: an estimate for each prompt.

    Returns:
        The ends, or None for a single prompt, which says nothing of others.

    >>> low, high = interval(np.array([1.0] * 20))
    >>> round(low, 2), high
    (0.82, 1.0)
    """
    from scipy.special import stdtrit  # no run needs it

    count = len(values)
    if count < 2:
        return None
    t = float(stdtrit(count - 1, (1 + LEVEL) / 2))
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(count)
    if values.min() < 0 or values.max() > 1:
        return mean - t * error, mean + t * error
    spread = mean * (1 - mean)
    draws = spread / error**2 if error > 1e-9 else float(count)  # all alike: nothing says more
    shrink = t * t / draws
    centre, half = mean + shrink / 2, math.sqrt(spread * shrink + (shrink / 2) ** 2)
    low, high = ((centre + sign * half) / (1 + shrink) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)

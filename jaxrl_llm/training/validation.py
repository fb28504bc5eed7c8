"""What k answers to each of P prompts say of a model, and how sure that is.

Estimators give one number for each prompt; the prompts are the independent draws. Values are the
answers' scores, 0 or 1 where answers are right or wrong, and NaN where nobody knows. An estimate is
NaN of a prompt with too few answers that have a value.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.workers.values import finite_number

LEVEL = 0.95
"""Of the intervals."""


def read_scores(
    groups: Sequence[Sequence[Score]],
) -> tuple[str, Float[np.ndarray, "P n"], list[list[str | None]] | None]:
    """Return what reward functions report of n answers to each of P prompts.

    Returns:
        The quantity: "acc" where every reward function that did not fail reports one, else
        "reward". Its values of the answers: 0 for the `acc` of one whose reward function failed,
        NaN where an answer is unscored or its `acc` is not a finite number. And votes, what was
        answered: None where that is not known; none at all without `pred`s.

    >>> read_scores([[Score(1.0, {"acc": 1.0, "pred": "4"}, None), Score(0.0, {}, "timeout")]])
    ('acc', array([[1., 0.]]), [['4', None]])
    """
    scored = [s for group in groups for s in group if s.error is None]
    name = "acc" if scored and all("acc" in s.extra for s in scored) else "reward"
    values = np.array([[_value(s, name) for s in group] for group in groups], float)
    if not scored or not all("pred" in s.extra for s in scored):
        return name, values, None
    return name, values, [[_vote(score) for score in group] for group in groups]


def _value(score: Score, name: str) -> float:
    if name == "reward":
        return score.score
    if score.error is not None and not score.is_unscored:
        return 0.0
    acc = None if score.is_unscored else finite_number(score.extra["acc"])
    return math.nan if acc is None else acc


def _vote(score: Score) -> str | None:
    pred = score.extra.get("pred") if score.error is None else None
    return None if pred is None else str(pred)


def mean_of_each(values: Float[np.ndarray, "P n"]) -> Float[np.ndarray, " P"]:
    """Return the mean of each prompt's answers that have a value.

    >>> mean_of_each(np.array([[1.0, 0.0], [1.0, np.nan], [np.nan, np.nan]]))
    array([0.5, 1. , nan])
    """
    known = ~np.isnan(values)
    sums, counts = np.where(known, values, 0).sum(1), known.sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def best_at(values: Float[np.ndarray, "P n"], k: int) -> Float[np.ndarray, " P"]:
    """Estimate the expected best of k answers from n ≥ k, without bias.

    It is the mean over all choices of k of the n answers. With v₁ ≤ … ≤ vₙ,
    Σᵢ vᵢ C(i-1, k-1) / C(n, k), since vᵢ is the best of so many choices. For c values of 1 and n-c
    of 0 this is pass@k = 1 - C(n-c, k) / C(n, k): Chen et al. 2021, eq. 1,
    https://arxiv.org/abs/2107.03374.

    Args:
        values: of the answers; n is the number of those of a prompt that are not NaN.
        k: answers that one has, at least 1.

    Returns:
        An estimate for each prompt; NaN where n is below k.

    Raises:
        ValueError: there are not k answers to a prompt.

    >>> best_at(np.array([[1.0, 0.0, 0.0, 0.0]]), 2)  # 3 of the 6 pairs
    array([0.5])
    """
    _check(values, k)
    known, ordered = (~np.isnan(values)).sum(1), np.sort(values, 1)  # NaN comes last
    best = np.full(len(values), np.nan)
    for n in np.unique(known[known >= k]).tolist():
        weights = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
        best[known == n] = ordered[known == n, :n] @ np.array(weights)
    return best


def majority_at(
    values: Float[np.ndarray, "P n"], votes: Sequence[Sequence[str | None]], k: int
) -> Float[np.ndarray, " P"]:
    """Estimate the expected value of the answer that most of k agree on (self-consistency).

    Wang et al. 2022, https://arxiv.org/abs/2203.11171. Each run of k of the n answers, one after
    another without overlap, takes one vote; their values are averaged. On a tie the answer that
    came first wins. None does not vote: the others decide, and if all are None, the first of the k
    answers does. (In verl, None is a vote like any other, and can win.)

    Args:
        values: of the answers; one of NaN is left out.
        votes: what was answered; None where there is nothing to vote for.
        k: answers that vote, at least 1.

    Returns:
        An estimate for each prompt; NaN where fewer than k have a value.

    Raises:
        ValueError: there are not k answers to a prompt.

    >>> majority_at(np.array([[0.0, 1.0, 1.0]]), [["5", "4", "4"]], 3)
    array([1.])
    """
    _check(values, k)
    means = np.full(len(values), np.nan)
    for row, answers in enumerate(votes):
        known = np.flatnonzero(~np.isnan(values[row]))
        best = list[float]()
        for first in range(0, len(known) - k + 1, k):
            block = known[first : first + k]
            voters = [i for i in block if answers[i] is not None] or [block[0]]
            winner = Counter(answers[i] for i in voters).most_common(1)[0][0]
            best.append(values[row, next(i for i in voters if answers[i] == winner)])
        means[row] = np.mean(best) if best else np.nan
    return means


def _check(values: np.ndarray, k: int) -> None:
    n = values.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"got k={k} for {n} answers to each prompt, expected 1 to {n}")


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


def group_by_source(
    prompts: Sequence[Prompt], scores: Sequence[Score], *, samples: int
) -> dict[str, list[Sequence[Score]]]:
    """Return the scores of each prompt's answers, by data source.

    Args:
        prompts: of all answers; the k answers of a prompt lie side by side.
        scores: one for each answer.
        samples: k.
    """
    groups: defaultdict[str, list[Sequence[Score]]] = defaultdict(list)
    for first in range(0, len(prompts), samples):
        groups[prompts[first].data_source].append(scores[first : first + samples])
    return dict(groups)


def validation_metrics(
    prompts: Sequence[Prompt], scores: Sequence[Score], *, samples: int
) -> dict[str, float]:
    """Return `val-core/<source>/<acc or reward>/{mean,best,maj}@k` for each data source.

    mean@k is the mean over all answers, best@k the mean over prompts of the best of k, maj@k the
    mean over prompts of the answer that most of the k agree on (by the reward function's `pred`; on
    a tie the one that came first). The quantity is the reward function's `acc` where it gives one;
    an answer whose reward function failed has `acc` 0 and no `pred`.

    Answers that are unscored are left out, and so are prompts with fewer than k others from best@k
    and maj@k. `val-aux/<source>/unscored` counts them where there are any.

    Args:
        prompts: of all answers; the k answers of a prompt lie side by side.
        scores: one for each answer.
        samples: k.
    """
    metrics = {}
    for source, groups in group_by_source(prompts, scores, samples=samples).items():
        name, values, votes = read_scores(groups)
        by_kind = {"mean": values}
        if samples > 1:
            by_kind["best"] = best_at(values, samples)
        if samples > 1 and votes is not None:
            by_kind["maj"] = majority_at(values, votes, samples)
        for kind, estimates in by_kind.items():
            known = estimates[~np.isnan(estimates)]
            if known.size:
                metrics[f"val-core/{source}/{name}/{kind}@{samples}"] = float(known.mean())
        if unscored := float(np.isnan(values).sum()):
            metrics[f"val-aux/{source}/unscored"] = unscored
    return metrics


def headline(metrics: dict[str, float]) -> float:
    """Return the mean over data sources of mean@k, by which the best checkpoint is chosen."""
    return float(np.mean([v for k, v in metrics.items() if "/mean@" in k]))

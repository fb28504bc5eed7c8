"""Validation: mean@k, best@k and maj@k of the policy on held-out prompts."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rewards.pool import Score


def validation_metrics(
    prompts: Sequence[Prompt], scores: Sequence[Score], *, samples: int
) -> dict[str, float]:
    """Return `val-core/<source>/<acc or reward>/{mean,best,maj}@k` for each data source.

    mean@k is the mean over all answers, best@k the mean over prompts of the best of k, maj@k the
    mean over prompts of the answer that most of the k agree on (by the scorer's `pred`; on a tie
    the one that came first). The quantity is the scorer's `acc` where it gives one; an answer whose
    scorer failed has `acc` 0 and no `pred`.

    Args:
        prompts: of all answers; the k answers of a prompt lie side by side.
        scores: one for each answer.
        samples: k.
    """
    by_source: defaultdict[str, list[Sequence[Score]]] = defaultdict(list)
    for first in range(0, len(prompts), samples):
        by_source[prompts[first].data_source].append(scores[first : first + samples])
    metrics = {}
    for source, groups in by_source.items():
        scored = [s for group in groups for s in group if s.error is None]
        name = "acc" if scored and all("acc" in s.extra for s in scored) else "reward"
        values = np.array([[_value(s, name) for s in group] for group in groups])
        prefix = f"val-core/{source}/{name}"
        metrics[f"{prefix}/mean@{samples}"] = float(values.mean())
        if samples > 1:
            metrics[f"{prefix}/best@{samples}"] = float(values.max(1).mean())
        if samples > 1 and scored and all("pred" in s.extra for s in scored):
            majority = [values[i, _majority(group)] for i, group in enumerate(groups)]
            metrics[f"{prefix}/maj@{samples}"] = float(np.mean(majority))
    return metrics


def headline(metrics: dict[str, float]) -> float:
    """Return the mean over data sources of mean@k, by which the best checkpoint is chosen."""
    return float(np.mean([v for k, v in metrics.items() if "/mean@" in k]))


def _value(score: Score, name: str) -> float:
    if name == "reward":
        return score.score
    return float(score.extra["acc"]) if score.error is None else 0.0


def _majority(group: Sequence[Score]) -> int:
    answers = [str(score.extra["pred"]) if score.error is None else None for score in group]
    return answers.index(Counter(answers).most_common(1)[0][0])

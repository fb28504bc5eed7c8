"""Validation: mean@k, best@k and maj@k of the policy on held-out prompts, while it is trained."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.evaluation.estimators import best_at, majority_at, read_scores
from jaxrl_llm.rewards.runner import Score


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
        found = {"mean": values}
        if samples > 1:
            found["best"] = best_at(values, samples)
        if samples > 1 and votes is not None:
            found["maj"] = majority_at(values, votes, samples)
        for kind, estimates in found.items():
            known = estimates[~np.isnan(estimates)]
            if known.size:
                metrics[f"val-core/{source}/{name}/{kind}@{samples}"] = float(known.mean())
        if unscored := float(np.isnan(values).sum()):
            metrics[f"val-aux/{source}/unscored"] = unscored
    return metrics


def headline(metrics: dict[str, float]) -> float:
    """Return the mean over data sources of mean@k, by which the best checkpoint is chosen."""
    return float(np.mean([v for k, v in metrics.items() if "/mean@" in k]))

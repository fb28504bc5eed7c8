"""Metrics of a training step: its batch, how well engine and trainer agree, and the machine."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.correction import mismatch_metrics
from jaxrl_llm.algorithms.stats import LARGEST_LOG_RATIO
from jaxrl_llm.config.sections import OptimConfig
from jaxrl_llm.data.packing import RowShape, choose_rows, imbalance, in_bucket, plan_microbatches
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.clock import memory_metrics, summary
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.rollouts import NOT_DRAWN, Rollouts
from jaxrl_llm.sharding.distributed import is_first
from jaxrl_llm.training.microbatches import sequence_sizes
from jaxrl_llm.training.update import TrainingError
from jaxrl_llm.types import Batch
from jaxrl_llm.workers.values import finite_number

OVER_UPDATES = {"divergence/max": np.max, "divergence/min": np.min}
"""How the metrics of a step's updates become one number; all others are means."""


def batch_metrics(
    balance: Callable[[], dict[str, float]], batch: Batch, rollouts: Rollouts, scores: list[Score]
) -> dict[str, float]:
    """Return metrics of a step's batch, under verl's names.

    Args:
        balance: says how evenly its updates load the devices.
        batch: of the step, with its advantages if there are any.
        rollouts: its answers.
        scores: of each answer.
    """
    usable, advantages = batch["usable"], batch.fields.get("advantages")
    lengths = batch["response_lengths"][usable]
    given = np.array([s.score for s in scores])[usable]
    prompts = np.array([len(episode.prompt) for episode in rollouts.episodes])
    return {
        **summary("critic/score", given),
        **summary("critic/rewards", batch["scores"][usable]),
        **(
            summary("critic/advantages", advantages[batch["mask"]])
            if advantages is not None
            else {}
        ),
        **summary("response_length", lengths),
        "response_length/clip_ratio": float(
            np.mean([episode.finish == "length" for episode in rollouts.episodes])
        ),
        **summary("prompt_length", prompts),
        **visual_metrics(batch),
        "critic/groups_without_spread": groups_without_spread(
            (batch["raw_scores"] + turn_rewards(rollouts))[usable], batch["group_ids"][usable]
        ),
        **episode_metrics(rollouts),
        **(age_metrics(batch) if batch["ages"].any() else {}),
        **(value_metrics(batch) if "values" in batch.fields else {}),
        **(correction_metrics(batch) if "correction" in batch.fields else {}),
        **extra_metrics(scores),
        **balance(),
        **scoring_counts(scores),
    }


def visual_metrics(batch: Batch) -> dict[str, float]:
    """Return how many tokens of images and videos sequences have; nothing where none has any.

    `vision/distinct` counts those whose pixels differ.
    """
    visuals = batch.visuals
    tokens = np.array([sum(visual.tokens for visual in own) for own in visuals])
    if not tokens.any():
        return {}
    keys = {visual.key for own in visuals for visual in own}
    return {**summary("vision/tokens", tokens), "vision/distinct": float(len(keys))}


def scoring_counts(scores: Sequence[Score]) -> dict[str, float]:
    """Return on how many answers a reward function failed, and how many have no score.

    >>> scoring_counts([Score(1.0, {}, None), Score(0.0, {}, "timeout: 5 s")])
    {'reward/errors': 1.0, 'reward/unscored': 0.0}
    """
    return {
        "reward/errors": float(sum(score.has_failed for score in scores)),
        "reward/unscored": float(sum(score.is_unscored for score in scores)),
    }


def over_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step from those of its updates; skipped ones are only counted.

    >>> of_each = [{"skipped": 0, "loss": x, "divergence/max": x} for x in (1.0, 3.0)]
    >>> over_updates(of_each)
    {'skipped': 0.0, 'loss': 2.0, 'divergence/max': 3.0}
    """
    applied = [m for m in updates if not m["skipped"]] or updates
    names = dict.fromkeys(name for metrics in applied for name in metrics)
    values = {name: [m[name] for m in applied if name in m] for name in names}
    of_step = {name: float(OVER_UPDATES.get(name, np.mean)(x)) for name, x in values.items()}
    return of_step | {"skipped": float(sum(m["skipped"] > 0 for m in updates))}


def step_histograms(batch: Batch, scores: Sequence[Score]) -> dict[str, np.ndarray]:
    """Return the values of a step whose distribution trackers show, by name.

    Answers that are not usable are left out.

    Args:
        batch: of the step, with its advantages if there are any.
        scores: of each answer.

    Returns:
        `score` and `response_length` (tokens) of each answer; `advantages` of each drawn token;
        and `logprob_diff`, the trainer's log-prob less the engine's (nats) of each drawn token,
        where a pass has computed the trainer's.
    """
    mask, usable = batch["mask"], batch["usable"]
    values = {
        "score": np.array([score.score for score in scores], np.float32)[usable],
        "response_length": batch["response_lengths"][usable],
    }
    if "advantages" in batch.fields:
        values["advantages"] = batch["advantages"][mask]
    old, engine = batch.fields.get("old_logprobs"), batch["rollout_logprobs"]
    if old is not None and old is not engine:
        values["logprob_diff"] = old[mask] - engine[mask]
    return values


def turn_rewards(rollouts: Rollouts) -> np.ndarray:
    """Return the sum of the rewards of each episode's turns [B]."""
    return np.array([sum(episode.rewards) for episode in rollouts.episodes], np.float32)


def groups_without_spread(scores: np.ndarray, group_ids: np.ndarray) -> float:
    """Return the share of groups whose answers have one score, in float32.

    >>> groups_without_spread(np.array([1.0, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 1]))
    0.5
    """
    groups = [scores[group_ids == group] for group in np.unique(group_ids)]
    return float(np.mean([np.ptp(group) == 0 for group in groups]))


def episode_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return metrics of turns and tools; none where all answers are plain."""
    episodes = rollouts.episodes
    if all(episode.last_answer is None for episode in episodes):
        return {}
    metrics = {
        **rollouts.metrics,
        **summary("num_turns", np.array([episode.num_turns for episode in episodes])),
        **summary("episode/seconds", np.array([episode.seconds for episode in episodes])),
        "episode/broken": float(sum(not episode.usable for episode in episodes)),
    }
    chains = np.array([episode.chains for episode in episodes])
    metrics |= summary("episode/chains", chains) if chains.max() > 1 else {}
    for reason, times in Counter(episode.finish for episode in episodes).items():
        metrics[f"episode/finish/{reason}"] = times / len(episodes)
    records = [record for episode in episodes for record in episode.tool_records]
    calls = [len(episode.tool_records) for episode in episodes]
    metrics |= summary("tool_call_counts", np.array(calls)) if records else {}
    for name in dict.fromkeys(record.name for record in records):
        own = [record for record in records if record.name == name]
        metrics[f"tools/{name}/calls"] = float(len(own))
        metrics[f"tools/{name}/seconds"] = float(np.mean([record.seconds for record in own]))
        for failure, times in Counter(r.failure for r in own if r.failure).items():
            metrics[f"tools/{name}/{failure}"] = float(times)
    return metrics


def age_metrics(batch: Batch) -> dict[str, float]:
    """Return how old the tokens of a batch are, in updates, and how far the policy has moved since.

    The latter only where a pass has computed `old_logprobs`.
    """
    mask = batch["mask"]
    ages, rows = batch["ages"][mask], np.flatnonzero(mask.any(1))
    policies = [len(np.unique(batch["versions"][row, mask[row]])) for row in rows]
    shares = np.bincount(ages) / len(ages)
    return {
        "async/age/mean": float(ages.mean()),
        "async/age/max": float(ages.max()),
        **{f"async/age/share/{age}": float(share) for age, share in enumerate(shares)},
        "async/policies_per_answer/mean": float(np.mean(policies)),
        **_divergence_by_age(batch),
    }


def _divergence_by_age(batch: Batch) -> dict[str, float]:
    old, rollout = batch.fields.get("old_logprobs"), batch["rollout_logprobs"]
    if old is None or old is rollout:
        return {}
    mask = batch["mask"]
    ages = batch["ages"][mask]
    log_ratio = np.clip(old[mask] - rollout[mask], -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    sums = np.bincount(ages, np.expm1(log_ratio) - log_ratio)
    counts = np.bincount(ages)
    return {
        f"async/k3_kl/age/{age}": float(sums[age] / counts[age]) for age in np.flatnonzero(counts)
    }


def value_metrics(batch: Batch) -> dict[str, float]:
    """Return what the critic knew at the start of the step."""
    values, returns = batch["values"][batch["mask"]], batch["returns"][batch["mask"]]
    unexplained = np.var(returns - values) / (np.var(returns) + 1e-5)
    return {
        **summary("critic/values", values),
        **summary("critic/returns", returns),
        "critic/vf_explained_var": float(1.0 - unexplained),
    }


def correction_metrics(batch: Batch) -> dict[str, float]:
    """Return how the off-policy correction weighs the tokens."""
    weights = batch["correction"][batch["mask"]]
    return {
        **summary("rollout_corr/weight", weights),
        "rollout_corr/rejected": float(np.mean(weights == 0)),
    }


def extra_metrics(scores: list[Score]) -> dict[str, float]:
    """Return the means of the reward function's other numbers, over the answers that have them.

    Values that float32 can't hold are left out, as None is.

    >>> extras = {"form": 1.0}, {"form": float("nan")}, {"form": 10**400}, {"form": None}
    >>> extra_metrics([Score(0.0, extra, None) for extra in extras])
    {'reward/form/mean': 1.0}
    """
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.extra.items():
            if (number := finite_number(value)) is not None:
                numbers[name].append(number)
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in numbers.items()}


def kl_metrics(batch: Batch, kl: np.ndarray, kl_coef: float) -> dict[str, float]:
    """Return the mean over sequences of their mean KL to the reference, and its coefficient."""
    per_sequence = kl.sum(1) / np.maximum(batch["response_lengths"], 1)
    return {"actor/kl": float(per_sequence[batch["usable"]].mean()), "actor/kl_coef": kl_coef}


def load_balance(minibatches: Sequence[Batch], shape: RowShape) -> dict[str, float]:
    """Return how evenly updates load the devices, and how much of them is padding.

    Args:
        minibatches: of a step; without any tokens there is nothing to say.
        shape: of the micro-batches.
    """
    planned, places, first = [], 0, 0
    each = [sequence_sizes(minibatch) for minibatch in minibatches]
    sizes = np.concatenate(each)
    for own in each:
        rows_shape = choose_rows(own, shape)
        packed = plan_microbatches(own, rows_shape)
        places += sum(in_bucket(own, rows, rows_shape)[1].tokens for rows in packed)
        planned += [[[first + i for i in row] for row in rows] for rows in packed]
        first += len(own)
    if not planned:
        return {}
    metrics = imbalance(sizes, planned, shape.ranks, shape.cost)
    return metrics | {"perf/padding": 1 - int(sizes.sum()) / places}


def check_agreement(
    batch: Batch, step: int, tolerance: float, *, keeps_cache: bool = False
) -> dict[str, float]:
    """Compare the engine's log-probs with the trainer's `logprobs`: they must agree at every step.

    Compared are tokens of the weights that were pushed last, so that a push that did not work is
    seen here; and what `mask` takes for drawn, but no weights have drawn.

    Args:
        batch: with `logprobs`.
        step: for the message.
        tolerance: the largest mean difference, in nats.
        keeps_cache: whether answers go on with keys and values of weights before; then only those
            are compared that were wholly drawn by the newest.

    Raises:
        TrainingError: a mean absolute difference above `tolerance`.
    """
    mask = batch["mask"]
    difference = np.abs(batch["logprobs"] - batch["rollout_logprobs"])
    newest = mask & ((batch["ages"] == 0) | (batch["versions"] == NOT_DRAWN))
    if keeps_cache:
        newest &= ~(batch["ages"] > 0).any(1, keepdims=True)
    own = {"actor/entropy": float(batch["entropy"][mask].mean())}
    if newest.any():
        mean = check_difference(float(difference[newest].mean()), step, tolerance)
        own["training/rollout_logprobs_diff_mean"] = mean
    mismatch = _mismatch(batch["logprobs"], batch["rollout_logprobs"], mask)
    return own | {name: float(value) for name, value in mismatch.items()}


def check_difference(mean: float, step: int, tolerance: float) -> float:
    """Return the mean difference of the engine's log-probs from the trainer's, if it is small.

    Raises:
        TrainingError: it is above `tolerance`.
    """
    if not mean <= tolerance:
        raise TrainingError(
            f"the engine's log-probs differ from the trainer's by {mean:.4f} nats on average "
            f"at step {step}, above rollout.logprob_tolerance={tolerance}: the sampler does "
            "not run the model that is trained (dtype, weights, temperature?)"
        )
    return mean


_mismatch = jax.jit(mismatch_metrics)


def throughput_metrics(step_s: float, batch: Batch) -> dict[str, float]:
    """Return memory, and the tokens per second and device of a step.

    Args:
        step_s: seconds of the step.
        batch: of the step.
    """
    total = int(batch.sequence_lengths.sum())
    return {
        **memory_metrics(),
        **job_context.metrics(),
        "perf/total_num_tokens": total,
        "perf/throughput": total / step_s / device_count(),
    }


def device_count() -> int:
    """Return the devices of all training processes, and of engines on nodes of their own."""
    job = job_context.current()
    return jax.device_count() + (job.engine_devices if job else 0)


log = logging.getLogger(__name__)

STEPS_WITHOUT_SPREAD = 3
"""Steps in a row whose advantages are all zero, after which the run warns."""


class StepWarnings:
    """Looks at the metrics of each step.

    Args:
        optims: of the models that are trained, by role.
        total_steps: steps in all.
    """

    def __init__(self, optims: Mapping[str, OptimConfig], total_steps: int) -> None:
        """Look at nothing yet."""
        self._optims, self._without_spread, self._warned = optims, 0, False
        self._limit = min(STEPS_WITHOUT_SPREAD, total_steps)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log what is wrong with a step, in the first process."""
        if is_first():
            self._warn_of_skipped(step, metrics)
            self._warn_of_no_spread(metrics)

    def _warn_of_skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        for role, optim in self._optims.items():
            skipped = metrics.get(f"{role}/skipped", 0)
            if skipped:
                log.warning(
                    "step %d: %d update(s) skipped, for the %s's gradient was not finite; more "
                    "than %s.max_skipped=%d in a row stop the run",
                    *(step, skipped, role.replace("_", " ")),
                    *("optim" if role == "actor" else f"{role}.optim", optim.max_skipped),
                )

    def _warn_of_no_spread(self, metrics: Mapping[str, float]) -> None:
        extremes = [metrics.get(f"critic/advantages/{end}") for end in ("min", "max")]
        self._without_spread = self._without_spread + 1 if extremes == [0, 0] else 0
        if self._without_spread >= self._limit and not self._warned:
            self._warned = True
            low, high = (metrics[f"critic/score/{end}"] for end in ("min", "max"))
            log.warning(
                "all advantages of the last %d step(s) are zero, so nothing was learned from them: "
                "the answers to each prompt have equal scores (from %g to %g in this step). Look "
                "at reward.function, take other prompts, or raise rollout.samples_per_prompt",
                *(self._without_spread, low, high),
            )

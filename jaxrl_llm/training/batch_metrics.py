"""Metrics of a training step: its batch, how well engine and trainer agree, and the machine."""

from collections import defaultdict
from collections.abc import Callable

import jax
import numpy as np

from jaxrl_llm.algorithms.correction import mismatch_metrics
from jaxrl_llm.cluster import context
from jaxrl_llm.data.balance import imbalance
from jaxrl_llm.data.bin_packing import padding, plan_microbatches
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.monitoring.clock import Clock, CompileCounter, memory_metrics, summary
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.training.update import TrainingError
from jaxrl_llm.types import Batch


def batch_metrics(
    balance: Callable[[Batch], dict[str, float]],
    batch: Batch,
    rollouts: Rollouts,
    scores: list[Score],
) -> dict[str, float]:
    """Return metrics of a step's batch, under verl's names.

    Args:
        balance: batch -> how evenly it loads the devices.
        batch: of the step, with its advantages.
        rollouts: its answers.
        scores: of each answer.
    """
    mask, lengths = batch["mask"], batch["response_lengths"]
    per_group = np.array([s.score for s in scores]).reshape(-1, np.bincount(batch["group_ids"])[0])
    return {
        **summary("critic/score", np.array([s.score for s in scores])),
        **summary("critic/rewards", batch["scores"]),
        **summary("critic/advantages", batch["advantages"][mask]),
        **summary("response_length", lengths),
        "response_length/clip_ratio": float(
            np.mean([answer.finish == "length" for answer in rollouts.completions])
        ),
        **summary("prompt_length", batch.sequence_lengths - lengths),
        "critic/groups_without_spread": float(np.mean(np.ptp(per_group, axis=1) == 0)),
        **(value_metrics(batch) if "values" in batch.fields else {}),
        **(correction_metrics(batch) if "correction" in batch.fields else {}),
        **extra_metrics(scores),
        **balance(batch),
        "reward/errors": float(sum(score.error is not None for score in scores)),
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
    """Return the means of the reward function's other numbers, over the answers that have them."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.extra.items():
            if isinstance(value, int | float):
                numbers[name].append(float(value))
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in numbers.items()}


def kl_metrics(batch: Batch, kl: np.ndarray, kl_coef: float) -> dict[str, float]:
    """Return the mean over sequences of their mean KL to the reference, and its coefficient."""
    per_sequence = kl.sum(1) / np.maximum(batch["response_lengths"], 1)
    return {"actor/kl": float(per_sequence.mean()), "actor/kl_coef": kl_coef}


def load_balance(batch: Batch, *, shape: RowShape, minibatch: int) -> dict[str, float]:
    """Return how evenly the updates of a batch load the devices, and how much of them is padding.

    Args:
        batch: of a step.
        shape: of the micro-batches.
        minibatch: sequences in an update.
    """
    planned, sizes = [], batch.sequence_lengths
    for first in range(0, len(sizes), minibatch):
        packed = plan_microbatches(sizes[first : first + minibatch], shape)
        planned += [[[first + i for i in row] for row in rows] for rows in packed]
    metrics = imbalance(sizes, planned, shape.rows, shape.ranks, shape.cost)
    return metrics | {"perf/padding": padding(sizes, planned, shape)}


def check_agreement(batch: Batch, step: int, tolerance: float) -> dict[str, float]:
    """Compare the engine's log-probs with the trainer's `logprobs`: they must agree at every step.

    Both are of the weights that were pushed last, so that a push that did not work is seen here.

    Raises:
        TrainingError: a mean absolute difference above `tolerance`.
    """
    mask = batch["mask"]
    difference = float(np.abs(batch["logprobs"] - batch["rollout_logprobs"])[mask].mean())
    if not difference <= tolerance:
        raise TrainingError(
            f"the engine's log-probs differ from the trainer's by {difference:.4f} nats on average "
            f"at step {step}, above rollout.logprob_tolerance={tolerance}: the sampler does not "
            "run the model that is trained (dtype, weights, temperature?)"
        )
    mismatch = _mismatch(batch["logprobs"], batch["rollout_logprobs"], mask)
    own = {
        "actor/entropy": float(batch["entropy"][mask].mean()),
        "training/rollout_logprobs_diff_mean": difference,
    }
    return own | {name: float(value) for name, value in mismatch.items()}


_mismatch = jax.jit(mismatch_metrics)


def system_metrics(clock: Clock, compiled: CompileCounter, batch: Batch) -> dict[str, float]:
    """Return times, memory, compilations since the last step, and tokens per second and device."""
    timing, total = clock.metrics(), int(batch.sequence_lengths.sum())
    return {
        **timing,
        **memory_metrics(),
        **compiled.metrics(),
        **context.metrics(),
        "perf/total_num_tokens": total,
        "perf/throughput": total / timing["timing_s/step"] / device_count(),
    }


def device_count() -> int:
    """Return the devices of all training processes, and of engines on nodes of their own."""
    job = context.current()
    return jax.device_count() + (job.engine_devices if job else 0)

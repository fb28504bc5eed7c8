"""The single controller: the whole synchronous loop."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.correction import mismatch_metrics
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import as_tree
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.dataflow import call
from jaxrl_llm.evaluate import headline
from jaxrl_llm.experience import Rollouts, experience, penalize
from jaxrl_llm.keys import TrainConfig
from jaxrl_llm.metrics import (
    Clock,
    CompileCounter,
    Display,
    MetricsLog,
    due,
    memory_metrics,
    summary,
)
from jaxrl_llm.rewards.pool import Score
from jaxrl_llm.rollout.engine import Engine, EngineError
from jaxrl_llm.step import Learner, TrainingError, TrainState, check_skipped
from jaxrl_llm.types import Batch


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the loop calls, built from a config.

    Attributes:
        total_steps: steps in all.
        origin: digests of the weights and data that the run began with.
        checksum: of parameters, as the engine should hold them.
        sample: (prompts, step) -> rollouts.
        score: rollouts -> one score for each answer.
        logprobs: (params, batch) -> `logprobs` and `entropy` [B T].
        advantage: adds `advantages` to a batch.
        kl: estimator (logprobs, ref_logprobs) -> [B T], or None.
        kl_reward: whether it is subtracted from the rewards (else it is in the loss).
        next_kl_coef: (coefficient, observed KL, sequences) -> coefficient.
        reference: parameters of the reference, or None when nothing asks for them.
        learner: the update.
        learning_rate: of an update, by its number.
        validate: step -> metrics, or None without validation data.
        dump: (step, batch, rollouts, scores) -> writes them to a file.
    """

    config: TrainConfig
    total_steps: int
    origin: dict[str, Any]
    engine: Engine
    checksum: Callable[[Any], Any]
    sample: Callable[[list[Prompt], int], Rollouts]
    score: Callable[[Rollouts], list[Score]]
    logprobs: Callable[[Any, Batch], dict[str, np.ndarray]]
    advantage: Callable[[Batch], Batch]
    kl: Callable[..., Any] | None
    kl_reward: bool
    next_kl_coef: Callable[[float, float, int], float]
    reference: Any
    learner: Learner
    learning_rate: Callable[[int], Any]
    validate: Callable[[int], dict[str, float]] | None
    dump: Callable[[int, Rollouts, list[Score]], None]
    checkpoints: Checkpoints
    log: MetricsLog
    display: Display


class Progress(NamedTuple):
    """Where a run stands: everything that the next step depends on, besides the data's position."""

    step: int
    state: TrainState
    kl_coef: float


def run(job: Job, start: Progress, prompt_batches: Any) -> Progress:
    """Train from `start` to the end.

    Args:
        job: what to call.
        start: where the run stands.
        prompt_batches: iterator over lists of prompts, with `get_state`.
    """
    config, compiled = job.config, CompileCounter()
    step, state, kl_coef = start
    push(job, state, step)
    if step == 0 and config.validation.before and job.validate:
        record(job, 0, job.validate(0))
    for step in range(start.step + 1, job.total_steps + 1):
        clock = Clock()
        with clock("gen"):
            rollouts = job.sample(next(prompt_batches), step)
        with clock("reward"):
            scores = job.score(rollouts)
            batch = lay_out(rollouts, scores, config)
        with clock("old_log_prob"):
            old = job.logprobs(state.params, batch)
            batch = batch.add(old_logprobs=old["logprobs"], entropy=old["entropy"])
            agreement = check_agreement(batch, step, config.rollout.logprob_tolerance)
        if job.reference is not None:
            with clock("ref"):
                batch = batch.add(ref_logprobs=job.logprobs(job.reference, batch)["logprobs"])
        with clock("adv"):
            observed_kl = kl_to_reference(job.kl, batch)
            batch = job.advantage(penalize(batch, observed_kl, kl_coef if job.kl_reward else 0.0))
        with clock("update_actor"):
            state, learned = update(job, state, batch, kl_coef)
        with clock("update_weights"):
            push(job, state, step)
        metrics = batch_metrics(batch, rollouts, scores) | agreement | learned
        if job.kl:
            metrics |= kl_metrics(batch, observed_kl, kl_coef)
            kl_coef = job.next_kl_coef(kl_coef, metrics["actor/kl"], len(batch.sizes))
        if job.validate and due(step, config.validation.every, job.total_steps):
            with clock("testing"):
                metrics |= job.validate(step)
        if due(step, config.rollout.dump_every, 0):
            job.dump(step, rollouts, scores)
        record(job, step, metrics | system_metrics(clock, compiled, batch))
        if due(step, config.checkpoint.every, job.total_steps):
            save(job, Progress(step, state, kl_coef), prompt_batches, metrics)
    compiled.close()
    job.checkpoints.wait()
    return Progress(step, state, kl_coef)


def lay_out(rollouts: Rollouts, scores: list[Score], config: TrainConfig) -> Batch:
    """Lay answers and scores out as a batch of the run's fixed width."""
    return experience(
        rollouts,
        scores,
        samples=config.rollout.samples_per_prompt,
        max_tokens=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
    )


def push(job: Job, state: TrainState, step: int) -> None:
    """Give the engine the current weights, and compare its echo with what was sent."""
    receipt = job.engine.load(state.params, version=step)
    sent = int(job.checksum(state.params))
    if receipt.version != step or receipt.checksum != sent:
        raise EngineError(
            f"the engine echoed version {receipt.version} with checksum {receipt.checksum:08x}, "
            f"wanted version {step} with {sent:08x}: it does not hold the weights that were sent"
        )


def check_agreement(batch: Batch, step: int, tolerance: float) -> dict[str, float]:
    """Compare the engine's log-probs with the trainer's; at step 1 they must agree.

    Raises:
        TrainingError: at step 1, a mean absolute difference above `tolerance`.
    """
    mask = batch["mask"]
    difference = float(np.abs(batch["old_logprobs"] - batch["rollout_logprobs"])[mask].mean())
    if step == 1 and not difference <= tolerance:
        raise TrainingError(
            f"the engine's log-probs differ from the trainer's by {difference:.4f} nats on average "
            f"at step 1, above rollout.logprob_tolerance={tolerance}: the sampler does not run the "
            "model that is trained (dtype, weights, temperature, chat template?)"
        )
    found = _mismatch(batch["old_logprobs"], batch["rollout_logprobs"], mask)
    return {name: float(value) for name, value in found.items()}


_mismatch = jax.jit(mismatch_metrics)


def kl_to_reference(kl: Callable[..., Any] | None, batch: Batch) -> np.ndarray:
    """Return the KL of every token to the reference, or zeros without one."""
    if kl is None:
        return np.zeros(batch.tokens.shape, np.float32)
    fields = {name: jnp.asarray(values) for name, values in batch.fields.items()}
    values = call(kl, {**fields, "logprobs": fields["old_logprobs"]})
    return np.where(batch["mask"], np.asarray(values, np.float32), 0)


def update(
    job: Job, state: TrainState, batch: Batch, kl_coef: float
) -> tuple[TrainState, dict[str, float]]:
    """Update the actor on every mini-batch of every epoch; return the means of its metrics.

    Raises:
        TrainingError: too many updates in a row with a non-finite gradient.
    """
    config = job.config
    coefs = {"kl_coef": kl_coef, "entropy_coef": config.algorithm.entropy_coef}
    first = int(state.updates)
    found = []
    for _ in range(config.batch.epochs_per_step):
        for minibatch in minibatches(batch, config):
            state, metrics = job.learner.update(state, minibatch, coefs)
            found.append(metrics)
    found = jax.device_get(found)
    check_skipped(max(int(m["skipped"]) for m in found), config.optim.max_skipped)
    applied = [m for m in found if not m["skipped"]] or found
    means = {f"actor/{k}": float(np.mean([m[k] for m in applied])) for k in found[0]}
    means["actor/skipped"] = float(sum(m["skipped"] > 0 for m in found))
    return state, means | {"actor/lr": float(job.learning_rate(first))}


def minibatches(batch: Batch, config: TrainConfig) -> Iterator[Batch]:
    """Cut a batch into mini-batches of whole groups."""
    prompts = config.batch.prompts_per_minibatch or config.batch.prompts_per_step
    size = prompts * config.rollout.samples_per_prompt
    for first in range(0, len(batch.sizes), size):
        yield batch.take(slice(first, first + size))


def batch_metrics(batch: Batch, rollouts: Rollouts, scores: list[Score]) -> dict[str, float]:
    """Return what a step's batch looks like, under verl's names."""
    mask, lengths = batch["mask"], batch["lengths"]
    per_group = np.array([s.score for s in scores]).reshape(-1, np.bincount(batch["group_ids"])[0])
    return {
        **summary("critic/score", np.array([s.score for s in scores])),
        **summary("critic/rewards", batch["scores"]),
        **summary("critic/advantages", batch["advantages"][mask]),
        **summary("response_length", lengths),
        "response_length/clip_ratio": float(
            np.mean([answer.finish == "length" for answer in rollouts.completions])
        ),
        **summary("prompt_length", batch.sizes - lengths),
        "actor/entropy": float(batch["entropy"][mask].mean()),
        "critic/groups_without_spread": float(np.mean(np.ptp(per_group, axis=1) == 0)),
        "reward/errors": float(sum(s.error is not None for s in scores)),
        **extra_metrics(scores),
    }


def extra_metrics(scores: list[Score]) -> dict[str, float]:
    """Return the means of what else the scorer reports as numbers, over answers that have it."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.extra.items():
            if isinstance(value, int | float):
                found[name].append(float(value))
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in found.items()}


def kl_metrics(batch: Batch, kl: np.ndarray, kl_coef: float) -> dict[str, float]:
    """Return the mean over sequences of their mean KL to the reference, and its coefficient."""
    per_sequence = kl.sum(1) / np.maximum(batch["lengths"], 1)
    return {"actor/kl": float(per_sequence.mean()), "actor/kl_coef": kl_coef}


def system_metrics(clock: Clock, compiled: CompileCounter, batch: Batch) -> dict[str, float]:
    """Return times, memory, compilations since the last step, and tokens per second and device."""
    timing, total = clock.metrics(), int(batch.sizes.sum())
    return {
        **timing,
        **memory_metrics(),
        "perf/compilations": compiled.take(),
        "perf/total_num_tokens": total,
        "perf/throughput": total / timing["timing_s/step"] / jax.device_count(),
    }


def record(job: Job, step: int, metrics: dict[str, float]) -> None:
    """Write a step's metrics, and one line on the screen."""
    job.log.write(step, metrics)
    shown = {
        "score": "critic/score/mean",
        "length": "response_length/mean",
        "entropy": "actor/entropy",
        "kl": "actor/kl",
        "grad": "actor/grad_norm",
        "s": "timing_s/step",
    }
    parts = [f"{label} {metrics[k]:.4g}" for label, k in shown.items() if k in metrics]
    parts += [f"{k.removeprefix('val-core/')} {v:.4g}" for k, v in metrics.items() if "@" in k]
    line = f"step {step}/{job.total_steps}  " + "  ".join(parts)
    job.display.advance(line) if step else job.display.line(line)


def save(job: Job, at: Progress, prompt_batches: Any, metrics: dict[str, float]) -> None:
    """Save everything from which the run continues bit for bit."""
    validated = {k: v for k, v in metrics.items() if "/mean@" in k}
    job.checkpoints.save(
        at.step,
        at.state,
        {
            "data": prompt_batches.get_state(),
            "kl_coef": at.kl_coef,
            "metrics_bytes": job.log.file.position(),
            "origin": job.origin,
            "config": as_tree(job.config),
        },
        {"validation": headline(validated)} if validated else None,
    )

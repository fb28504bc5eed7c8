"""The single controller: the whole synchronous loop."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.correction import mismatch_metrics
from jaxrl_llm.cluster import context
from jaxrl_llm.config.fields import asks_for, call, describe
from jaxrl_llm.config.load import as_tree
from jaxrl_llm.config.sections.offload import OffloadConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.evaluation.validation import headline
from jaxrl_llm.monitoring.clock import Clock, CompileCounter, is_due, memory_metrics, summary
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.metrics_log import MetricsLog
from jaxrl_llm.monitoring.profiler import Profiler
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Engine, EngineError
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.runs.preemption import Preemption
from jaxrl_llm.runs.watchdog import Watchdog
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.offload import on_device, to_device, to_host
from jaxrl_llm.training.experience import add_to_scores, penalize
from jaxrl_llm.training.objective import LossError, per_token
from jaxrl_llm.training.roles import Role
from jaxrl_llm.training.update import TrainingError, TrainState, check_skipped
from jaxrl_llm.types import Batch

States = dict[str, TrainState]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the loop calls, built from a config. None where nothing asks for it.

    Attributes:
        total_steps: steps in all.
        origin: digests of the weights and data that the run began with.
        whole: trained parameters -> those of the model, with an adapter merged into it.
        checksum: of a model's parameters, as the engine should hold them.
        sample: (prompts, step, draw) -> rollouts.
        score: rollouts -> one score for each answer.
        aside: a thread for what is done while the devices work.
        scored_aside: whether `score` may run there.
        lay_out: rollouts -> batch.
        add_scores: (batch, scores) -> batch.
        keep: batch -> which answers to train on [B].
        penalty: batch -> what is added to the scores [B].
        greedy_scores: (rollouts, step) -> scores of the greedy answers to their prompts [B], and
            how many of them could not be scored.
        old_logprobs: (params, batch) -> the batch with `old_logprobs` and, unless they are the
            engine's, what else the policy says; and a batch with the policy's `logprobs`. None
            where the update itself finds them.
        advantage: adds `advantages`, and `returns` if there is a critic.
        correct: adds `correction`.
        kl: estimator (logprobs, ref_logprobs) -> [B T].
        kl_reward: whether it is subtracted from the rewards (else it is in the loss).
        next_kl_coef: (coefficient, observed KL, sequences) -> coefficient.
        reference: batch -> what the reference says of each token [B T], by name.
        balance: batch -> metrics of how evenly it loads the devices, and of its padding.
        validate: step -> metrics.
        dump: (step, rollouts, scores) -> writes them to a file.
        preemption: whether the run was told to end.
        watchdog: ends the run when it hangs; `record` tells it of each step.
    """

    config: TrainConfig
    total_steps: int
    origin: dict[str, Any]
    engine: Engine
    whole: Callable[[Any], Any]
    checksum: Callable[[Any], Any]
    sample: Callable[[list[Prompt], int, int], Rollouts]
    score: Callable[[Rollouts], list[Score]]
    aside: Executor
    scored_aside: bool
    lay_out: Callable[[Rollouts], Batch]
    add_scores: Callable[[Batch, list[Score]], Batch]
    keep: Callable[[Batch], np.ndarray] | None
    penalty: Callable[[Batch], np.ndarray] | None
    greedy_scores: Callable[[Rollouts, int], tuple[np.ndarray, int]] | None
    old_logprobs: Callable[[Any, Batch], tuple[Batch, Batch]] | None
    advantage: Callable[[Batch], Batch]
    correct: Callable[[Batch], Batch] | None
    kl: Callable[..., Any] | None
    kl_reward: bool
    next_kl_coef: Callable[[float, float, int], float]
    reference: Callable[[Batch], dict[str, np.ndarray]] | None
    actor: Role
    critic: Role | None
    reward_model: Role | None
    balance: Callable[[Batch], dict[str, float]]
    validate: Callable[[int], dict[str, float]] | None
    dump: Callable[[int, Rollouts, list[Score]], None]
    checkpoints: Checkpoints
    log: MetricsLog
    display: Display
    preemption: Preemption
    watchdog: Watchdog


class Progress(NamedTuple):
    """Where a run stands: everything that the next step depends on, besides the data's position."""

    step: int
    states: States
    kl_coef: float


def run(job: Job, start: Progress, prompt_batches: Any) -> Progress:
    """Train from `start` to the end, or to the step in which the run is told to end.

    Args:
        job: what to call.
        start: where the run stands.
        prompt_batches: iterator over lists of prompts, with `get_state`.
    """
    config, compiled = job.config, CompileCounter()
    step, states, kl_coef = start
    left = range(step + 1, job.total_steps + 1)
    profiler = Profiler(left, config.log.profile_steps, config.run_dir, job.display)
    states = {name: put_away(state, config.offload) for name, state in states.items()}
    push(job, states, step)
    if step == 0 and config.validation.before and job.validate:
        record(job, 0, job.validate(0))
    for step in range(start.step + 1, job.total_steps + 1):
        profiler.turn_to(step)
        clock = Clock()
        rollouts, scoring, drawn = gather(job, prompt_batches, step, clock)
        batch, scores, agreement = assess(job, states, rollouts, scoring, step, clock)
        with clock("adv"):
            if job.kl_reward:
                batch = penalize(batch, kl_to_reference(job.kl, batch), kl_coef)
            batch = job.advantage(batch)
            batch = job.correct(batch) if job.correct else batch
        described = job.aside.submit(batch_metrics, job, batch, rollouts, scores)
        states, batch, learned = learn(job, states, batch, step, kl_coef, clock)
        with clock("update_weights"):
            moved = push(job, states, step)
        metrics = described.result() | drawn | agreement | learned | moved
        if job.kl:
            metrics |= kl_metrics(batch, kl_to_reference(job.kl, batch), kl_coef)
            kl_coef = job.next_kl_coef(kl_coef, metrics["actor/kl"], len(batch.sizes))
        if job.validate and is_due(step, config.validation.every, job.total_steps):
            with clock("testing"):
                metrics |= job.validate(step)
        if is_due(step, config.rollout.dump_every, 0) and distributed.is_first():
            job.dump(step, rollouts, scores)
        record(job, step, metrics | system_metrics(clock, compiled, batch))
        if end_step(job, Progress(step, states, kl_coef), prompt_batches, metrics):
            break
    profiler.close()
    compiled.close()
    job.checkpoints.wait()
    return Progress(step, states, kl_coef)


def gather(
    job: Job, prompt_batches: Any, step: int, clock: Clock
) -> tuple[Rollouts, Future[list[Score]], dict[str, float]]:
    """Draw a step's answers and begin to score them; draw more until enough groups are kept.

    Raises:
        TrainingError: `algorithm.max_generation_batches` batches did not hold enough such groups.
    """
    config = job.config
    wanted = config.batch.prompts_per_step * config.rollout.samples_per_prompt
    rollouts, scores, dropped, errors = Rollouts([], [], []), [], 0, 0
    for draw in range(config.algorithm.max_generation_batches):
        with clock("gen"):
            drawn = job.sample(next(prompt_batches), step, draw)
        if job.keep is None and job.scored_aside:
            return drawn, job.aside.submit(job.score, drawn), {}
        with clock("reward"):
            found = job.score(drawn)
        if job.keep is None:
            return drawn, _known(found), {}
        errors += sum(score.error is not None for score in found)
        rows = np.flatnonzero(job.keep(job.add_scores(job.lay_out(drawn), found))).tolist()
        dropped += (len(found) - len(rows)) // config.rollout.samples_per_prompt
        rollouts = rollouts.join(drawn.take(rows))
        scores += [found[row] for row in rows]
        if len(scores) >= wanted:
            metrics = {
                "batch/generation_batches": draw + 1.0,
                "batch/dropped_groups": float(dropped),
                "reward/errors": float(errors),
            }
            return rollouts.take(range(wanted)), _known(scores[:wanted]), metrics
    raise TrainingError(
        f"step {step}: algorithm.group_filter kept "
        f"{len(scores) // config.rollout.samples_per_prompt} of "
        f"{config.batch.prompts_per_step * config.algorithm.max_generation_batches} groups, wanted "
        f"{config.batch.prompts_per_step}: the prompts are too easy or too hard for the policy. "
        "Raise algorithm.max_generation_batches and run the same command again, or begin a run "
        "with other prompts or more samples_per_prompt"
    )


def _known(scores: list[Score]) -> Future[list[Score]]:
    found: Future[list[Score]] = Future()
    found.set_result(scores)
    return found


def assess(
    job: Job,
    states: States,
    rollouts: Rollouts,
    scoring: Future[list[Score]],
    step: int,
    clock: Clock,
) -> tuple[Batch, list[Score], dict[str, float]]:
    """Lay answers out as a batch, and ask each model for what the algorithm needs of them.

    Their scores are waited for last.
    """
    batch, metrics = job.lay_out(rollouts), {}

    def infer(role: Role) -> dict[str, np.ndarray]:
        with on_device(states[role.name].params) as params:
            return role.infer(params, batch)

    if job.old_logprobs is not None:
        with clock("old_log_prob"):
            with on_device(states["actor"].params) as params:
                batch, probe = job.old_logprobs(params, batch)
            metrics |= check_agreement(probe, step, job.config.rollout.logprob_tolerance)
    if job.reference is not None:
        with clock("ref"):
            found = job.reference(batch)
            batch = batch.add(ref_logprobs=found["logprobs"])
    if job.reward_model:
        with clock("implicit_reward_model"):
            batch = batch.add(reward_logprobs=infer(job.reward_model)["logprobs"])
    if job.critic:
        with clock("values"):
            values = infer(job.critic)["values"]
            batch = batch.add(values=values, old_values=values)
    with clock("reward"):
        scores = scoring.result()
    batch = job.add_scores(batch, scores)
    if job.penalty:
        batch = add_to_scores(batch, job.penalty(batch))
    if job.greedy_scores:
        with clock("gen_max"):
            greedy, errors = job.greedy_scores(rollouts, step)
            batch = batch.add(greedy_scores=greedy)
            metrics["reward/greedy_errors"] = float(errors)
    return batch, scores, metrics


def learn(
    job: Job, states: States, batch: Batch, step: int, kl_coef: float, clock: Clock
) -> tuple[States, Batch, dict[str, float]]:
    """Update every model that is trained; the actor only when the critic has warmed up.

    The batch comes back with the `old_logprobs` that an update on policy has found.
    """
    roles = [role for role in (job.reward_model, job.critic) if role]
    if not job.critic or step > job.config.critic.warmup_steps:
        roles.append(job.actor)
    metrics = {}
    for role in roles:
        with clock(f"update_{role.name}"):
            state = to_device(states[role.name])
            state, said, found = update(role, state, batch, job.config, kl_coef)
            states |= {role.name: put_away(state, job.config.offload)}
            metrics |= found
        if said:
            probe = batch.add(**said)
            metrics |= check_agreement(probe, step, job.config.rollout.logprob_tolerance)
            batch = batch.add(old_logprobs=said["logprobs"])
    return states, batch, metrics


def put_away(state: TrainState, offload: OffloadConfig) -> TrainState:
    """Move to the host what waits there until it is used again."""
    if offload.params:
        state = state._replace(params=to_host(state.params))
    if offload.optimizer:
        state = state._replace(opt_state=to_host(state.opt_state))
    return state


def push(job: Job, states: States, step: int) -> dict[str, float]:
    """Give the engine the current weights, and compare its echo with what was sent."""
    with on_device(states["actor"].params) as held:
        params = job.whole(held)
        receipt = job.engine.load(params, version=step)
        echoed = receipt.checksum  # None: the engine has compared by itself
        sent = None if echoed is None else int(job.checksum(params))
    if (receipt.version, echoed) != (step, sent):
        raise EngineError(
            f"the engine echoed version {receipt.version} with checksum {echoed}, wanted version "
            f"{step} with {sent}: it does not hold the weights that were sent"
        )
    return {"perf/moved_gb": receipt.moved_bytes / 2**30}


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
    found = _mismatch(batch["logprobs"], batch["rollout_logprobs"], mask)
    entropy = {"actor/entropy": float(batch["entropy"][mask].mean())}
    return entropy | {name: float(value) for name, value in found.items()}


_mismatch = jax.jit(mismatch_metrics)


def kl_to_reference(kl: Callable[..., Any] | None, batch: Batch) -> np.ndarray:
    """Return the KL of every token to the reference, or zeros without one."""
    if kl is None:
        return np.zeros(batch.tokens.shape, np.float32)
    fields = {**batch.fields, "logprobs": batch["old_logprobs"]}
    found = call(kl, {name: jnp.asarray(fields[name]) for name in asks_for(kl)})
    values = np.asarray(per_token(found, kl, "kl", batch.tokens.shape), np.float32)
    if not np.isfinite(values[batch["mask"]]).all():
        raise LossError(f"kl {describe(kl)!r} returned NaN or infinity")
    return np.where(batch["mask"], values, 0)


def update(
    role: Role, state: TrainState, batch: Batch, config: TrainConfig, kl_coef: float
) -> tuple[TrainState, dict[str, np.ndarray], dict[str, float]]:
    """Update a role on every mini-batch of every epoch.

    Returns:
        The new state; what the policy said of the batch's tokens [B T], where a single update has
        found it, by name; and the means of the metrics.

    Raises:
        TrainingError: too many updates in a row with a non-finite gradient.
    """
    coefs = {"kl_coef": kl_coef, "entropy_coef": config.algorithm.entropy_coef}
    first = int(state.updates)
    found, said = [], {}
    for _ in range(config.batch.epochs_per_step):
        for minibatch in minibatches(batch, config):
            marked = role.mark(state, minibatch) if role.mark else minibatch
            state, metrics = role.learner.update(state, marked, coefs)
            said = metrics.pop("policy", {})
            found.append(metrics)
    found = jax.device_get(found)
    key = "optim" if role.name == "actor" else f"{role.name}.optim"
    check_skipped(max(int(m["skipped"]) for m in found), role.max_skipped, key)
    applied = [m for m in found if not m["skipped"]] or found
    means = {k: float(np.mean([m[k] for m in applied])) for k in found[0]}
    means["skipped"] = float(sum(m["skipped"] > 0 for m in found))
    means["lr"] = float(role.learning_rate(first))
    return state, said, {f"{role.name}/{name}": value for name, value in means.items()}


def minibatches(batch: Batch, config: TrainConfig) -> Iterator[Batch]:
    """Cut a batch into mini-batches of whole groups."""
    size = minibatch_size(config)
    for first in range(0, len(batch.sizes), size):
        yield batch.take(slice(first, first + size))


def minibatch_size(config: TrainConfig) -> int:
    """Return how many sequences an update has."""
    prompts = config.batch.prompts_per_minibatch or config.batch.prompts_per_step
    return prompts * config.rollout.samples_per_prompt


def batch_metrics(
    job: Job, batch: Batch, rollouts: Rollouts, scores: list[Score]
) -> dict[str, float]:
    """Return what a step's batch looks like, under verl's names."""
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
        **summary("prompt_length", batch.sizes - lengths),
        "critic/groups_without_spread": float(np.mean(np.ptp(per_group, axis=1) == 0)),
        **(value_metrics(batch) if "values" in batch.fields else {}),
        **(correction_metrics(batch) if "correction" in batch.fields else {}),
        **extra_metrics(scores),
        **job.balance(batch),
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
    """Return the means of a reward function's other numbers, over the answers that have them."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.extra.items():
            if isinstance(value, int | float):
                found[name].append(float(value))
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in found.items()}


def kl_metrics(batch: Batch, kl: np.ndarray, kl_coef: float) -> dict[str, float]:
    """Return the mean over sequences of their mean KL to the reference, and its coefficient."""
    per_sequence = kl.sum(1) / np.maximum(batch["response_lengths"], 1)
    return {"actor/kl": float(per_sequence.mean()), "actor/kl_coef": kl_coef}


def system_metrics(clock: Clock, compiled: CompileCounter, batch: Batch) -> dict[str, float]:
    """Return times, memory, compilations since the last step, and tokens per second and device."""
    timing, total = clock.metrics(), int(batch.sizes.sum())
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


def record(job: Job, step: int, metrics: dict[str, float]) -> None:
    """Write a step's metrics, and one line on the screen."""
    job.watchdog.beat()
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


def end_step(job: Job, at: Progress, prompt_batches: Any, metrics: dict[str, float]) -> bool:
    """Save where that is due; return whether the run was told to end: then it is due, too."""
    job.checkpoints.check()
    ending = job.preemption.requested()
    if ending or is_due(at.step, job.config.checkpoint.every, job.total_steps):
        save(job, at, prompt_batches, metrics)
    return ending


def save(job: Job, at: Progress, prompt_batches: Any, metrics: dict[str, float]) -> None:
    """Save everything from which the run continues bit for bit."""
    validated = {k: v for k, v in metrics.items() if "/mean@" in k}
    job.checkpoints.save(
        at.step,
        at.states,
        {
            "data": prompt_batches.get_state(),
            "kl_coef": at.kl_coef,
            "metrics_bytes": job.log.position(at.step),
            "origin": job.origin,
            "config": as_tree(job.config),
        },
        {"validation": headline(validated)} if validated else None,
    )

"""The single controller: the whole loop."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.compilation import BACKGROUND
from jaxrl_llm.config.load import as_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import AlgorithmConfig, OffloadConfig
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.evaluation.validation import headline
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import Clock, CompileCounter, is_due, stage_label
from jaxrl_llm.monitoring.dumps import trained_rows
from jaxrl_llm.monitoring.profiler import Profiler
from jaxrl_llm.monitoring.tables import AnswerTable
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.precision import agreement_tolerance
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.sharding.offload import on_device, to_device, to_host
from jaxrl_llm.training.batch_metrics import (
    batch_metrics,
    check_agreement,
    over_updates,
    system_metrics,
)
from jaxrl_llm.training.buffer import Collected, Window
from jaxrl_llm.training.experience import Selected, cut_minibatches, with_ages
from jaxrl_llm.training.layouts import minibatch_size
from jaxrl_llm.training.roles import Role
from jaxrl_llm.training.stages.algorithm import AlgorithmStage
from jaxrl_llm.training.stages.models import ModelsStage, States
from jaxrl_llm.training.stages.reference import REFERENCE
from jaxrl_llm.training.stages.rollout import RolloutStage
from jaxrl_llm.training.stages.run import RunStage
from jaxrl_llm.training.stages.scoring import ScoringStage
from jaxrl_llm.training.teachers import AVERAGE
from jaxrl_llm.training.update import TrainingError, TrainState, check_skipped
from jaxrl_llm.types import Batch

log = logging.getLogger(__name__)

Metrics = dict[str, float]


class Stages(NamedTuple):
    """The stages of a run's training steps, built from its config."""

    rollout: RolloutStage
    scoring: ScoringStage
    models: ModelsStage
    algorithm: AlgorithmStage
    run: RunStage


class Coefs(NamedTuple):
    """The coefficients of the loss's terms; a compiled update takes any."""

    kl_coef: float
    entropy_coef: float
    distillation_coef: float

    @classmethod
    def of(cls, config: AlgorithmConfig) -> "Coefs":
        """Return those of a config."""
        return cls(**{name: getattr(config, name) for name in cls._fields})

    def restored(self, extra: Mapping[str, Any]) -> "Coefs":
        """Return those of a checkpoint, where it has them."""
        return self._replace(**{name: extra[name] for name in self._fields if name in extra})


class Progress(NamedTuple):
    """Where a run stands: everything that the next step depends on, besides the data's position.

    Attributes:
        step: steps done.
        states: of the models that are trained, and of a reference that is refreshed.
        coefs: of the loss's terms.
        empty_steps: in a row, the last ones, of which no answer was left to update the policy on.
    """

    step: int
    states: States
    coefs: Coefs
    empty_steps: int = 0


class FinishedStep(NamedTuple):
    """What a training step has made.

    Attributes:
        number: of the step, from 1 on.
        batch: tokens, and every field that a function of the config asked for, as the update had
            them.
        rollouts: prompts, answers and their texts.
        scores: of the answers.
        metrics: by name, as in `metrics.jsonl`.
        decode: token ids -> text.
    """

    number: int
    batch: Batch
    rollouts: Rollouts
    scores: list[Score]
    metrics: Metrics
    decode: Callable[[list[int]], str]

    @property
    def texts(self) -> list[str]:
        """The sampled answers as texts [B]."""
        return self.rollouts.texts

    @property
    def answers(self) -> AnswerTable:
        """The sampled answers with scores, advantages and log-probs of their tokens."""
        return AnswerTable(trained_rows(self.batch, self.rollouts, self.scores), self.decode)


class TrainingLoop:
    """The loop, a step at a time. It is synchronous at `rollout.staleness` 0.

    Args:
        stages: of a training step.
        start: where the run stands.
        window: the prompts and answers that are not trained yet.

    Attributes:
        progress: where the run stands now. Its coefficients may be changed between steps.
        ended: whether the run was told to end; it has saved then.
    """

    def __init__(self, stages: Stages, start: Progress, window: Window) -> None:
        """Bring the weights to the engine, and validate where that comes before the first step."""
        run, self.stages, self.window = stages.run, stages, window
        states = {n: offload_state(n, s, run.config.offload) for n, s in start.states.items()}
        self.progress, self.ended = start._replace(states=states), False
        self._compiled = CompileCounter()
        steps = range(start.step + 1, run.total_steps + 1)
        profiled = run.config.log.profile_steps
        self._profiler = Profiler(steps, profiled, run.config.run_dir, run.display)
        stages.rollout.sync_weights(states["actor"].params, start.step)
        if start.step == 0 and run.should_validate(0):
            run.record(0, run.validate(0))

    def __iter__(self) -> Iterator[FinishedStep]:
        """Yield the steps that are left, each when it is done; a later loop goes on after them."""
        while self.progress.step < self.stages.run.total_steps and not self.ended:
            yield self.step()

    def step(self) -> FinishedStep:
        """Take the next step."""
        (_, _, _, algorithm, run), (done, states, coefs, empty) = self.stages, self.progress
        step, clock, stages = done + 1, Clock(), self.stages
        self._profiler.turn_to(step)
        collected = self.window.take(step, clock)
        batch, scores, agreement = make_experience(stages, states, collected, step, clock)
        with clock("adv"):
            batch = algorithm.penalize_kl(batch, coefs.kl_coef)
            batch = algorithm.add_advantages(batch)
            batch = algorithm.add_correction(batch)
            selected = algorithm.select(batch)
        empty = count_empty(selected, empty, step, run.config)
        rollouts, balance = collected.rollouts, functools.partial(run.balance, selected.minibatches)
        described = run.executor.submit(batch_metrics, balance, batch, rollouts, scores)
        states, batch, updated = update_models(stages, states, batch, selected, step, coefs, clock)
        states = stages.models.refresh_reference(states, step)
        left = self.window.interrupt(step, clock)
        with clock("update_weights"):
            synced = stages.rollout.sync_weights(states["actor"].params, step)
        kl, kl_coef = algorithm.control_kl(batch, coefs.kl_coef)
        metrics = described.result() | collected.metrics | agreement | updated | left | synced | kl
        if run.should_validate(step):
            with clock("testing"):
                metrics |= run.validate(step)
        if run.should_dump(step):
            run.dump(step, batch, rollouts, scores)
        metrics |= system_metrics(clock, self._compiled, batch)
        run.record(step, metrics, **run.some_answers(step, batch, rollouts, scores))
        self.progress = Progress(step, states, coefs._replace(kl_coef=kl_coef), empty)
        self.ended = end_step(run, self.progress, self.window, metrics)
        BACKGROUND.release()  # the other programs, now that there is a step to see
        decode = text_decoder(stages.rollout.tokenizer, skip_special_tokens=False)
        return FinishedStep(step, batch, rollouts, scores, metrics, decode)

    def close(self) -> None:
        """End what measures the steps."""
        self._profiler.close()
        self._compiled.close()


def make_experience(
    stages: Stages,
    states: States,
    collected: Collected,
    step: int,
    clock: Clock,
) -> tuple[Batch, list[Score], Metrics]:
    """Lay answers out as a batch, run the models over it, and add the scores.

    The scores are waited for last, but for what needs them.

    Raises:
        TrainingError: no answer is usable.
    """
    rollouts, lay_out = collected.rollouts, stages.scoring.lay_out
    batch, metrics = with_ages(lay_out(rollouts), step), {}
    if collected.canaries is not None:
        fresh = lay_out(collected.canaries, samples=1)
        metrics |= stages.models.check_canaries(states, fresh, step)
    for model_pass in stages.models.passes:
        if model_pass.begin is not None:
            model_pass.begin(batch, rollouts)
    for model_pass in stages.models.passes:
        with clock(model_pass.timer):
            batch, agreement = model_pass.run(states, batch, rollouts, step)
        metrics |= agreement
    with clock("reward"):
        scores = collected.scores()
    batch = stages.scoring.add_penalty(stages.scoring.add_scores(batch, scores))
    batch, errors = stages.scoring.add_greedy_scores(batch, rollouts, step, clock)
    if not batch["usable"].any():
        raise TrainingError(
            f"step {step}: no answer can be trained on: all are broken (episode/broken), unscored "
            "(reward/unscored), or alone are left of their groups"
        )
    for scored_pass in stages.models.scored_passes:
        with clock(scored_pass.timer):
            batch, told = scored_pass.run(states, batch, rollouts, scores, step)
        metrics |= told
    return batch, scores, metrics | errors


def count_empty(selected: Selected, before: int, step: int, config: TrainConfig) -> int:
    """Return how many steps in a row, up to this one, have left nothing to update the policy on.

    Args:
        selected: of the step.
        before: the same count of the step before.
        step: for the message.
        config: of the run.

    Raises:
        TrainingError: they are too many.
    """
    if not selected.is_empty:
        return 0
    key = "pairs" if config.algorithm.pairs is not None else "answer_filter"
    empty, limit = before + 1, config.algorithm.max_generation_batches
    if empty >= limit:
        raise TrainingError(
            f"step {step}: algorithm.{key} left nothing to train on in {empty} steps in a row "
            f"(algorithm.max_generation_batches={limit}): the answers to each prompt score alike, "
            "or too low. Raise algorithm.max_generation_batches and run the same command again, or "
            "begin a run with other prompts or more samples_per_prompt"
        )
    log.warning(
        "step %d: algorithm.%s left nothing to train on, so the policy stays as it is; %d steps "
        "in a row stop the run",
        *(step, key, limit),
    )
    return empty


def update_models(
    stages: Stages,
    states: States,
    batch: Batch,
    selected: Selected,
    step: int,
    coefs: Coefs,
    clock: Clock,
) -> tuple[States, Batch, Metrics]:
    """Update every model that is trained: the actor on what is selected, the others on all answers.

    The batch comes back with the `old_logprobs` that an update on policy has computed.
    """
    config, metrics = stages.run.config, dict(selected.metrics)
    for role in stages.models.to_update(step):
        with clock(f"update_{role.name}"):
            state = to_device(states[role.name])
            cut = selected.minibatches
            if role.name != "actor":
                cut = [*cut_minibatches(batch, minibatch_size(config))]
            state, policy_stats, means = update_role(role, state, cut, config, coefs)
            states |= {role.name: offload_state(role.name, state, config.offload)}
            metrics |= means
        if policy_stats:
            probe = batch.add(**policy_stats)
            keeps_cache = config.rollout.at_push == "keep"
            metrics |= check_agreement(
                probe, step, agreement_tolerance(config.rollout), keeps_cache=keeps_cache
            )
            batch = batch.add(old_logprobs=policy_stats["logprobs"])
    states = stages.models.follow(states)
    if AVERAGE in states:
        states |= {AVERAGE: offload_state(AVERAGE, states[AVERAGE], config.offload)}
    return states, batch, metrics


def offload_state(name: str, state: TrainState, offload: OffloadConfig) -> TrainState:
    """Move to the host what waits there until it is used again."""
    waits = {AVERAGE: offload.teacher, REFERENCE: offload.reference}
    if waits.get(name, offload.params):
        state = state._replace(params=to_host(state.params))
    if offload.optimizer:
        state = state._replace(opt_state=to_host(state.opt_state))
    return state


def update_role(
    role: Role,
    state: TrainState,
    minibatches: Sequence[Batch],
    config: TrainConfig,
    coefs: Coefs,
) -> tuple[TrainState, dict[str, np.ndarray], Metrics]:
    """Update a role on every mini-batch of every epoch.

    Returns:
        The new state; the policy's statistics of the batch's tokens [B T], by name, where a single
        update has computed them; and the metrics, none without an update.

    Raises:
        TrainingError: too many updates in a row with a non-finite gradient.
    """
    first = int(state.updates)
    updates, policy_stats = [], {}
    cut = [*minibatches] * config.batch.epochs_per_step
    with (
        activity(stage_label(f"update_{role.name}"), len(cut)) as progress,
        on_device(role.teacher) as teacher,
    ):
        given = coefs._asdict() | ({} if teacher is None else {"teacher": teacher})
        for minibatch in cut:
            progress.advance()
            if not minibatch["mask"].any():
                continue  # none of its answers is usable, or none is left
            annotated = role.annotate_minibatch(state, minibatch)
            state, metrics = role.learner.update(state, annotated, given)
            policy_stats = metrics.pop("policy", {})
            updates.append(metrics)
    if not updates:
        return state, {}, {}
    updates = jax.device_get(updates)
    key = "optim" if role.name == "actor" else f"{role.name}.optim"
    check_skipped(max(int(m["skipped"]) for m in updates), role.max_skipped, key)
    means = over_updates(updates)
    means["lr"] = float(role.learning_rate(first))
    return state, policy_stats, {f"{role.name}/{name}": value for name, value in means.items()}


def end_step(run: RunStage, at: Progress, window: Window, metrics: Metrics) -> bool:
    """Save where that is due; return whether the run was told to end: then it is due, too."""
    run.checkpoints.check()
    ending = run.preemption.requested()
    if ending or is_due(at.step, run.config.checkpoint.every, run.total_steps):
        save(run, at, window, metrics)
    return ending


@activity("saving")
def save(run: RunStage, at: Progress, window: Window, metrics: Metrics) -> None:
    """Save everything from which the run continues bit for bit."""
    validated = {k: v for k, v in metrics.items() if "/mean@" in k}
    run.checkpoints.save(
        at.step,
        at.states,
        {
            "data": window.prompt_batches.get_state(),
            "window": window.get_state(),
            **at.coefs._asdict(),
            "empty_steps": at.empty_steps,
            "metrics_bytes": run.log.position(at.step),
            "origin": run.start_digests,
            "config": as_tree(run.config),
        },
        {"validation": headline(validated)} if validated else None,
    )

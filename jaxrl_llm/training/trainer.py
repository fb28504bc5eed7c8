"""Reinforcement learning, a step at a time: sample, score, log-probs, advantages, update, sync.

`RLTrainer.step` is the algorithm. The engine samples on while the models are trained only within
`buffer`, which has the answers that are begun before their step.
"""

import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.algorithms.correction import mismatch_metrics
from jaxrl_llm.algorithms.stats import LARGEST_LOG_RATIO
from jaxrl_llm.config.load import as_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import OffloadConfig, OptimConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.packing import RowShape, choose_rows, imbalance, in_bucket, plan_microbatches
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import Clock, is_due, memory_metrics, stage_label, summary
from jaxrl_llm.monitoring.tables import SHOWN, AnswerTable
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.build import agreement_tolerance
from jaxrl_llm.rollout.engine import NOT_DRAWN
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.runs.checkpoint import Saved
from jaxrl_llm.sharding.distributed import is_first
from jaxrl_llm.sharding.reshard import copy_on_device, on_device, to_device, to_host
from jaxrl_llm.training import experience
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.buffer import Buffer, Sampler, Scorer, needs_canaries, scores_of, states_of
from jaxrl_llm.training.dumps import RolloutDumps, chosen_rows, example_lines, trained_rows
from jaxrl_llm.training.experience import scoring_counts
from jaxrl_llm.training.forward import sequence_sizes
from jaxrl_llm.training.loop import Metrics, OpenFiles, Trainer
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.roles import REFERENCE, Models, Role
from jaxrl_llm.training.teachers import AVERAGE, PolicyTeacher, Teachers, add_prompted_logprobs
from jaxrl_llm.training.update import COEFS, TrainingError, TrainState, check_skipped, over_updates
from jaxrl_llm.training.validation import validation_metrics
from jaxrl_llm.types import Batch
from jaxrl_llm.workers.values import finite_number

log = logging.getLogger(__name__)

SHOWN_WAIT_S = 1.0
"""From which on a step's wait for programs has a line of its own."""


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


class RLTrainer(Trainer):
    """Trains a policy by the scores of its own answers.

    Attributes:
        config: of the run.
        functions: that it names.
        files: of the run.
        models: that are trained, and those that are asked.
        sampler: the engine, and how it samples.
        scorer: scores answers.
        buffer: the prompts and answers that are not trained yet.
        validation_prompts: to validate on; none: nothing is validated.
        coefs: of the loss's terms, by name; they may be changed between steps.
        finished: the newest step that was taken here.
    """

    finished: FinishedStep

    def __init__(
        self,
        config: TrainConfig,
        functions: AlgorithmFunctions,
        opened: tuple[OpenFiles, Saved],
        *,
        models: Models,
        sampler: Sampler,
        scorer: Scorer,
        buffer: Buffer,
        validation_prompts: list[Prompt],
    ) -> None:
        """Compile nothing yet; the engine gets its weights by `sync`."""
        self.config, self.functions, self.models = config, functions, models
        self.sampler, self.scorer, self.buffer = sampler, scorer, buffer
        self.validation_prompts = validation_prompts
        self.coefs = {name: getattr(config.algorithm, name) for name in COEFS}
        self._empty_steps = 0
        super().__init__(*opened, config.validation if validation_prompts else None)
        self.states = {name: self._offloaded(name, s) for name, s in self.states.items()}
        self._tolerance = agreement_tolerance(config.rollout)
        self._decode = text_decoder(sampler.tokens.tokenizer, skip_special_tokens=False)
        self._dump = RolloutDumps(Path(config.run_dir) / "rollouts")
        optims = {"actor": config.optim, "critic": config.critic.optim}
        optims |= {"implicit_reward_model": config.implicit_reward_model.optim}
        self._warn = StepWarnings(optims, self.files.total_steps)
        self._background = ThreadPoolExecutor(1, "background")
        self._kl = functions.kl and experience.kl_to_reference(functions.kl)
        self._control_kl = experience.checked_controller(functions.controller)
        self._add_advantages = functions.advantage and experience.advantage_step(
            functions.advantage, with_returns=models.critic is not None
        )
        self._add_correction = (
            experience.correction_step(functions.corrections) if functions.corrections else None
        )
        self._make_pairs = functions.pairs and experience.pair_maker(functions.pairs)
        self._keeps = functions.answer_filter and experience.per_answer(
            functions.answer_filter, "algorithm.answer_filter", np.bool_
        )

    def step(self, clock: Clock) -> Metrics:
        """Take the step after `number`: sample, score, log-probs, advantages, update, sync.

        It is `finished` then.

        Raises:
            RunError: no answer can be trained on, a function or the engine failed, or the engine
                does not hold the weights that it was sent.
        """
        step, config, models = self.number + 1, self.config, self.models
        algorithm = config.algorithm

        groups, metrics = self.buffer.take(step, clock)  # until this step's groups are whole
        rollouts = self.sampler.examine(self.sampler.gather(states_of(groups)))
        canaries = None
        if needs_canaries(rollouts, step, keeps_cache=self.sampler.keeps_cache):
            with clock("gen"):
                canaries = self.sampler.sample_canaries(rollouts, step)
        self.buffer.go_on(step)  # with the others, where the engine has devices of its own
        batch = experience.with_ages(self.scorer.lay_out(rollouts), step)
        if canaries is not None:
            metrics |= self.check_canaries(canaries, step)

        batch, told = self.add_logprobs(batch, rollouts, step, clock)
        metrics |= told
        with clock("reward"):
            scores = scores_of(groups)  # waited for last: they come while the models are run
        batch = self.scorer.add_penalty(self.scorer.add_scores(batch, scores))
        if "greedy_scores" in self.functions.needs:
            with clock("gen_max"):
                greedy = self.sampler.sample_greedy(rollouts, step)
                batch, counts = self.scorer.add_greedy_scores(batch, greedy)
            metrics |= counts
        if not batch["usable"].any():
            raise TrainingError(
                f"step {step}: no answer can be trained on: all are broken (episode/broken), "
                "unscored (reward/unscored), or alone are left of their groups"
            )
        if models.teacher is not None and (prompts := models.teacher_prompts) is not None:
            with clock("teacher"):
                batch, told = add_prompted_logprobs(
                    batch, rollouts, scores, prompts, self.add_teacher_logprobs
                )
            metrics |= told

        with clock("adv"):
            if self._kl and algorithm.kl_reward is not None:
                batch = experience.penalize(batch, self._kl(batch), self.coefs["kl_coef"])
            if self._add_advantages:
                batch = self._add_advantages(batch)
            if self._add_correction:
                batch = self._add_correction(batch)
            minibatches, updated = self.select(batch)
        self._count_empty(minibatches, step)
        balance = functools.partial(load_balance, minibatches, models.actor.learner.shape)
        described = self._background.submit(batch_metrics, balance, batch, rollouts, scores)

        for role in models.to_update(step, config.critic.warmup_steps):
            if role.name == "actor":
                batch, told = self.update_actor(batch, minibatches, step, clock)
                updated |= told
            else:
                with clock(f"update_{role.name}"):
                    cut = experience.cut_minibatches(batch, config.sequences_per_minibatch)
                    updated |= self.update(role, [*cut])[0]
        self._follow_policy(step)

        interrupted = self.buffer.interrupt(step, clock)
        with clock("update_weights"):
            synced = self.sync(step)
        if self._kl:
            kl_coef, usable = self.coefs["kl_coef"], int(batch["usable"].sum())
            told = kl_metrics(batch, self._kl(batch), kl_coef)
            self.coefs["kl_coef"] = self._control_kl(kl_coef, told["actor/kl"], usable)
        else:
            told = {}
        total = self.files.total_steps
        if is_first() and (step == 1 or is_due(step, config.rollout.dump_every, total)):
            self._dump(step, batch, rollouts, scores)
        metrics = described.result() | metrics | updated | interrupted | synced | told
        self.finished = FinishedStep(step, batch, rollouts, scores, metrics, self._decode)
        return metrics

    def add_logprobs(
        self, batch: Batch, rollouts: Rollouts, step: int, clock: Clock
    ) -> tuple[Batch, Metrics]:
        """Run the models over a step's answers, and add what they say of each token.

        Returns:
            The batch with `old_logprobs`, and with `ref_logprobs`, `values` and teachers' log-probs
            where a function asks for them; and metrics.

        Raises:
            TrainingError: the policy's log-probs are not those of the engine.
        """
        models, states, metrics = self.models, self.states, Metrics()
        teacher = models.teacher if models.teacher_prompts is None else None
        if isinstance(teacher, Teachers):
            teacher.begin(batch, rollouts)  # servers answer meanwhile
        if models.tower is not None:
            with clock("vision"):
                models.tower.keep(batch)
        if not self.functions.on_policy:  # else the update computes them
            with clock("old_log_prob"):
                batch, told = self.add_old_logprobs(batch, step)
            metrics |= told
        if models.reference is not None:
            with clock("ref"):
                batch = batch.add(ref_logprobs=models.reference.logprobs(states, batch))
        if (reward := models.roles.get("implicit_reward_model")) is not None:
            with clock(reward.name), on_device(states[reward.name].params) as params:
                batch = batch.add(reward_logprobs=reward.infer(params, batch)["logprobs"])
        if (critic := models.critic) is not None:
            with clock("values"), on_device(states["critic"].params) as params:
                values = critic.infer(params, batch)["values"]
                batch = batch.add(values=values, old_values=values)
        if teacher is not None:
            with clock("teacher"):
                batch, told = self.add_teacher_logprobs(batch, rollouts)
            metrics |= told
        return batch, metrics

    def add_old_logprobs(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Add `old_logprobs`, the policy's before the update, and compare the engine's with them.

        Where these are the engine's, or nothing asks for them, the policy runs over the first
        usable sequences only, to compare the two.
        """
        actor, config = self.models.actor, self.config
        from_engine = config.algorithm.use_rollout_logprobs or self.functions.probes_only
        with on_device(self.states["actor"].params) as params:
            if from_engine:
                # the same number in every step, or what compares the two would compile again
                count = max(1, config.batch.max_tokens_per_device // batch.tokens.shape[1])
                some = batch.take(np.argsort(~batch["mask"].any(1), kind="stable")[:count])
                probe = some.add(**actor.infer(params, some))
                batch = batch.add(old_logprobs=batch["rollout_logprobs"])
            else:
                stats = actor.infer(params, batch)
                probe = batch.add(**stats)
                batch = batch.add(old_logprobs=stats.pop("logprobs"), **stats)
        return batch, self._compare(probe, step)

    def add_teacher_logprobs(self, batch: Batch, rollouts: Rollouts) -> tuple[Batch, Metrics]:
        """Add what the teachers say of answers, and return how far the policy is from them."""
        teacher = self.models.teacher
        if isinstance(teacher, PolicyTeacher):
            return teacher.add_logprobs(self.states, batch)
        assert teacher is not None
        return teacher.add_logprobs(batch, rollouts)

    def check_canaries(self, canaries: Rollouts, step: int) -> Metrics:
        """Compare the engine's log-probs of a few fresh answers with the trainer's."""
        batch = self.scorer.lay_out(canaries, samples=1)
        with on_device(self.states["actor"].params) as params:
            logprobs = self.models.actor.infer(params, batch)["logprobs"]
        difference = np.abs(logprobs - batch["rollout_logprobs"])[batch["mask"]].mean()
        checked = check_difference(float(difference), step, self._tolerance)
        return {"async/canary_diff_mean": checked}

    def select(self, batch: Batch) -> tuple[list[Batch], Metrics]:
        """Return what of a batch the policy is updated on: all, what a filter keeps, or pairs.

        These are mini-batches, and metrics of what is left out.
        """
        size = self.config.sequences_per_minibatch
        unit = size // self.config.rollout.samples_per_prompt
        if self._make_pairs:
            return experience.select_pairs(self._make_pairs, size, unit, batch)
        if self._keeps:
            return experience.select_kept(self._keeps, size, unit, batch)
        return [*experience.cut_minibatches(batch, size)], {}

    def update_actor(
        self, batch: Batch, minibatches: Sequence[Batch], step: int, clock: Clock
    ) -> tuple[Batch, Metrics]:
        """Update the policy; return the batch with the `old_logprobs` of an update on policy."""
        with clock("update_actor"):
            metrics, policy_stats = self.update(self.models.actor, minibatches)
        if policy_stats:
            metrics |= self._compare(batch.add(**policy_stats), step)
            batch = batch.add(old_logprobs=policy_stats["logprobs"])
        return batch, metrics

    def update(
        self, role: Role, minibatches: Sequence[Batch]
    ) -> tuple[Metrics, dict[str, np.ndarray]]:
        """Update a model on every mini-batch of every epoch.

        Returns:
            Metrics, none without an update; and the policy's statistics of the batch's tokens
            [B T], by name, where a single update has computed them.

        Raises:
            TrainingError: too many updates in a row with a non-finite gradient.
        """
        state, updates, policy_stats = to_device(self.states[role.name]), [], {}
        first, coefs = int(state.updates), Metrics(self.coefs)
        minibatches = [*minibatches] * self.config.batch.epochs_per_step
        with (
            activity(stage_label(f"update_{role.name}"), len(minibatches)) as progress,
            on_device(role.teacher) as teacher,
        ):
            coefs |= {} if teacher is None else {"teacher": teacher}
            for minibatch in minibatches:
                progress.advance()
                if not minibatch["mask"].any():
                    continue  # none of its answers is usable, or none is left
                annotated = role.annotate(state, minibatch)
                state, metrics = role.learner.update(state, annotated, coefs)
                policy_stats = metrics.pop("policy", {})
                updates.append(metrics)
        self.states |= {role.name: self._offloaded(role.name, state)}
        if not updates:
            return {}, {}
        updates = jax.device_get(updates)
        key = "optim" if role.name == "actor" else f"{role.name}.optim"
        check_skipped(max(int(m["skipped"]) for m in updates), role.max_skipped, key)
        means = over_updates(updates) | {"lr": float(role.learning_rate(first))}
        return {f"{role.name}/{name}": value for name, value in means.items()}, policy_stats

    def sync(self, version: int) -> Metrics:
        """Give the engine the policy's weights, and check that it holds them."""
        return self.sampler.sync(self.states["actor"].params, version)

    def policy(self) -> Policy:
        """Return the policy as it is now; the next step writes over its weights."""
        params = jax.tree.map(copy_on_device, self.states["actor"].params)
        weights, tokens = self.sampler.weights, self.sampler.tokens
        return Policy(
            model=weights.model,
            params=weights.merged(params),
            tokenizer=tokens.tokenizer,
            stops=tokens.stops,
            layout=weights.layout,
            dtype=weights.dtype,
            step=self.number,
        )

    def validate(self, number: int) -> Metrics:
        """Return metrics of the policy's answers to the validation prompts; show the first ones."""
        with activity("validating"):
            rollouts = self.sampler.sample_validation(
                self.validation_prompts, number, self.config.validation
            )
            scores, samples = self.scorer.score_validation(rollouts), self.config.validation.samples
        for line in example_lines(rollouts, scores, samples=samples):
            self.files.display.line(line)
        return validation_metrics(rollouts.prompts, scores, samples=samples)

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the states, as JSON can hold it."""
        return {
            "data": self.buffer.prompt_batches.get_state(),
            "window": self.buffer.get_state(),
            **self.coefs,
            "empty_steps": self._empty_steps,
            "config": as_tree(self.config),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` has returned; older checkpoints lack some of it."""
        super().set_state(state)
        self.buffer.set_state(state["window"])
        self.coefs |= {name: state[name] for name in COEFS if name in state}
        self._empty_steps = state.get("empty_steps", 0)

    def line(self, number: int, metrics: Metrics) -> str:
        """Return a step's line on the screen."""
        parts = [f"{label} {metrics[k]:.4g}" for label, k in SHOWN.items() if k in metrics]
        parts += [
            f"{name} {metrics[f'reward/{name}']:.4g}"
            for name in ("errors", "unscored")
            if metrics.get(f"reward/{name}")
        ]
        parts += [f"{k.removeprefix('val-core/')} {v:.4g}" for k, v in metrics.items() if "@" in k]
        return f"step {number}/{self.files.total_steps}  " + "  ".join(parts)

    def report(self, number: int, metrics: Metrics) -> None:
        """Write a step's metrics, and on some steps its answers; show both, and warn of both."""
        _, batch, rollouts, scores, *_ = self.finished
        config, display, total = self.config, self.files.display, self.files.total_steps
        metrics |= throughput_metrics(metrics["timing_s/step"], batch)
        answers, histograms, every = [], None, config.log.answers_every
        if every and is_first() and (number == 1 or is_due(number, every, total)):
            samples = config.rollout.samples_per_prompt
            answers = chosen_rows(batch, rollouts, scores, samples=samples)
            histograms = step_histograms(batch, scores)
        self.files.log.write(number, metrics, answers=answers, histograms=histograms)
        display.advance(self.line(number, metrics))
        waited = metrics.get("perf/compile_wait_s", 0.0)
        if waited >= SHOWN_WAIT_S:
            compiled, loaded = (
                metrics[f"perf/{name}"] for name in ("compilations", "compilation_cache_hits")
            )
            display.line(
                f"waited {waited:.1f} s for programs: {compiled:.0f} compiled, {loaded:.0f} loaded"
            )
        display.plot(number, metrics)
        if answers:
            display.answers(number, answers)
        self._warn(number, metrics)

    def close(self) -> None:
        """End the thread that describes steps."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def _compare(self, probe: Batch, step: int) -> Metrics:
        """Compare the engine's log-probs of tokens with the policy's `logprobs`."""
        keeps_cache = self.sampler.keeps_cache
        return check_agreement(probe, step, self._tolerance, keeps_cache=keeps_cache)

    def _follow_policy(self, step: int) -> None:
        """Move what follows the policy: a teacher that is its average, a refreshed reference."""
        teacher, reference, states = self.models.teacher, self.models.reference, self.states
        if isinstance(teacher, PolicyTeacher) and teacher.average is not None:
            moved = teacher.average.follow(states[AVERAGE], states["actor"])
            states |= {AVERAGE: self._offloaded(AVERAGE, moved)}
        if reference is not None and reference.is_due(step):
            states |= {REFERENCE: reference.refreshed(states[REFERENCE], states["actor"])}

    def _offloaded(self, name: str, state: TrainState) -> TrainState:
        """Move to the host what waits there until it is used again."""
        offload: OffloadConfig = self.config.offload
        waits = {AVERAGE: offload.teacher, REFERENCE: offload.reference}
        if waits.get(name, offload.params):
            state = state._replace(params=to_host(state.params))
        if offload.optimizer:
            state = state._replace(opt_state=to_host(state.opt_state))
        return state

    def _count_empty(self, minibatches: Sequence[Batch], step: int) -> None:
        """Count the steps in a row that have left nothing to update the policy on.

        Raises:
            TrainingError: they are too many.
        """
        if any(minibatch["mask"].any() for minibatch in minibatches):
            self._empty_steps = 0
            return
        algorithm = self.config.algorithm
        key = "pairs" if algorithm.pairs is not None else "answer_filter"
        self._empty_steps += 1
        limit = algorithm.max_generation_batches
        if self._empty_steps >= limit:
            raise TrainingError(
                f"step {step}: algorithm.{key} left nothing to train on in {self._empty_steps} "
                f"steps in a row (algorithm.max_generation_batches={limit}): the answers to each "
                "prompt score alike, or too low. Raise algorithm.max_generation_batches and run "
                "the same command again, or begin a run with other prompts or more "
                "samples_per_prompt"
            )
        log.warning(
            "step %d: algorithm.%s left nothing to train on, so the policy stays as it is; %d "
            "steps in a row stop the run",
            step,
            key,
            limit,
        )


# Metrics of a step: its batch, how well engine and trainer agree, and the machine.


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
                    step,
                    skipped,
                    role.replace("_", " "),
                    "optim" if role == "actor" else f"{role}.optim",
                    optim.max_skipped,
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
                self._without_spread,
                low,
                high,
            )

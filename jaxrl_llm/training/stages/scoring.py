"""The scoring stage: from a step's answers to a batch with their scores."""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.model import Model
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import Scoring, make_scoring
from jaxrl_llm.rollout.sampling import Rollouts, lay_out
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.experience import (
    ScoreError,
    add_to_scores,
    per_answer,
    with_scores,
    without_rows,
)
from jaxrl_llm.training.microbatches import has_chains
from jaxrl_llm.training.reward_model import RewardModel, open_reward_model
from jaxrl_llm.training.stages.rollout import RolloutStage
from jaxrl_llm.types import Batch

log = logging.getLogger(__name__)

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ScoringStage:
    """The scores of answers, and what is made of them before the algorithm sees them.

    Attributes:
        start: (rollouts, clock) -> their scores, as soon as they are known.
        keep: (rollouts, scores) -> whether the group filter keeps each group [P]; None: all are.
        lay_out: (rollouts, samples=G) -> batch.
        add_scores: (batch, scores) -> batch.
        add_penalty: adds the penalty to a batch's scores; the same batch without one.
        add_greedy_scores: (batch, rollouts, step, clock) -> the batch with `greedy_scores`, and
            metrics; the same batch where no function asks for them.
        score_validation: rollouts -> one score for each answer.
        in_background: whether answers are scored elsewhere than on the devices.
    """

    start: Callable[[Rollouts, Clock], Future[list[Score]]]
    keep: Callable[[Rollouts, list[Score]], list[bool]] | None
    lay_out: Callable[..., Batch]
    add_scores: Callable[[Batch, list[Score]], Batch]
    add_penalty: Callable[[Batch], Batch]
    add_greedy_scores: Callable[[Batch, Rollouts, int, Clock], tuple[Batch, Metrics]]
    score_validation: Scoring
    in_background: bool


def build_scoring(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    reward_model: RewardModel | None,
    rollout: RolloutStage,
    stack: contextlib.ExitStack,
) -> ScoringStage:
    """Start the reward functions, and build what is done with their scores.

    Args:
        config: of the run.
        functions: that it names.
        reward_model: that scores answers, if one does.
        rollout: samples greedy answers.
        stack: ends the scoring processes at the run's end.
    """
    score, score_validation = make_scoring(
        config.reward, reward_model.score if reward_model else None, stack, Path(config.run_dir)
    )
    samples, compares = config.rollout.samples_per_prompt, "group_ids" in functions.needs
    groups = {"samples": samples, "compares": compares}
    refused = refused_with_chains(config, functions)

    def arrange(rollouts: Rollouts, **layout: Any) -> Batch:
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        batch = lay_out(rollouts, **{"max_tokens": longest, **groups, **layout})
        return check_chains(batch, refused)

    warn_of_rounding = rounding_warner()

    def add_scores(batch: Batch, scores: Sequence[Score], **layout: Any) -> Batch:
        layout = groups | layout
        warn_of_rounding(scores, layout["samples"])
        return with_scores(batch, scores, components=config.reward.components, **layout)

    # elsewhere than on the devices, and not together with other processes
    in_background = (
        reward_model is None and config.reward.workers > 0 and distributed.process_count() == 1
    )
    executor = ThreadPoolExecutor(1, "scoring")
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    penalty = functions.penalty and per_answer(functions.penalty, "algorithm.penalty", np.floating)

    def scored_batch(rollouts: Rollouts, scores: list[Score], **layout: Any) -> Batch:
        return add_scores(arrange(rollouts, **layout), scores, **layout)

    return ScoringStage(
        start=functools.partial(submit_scores if in_background else score_now, executor, score),
        keep=group_keeper(config, functions.group_filter, scored_batch)
        if functions.group_filter
        else None,
        lay_out=arrange,
        add_scores=add_scores,
        add_penalty=functools.partial(add_penalty, penalty) if penalty else unchanged,
        add_greedy_scores=greedy_scorer(config, rollout, score, scored_batch, penalty)
        if "greedy_scores" in functions.needs
        else without_greedy_scores,
        score_validation=score_validation,
        in_background=in_background,
    )


def rounding_warner() -> Callable[[Sequence[Score], int], None]:
    """Return the function that warns, once, of scores that are equal in float32 alone.

    It takes scores and how many answers a prompt has. What differs by float64's rounding, as 0.3
    and 0.1 + 0.2, is equal.
    """
    has_warned = False

    def warn(scores: Sequence[Score], samples: int) -> None:
        nonlocal has_warned
        ordered = np.sort(np.array([score.score for score in scores]).reshape(-1, samples))
        low, high = ordered[:, :-1], ordered[:, 1:]
        differ = high - low > 1e-12 * np.abs(high)
        lost = np.argwhere(differ & (low.astype(np.float32) == high.astype(np.float32)))
        if lost.size and not has_warned:
            has_warned = True
            place = tuple(lost[0])
            log.warning(
                "reward.function gave answers to one prompt the scores %r and %r, which are equal "
                "in float32, in which advantages are computed: let it return smaller numbers, less "
                "a constant or divided by one",
                *(float(low[place]), float(high[place])),
            )

    return warn


def refused_with_chains(config: TrainConfig, functions: AlgorithmFunctions) -> list[str]:
    """Return the keys of a config that compare whole answers, and take no several chains."""
    algorithm = config.algorithm
    keys = {
        "algorithm.pairs": algorithm.pairs is not None,
        "algorithm.distillation": algorithm.distillation is not None,
        "teacher": functions.needs_teacher,
        "implicit_reward_model": "implicit_reward_model" in functions.updates,
        "reward.step_rewards": config.reward.step_rewards,
    }
    return [key for key, is_set in keys.items() if is_set]


def check_chains(batch: Batch, refused: Sequence[str]) -> Batch:
    """Return a batch that has no episode of several chains, or has them where that is defined.

    Args:
        batch: of a step.
        refused: as `refused_with_chains` returns them.

    Raises:
        ScoreError: it has some beside one of the keys.
    """
    if refused and has_chains(batch):
        several = int((batch["chain_ids"].max(1) > 0).sum())
        raise ScoreError(
            f"{refused[0]} is set, and the agent has begun other chains (chat.new) in {several} of "
            f"{len(batch.tokens)} episodes, which it is not defined for: remove {refused[0]}, or "
            "use an agent that keeps one history"
        )
    return batch


def open_scoring_model(
    config: TrainConfig, tokenizer: Any, actor: Model, layout: Layout
) -> RewardModel | None:
    """Load the model that gives answers their scores, if the config names one."""
    if not config.reward.classifier:
        return None
    return open_reward_model(config, config.reward.classifier, tokenizer, actor, layout)


def submit_scores(
    executor: Executor, score: Scoring, rollouts: Rollouts, clock: Clock
) -> Future[list[Score]]:
    """Begin to score answers in another thread."""
    del clock
    return executor.submit(score, rollouts)


def score_now(
    executor: Executor, score: Scoring, rollouts: Rollouts, clock: Clock
) -> Future[list[Score]]:
    """Score answers before anything else is done."""
    del executor
    with clock("reward"):
        return completed(score(rollouts))


def completed(scores: list[Score]) -> Future[list[Score]]:
    """Return scores that are known as those that come."""
    future: Future[list[Score]] = Future()
    future.set_result(scores)
    return future


def group_keeper(
    config: TrainConfig,
    group_filter: Callable[..., Any],
    scored_batch: Callable[[Rollouts, list[Score]], Batch],
) -> Callable[[Rollouts, list[Score]], list[bool]]:
    """Return the function that tells which groups the group filter keeps.

    It sees as many groups as a step has: where there are fewer, the first one fills the places, or
    other numbers would compile it again.

    Args:
        config: of the run.
        group_filter: asks for fields of a batch; returns which answers to keep [B].
        scored_batch: (rollouts, scores) -> batch.
    """
    samples, prompts = config.rollout.samples_per_prompt, config.batch.prompts_per_step
    keep = whole_groups(per_answer(group_filter, "algorithm.group_filter", np.bool_), samples)

    def kept(rollouts: Rollouts, scores: list[Score]) -> list[bool]:
        groups, filling = len(scores) // samples, list(range(samples))
        rows = list(range(len(scores))) + filling * (prompts - groups)
        batch = scored_batch(rollouts.take(rows), [scores[row] for row in rows])
        return np.any(keep(batch).reshape(-1, samples), axis=1).tolist()[:groups]

    return kept


def whole_groups(
    keep: Callable[[Batch], np.ndarray], samples: int
) -> Callable[[Batch], np.ndarray]:
    """Return `keep`, checked to decide for groups of `samples` answers as wholes.

    Answers that are not usable go with those of their group that are; a group has to have some.
    """

    def checked(batch: Batch) -> np.ndarray:
        usable = batch["usable"].reshape(-1, samples)
        groups = keep(batch).reshape(-1, samples) & usable
        split = np.flatnonzero(groups.any(1) & (groups != usable).any(1))
        if split.size:
            raise ScoreError(
                f"algorithm.group_filter kept {int(groups[split[0]].sum())} of the {samples} "
                "answers of a group; expected all or none, as baselines are over whole groups"
            )
        return np.repeat(groups.any(1), samples)

    return checked


def add_penalty(penalty: Callable[[Batch], np.ndarray], batch: Batch) -> Batch:
    """Add a penalty to a batch's scores and rewards."""
    return add_to_scores(batch, penalty(batch))


def unchanged(batch: Batch) -> Batch:
    """Return the same batch."""
    return batch


def greedy_scorer(
    config: TrainConfig,
    rollout: RolloutStage,
    score: Scoring,
    scored_batch: Callable[..., Batch],
    penalty: Callable[[Batch], np.ndarray] | None,
) -> Callable[[Batch, Rollouts, int, Clock], tuple[Batch, Metrics]]:
    """Return the function that adds the scores of greedy answers to a batch's prompts.

    Args:
        config: of the run.
        rollout: samples them.
        score: rollouts -> one score for each answer.
        scored_batch: (rollouts, scores, samples=1) -> batch.
        penalty: batch -> what is added to the scores [B], if anything is.
    """
    samples = config.rollout.samples_per_prompt

    def add(batch: Batch, rollouts: Rollouts, step: int, clock: Clock) -> tuple[Batch, Metrics]:
        with clock("gen_max"):
            greedy = rollout.sample_greedy(rollouts, step)
            scores = score(greedy)
            scored = scored_batch(greedy, scores, samples=1)
            added = penalty(scored) if penalty else np.float32(0)
            counts = {
                "reward/greedy_errors": float(sum(score.has_failed for score in scores)),
                "reward/greedy_unscored": float(sum(score.is_unscored for score in scores)),
            }
            greedy_scores = np.repeat(scored["scores"] + added, samples)
            batch = without_rows(batch, np.repeat(~scored["usable"], samples))
            return batch.add(greedy_scores=greedy_scores), counts

    return add


def without_greedy_scores(
    batch: Batch, rollouts: Rollouts, step: int, clock: Clock
) -> tuple[Batch, Metrics]:
    """Return the same batch, where no function asks for greedy answers."""
    del rollouts, step, clock
    return batch, {}

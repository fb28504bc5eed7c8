"""The scores of a step's answers, and the batch that an algorithm sees of them."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from jaxrl_llm.config.sections import RewardConfig
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import make_scoring
from jaxrl_llm.rollout.rollouts import Rollouts, lay_out
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.experience import (
    ScoreError,
    add_to_scores,
    per_answer,
    with_scores,
    without_rows,
)
from jaxrl_llm.training.loop import open_executor
from jaxrl_llm.training.microbatches import has_chains
from jaxrl_llm.training.reward_model import RewardModel
from jaxrl_llm.types import Batch

log = logging.getLogger(__name__)


class Scorer:
    """Scores answers, and lays them out as a batch with their scores.

    Args:
        reward: how the run scores.
        functions: of the algorithm.
        reward_model: that scores answers, if one does.
        stack: ends the scoring processes at the run's end.
        folder: of the run.
        prompts: of a step.
        samples: to each prompt.
        longest: tokens of the longest prompt and answer.

    Attributes:
        score: rollouts -> one score for each answer; waits for them.
        score_validation: the same for answers to validation prompts.
        in_background: whether answers are scored elsewhere than on the devices.
    """

    def __init__(
        self,
        reward: RewardConfig,
        functions: AlgorithmFunctions,
        reward_model: RewardModel | None,
        stack: contextlib.ExitStack,
        *,
        folder: Path,
        prompts: int,
        samples: int,
        longest: int,
    ) -> None:
        """Start the reward functions."""
        by_model = reward_model.score if reward_model else None
        self.score, self.score_validation = make_scoring(reward, by_model, stack, folder)
        # elsewhere than on the devices, and not together with other processes
        self.in_background = (
            reward_model is None and reward.workers > 0 and distributed.process_count() == 1
        )
        self._executor = open_executor(1, "scoring", stack)
        self._samples, self._prompts, self._longest = samples, prompts, longest
        self._components = reward.components
        self._compares = "group_ids" in functions.needs
        self._one_chain_only = refused_with_chains(functions, reward)
        self._has_warned = False
        self._penalty = functions.penalty and per_answer(
            functions.penalty, "algorithm.penalty", np.floating
        )
        self._keep = functions.group_filter and whole_groups(
            per_answer(functions.group_filter, "algorithm.group_filter", np.bool_), self._samples
        )

    @property
    def filters_groups(self) -> bool:
        """Whether a group filter refuses some groups."""
        return self._keep is not None

    def start(self, rollouts: Rollouts, clock: Clock) -> Future[list[Score]]:
        """Return the scores of answers, as soon as they are known."""
        if self.in_background:
            return self._executor.submit(self.score, rollouts)
        future: Future[list[Score]] = Future()
        with clock("reward"):
            future.set_result(self.score(rollouts))
        return future

    def keep_groups(self, rollouts: Rollouts, scores: list[Score]) -> list[bool]:
        """Return which groups the group filter keeps [P].

        It sees as many groups as a step has: where there are fewer, the first one fills the places,
        or other numbers would compile it again.
        """
        assert self._keep is not None
        samples = self._samples
        groups, filling = len(scores) // samples, list(range(samples))
        rows = list(range(len(scores))) + filling * (self._prompts - groups)
        some = [scores[row] for row in rows]
        batch = self.add_scores(self.lay_out(rollouts.take(rows)), some)
        return np.any(self._keep(batch).reshape(-1, samples), axis=1).tolist()[:groups]

    def lay_out(self, rollouts: Rollouts, *, samples: int | None = None) -> Batch:
        """Lay answers out as a batch.

        Args:
            rollouts: the answers.
            samples: to each prompt; None: as many as the run has.

        Raises:
            ScoreError: an episode has several chains, which the algorithm is not defined for.
        """
        samples = samples or self._samples
        batch = lay_out(
            rollouts, samples=samples, max_tokens=self._longest, compares=self._compares
        )
        return check_chains(batch, self._one_chain_only)

    def add_scores(
        self, batch: Batch, scores: Sequence[Score], *, samples: int | None = None
    ) -> Batch:
        """Add the scores of a batch's answers; see `with_scores`."""
        samples = samples or self._samples
        self._warn_of_rounding(scores, samples)
        return with_scores(
            batch, scores, samples=samples, compares=self._compares, components=self._components
        )

    def add_penalty(self, batch: Batch) -> Batch:
        """Add the penalty to a batch's scores, if there is one."""
        return add_to_scores(batch, self._penalty(batch)) if self._penalty else batch

    def add_greedy_scores(self, batch: Batch, greedy: Rollouts) -> tuple[Batch, dict[str, float]]:
        """Add `greedy_scores`, of a greedy answer to each prompt; return metrics, too.

        Answers whose greedy one has no score are not usable.
        """
        scores = self.score(greedy)
        scored = self.add_scores(self.lay_out(greedy, samples=1), scores, samples=1)
        added = self._penalty(scored) if self._penalty else np.float32(0)
        metrics = {
            "reward/greedy_errors": float(sum(score.has_failed for score in scores)),
            "reward/greedy_unscored": float(sum(score.is_unscored for score in scores)),
        }
        greedy_scores = np.repeat(scored["scores"] + added, self._samples)
        batch = without_rows(batch, np.repeat(~scored["usable"], self._samples))
        return batch.add(greedy_scores=greedy_scores), metrics

    def _warn_of_rounding(self, scores: Sequence[Score], samples: int) -> None:
        """Warn, once, of scores of one prompt that are equal in float32 alone.

        What differs by float64's rounding, as 0.3 and 0.1 + 0.2, is equal.
        """
        if self._has_warned or (pair := lost_in_rounding(scores, samples)) is None:
            return
        self._has_warned = True
        log.warning(
            "reward.function gave answers to one prompt the scores %r and %r, which are equal "
            "in float32, in which advantages are computed: let it return smaller numbers, less "
            "a constant or divided by one",
            *pair,
        )


def lost_in_rounding(scores: Sequence[Score], samples: int) -> tuple[float, float] | None:
    """Return two scores of one prompt that differ, but not in float32; None: there are none.

    >>> lost_in_rounding([Score(s, {}, None) for s in (1e9, 1e9 + 1)], 2)
    (1000000000.0, 1000000001.0)
    """
    ordered = np.sort(np.array([score.score for score in scores]).reshape(-1, samples))
    low, high = ordered[:, :-1], ordered[:, 1:]
    differ = high - low > 1e-12 * np.abs(high)
    lost = np.argwhere(differ & (low.astype(np.float32) == high.astype(np.float32)))
    return (float(low[tuple(lost[0])]), float(high[tuple(lost[0])])) if lost.size else None


def refused_with_chains(functions: AlgorithmFunctions, reward: RewardConfig) -> list[str]:
    """Return the keys of a config that compare whole answers, and take no several chains."""
    keys = {
        "algorithm.pairs": functions.pairs is not None,
        "algorithm.distillation": functions.distillation is not None,
        "teacher": functions.needs_teacher,
        "implicit_reward_model": "implicit_reward_model" in functions.updates,
        "reward.step_rewards": reward.step_rewards,
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

"""From sampled answers to their scores: a reward function's, a reward model's, or both."""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, find_function, signature_of
from jaxrl_llm.config.sections.reward import RewardConfig, ScoringConfig
from jaxrl_llm.rewards.functions import GENERATED, SOURCES
from jaxrl_llm.rewards.judge import judge
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.runner import (
    FUNCTION_COMPONENT,
    OnError,
    RewardError,
    RewardRunner,
    Score,
    check_reward_function,
)
from jaxrl_llm.rewards.tasks import RewardTasks
from jaxrl_llm.rewards.worker import BUILTIN_MODULE, UNSCORED, AsyncCalls, RewardItem
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.sharding import distributed
from jaxrl_llm.workers.answers import shorten
from jaxrl_llm.workers.limits import Limits, passed_environment

log = logging.getLogger(__name__)

Scoring = Callable[[Rollouts], list[Score]]


RUN_DIR = "run_dir"
"""A keyword of reward functions which a run gives its folder."""


def make_scoring(
    reward: RewardConfig,
    score_by_model: Callable[[Rollouts], np.ndarray] | None,
    stack: contextlib.ExitStack,
    folder: Path,
) -> tuple[Scoring, Scoring]:
    """Return the functions from answers to their scores, in training and in validation.

    A reward model gives the score in training. Validation keeps to the reward function, where there
    is one.

    Args:
        reward: the config's section.
        score_by_model: from B answers to a reward model's scores [B]; None without such a model.
        stack: ends the scoring processes.
        folder: of the run.
    """
    by_function = reward.function and stopping(
        make_function_scoring(reward, reward.function, stack, folder), reward, reward.function
    )
    if score_by_model is None:
        assert by_function is not None, "keys.check_reward refuses a run without either"
        return by_function, by_function

    def by_model(rollouts: Rollouts) -> list[Score]:
        scored = by_function(rollouts) if by_function else None
        values = score_by_model(rollouts)
        return combine_scores(rollouts, values, scored, on_error=reward.on_error)

    return by_model, by_function or by_model


def combine_scores(
    rollouts: Rollouts,
    values: np.ndarray,
    scored: Sequence[Score] | None,
    *,
    on_error: OnError,
) -> list[Score]:
    """Return a reward model's scores, with what a reward function reports of the same answers.

    The reward function's own score is kept under the name `function`. An answer that it leaves
    unscored stays so.

    Args:
        rollouts: B answers.
        values: the reward model's scores [B].
        scored: the reward function's results, if there is one.
        on_error: score where the model's is not finite; None raises, "unscored" leaves the answer
            without one.

    Raises:
        RewardError: a score is not finite, and `on_error` is None.
    """
    scores = []
    for i, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            scores.append(_failed(rollouts, i, value, on_error))
        elif scored is None:
            scores.append(Score(value, {}, None))
        elif scored[i].is_unscored:
            scores.append(scored[i])
        else:
            extra = scored[i].extra | {FUNCTION_COMPONENT: scored[i].score}
            scores.append(Score(value, extra, scored[i].error))
    return scores


def _failed(rollouts: Rollouts, row: int, value: float, on_error: OnError) -> Score:
    error = f"invalid: the reward model gave {value}"
    where = f"row {row} (reply {shorten(repr(rollouts.texts[row]), 120)})"
    if on_error is None:
        raise RewardError(f"reward.classifier failed on {where}: {error}")
    log.warning("reward.classifier failed on %s: %s", where, error)
    return Score(math.nan if on_error == UNSCORED else float(on_error), {}, error)


def make_function_scoring(
    reward: ScoringConfig, function: FunctionSpec, stack: contextlib.ExitStack, folder: Path
) -> Scoring:
    """Start the scoring processes; return the function from answers to their scores.

    Each process of a run scores its share of the answers, and gets the scores of all.

    Args:
        reward: the config's section.
        function: that scores; it gets the folder where it has a parameter `run_dir` of which the
            config says nothing.
        stack: ends the scoring processes.
        folder: of the run, or of an evaluation's results.

    Raises:
        ConfigError: as `check_scoring`.
    """
    check_scoring(reward, function)
    pool = stack.enter_context(open_pool(reward, with_run_dir(function, folder)))

    def score(rollouts: Rollouts) -> list[Score]:
        items = reward_items(rollouts)
        own, retried_before = distributed.process_slice(len(items)), pool.counts.get("retried", 0)
        parts = distributed.all_gather(pool.score(items[own], first=own.start))
        context.increment("reward_retries", pool.counts.get("retried", 0) - retried_before)
        return [result for part in parts for result in part]

    return score


def with_run_dir(function: FunctionSpec, folder: Path) -> FunctionSpec:
    """Give a reward function the run's folder, where it takes one and the config gives it none.

    >>> with_run_dir(FunctionSpec("arithmetic"), Path("runs/a"))
    FunctionSpec(fn='arithmetic', kwargs={}, given=None)
    """
    found = find_function(function, BUILTIN_MODULE, key="reward.function")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        if RUN_DIR in signature_of(found).parameters:
            return replace(function, kwargs={RUN_DIR: str(folder), **function.kwargs})
    return function


def reward_items(rollouts: Rollouts) -> list[RewardItem]:
    """Return what a reward function gets of each episode.

    `extra_info` has the row's messages as `prompt`, where the row has nothing of that name. Of an
    episode of an agent, `extra_info` says more: `turns` of the policy; `num_turns` as verl
    counts them, the user's first and those of tools and the environment included; `last_answer`
    (text of the last turn), `environment_score`, `turn_rewards`, `messages`, `tool_calls`,
    `tool_errors` and `finish`.
    """
    return [
        RewardItem(
            prompt.data_source,
            text,
            prompt.ground_truth,
            {"prompt": prompt.messages, **prompt.extra_info, **about(episode)},
        )
        for prompt, episode, text in zip(*rollouts[:3], strict=True)
    ]


def about(episode: Episode) -> dict[str, Any]:
    """Return what a reward function is told of an agent's episode; nothing of a plain answer."""
    if episode.last_answer is None:
        return {}
    return {
        "turns": episode.turns,
        "num_turns": episode.num_turns,
        "last_answer": episode.last_answer,
        "environment_score": episode.score,
        "turn_rewards": list(episode.rewards),
        "messages": list(episode.messages),
        "tool_calls": len(episode.tool_records),
        "tool_errors": sum(record.failure is not None for record in episode.tool_records),
        "finish": episode.finish,
    }


def stopping(score: Scoring, reward: RewardConfig, function: FunctionSpec) -> Scoring:
    """Return scoring that stops where a reward function gives too few answers a score.

    Args:
        score: rollouts -> one score for each answer.
        reward: the config's section.
        function: that scores.
    """

    def checked(rollouts: Rollouts) -> list[Score]:
        scores = score(rollouts)
        errors = [result.error for result in scores if result.error is not None]
        if len(errors) > reward.max_error_share * len(scores):
            failed = sum(result.has_failed for result in scores)
            unscored = "" if failed == len(errors) else f" ({len(errors) - failed} are unscored)"
            raise RewardError(
                f"reward {function.fn!r} failed on {len(errors)} of {len(scores)} answers, more "
                f"than reward.max_error_share={reward.max_error_share:g} of them; the first "
                f"failure: {errors[0]}{unscored}"
            )
        return scores

    return checked


def open_pool(reward: ScoringConfig, function: FunctionSpec) -> RewardRunner:
    """Start what calls the reward function: processes here, or tasks on a cluster that scores."""
    job = context.current()
    limits = Limits(reward.memory_gb, reward.max_processes, tuple(reward.pass_env))
    share = max(1, reward.concurrency // distributed.process_count())
    calls = AsyncCalls(share, reward.retries)
    if job is not None and job.reward_tasks:
        return RewardTasks(
            function,
            tasks=job.reward_tasks,
            timeout_s=reward.timeout_s,
            retries=job.max_retries,
            on_error=reward.on_error,
            calls=calls,
            limits=limits,
        )
    return RewardPool(
        function,
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
        calls=calls,
        limits=limits,
    )


def check_scoring(reward: ScoringConfig, function: FunctionSpec) -> None:
    """Import a reward function, and refuse a judge whose failures would be scores.

    Raises:
        ConfigError: as `check_reward_function`; a judge's failures would get a number; its key
            would not be seen.
    """
    check_reward_function(function)
    if find_function(function, BUILTIN_MODULE) is not judge:
        return
    if isinstance(reward.on_error, int | float):
        raise ConfigError(
            f"reward.on_error={reward.on_error:g} would be the score of every answer about which "
            "the judge can't be asked: set it to unscored, which leaves them out, or to null, "
            "which stops the run"
        )
    name = function.kwargs.get("api_key_env")
    if name is None:
        return
    if name not in os.environ:
        raise ConfigError(f"reward.function.api_key_env: there is no environment variable {name}")
    if reward.workers and name not in passed_environment(os.environ, tuple(reward.pass_env)):
        raise ConfigError(
            f"reward.pass_env: expected it to name {name}, which reward.function.api_key_env is to "
            f"read, got {list(reward.pass_env)}"
        )


def check_sources(function: FunctionSpec | None, sources: Iterable[str]) -> None:
    """Refuse data sources for which `by_source` knows no function, before anything is sampled."""
    if function and function.fn == "by_source":
        unknown = sorted(s for s in {*sources} - SOURCES.keys() if not s.startswith(GENERATED))
        if unknown:
            raise ConfigError(
                f"reward.function: by_source knows no function for data_source {unknown[0]!r}, "
                f"only for {', '.join(SOURCES)}, {GENERATED}…; "
                "name one of these, or one of your own"
            )

"""From sampled answers to their scores: a reward function's, a reward model's, or both."""

import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec, find_function, signature_of
from jaxrl_llm.config.sections import ErrorScore, RewardConfig, ScoringConfig
from jaxrl_llm.data.rows import Row, map_rows
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.rewards.functions import check_ground_truth
from jaxrl_llm.rewards.runner import (
    ASKING,
    FUNCTION_COMPONENT,
    RewardError,
    RewardPool,
    RewardRunner,
    RewardTasks,
    Score,
    check_reward_function,
)
from jaxrl_llm.rewards.worker import BUILTIN_MODULE, RewardItem, load_reward_function
from jaxrl_llm.rollout.rollouts import Episode, Rollouts
from jaxrl_llm.sharding import distributed
from jaxrl_llm.workers.pool import passed_environment
from jaxrl_llm.workers.values import UNSCORED, finite_number, short_repr, shorten

log = logging.getLogger(__name__)

Scoring = Callable[[Rollouts], list[Score]]


FEWEST_ANSWERS = 16
"""Fewer say little of the share that has no score."""

RUN_DIR = "run_dir"
"""A keyword of reward functions which a run gives its folder."""


class ModelScores(NamedTuple):
    """What a reward model says of answers.

    Attributes:
        values: its scores [B]; what it was not given has any.
        failures: why it was not given an answer, by row.
        steps: of a process reward model, for each answer, the score of each step and the index of
            its last token among those that the policy drew; else empty.
        rewards_steps: whether each step's score is the reward of that token.
    """

    values: np.ndarray
    failures: Mapping[int, str] = MappingProxyType({})
    steps: Sequence[tuple[tuple[int, float], ...]] = ()
    rewards_steps: bool = False


def make_scoring(
    reward: RewardConfig,
    score_by_model: Callable[[Rollouts], ModelScores] | None,
    stack: contextlib.ExitStack,
    folder: Path,
) -> tuple[Scoring, Scoring]:
    """Return the functions from answers to their scores, in training and in validation.

    A reward model gives the score in training. Validation keeps to the reward function, where there
    is one.

    Args:
        reward: the config's section.
        score_by_model: from B answers to a reward model's scores; None without such a model.
        stack: ends the scoring processes.
        folder: of the run.
    """
    by_function = reward.function and stopping(
        with_components(make_function_scoring(reward, reward.function, stack, folder), reward),
        reward,
        reward.function,
    )
    if score_by_model is None:
        assert by_function is not None, "keys.check_reward refuses a run without either"
        return by_function, by_function

    def by_model(rollouts: Rollouts) -> list[Score]:
        scored = by_function(rollouts) if by_function else None
        given = score_by_model(rollouts)
        return combine_scores(rollouts, given, scored, on_error=reward.on_error)

    return by_model, by_function or by_model


def combine_scores(
    rollouts: Rollouts,
    given: ModelScores,
    scored: Sequence[Score] | None,
    *,
    on_error: ErrorScore | None,
) -> list[Score]:
    """Return a reward model's scores, with what a reward function reports of the same answers.

    The reward function's own score is kept under the name `function`, and how many steps a process
    reward model found under `steps`, with their scores as `step_scores`. An answer that the reward
    function leaves unscored stays so.

    Args:
        rollouts: B answers.
        given: the reward model's scores.
        scored: the reward function's results, if there is one.
        on_error: score where the model gives no finite one; None raises, "unscored" leaves the
            answer without one.

    Raises:
        RewardError: there is no finite score, and `on_error` is None.
    """
    scores = []
    for i, value in enumerate(given.values.tolist()):
        if scored is not None and scored[i].is_unscored:
            scores.append(scored[i])
            continue
        steps = given.steps[i] if given.steps else ()
        if i in given.failures or not math.isfinite(value):
            reason = given.failures.get(i, f"the reward model gave {value}")
            failed = _failed(rollouts, i, "reward.classifier", f"invalid: {reason}", on_error)
            scores.append(failed)
            continue
        extra: dict[str, Any] = {}
        if scored is not None:
            extra = scored[i].extra | {FUNCTION_COMPONENT: scored[i].score}
        if given.steps:
            extra |= {"steps": len(steps), "step_scores": [round(x, 4) for _, x in steps]}
        error = None if scored is None else scored[i].error
        scores.append(Score(value, extra, error, steps if given.rewards_steps else ()))
    return scores


def with_components(score: Scoring, reward: RewardConfig) -> Scoring:
    """Return scoring in which an answer fails if one of its components is not a finite number.

    One that is not reported at all is an error of the config, which `with_scores` finds.
    """

    def checked(rollouts: Rollouts) -> list[Score]:
        scores = score(rollouts)
        for row, given in enumerate(scores):
            reported = [] if given.error else [n for n in reward.components if n in given.extra]
            wrong = [n for n in reported if finite_number(given.extra[n]) is None]
            if wrong:
                error = f"invalid: expected a finite number (float32) as {wrong[0]}, got "
                error += short_repr(given.extra[wrong[0]])
                scores[row] = _failed(rollouts, row, "reward.function", error, reward.on_error)
        return scores

    return checked


def _failed(
    rollouts: Rollouts, row: int, key: str, error: str, on_error: ErrorScore | None
) -> Score:
    where = f"row {rollouts.prompts[row].index} (reply {shorten(repr(rollouts.texts[row]), 120)})"
    if on_error is None:
        raise RewardError(f"{key} failed on {where}: {error}")
    log.warning("%s failed on %s: %s", key, where, error)
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
        parts = distributed.all_gather(
            pool.score(items[own], rows=[prompt.index for prompt in rollouts.prompts[own]])
        )
        job_context.increment("reward_retries", pool.counts.get("retried", 0) - retried_before)
        return [result for part in parts for result in part]

    return score


def with_run_dir(function: FunctionSpec, folder: Path) -> FunctionSpec:
    """Give a reward function the run's folder, where it takes one and the config gives it none.

    >>> with_run_dir(FunctionSpec("arithmetic"), Path("runs/a"))
    FunctionSpec(fn='arithmetic', kwargs={}, given=None)
    """
    called = find_function(function, BUILTIN_MODULE, key="reward.function")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        if RUN_DIR in signature_of(called).parameters:
            return replace(function, kwargs={RUN_DIR: str(folder), **function.kwargs})
    return function


def reward_items(rollouts: Rollouts) -> list[RewardItem]:
    """Return what a reward function gets of each episode.

    `extra_info` has the row's messages as `prompt`, where the row has nothing of that name. Of an
    episode of an agent it says more: `turns` of the policy; `num_turns` as verl
    counts them, the user's first and those of tools and the environment included; `last_answer`
    (text of the last turn), `environment_score`, `turn_rewards`, `messages`, `tool_calls`,
    `tool_errors` and `finish`. Of several chains, `messages` are those of the one that drew last,
    and `chats` those of each.
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
        "chats": [list(chat) for chat in episode.chats or (episode.messages,)],
        "tool_calls": len(episode.tool_records),
        "tool_errors": sum(record.failure is not None for record in episode.tool_records),
        "finish": episode.finish,
    }


def stopping(score: Scoring, reward: RewardConfig, function: FunctionSpec) -> Scoring:
    """Return scoring that stops where a reward function gives too few answers a score.

    Those that are scored together may be one group: earlier ones count with them, up to
    `FEWEST_ANSWERS` in all.

    Args:
        score: rollouts -> one score for each answer.
        reward: the config's section.
        function: that scores.
    """

    newest = deque[Score](maxlen=FEWEST_ANSWERS)

    def checked(rollouts: Rollouts) -> list[Score]:
        scores = score(rollouts)
        newest.extend(scores)
        counted = scores if len(scores) > len(newest) else [*newest]
        errors = [result.error for result in counted if result.error is not None]
        if len(errors) > reward.max_error_share * max(len(counted), FEWEST_ANSWERS):
            failed = sum(result.has_failed for result in counted)
            unscored = "" if failed == len(errors) else f" ({len(errors) - failed} are unscored)"
            raise RewardError(
                f"reward {function.fn!r} failed on {len(errors)} of {len(counted)} answers, more "
                f"than reward.max_error_share={reward.max_error_share:g} of them; the first "
                f"failure: {errors[0]}{unscored}"
            )
        return scores

    return checked


def open_pool(reward: ScoringConfig, function: FunctionSpec) -> RewardRunner:
    """Start what calls the reward function: processes here, or tasks on a cluster that scores."""
    job = job_context.current()
    share = max(1, reward.concurrency // distributed.process_count())
    reward = replace(reward, concurrency=share)
    if job is not None and job.reward_tasks:
        return RewardTasks(function, reward, tasks=job.reward_tasks, retries=job.max_retries)
    return RewardPool(function, reward)


def check_scoring(reward: ScoringConfig, function: FunctionSpec) -> None:
    """Import a reward function, and refuse a server whose failures would be scores.

    Raises:
        ConfigError: as `check_reward_function`; failures of a judge or a served reward model would
            get a number; its key would not be seen.
    """
    check_reward_function(function)
    if find_function(function, BUILTIN_MODULE) not in ASKING:
        return
    if isinstance(reward.on_error, int | float):
        raise ConfigError(
            f"reward.on_error={reward.on_error:g} would be the score of every answer about which "
            f"{function.fn} can't ask its server: set it to unscored, which leaves them out, or to "
            "null, which stops the run"
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


def check_reward_rows(function: FunctionSpec | None, rows: Sequence[Row], key: str) -> None:
    """Refuse rows that a reward function of ours can't score, before anything is sampled.

    Args:
        function: the config's.
        rows: of one split.
        key: which names their files, for messages.

    Raises:
        ConfigError: `by_source` knows no function for a row's data source, or a function can't use
            its ground truth.
    """
    if function is None:
        return
    loaded = load_reward_function(function)

    def check(_: int, row: Row) -> None:
        check_ground_truth(loaded, row["data_source"], row["reward_model"]["ground_truth"])

    with config_errors_at(key):
        map_rows(check, rows)

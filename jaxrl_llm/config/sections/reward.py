"""The keys of scoring."""

import math
from dataclasses import dataclass

from jaxrl_llm.config.checks import require
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """The processes in which a reward function runs."""

    workers: int = key(2, "scoring processes; 0 scores in this process, without a time limit")
    timeout_s: float = key(10.0, "seconds for one answer")
    on_error: float | None = key(
        0.0,
        "score of an answer whose reward function raises or hangs, or whose score is not finite; "
        "null stops the run",
    )
    memory_gb: float | None = key(
        4.0, "GB of memory of each process of a reward function; null sets no limit"
    )
    max_processes: int | None = key(
        64, "processes that a reward function may have started at once; null sets no limit"
    )
    pass_env: tuple[str, ...] = key(
        (),
        "environment variables that a reward function gets beside the usual ones, such as "
        "OPENAI_API_KEY; * stands for any letters",
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(ScoringConfig):
    """How answers are scored."""

    function: FunctionSpec | None = key(
        FunctionSpec("by_source"),
        "function (data_source, solution_str, ground_truth, extra_info) -> float or dict; null "
        "where reward.classifier alone scores",
    )
    classifier: str | None = key(
        None,
        "Hugging Face directory of a sequence classifier with one label and the policy's "
        "tokenizer: its score of prompt and answer is the score; null takes the reward function's",
    )
    components: tuple[str, ...] = key(
        (),
        "numbers in the reward function's dict that are the field score_components, in this order",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateRewardConfig(ScoringConfig):
    """How answers are scored in an evaluation."""

    function: FunctionSpec = key(
        FunctionSpec("by_source"),
        "function (data_source, solution_str, ground_truth, extra_info) -> float or dict",
    )


def check_scoring(reward: ScoringConfig) -> None:
    """Refuse limits that allow nothing."""
    require(reward.timeout_s > 0, f"reward.timeout_s={reward.timeout_s}, wanted a number above 0")
    for name in ("memory_gb", "max_processes"):
        limit = getattr(reward, name)
        wanted = "wanted a number above 0, or null"
        require(limit is None or 0 < limit < math.inf, f"reward.{name}={limit}, {wanted}")


def check_reward(reward: RewardConfig) -> None:
    """Refuse contradictions between the keys of scoring."""
    check_scoring(reward)
    require(
        reward.function is not None or reward.classifier is not None,
        "reward.function and reward.classifier are both null: nothing scores the answers",
    )
    require(
        reward.function is not None or not reward.components,
        "reward.components are what a reward function reports, but reward.function is null",
    )

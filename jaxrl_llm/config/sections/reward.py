"""The keys of scoring."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, Several, function_key


def _as_score(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "unscored" and not (is_number and math.isfinite(value)):
        raise PydanticCustomError("score_type", "a finite number or unscored")
    return float(value) if is_number else value


ErrorScore = Annotated[
    float | Literal["unscored"],
    PlainValidator(_as_score, json_schema_input_type=float | Literal["unscored"]),
]
"""A score, or that there is none. One validator for both: a union would have errors for each."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProcessConfig(Section):
    """What bounds the processes in which functions of the user's run."""

    memory_gb: Number | None = Field(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="GB of memory of each process; null sets no limit",
    )
    max_processes: int | None = Field(
        default=64,
        gt=0,
        description="processes that one of them may have started at once; null sets no limit",
    )
    pass_env: Several[str] = Field(
        default=(),
        description=(
            "environment variables that they see besides the usual ones, such as OPENAI_API_KEY; "
            "* stands for any letters"
        ),
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScoringConfig(ProcessConfig):
    """The processes in which a reward function runs."""

    workers: int = Field(
        default=2,
        ge=0,
        description="scoring processes; 0 scores in this process, without a time limit",
    )
    timeout_s: Number = Field(
        default=10.0,
        gt=0,
        description="seconds for one response; of an async function, for each try",
    )
    concurrency: int = Field(
        default=16, ge=1, description="calls of an async reward function at once, in the whole run"
    )
    retries: int = Field(
        default=3,
        ge=0,
        description=(
            "how often a call of an async reward function is tried again after HTTP 408, 425, 429 "
            "or 500 and above, a lost connection or timeout_s"
        ),
    )
    on_error: ErrorScore | None = Field(
        default=0.0,
        description=(
            "score of a response whose reward function raises or hangs, or whose "
            "score is not finite; unscored leaves the response out, null stops the run"
        ),
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig(ScoringConfig):
    """How answers are scored."""

    function: Function | None = function_key(
        kinds.REWARD_FUNCTIONS,
        "by_source",
        "reward function (data_source, solution_str, ground_truth, extra_info) "
        "-> float or dict; null if reward.classifier alone scores",
    )
    max_error_share: Number = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "stop when a reward function fails on, or leaves unscored, more than this share of the "
            "responses that are scored together; 1 never stops"
        ),
    )
    classifier: str | None = Field(
        default=None,
        description=(
            "Hugging Face directory of a sequence classifier with one label and "
            "the policy's tokenizer, which scores prompt and response; null: "
            "reward.function's score"
        ),
    )
    components: Several[str] = Field(
        default=(),
        description=(
            "numbers in the reward function's dict that are the field score_components, in this "
            "order"
        ),
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateRewardConfig(ScoringConfig):
    """How answers are scored in an evaluation."""

    function: Function = function_key(
        kinds.REWARD_FUNCTIONS,
        "by_source",
        "reward function (data_source, solution_str, ground_truth, extra_info) -> float or dict",
    )

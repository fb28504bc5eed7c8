"""The keys of scoring."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, Several, Table, function_key
from jaxrl_llm.config.rules import check
from jaxrl_llm.workers.answers import finite_number


def _as_score(value: Any) -> Any:
    number = None if isinstance(value, bool) else finite_number(value)
    if value != "unscored" and number is None:
        raise PydanticCustomError("score_type", "a finite number or unscored")
    return value if number is None else number


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
class ClassifierConfig(Section):
    """The reward model that scores answers, if one does."""

    classifier: str | None = Field(
        default=None,
        description=(
            "Hugging Face directory of a reward model, which scores prompt and response: a "
            "sequence classifier with one label, or a process reward model; null: "
            "reward.function's score"
        ),
    )
    render: Literal["auto", "ids", "answer", "chat"] = Field(
        default="auto",
        description=(
            "what reward.classifier reads. ids: the policy's tokens; answer: text by its own "
            "tokenizer, the templated prompt, the response and the end token, as jaxrl_llm.prefer "
            "trains it; chat: the whole chat by its own template; auto: ids where the tokenizers "
            "are the same, else answer for a model of jaxrl_llm.prefer and chat for another"
        ),
    )
    chat_template_kwargs: Table = Field(
        default={}, description="keywords for reward.classifier's chat template"
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "the longest prompt and response in tokens of reward.classifier, where it reads text; "
            "longer ones score reward.on_error; null: twice what the policy's tokens may be, or "
            "what reward.classifier and batch.max_tokens_per_device hold"
        ),
    )
    step_separator: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "text that ends a step of a response, for a process reward model; null: the one that "
            "it was trained with"
        ),
    )
    aggregate: Literal["min", "product", "last", "mean"] = Field(
        default="min",
        description="a response's score from its steps' scores, of a process reward model",
    )
    step_rewards: bool = Field(
        default=False,
        description=(
            "each step's score is the reward of its last token, in place of the response's score "
            "on the last one, with a process reward model"
        ),
    )

    def __post_init__(self) -> None:
        """Refuse keys of a reward model where there is none."""
        check(self, keys_have_a_classifier)


def keys_have_a_classifier(config: ClassifierConfig) -> Iterator[str]:
    """Refuse keys of a reward model where there is none."""
    for name, field in ClassifierConfig.__pydantic_fields__.items():
        if config.classifier is None and getattr(config, name) != field.default:
            yield f"{name} is set, but reward.classifier names no reward model"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig(ClassifierConfig, ScoringConfig):
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
            "responses that are scored together, or of the newest 16 if those are fewer; 1 never "
            "stops"
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

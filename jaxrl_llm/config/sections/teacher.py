"""The keys of teachers."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import (
    STRICT,
    Function,
    Number,
    PerSource,
    Section,
    Table,
    function_key,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig(Section):
    """The models that the policy learns from, where a function asks for teacher_logprobs.

    They are also asked for by algorithm.distillation.
    """

    path: PerSource | None = Field(
        default=None,
        description=(
            "Hugging Face directory or hub id of a model with the policy's tokenizer; or one for "
            "each data_source, {math: DIRECTORY, code: DIRECTORY}"
        ),
    )
    weights: Literal["given", "initial", "live", "ema"] = Field(
        default="given",
        description=(
            "given: of path; else the policy's own: initial as at the start of the run, live as it "
            "is, ema their exponential moving average"
        ),
    )
    ema: Number = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="share of the policy's weights that the moving average takes over in each step",
    )
    prompt: Function | None = function_key(
        kinds.TEACHER_PROMPTS,
        None,
        "function in data.teacher_prompts: the prompt that the teacher reads before an answer; "
        "null: the policy's",
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "longest prompt of teacher.prompt: an answer with a longer one has no teacher; null: "
            "data.max_prompt_tokens"
        ),
    )
    url: PerSource | None = Field(
        default=None,
        description=(
            "in place of path: API of a server that scores the answers, as http://HOST:8000/v1 of "
            "`vllm serve` or jaxrl_llm.serve; or one for each data_source"
        ),
    )
    model: PerSource | None = Field(
        default=None,
        description="the teacher's name on the server of url; null: the only one that it has",
    )
    tokenizer: PerSource | None = Field(
        default=None,
        description=(
            "Hugging Face directory with the teacher's own tokenizer and chat template: answers "
            "are compared over their texts then; null: it has the policy's tokens"
        ),
    )
    chat_template_kwargs: Table = Field(
        default={}, description="variables of the chat template of tokenizer"
    )
    max_tokens: int | None = Field(
        default=None,
        ge=2,
        description=(
            "longest sequence of a teacher with a tokenizer of its own, in its tokens; null: twice "
            "the policy's, or what it takes"
        ),
    )
    api_key: str | None = Field(
        default=None,
        min_length=1,
        description="sent to url; null takes JAXRL_LLM_TEACHER_API_KEY of the environment, if set",
    )
    concurrency: int = Field(default=32, ge=1, description="requests to url at once")
    timeout_s: Number = Field(default=120.0, gt=0, description="seconds for an answer of url")
    retries: int = Field(
        default=4, ge=0, description="further tries of a request that url refuses for now or loses"
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description=(
            "likeliest tokens of which a teacher gives the log-probs, for algorithm.distillation "
            "or a function that asks for teacher_top_logprobs; null: distillation compares the "
            "whole vocabulary, where the policy is trained"
        ),
    )

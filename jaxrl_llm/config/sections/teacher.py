"""The keys of teachers."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Number, PerSource, Section, function_key


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
    top_k: int | None = Field(
        default=None,
        ge=1,
        description=(
            "likeliest tokens of which a teacher gives the log-probs, for algorithm.distillation "
            "or a function that asks for teacher_top_logprobs; null: distillation compares the "
            "whole vocabulary, where the policy is trained"
        ),
    )

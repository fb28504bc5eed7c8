"""The keys of teachers."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, PerSource, Section


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
    top_k: int | None = Field(
        default=None,
        ge=1,
        description=(
            "likeliest tokens of which a teacher gives the log-probs, for algorithm.distillation "
            "or a function that asks for teacher_top_logprobs; null: distillation compares the "
            "whole vocabulary, where the policy is trained"
        ),
    )

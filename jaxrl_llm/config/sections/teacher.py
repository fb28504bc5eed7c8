"""The keys of teachers."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, PerSource, Section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig(Section):
    """The models that the policy learns from, where a function asks for teacher_logprobs."""

    path: PerSource | None = Field(
        default=None,
        description=(
            "Hugging Face directory or hub id of a model with the policy's tokenizer; or one for "
            "each data_source, {math: DIRECTORY, code: DIRECTORY}"
        ),
    )

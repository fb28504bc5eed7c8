"""The keys of validation."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Number, Section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationConfig(Section):
    """Validation on data.validation."""

    before: bool = Field(default=True, description="validate before the first step")
    every: int = Field(default=0, ge=0, description="validate every n steps; 0 only at the end")
    samples: int = Field(
        default=1, ge=1, description="k: responses per prompt, for mean@k, best@k, maj@k"
    )
    temperature: Number = Field(default=0.0, ge=0, description="softmax temperature; 0 is greedy")
    top_p: Number = Field(
        default=1.0, gt=0, le=1, description="nucleus: sample from the smallest set with this mass"
    )
    rows: int | None = Field(
        default=None, ge=1, description="the first n rows only; null takes all"
    )

"""The keys of how data are cut."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Section

VISUAL_TOKENS = Field(
    default=None,
    ge=1,
    description=(
        "how many of these may stand for images and videos; null: all. Rows of patches, or "
        "features of a frozen tower, have room for as many: lower it where few are"
    ),
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BatchConfig(Section):
    """How a step's data are cut."""

    prompts_per_step: int = Field(default=64, ge=1, description="P: prompts sampled in a step")
    prompts_per_minibatch: int | None = Field(
        default=None, ge=1, description="prompts in one update; null takes all of them"
    )
    epochs_per_step: int = Field(default=1, ge=1, description="passes over a step's data")
    max_tokens_per_device: int = Field(
        default=16384,
        description="tokens of a micro-batch on each device: bounds memory, never exceeded",
    )
    max_visual_tokens_per_device: int | None = VISUAL_TOKENS


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftBatchConfig(Section):
    """How the examples are cut."""

    examples_per_step: int = Field(default=64, ge=1, description="examples in one update")
    max_tokens_per_device: int = Field(
        default=16384,
        description="tokens of a micro-batch on each device: bounds memory, never exceeded",
    )
    max_visual_tokens_per_device: int | None = VISUAL_TOKENS

"""The keys of the critic."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Section, function_key
from jaxrl_llm.config.sections.optim import OptimConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticConfig(Section):
    """The critic, where a function asks for values or returns."""

    path: str | None = Field(
        default=None,
        description="Hugging Face directory, with a value head or without; null takes model.path",
    )
    loss: Function = function_key(
        kinds.VALUES, "clipped_value_loss", "function in algorithms.values"
    )
    reduce: Function = function_key(kinds.REDUCTIONS, "token_mean", "function in algorithms.reduce")
    warmup_steps: int = Field(
        default=0, ge=0, description="steps in which the critic alone is updated"
    )
    optim: OptimConfig = Field(default_factory=OptimConfig)

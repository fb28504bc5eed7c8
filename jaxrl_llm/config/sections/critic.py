"""The keys of the critic."""

from dataclasses import dataclass

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key, section
from jaxrl_llm.config.sections.optim import OptimConfig


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic, where a function asks for values or returns."""

    path: str | None = key(
        None, "Hugging Face directory, with a value head or without; null takes model.path"
    )
    loss: FunctionSpec = key(FunctionSpec("clipped_value_loss"), "function in algorithms.values")
    reduce: FunctionSpec = key(FunctionSpec("token_mean"), "function in algorithms.reduce")
    warmup_steps: int = key(0, "steps in which the critic alone is updated")
    optim: OptimConfig = section(OptimConfig)

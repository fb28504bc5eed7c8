"""The keys of the implicit reward model."""

from dataclasses import dataclass

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key, section
from jaxrl_llm.config.sections.optim import OptimConfig


@dataclass(frozen=True, kw_only=True)
class ImplicitRewardModelConfig:
    """The implicit reward model, where a function asks for reward_logprobs."""

    path: str | None = key(None, "Hugging Face directory; null takes model.path")
    loss: FunctionSpec = key(FunctionSpec("implicit_reward_loss"), "function in algorithms.values")
    reduce: FunctionSpec = key(
        FunctionSpec("sequence_mean_token_mean"), "function in algorithms.reduce"
    )
    optim: OptimConfig = section(OptimConfig)

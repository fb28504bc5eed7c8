"""The keys of the implicit reward model."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Section, function_key
from jaxrl_llm.config.sections.optim import OptimConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImplicitRewardModelConfig(Section):
    """The implicit reward model, where a function asks for reward_logprobs."""

    path: str | None = Field(
        default=None, description="Hugging Face directory; null takes model.path"
    )
    loss: Function = function_key(
        kinds.VALUES, "implicit_reward_loss", "function in algorithms.values"
    )
    reduce: Function = function_key(
        kinds.REDUCTIONS, "sequence_mean_token_mean", "function in algorithms.reduce"
    )
    optim: OptimConfig = Field(default_factory=OptimConfig)

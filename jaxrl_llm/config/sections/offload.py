"""The keys of what waits in the host's memory."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OffloadConfig(Section):
    """What waits in the host's memory while it is not used."""

    params: bool = Field(default=False, description="weights of the models that are trained")
    optimizer: bool = Field(default=False, description="the optimizers' states")
    reference: bool = Field(default=False, description="weights of the reference")
    teacher: bool = Field(default=False, description="weights of the teachers")

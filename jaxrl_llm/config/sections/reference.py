"""The keys of the reference policy."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Number, Section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReferenceConfig(Section):
    """The reference, which is the policy as the run begins with it until it is refreshed."""

    refresh_every: int | None = Field(
        default=None,
        ge=1,
        description="every so many steps the reference becomes the policy as it is after the step; "
        "null: never",
    )
    mix: Number = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the policy in a refreshed reference, the rest is the one before; 1 "
        "copies the policy",
    )

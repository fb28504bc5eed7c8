"""The keys of checkpoints."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Number, Section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig(Section):
    """Checkpoints in run_dir/checkpoints."""

    every: int = Field(default=0, ge=0, description="save every n steps; 0 only at the end")
    keep: int = Field(
        default=2, ge=1, description="newest checkpoints to keep, besides the best by validation"
    )
    grace_s: Number = Field(
        default=120.0,
        gt=0,
        description=("seconds in which a run that gets SIGTERM must finish its step and save"),
    )
    resume: Literal["auto", "never"] = Field(
        default="auto", description="auto continues from the newest checkpoint; never refuses to"
    )

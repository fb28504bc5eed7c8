"""The keys of an optimizer."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, function_key


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig(Section):
    """The optimizer."""

    optimizer: Function = function_key(
        kinds.OPTIMIZERS,
        "adamw",
        "optax optimizer; mu_dtype: bfloat16 is a keyword of adamw's that halves its first moment",
        passed=("learning_rate",),
    )
    schedule: Function = function_key(
        kinds.SCHEDULES,
        FunctionSpec("constant_schedule", {"value": 1e-6}),
        "optax schedule: learning rate by update",
        passed=(),
    )
    grad_clip: Number | None = Field(
        default=1.0, gt=0, description="largest global gradient norm; null does not clip"
    )
    max_skipped: int = Field(
        default=3,
        ge=0,
        description="stop when more updates in a row had a non-finite gradient and were skipped",
    )

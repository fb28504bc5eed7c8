"""The keys of an optimizer."""

from dataclasses import dataclass

from jaxrl_llm.config.checks import require
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    optimizer: FunctionSpec = key(
        FunctionSpec("adamw"),
        "optax optimizer; mu_dtype: bfloat16 is a keyword of adamw's that halves its first moment",
    )
    schedule: FunctionSpec = key(
        FunctionSpec("constant_schedule", {"value": 1e-6}),
        "optax schedule: learning rate by update",
    )
    grad_clip: float | None = key(1.0, "largest global gradient norm; null does not clip")
    max_skipped: int = key(
        3, "stop when more updates in a row had a non-finite gradient and were skipped"
    )


def check_clip(name: str, clip: float | None) -> None:
    require(clip is None or clip > 0, f"{name}={clip}, wanted a number above 0 or null")

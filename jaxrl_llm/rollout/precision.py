"""What follows for a run from an engine that computes with fewer bits than the trainer."""

from jaxrl_llm.config.sections import (
    CACHE_TOLERANCE,
    FP8_TOLERANCE,
    TOLERANCE,
    RolloutConfig,
)


def is_low_precision(rollout: RolloutConfig) -> bool:
    """Return whether an engine holds numbers of fewer bits than the trainer."""
    return rollout.quantization != "none" or rollout.kv_cache_dtype != "auto"


def agreement_tolerance(rollout: RolloutConfig) -> int | float:
    """Return the largest mean difference of engine's and trainer's log-probs, in nats."""
    if rollout.logprob_tolerance is not None:
        return rollout.logprob_tolerance
    by_part = [
        FP8_TOLERANCE if rollout.quantization == "fp8" else TOLERANCE,
        CACHE_TOLERANCE if rollout.kv_cache_dtype != "auto" else TOLERANCE,
    ]
    return max(by_part)

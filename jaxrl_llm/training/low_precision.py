"""Engines that compute with fewer bits than the trainer, and what a run does about it."""

import logging

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections.rollout import TOLERANCE, WIDE_TOLERANCE, RolloutConfig
from jaxrl_llm.config.train import TrainConfig

log = logging.getLogger(__name__)


def is_low_precision(rollout: RolloutConfig) -> bool:
    """Tell whether the engine computes with fewer bits than the trainer."""
    return rollout.quantization != "none"


def corrections(config: TrainConfig) -> tuple[FunctionSpec, ...]:
    """Return the off-policy corrections of a run.

    By default, where engine and trainer compute otherwise, `truncated_token` with its cap of 2:
    without a correction, rewards fall in runs whose engine is in float8.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.correction is not None:
        return algorithm.correction
    differ = rollout.engine == "vllm" or is_low_precision(rollout)
    if not differ or algorithm.use_rollout_logprobs:
        return ()
    if is_low_precision(rollout):
        log.info("the engine is in low precision: algorithm.correction is truncated_token")
    return (FunctionSpec("truncated_token"),)


def agreement_tolerance(rollout: RolloutConfig) -> int | float:
    """Return the largest mean difference of log-probs, in nats, at which a run goes on."""
    if rollout.logprob_tolerance is not None:
        return rollout.logprob_tolerance
    return WIDE_TOLERANCE if is_low_precision(rollout) else TOLERANCE

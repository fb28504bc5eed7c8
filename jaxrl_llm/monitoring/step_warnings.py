"""Warnings about a run that trains, but does not learn what it should."""

import logging
from collections.abc import Mapping

from jaxrl_llm.config.sections import OptimConfig
from jaxrl_llm.sharding.distributed import is_first

log = logging.getLogger(__name__)

STEPS_WITHOUT_SPREAD = 3
"""Steps in a row whose advantages are all zero, after which the run warns."""


class StepWarnings:
    """Looks at the metrics of each step.

    Args:
        optims: of the models that are trained, by role.
        total_steps: steps in all.
    """

    def __init__(self, optims: Mapping[str, OptimConfig], total_steps: int) -> None:
        """Look at nothing yet."""
        self._optims, self._without_spread, self._warned = optims, 0, False
        self._limit = min(STEPS_WITHOUT_SPREAD, total_steps)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log what is wrong with a step, in the first process."""
        if is_first():
            self._warn_of_skipped(step, metrics)
            self._warn_of_no_spread(metrics)

    def _warn_of_skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        for role, optim in self._optims.items():
            skipped = metrics.get(f"{role}/skipped", 0)
            if skipped:
                log.warning(
                    "step %d: %d update(s) skipped, for the %s's gradient was not finite; more "
                    "than %s.max_skipped=%d in a row stop the run",
                    *(step, skipped, role.replace("_", " ")),
                    *("optim" if role == "actor" else f"{role}.optim", optim.max_skipped),
                )

    def _warn_of_no_spread(self, metrics: Mapping[str, float]) -> None:
        extremes = [metrics.get(f"critic/advantages/{end}") for end in ("min", "max")]
        self._without_spread = self._without_spread + 1 if extremes == [0, 0] else 0
        if self._without_spread >= self._limit and not self._warned:
            self._warned = True
            low, high = (metrics[f"critic/score/{end}"] for end in ("min", "max"))
            log.warning(
                "all advantages of the last %d step(s) are zero, so nothing was learned from them: "
                "the answers to each prompt have equal scores (from %g to %g in this step). Look "
                "at reward.function, take other prompts, or raise rollout.samples_per_prompt",
                *(self._without_spread, low, high),
            )

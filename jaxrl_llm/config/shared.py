"""The keys and rules that training and SFT share."""

from collections.abc import Iterator
from typing import Any

STALL_TIMEOUT = (
    "seconds without a step until the run counts as hung: it prints its "
    "stacks and ends, on a cluster it restarts; must be long enough for "
    "the first step, with loading; null: never"
)
COMPILATION_CACHE = (
    "keep compiled programs in run_dir/cache/compilation, for when the run "
    "is continued; JAX_COMPILATION_CACHE_DIR names another folder, used in "
    "any case"
)


def profiled_steps_are_steps(config: Any) -> Iterator[str]:
    """Require that the steps to profile are steps of the run."""
    for step in config.log.profile_steps:
        if step < 1 or (config.steps is not None and step > config.steps):
            yield (
                f"log.profile_steps: expected numbers from 1 to {config.steps or 'the last step'}, "
                f"got {list(config.log.profile_steps)}, but {step} is not a step of the run"
            )

"""Which program a run's config is of."""

from collections.abc import Mapping
from typing import Any, Literal


def program_of(config: Mapping[str, Any]) -> Literal["train", "sft", "prefer"]:
    """Return the program whose run has a resolved config, by a key that it alone has.

    >>> program_of({"run_dir": "runs/a", "reference": None})
    'prefer'
    """
    if "rollout" in config:
        return "train"
    return "prefer" if "reference" in config else "sft"

"""Limits of code, as a config gives them."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.sandbox.types import CodeLimits

WHOLE = ("memory_mb", "processes", "file_mb", "output_bytes")


def read_limits(given: Mapping[str, Any], *, wall_s: float) -> CodeLimits:
    """Return limits of code, from the keys of a config.

    Args:
        given: by name; others have their defaults.
        wall_s: the default of `wall_s`, in seconds; that of `cpu_s` is at most as much.

    Raises:
        ConfigError: a name is unknown, or a value is no number above 0.

    >>> read_limits({"memory_mb": 64}, wall_s=4.0)[:3]
    (4.0, 4.0, 64)
    """
    for name, value in given.items():
        if name not in CodeLimits._fields:
            raise ConfigError(f"there is no {name!r}; {closest(name, CodeLimits._fields)}")
        kinds = (int,) if name in WHOLE else (int, float)
        if type(value) not in kinds or not 0 < value < math.inf:
            wanted = "a whole number" if name in WHOLE else "a number"
            raise ConfigError(f"{name}: expected {wanted} above 0, got {value!r}")
    limits = CodeLimits(wall_s=wall_s)._replace(**given)
    return limits if "cpu_s" in given else limits._replace(cpu_s=min(limits[:2]))

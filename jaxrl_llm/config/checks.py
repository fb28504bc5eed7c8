"""Checks of values that the sections share."""

import operator
from typing import Any

from jaxrl_llm.config.errors import ConfigError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def at_least(config: Any, least: int, names: str) -> None:
    for name, value in _values(config, names):
        fits = value is None or value >= least
        require(fits, f"{name}={value}, wanted {least} or more")


def above_zero(config: Any, names: str) -> None:
    for name, value in _values(config, names):
        require(value is None or value > 0, f"{name}={value}, wanted a number above 0")


def _values(config: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, operator.attrgetter(name)(config)) for name in names.split()]

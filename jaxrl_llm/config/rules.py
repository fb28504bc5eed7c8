"""Rules between keys: small functions that yield a line for each contradiction."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from jaxrl_llm.config.errors import ConfigError

Config = TypeVar("Config")


def check(config: Config, *rules: Callable[[Config], Iterator[str]]) -> None:
    """Apply all rules.

    Raises:
        ConfigError: a line for each contradiction.
    """
    if lines := [line for rule in rules for line in rule(config)]:
        raise ConfigError(*lines)

"""The dataflow graph, read off the functions' signatures.

A function's positional parameters without a default name the fields that it asks for; what none of
them asks for is never computed.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.types import FIELDS


def asks_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the fields that a function asks for.

    >>> def advantage(scores, group_ids, *, eps=1e-6): ...
    >>> asks_for(advantage)
    ('scores', 'group_ids')
    """
    return tuple(
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    )


def check_fields(function: Callable[..., Any], key: str, *, after: frozenset[str]) -> None:
    """Raise ConfigError where a function asks for a field that nothing produces before it.

    Args:
        function: as a config names it.
        key: its config key, for the message.
        after: fields that exist only later in the step.
    """
    available = [name for name in FIELDS if name not in after]
    for name in asks_for(function):
        if name not in available:
            raise ConfigError(
                f"{key}: {name_of(function)} asks for {name!r}, which nothing produces there; "
                + closest(name, available)
            )


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages.

    >>> name_of(functools.partial(max, 1))
    'max'
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", repr(function))


def call(function: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Call a function with the fields that it asks for.

    >>> call(lambda scores: scores * 2, {"scores": 3, "mask": None})
    6
    """
    return function(*(fields[name] for name in asks_for(function)))

"""The interpreter of a level. A level that this machine does not have is refused."""

import importlib
from typing import get_args

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.sandbox.types import CodeLimits, Interpreter, Level

DEFAULT_CODE_LIMITS = CodeLimits()


def open_interpreter(
    level: str,
    limits: CodeLimits = DEFAULT_CODE_LIMITS,
    *,
    keep_state: bool = False,
    url: str | None = None,
) -> Interpreter:
    """Return what runs code at a level; never one of a weaker level.

    Args:
        level: of isolation, one of `Level`.
        limits: of each run.
        keep_state: whether a run finds the names that earlier runs have bound.
        url: of the server, for `service` alone.

    Raises:
        ConfigError: there is no such level, or this machine lacks what it needs, which is named.
        ConnectionError: the server of `service` gives no answer.
    """
    if level not in get_args(Level):
        raise ConfigError(f"got sandbox {level!r}; " + closest(level, get_args(Level)))
    if (url is not None) != (level == "service"):
        wanted = "an url" if level == "service" else "no url"
        raise ConfigError(f"sandbox {level}: expected {wanted}, got {url!r}")
    module = importlib.import_module(f"jaxrl_llm.sandbox.{level}")
    return module.open_level(limits, keep_state=keep_state, url=url)

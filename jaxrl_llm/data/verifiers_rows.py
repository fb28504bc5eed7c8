"""Environments of Prime Intellect's `verifiers`, by its Python API of 0.1."""

import contextlib
import functools
import importlib.metadata
import json
import signal
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.config.errors import ConfigError

SOURCE = "verifiers"
"""The data source of the rows, and the key of `extra_info` with an environment's own row."""


@functools.cache
def load_verifiers(id: str, args: str) -> Any:
    """Return an environment of `verifiers`, which this process makes once.

    Args:
        id: of the environment.
        args: keywords of its `load_environment`, as JSON.

    Raises:
        ConfigError: it can't be loaded, or is none that this library can lead.
    """
    try:
        import verifiers as library  # pyright: ignore[reportMissingImports]
        from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        installed = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = f", got {importlib.metadata.version('verifiers')}"
        raise ConfigError(
            f"verifiers: expected the package verifiers 0.1 with verifiers.clients, as 0.1.14 has "
            f"it{installed}: {error}"
        ) from error
    if not hasattr(Client, "get_response"):
        raise ConfigError("verifiers: expected version 0.1.14, whose clients have get_response")
    with _signals_kept():
        try:
            env = library.load_environment(id, **json.loads(args))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"verifiers: {id!r}: {error}") from error
    if not isinstance(env, library.MultiTurnEnv):
        kind = type(env).__name__
        raise ConfigError(f"verifiers: {id!r} is a {kind}, expected a MultiTurnEnv of version 0.1")
    if env.rubric.has_group_rewards:
        raise ConfigError(f"verifiers: {id!r} scores answers in groups; expected one by one")
    return env


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Leave this process's signals alone, which environments take when they are made."""
    kept, signal.signal = signal.signal, lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        signal.signal = kept

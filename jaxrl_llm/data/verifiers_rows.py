"""Environments of Prime Intellect's `verifiers`, by its Python API of 0.1, and their rows."""

import contextlib
import functools
import importlib.metadata
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.data.row_fields import map_rows
from jaxrl_llm.data.rows import Row, Written, write_splits

SOURCE = "verifiers"
"""The data source of the rows, and the key of `extra_info` with an environment's own row."""


def verifiers(
    out: str | Path,
    *,
    id: str = "",
    args: Mapping[str, Any] | None = None,
    train_rows: int = -1,
    validation_rows: int = -1,
) -> Written:
    """Write the rows of an environment of `verifiers` 0.1, for the agent `verifiers_environment`.

    Args:
        out: directory for train.parquet and validation.parquet; the latter is the environment's own
            data for evaluation, which is its data to train on where there is no other.
        id: of the environment, whose package is installed.
        args: keywords of its `load_environment`; the agent needs the same.
        train_rows: so many at most; -1 takes all.
        validation_rows: so many at most.

    Returns:
        The files and their rows.

    Raises:
        ValueError: there is no such environment, or it has prompts that are no chats.
    """
    env = load_verifiers(id, json.dumps(args or {}, sort_keys=True))
    data = {
        "train": env.get_dataset(train_rows),
        "validation": env.get_eval_dataset(validation_rows),
    }
    return write_splits(
        Path(out),
        {
            split: map_rows(
                lambda index, row, split=split: _row(dict(row), split, index),
                rows,
                name=lambda index, _, split=split: f"{split}, row {index}",
            )
            for split, rows in data.items()
        },
    )


def _row(row: dict[str, Any], split: str, index: int) -> Row:
    prompt = row.pop("prompt")
    if not isinstance(prompt, list):
        raise ValueError(f"expected a chat as prompt, got {prompt!r}")
    return {
        "data_source": SOURCE,
        "prompt": [{k: v for k, v in message.items() if v is not None} for message in prompt],
        "reward_model": {"style": "rule", "ground_truth": str(row.get("answer") or "")},
        "extra_info": {"split": split, "index": index, SOURCE: json.dumps(row, default=str)},
    }


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

"""The rows of published datasets, from the hub or from copies."""

import contextlib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.data.rows import Row, map_rows, read_rows

HUB_TIMEOUT_S = 10.0
"""Seconds in which the hub must answer, or it is taken for unreachable."""


def source_rows(source: str, config: str, split: str) -> list[Row]:
    """Read the rows of a published dataset, from the hub or from a copy.

    Args:
        source: a dataset on the Hugging Face hub; or a directory with parquet or jsonl files named
            as the split and more; or two such files as "TRAIN,TEST".
        config: of a dataset on the hub that has several.
        split: train or test.

    Raises:
        ValueError: there is no such dataset, or it can't be read.
    """
    if Path(source).is_dir():
        return _directory_rows(Path(source), config, split)
    if source.endswith((".parquet", ".jsonl")):
        files = source.split(",")
        if len(files) != 2:
            raise ValueError(f"{source}: expected two files as 'TRAIN,TEST', got {len(files)}")
        return read_rows(files[split == "test"])
    return hub_rows(source, config, split)


def _directory_rows(directory: Path, config: str, split: str) -> list[Row]:
    # A snapshot of a hub dataset keeps each configuration in a folder of its own.
    home = directory / config if (directory / config).is_dir() else directory
    files = sorted(
        path for path in home.rglob(f"{split}*") if path.suffix in (".parquet", ".jsonl")
    )
    if not files:
        raise ValueError(f"{home}: no file named {split}*.parquet or {split}*.jsonl")
    return [row for path in files for row in read_rows(path)]


def hub_rows(source: str, config: str, split: str) -> list[Row]:
    """Read the rows of a split of a dataset on the hub.

    Raises:
        ValueError: the package that reads is not installed, or the hub does not give the split.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{source}: no such directory, and reading from the hub needs the datasets package:"
            " pip install 'jaxrl_llm[hub]'"
        ) from error
    with _offline_if_unreachable() as problem:
        try:
            return [dict(row) for row in load_dataset(source, config, split=split)]
        except (OSError, ValueError, RuntimeError) as error:
            reason = problem or " ".join(str(error).split())[:300]
            raise ValueError(
                f"{source}: no such directory, and the hub did not give split {split!r}: {reason}"
            ) from error


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[str | None]:
    """Have only what is kept of the hub read where it can't be reached, without several attempts.

    Yields:
        Why it can't be reached; None if it can be.
    """
    import datasets.config
    from huggingface_hub import constants

    problem = None
    try:
        if not constants.HF_HUB_OFFLINE:
            urllib.request.urlopen(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        problem = (
            f"{constants.ENDPOINT} can't be reached ({reason}), and nothing of it is kept here"
        )
    switches: list[Any] = [constants, datasets.config]
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches if problem else ():
            switch.HF_HUB_OFFLINE = True
        yield problem
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def read_train(source: str) -> list[Row]:
    """Read a file, or the train split of a dataset on the hub."""
    if source.endswith((".parquet", ".jsonl")):
        return read_rows(source)
    return hub_rows(source, "default", "train")


def convert_splits(
    source: str, config: str, convert: Callable[[Row, str, int], Row]
) -> dict[str, list[Row]]:
    """Convert the rows of `train`, and those of `test` for validation, given split and number."""
    return {
        ours: map_rows(
            lambda index, row, ours=ours: convert(row, ours, index),
            source_rows(source, config, theirs),
            name=lambda index, _, theirs=theirs: f"{source}, {theirs} row {index}",
        )
        for ours, theirs in (("train", "train"), ("validation", "test"))
    }


def text_columns(row: Row, names: Sequence[str]) -> list[str]:
    """Return the texts of some columns; raise ValueError where one has none."""
    for name in names:
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"expected text in column {name!r}, got columns {', '.join(sorted(row))}"
            )
    return [row[name] for name in names]

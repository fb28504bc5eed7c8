"""The rows of an environment of `verifiers`, for the agent `verifiers_environment`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.data.rows import Row, Written, map_rows, write_splits
from jaxrl_llm.data.verifiers_rows import SOURCE, load_verifiers


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

"""DAPO's math problems, and AIME to validate with."""

import json
from pathlib import Path

from jaxrl_llm.configs.tasks._sources import read_train
from jaxrl_llm.data.rows import Row, Written, map_rows, write_splits


def dapo_math(
    out: str | Path,
    *,
    source: str = "BytedTsinghua-SIA/DAPO-Math-17k",
    validation_source: str = "BytedTsinghua-SIA/AIME-2024",
) -> Written:
    """Write DAPO's math problems (https://arxiv.org/abs/2503.14476), each of them once.

    The published files are in verl's schema, as ours, but have each problem many times.

    Args:
        out: directory for train.parquet and validation.parquet.
        source: a dataset on the Hugging Face hub, or a parquet or jsonl file of it.
        validation_source: the same, to validate with.

    Returns:
        The files and their rows.

    Raises:
        ValueError: a source can't be read, or a row of it has no prompt or no reference answer.

    >>> dapo_math("out", source="no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    splits = {
        split: _once_each(read_train(given), given, split)
        for split, given in (("train", source), ("validation", validation_source))
    }
    return write_splits(Path(out), splits)


def _once_each(rows: list[Row], source: str, split: str) -> list[Row]:
    unique: dict[str, Row] = {}

    def add(_: int, row: Row) -> None:
        prompt, reference = row.get("prompt"), row.get("reward_model")
        if not prompt or not isinstance(reference, dict) or "ground_truth" not in reference:
            raise ValueError(
                "expected a prompt and reward_model.ground_truth, got columns "
                f"{', '.join(sorted(row))}"
            )
        unique.setdefault(
            json.dumps(prompt),
            {
                "data_source": "math_dapo",
                "prompt": prompt,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(reference["ground_truth"])},
                "extra_info": {"split": split, "index": len(unique)},
            },
        )

    map_rows(add, rows, name=lambda number, _: f"{source}, row {number}")
    return [*unique.values()]

"""Geometry3K: problems with their drawings."""

import io
from pathlib import Path
from typing import Any

from jaxrl_llm.configs.tasks._sources import convert_splits
from jaxrl_llm.data.rows import Row, Written, write_splits

BOX_INSTRUCTION = (
    r"Reason first, inside <think> and </think>, as if you talked to yourself. Then give the final"
    r" answer inside \boxed{}."
)


def geo3k(
    out: str | Path, *, source: str = "hiyouga/geometry3k", instruction: str = BOX_INSTRUCTION
) -> Written:
    """Write Geometry3K (https://arxiv.org/abs/2105.04165) in verl's schema, with its drawings.

    Args:
        out: directory for train.parquet and validation.parquet (Geometry3K's test split).
        source: the dataset on the hub, or a copy: a directory, or two files as "TRAIN,TEST". The
            columns are `problem`, which holds `<image>`, `answer` and `images`.
        instruction: behind each problem.

    Returns:
        The files and their rows.

    Raises:
        ValueError: the source can't be read, or a row has no such columns.

    >>> geo3k("out", source="no.jsonl,no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    splits = convert_splits(
        source, "default", lambda row, split, index: _problem_row(row, instruction, split, index)
    )
    return write_splits(Path(out), splits)


def _problem_row(row: Row, instruction: str, split: str, number: int) -> Row:
    problem, answer, images = (row.get(name) for name in ("problem", "answer", "images"))
    if not isinstance(problem, str) or not isinstance(answer, str) or not isinstance(images, list):
        raise ValueError(
            "expected texts as problem and answer, and images as a list, got columns"
            f" {', '.join(sorted(row))}"
        )
    if problem.count("<image>") != len(images):
        raise ValueError(
            "expected as many images as the problem says <image>,"
            f" {problem.count('<image>')}, got {len(images)}"
        )
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{problem.strip()} {instruction}"}],
        "images": [{"bytes": _file(image)} for image in images],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": number, "answer": answer, "question": problem},
    }


def _file(image: Any) -> bytes:
    """Return an image as a file: as it is in a copy, or as PNG where the hub's reader opened it."""
    given = image.get("bytes") if isinstance(image, dict) else None
    if isinstance(given, bytes):
        return given
    save = getattr(image, "save", None)
    if save is None:
        raise ValueError(f"expected an image with its bytes, got {image!r:.80}")
    file = io.BytesIO()
    save(file, "PNG")
    return file.getvalue()

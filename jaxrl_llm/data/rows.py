"""Rows on disk: reading and writing them, and checking them one by one.

Rows follow verl's schema, so its prepared files work unchanged: `prompt` (a list of messages),
`data_source`, `reward_model` with a `ground_truth`, and optionally `extra_info` and `ability`.
Supervised rows hold `prompt` and `response`. A custom dataset is any function or class that is
called with the configured paths and gives a sequence of such rows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.functions import FunctionSpec, load_function
from jaxrl_llm.data.files import atomic_write
from jaxrl_llm.data.preference_rows import normalize_row
from jaxrl_llm.data.row_fields import check_messages, field_error

Row = dict[str, Any]


class FileRow(dict[str, Any]):
    """A row of a file.

    Attributes:
        folder: of the file, where relative paths in it begin.
    """

    folder: Path = Path()


Written = dict[Path, int]  # rows per file


def read_rows(path: str | Path) -> list[Row]:
    """Read the rows of a `.parquet` or `.jsonl` file, unchecked.

    Raises:
        ValueError: another suffix; the file is missing, truncated or otherwise unreadable.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    >>> _ = path.write_text('{"prompt": "2+2="}\\n')
    >>> read_rows(path)
    [{'prompt': '2+2='}]
    """
    path = Path(path)
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"{path}: expected a .parquet or .jsonl file")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return readers[path.suffix](path)


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(str(path)) as file:
            return file.read().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a whole parquet file: {reason}") from error


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                rows.append(_json_row(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from error
    return rows


def _json_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got a {type(row).__name__}")
    return row


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a `.parquet` file, whole or not at all.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.parquet"
    >>> write_rows(path, [{"prompt": "2+2="}])
    >>> read_rows(path)
    [{'prompt': '2+2='}]
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows))
    with atomic_write(path) as file:
        pyarrow.parquet.write_table(table, file)


def write_splits(out: Path, splits: Mapping[str, Sequence[Row]]) -> Written:
    """Write rows to `NAME.parquet` in a directory for each name.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp())
    >>> [path.name for path in write_splits(out, {"train": [{"prompt": "2+2="}]})]
    ['train.parquet']
    """
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, rows in splits.items():
        path = out / f"{name}.parquet"
        write_rows(path, rows)
        written[path] = len(rows)
    return written


def verl_rows(paths: Sequence[str]) -> Sequence[Row]:
    """Read rows for reinforcement learning from parquet and jsonl files, in the order given.

    Args:
        paths: files of rows `{"prompt": [{"role", "content"}, …], "data_source": str,
            "reward_model": {"ground_truth": …}, "extra_info": {…}}`, the last one optional; and
            `images` and `videos` (docs/images.md).

    Returns:
        The rows of all the files.

    Raises:
        ValueError: an unreadable file, or a row that does not fit, by file, row (counted from 0),
            field, what is expected and what was got.

    >>> verl_rows(["train.csv"])
    Traceback (most recent call last):
    ValueError: train.csv: expected a .parquet or .jsonl file
    """
    return _read_all(paths, check_prompt_row)


def sft_rows(paths: Sequence[str]) -> Sequence[Row]:
    """Read supervised rows `{"prompt": [messages], "response": str}` from parquet and jsonl files.

    Args:
        paths: the files, read in the order given.

    Returns:
        The rows of all the files.

    Raises:
        ValueError: as for `verl_rows`.

    >>> sft_rows(["no.jsonl"])
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    return _read_all(paths, check_example_row)


def _read_all(paths: Sequence[str], check: Callable[[Any, str], None]) -> list[FileRow]:
    if isinstance(paths, str) or not paths:
        raise ValueError(f"dataset paths: expected a list of one file or more, got {paths!r}")
    rows: list[FileRow] = []
    for path in paths:
        file_rows = read_rows(path)
        for number, row in enumerate(file_rows):
            check(row, f"{path}, row {number}")
            rows.append(FileRow(row))
            rows[-1].folder = Path(path).parent
    return rows


def preference_rows(paths: Sequence[str]) -> list[Row]:
    """Read pairs, or answers with a label each or one for each step, from parquet and jsonl.

    Args:
        paths: files of rows in any form that `jaxrl_llm.data.preference_rows.normalize_row` takes,
            read in the order given.

    Returns:
        The rows of all the files, in one form.

    Raises:
        ValueError: as for `verl_rows`.

    >>> preference_rows(["no.jsonl"])
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    return [
        normalize_row(row, f"{path}, row {number}")
        for path in paths
        for number, row in enumerate(read_rows(path))
    ]


def load_rows(
    spec: FunctionSpec, paths: Sequence[str], *, check: Callable[[Any, str], Any]
) -> Sequence[Row]:
    """Call the dataset function that a config names, and check the rows it gives.

    Args:
        spec: `verl_rows`, `sft_rows`, or the user's `my_file.py:name`, called as
            `name(paths, **keywords)`; a class serves too when its instances are sequences.
        paths: the configured files.
        check: `check_prompt_row` or `check_example_row`.

    Returns:
        The rows.

    Raises:
        ValueError: the result is not a sequence, or a row does not fit; `ConfigError` (a
            ValueError) when the function can't be found or does not take the keywords.

    >>> load_rows(FunctionSpec("verl_rows"), ["no.parquet"], check=check_prompt_row)
    Traceback (most recent call last):
    ValueError: no.parquet: no such file
    """
    rows = load_function(spec, home=__name__, passed=("paths",), key="data.dataset")(paths)
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, Mapping):
        raise ValueError(
            f"dataset: expected a sequence of rows from {spec.fn!r}, got a {type(rows).__name__}"
        )
    rows = [rows[number] for number in range(len(rows))]
    for number, row in enumerate(rows):
        check(row, f"{spec.fn}, row {number}")
    return rows


def check_prompt_row(row: Any, where: str) -> None:
    """Raise ValueError, beginning with `where`, unless `row` fits verl's schema.

    >>> check_prompt_row({"prompt": "2+2="}, "train.jsonl, row 0")
    Traceback (most recent call last):
    ValueError: train.jsonl, row 0: field 'prompt': expected a list of messages, got '2+2='
    """
    check_messages(row, where, parts=True)
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        raise field_error(where, "data_source", source, "a non-empty string")
    reward = row.get("reward_model")
    if not isinstance(reward, dict):
        raise field_error(where, "reward_model", reward, "an object with a 'ground_truth'")
    if reward.get("ground_truth") is None:
        raise field_error(where, "reward_model.ground_truth", None, "the reference answer")
    if not isinstance(row.get("extra_info"), dict | None):
        raise field_error(where, "extra_info", row["extra_info"], "an object or nothing")


def check_example_row(row: Any, where: str) -> None:
    """Raise ValueError, beginning with `where`, unless `row` is a supervised row.

    >>> row = {"prompt": [{"role": "user", "content": "2+2="}], "response": 4}
    >>> check_example_row(row, "sft.jsonl, row 0")
    Traceback (most recent call last):
    ValueError: sft.jsonl, row 0: field 'response': expected a non-empty string, got 4
    """
    if isinstance(row, dict) and row.get("messages") is not None:
        check_messages({"prompt": row["messages"]}, where, parts=True)
        return
    check_messages(row, where, parts=True)
    response = row.get("response")
    if not isinstance(response, str) or not response:
        raise field_error(where, "response", response, "a non-empty string")

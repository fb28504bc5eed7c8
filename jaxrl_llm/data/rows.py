"""Rows on disk: reading and writing them, and checking them one by one.

Rows follow verl's schema, so its prepared files work unchanged: `prompt` (a list of messages),
`data_source`, `reward_model` with a `ground_truth`, and optionally `extra_info`, `ability` and
`tools`. Supervised rows hold `prompt` and `response`, or a conversation as `messages`. A custom
dataset is any function or class that is called with the configured paths and gives a sequence of
such rows. Whatever their origin, rows are brought into one form (`row_fields`).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.functions import FunctionSpec, load_function
from jaxrl_llm.data.row_fields import (
    FileRow,
    Row,
    as_row,
    check_columns,
    check_unicode,
    field_error,
    map_rows,
    normalize_answer,
    normalize_messages,
    with_tool_schemas,
    without_nulls,
)
from jaxrl_llm.files import atomic_write
from jaxrl_llm.workers.protocol import finite_number

CHATS = ("prompt", "messages", "completion", "completions", "response", "chosen", "rejected")
"""Columns that hold chats, or parts of them."""

Normalize = Callable[[Any], Row]
"""A row as it is in a file -> in one form; raises ValueError, with the field."""

Written = dict[Path, int]  # rows per file


def read_rows(path: str | Path) -> list[Row]:
    """Read the rows of a `.parquet` or `.jsonl` file, unchecked.

    A struct of a parquet file has the keys of all rows; those that a row's chats and tools lack are
    left out.

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
            rows = file.read().to_pylist(maps_as_pydicts="strict")
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a whole parquet file: {reason}") from error
    for row in rows:
        row |= {name: without_nulls(row[name]) for name in (*CHATS, "tools") if name in row}
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
            if line.strip():
                rows.append(_json_row(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from error
    return rows


def _json_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter of what is nested too deep
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
            "reward_model": {"ground_truth": …}, "extra_info": {…}, "tools": [schemas]}`, the last
            two optional; and `images` and `videos` (docs/images.md).

    Returns:
        The rows of all the files.

    Raises:
        ValueError: an unreadable file; `RowError` for rows that do not fit, by file, row (counted
            from 0), field, what is expected and what was got.

    >>> verl_rows(["train.csv"])
    Traceback (most recent call last):
    ValueError: train.csv: expected a .parquet or .jsonl file
    """
    return _read_all(paths, normalize_prompt_row)


def sft_rows(paths: Sequence[str]) -> Sequence[Row]:
    """Read supervised rows from parquet and jsonl files.

    Args:
        paths: files of rows in a form that `normalize_example_row` takes, read in the order given.

    Returns:
        The rows of all the files.

    Raises:
        ValueError: as for `verl_rows`.

    >>> sft_rows(["no.jsonl"])
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    return _read_all(paths, normalize_example_row)


def preference_rows(paths: Sequence[str]) -> Sequence[Row]:
    """Read pairs, or answers with a label each or one for each step, from parquet and jsonl.

    Args:
        paths: files of rows in any form that `normalize_preference_row` takes, read in the order
            given.

    Returns:
        The rows of all the files, in one form.

    Raises:
        ValueError: as for `verl_rows`.

    >>> preference_rows(["no.jsonl"])
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    return _read_all(paths, normalize_preference_row)


def _read_all(paths: Sequence[str], normalize: Normalize) -> list[FileRow]:
    if isinstance(paths, str) or not paths:
        raise ValueError(f"dataset paths: expected a list of one file or more, got {paths!r}")
    read = [
        FileRow.of(row, f"{path}, row {number}", Path(path).parent)
        for path in paths
        for number, row in enumerate(read_rows(path))
    ]
    return map_rows(lambda _, row: FileRow.of(normalize(row), row.where, row.folder), read)


def load_rows(
    spec: FunctionSpec, paths: Sequence[str], *, normalize: Normalize
) -> Sequence[FileRow]:
    """Call the dataset function that a config names, and bring the rows it gives into one form.

    Args:
        spec: `verl_rows`, `sft_rows`, or the user's `my_file.py:name`, called as
            `name(paths, **keywords)`; a class serves too when its instances are sequences.
        paths: the configured files.
        normalize: `normalize_prompt_row` or one of its siblings.

    Returns:
        The rows.

    Raises:
        ValueError: the result is not a sequence; `RowError` for rows that do not fit;
            `ConfigError` when the function can't be found or does not take the keywords.

    >>> load_rows(FunctionSpec("verl_rows"), ["no.parquet"], normalize=normalize_prompt_row)
    Traceback (most recent call last):
    ValueError: no.parquet: no such file
    """
    rows = load_function(spec, home=__name__, passed=("paths",), key="data.dataset")(paths)
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, Mapping):
        raise ValueError(
            f"dataset: expected a sequence of rows from {spec.fn!r}, got a {type(rows).__name__}"
        )

    def normalized(number: int, _: int) -> FileRow:
        row, where = rows[number], f"{spec.fn}, row {number}"
        known = row if isinstance(row, FileRow) else FileRow.of({}, where, Path())
        return FileRow.of(normalize(row), known.where, known.folder)

    return map_rows(normalized, range(len(rows)), name=lambda n, _: f"{spec.fn}, row {n}")


def normalize_prompt_row(row: Any) -> Row:
    """Return a row of verl's schema, its chat and its tools in one form.

    Raises:
        ValueError: it does not fit the schema.

    >>> normalize_prompt_row({"prompt": "2+2="})
    Traceback (most recent call last):
    ValueError: field 'prompt': expected a list of messages, got '2+2='
    """
    made = as_row(row)
    made["prompt"] = normalize_messages(made.get("prompt"), "prompt", parts=True)
    source = made.get("data_source")
    if not isinstance(source, str) or not source:
        raise field_error("data_source", source, "a non-empty string")
    reward = made.get("reward_model")
    if not isinstance(reward, dict):
        raise field_error("reward_model", reward, "an object with a 'ground_truth'")
    truth = reward.get("ground_truth")
    if truth is None or (isinstance(truth, float) and math.isnan(truth)):
        raise field_error("reward_model.ground_truth", truth, "the reference answer")
    if not isinstance(made.get("extra_info", {}), dict):
        raise field_error("extra_info", made["extra_info"], "an object or nothing")
    return with_tool_schemas(made)


def normalize_example_row(row: Any) -> Row:
    """Return a supervised row in one of two forms: an answer to a prompt, or a conversation.

    An answer to a prompt is `{"prompt": [messages], "response": …}`, where `completion` does for
    `response`: a text, or one message of the assistant, which may stand in a list. A conversation
    is `{"messages": [messages]}`, of which each answer of the assistant is learned. Both may have
    `tools`.

    Raises:
        ValueError: it is neither of these.

    >>> row = {"prompt": [{"role": "user", "content": "2+2="}], "response": 4}
    >>> normalize_example_row(row)
    Traceback (most recent call last):
    ValueError: field 'response': expected a non-empty string or one assistant's message, got 4
    """
    made = as_row(row)
    check_columns(made)
    if "messages" not in made:
        made["prompt"] = normalize_messages(made.get("prompt"), "prompt", parts=True)
        name = "completion" if "completion" in made else "response"
        answer = made.pop(name, None)
        message = normalize_answer(answer, name, parts=True)
        made["response"] = message["content"] if isinstance(answer, str) else message
        return with_tool_schemas(made)
    for name in ("response", "completion"):
        if name in made:
            raise field_error(name, made[name], "nothing beside 'messages'")
    if not isinstance(made.pop("prompt", ""), str):  # a text is a copy of the first message
        raise field_error("prompt", row["prompt"], "nothing beside 'messages'")
    made["messages"] = normalize_messages(made["messages"], "messages", parts=True)
    if all(message["role"] != "assistant" for message in made["messages"]):
        raise field_error("messages", made["messages"], "an answer of the assistant among them")
    return with_tool_schemas(made)


def normalize_step_row(row: Row, prompt: list[Row]) -> Row:
    """Return a row whose answer has labelled steps in this library's form.

    Args:
        row: with `completions`, the texts of the steps, and as many `labels`, each true, false or
            a number from 0 to 1.
        prompt: of the row, in one form.

    Returns:
        `prompt`, `completions` and `labels`, numbers.

    Raises:
        ValueError: it is another.

    >>> row = {"completions": ["1+1=2", "2*2=5"], "labels": [True, False]}
    >>> normalize_step_row(row, [{"role": "user", "content": "2(1+1)="}])["labels"]
    [1.0, 0.0]
    """
    steps, labels = row["completions"], row.get("labels")
    if not isinstance(steps, list) or not steps:
        raise field_error("completions", steps, "a list of the texts of steps")
    for number, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise field_error(f"completions[{number}]", step, "the text of a step")
        check_unicode(step, f"completions[{number}]")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise field_error("labels", labels, f"a list of {len(steps)}, one for each step")
    for number, label in enumerate(labels):
        if finite_number(label) is None or not 0 <= label <= 1:
            expected = "true, false or a number from 0 to 1"
            raise field_error(f"labels[{number}]", label, expected)
    return {"prompt": prompt, "completions": steps, "labels": [float(label) for label in labels]}


REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps")
"""Columns of rows that bring log-probs under the reference along."""


def normalize_preference_row(row: Any) -> Row:
    """Return a row in this library's form, from any of the forms that data sets have.

    A pair is `{"prompt", "chosen", "rejected"}`, with answers that are texts, messages of the
    assistant, or whole chats that begin with the prompt, which need no `prompt` then; optionally
    `margin`, or `score_chosen` and `score_rejected`, whose difference it is. An answer with a
    label is `{"prompt", "completion" or "response", "label": bool}`. An answer whose steps have
    labels is `{"prompt", "completions", "labels"}`; see `normalize_step_row`. A prompt is a list
    of messages, or a text, which is then the user's. All may have `tools`.

    Args:
        row: as it is in a file, or as it is returned here.

    Returns:
        The row with `prompt` as messages, and answers as messages of the assistant, or steps as
        texts.

    Raises:
        ValueError: it is none of these.

    >>> chat = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    >>> row = {"chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "5"}]}
    >>> made = normalize_preference_row(row)
    >>> made["prompt"], made["chosen"]["content"], made["rejected"]["content"]
    ([{'role': 'user', 'content': '2+2='}], '4', '5')
    """
    row = as_row(row)
    check_columns(row)
    if columns := [name for name in ("images", "videos") if row.get(name)]:
        raise field_error(columns[0], row[columns[0]], "nothing: preferences are of text")
    prompt, tools = row.get("prompt"), {"tools": row.get("tools", [])}
    if isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}]
    if "completions" in row:
        return with_tool_schemas(
            normalize_step_row(row, normalize_messages(prompt, "prompt")) | tools
        )
    if "chosen" in row or "rejected" in row:
        made = _pair(row, prompt)
    else:
        name = "completion" if "completion" in row else "response"
        if not isinstance(row.get("label"), bool):
            raise field_error("label", row.get("label"), "true or false")
        answer = normalize_answer(row.get(name), name)
        made = {
            "prompt": normalize_messages(prompt, "prompt"),
            "response": answer,
            "label": row["label"],
        }
    return with_tool_schemas(made | tools | _numbers(row))


def _pair(row: Row, prompt: Any) -> Row:
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if _is_whole_chat(chosen):
        if not _is_whole_chat(rejected):
            raise field_error("rejected", rejected, "a chat that begins as 'chosen' does")
        chosen, rejected = (normalize_messages(row[n], n) for n in ("chosen", "rejected"))
        shared = _count_shared(chosen, rejected)
        if (
            isinstance(row.get("prompt"), list)
            and normalize_messages(prompt, "prompt") != (chosen[:shared])
        ):
            raise field_error("prompt", prompt, "the messages with which both chats begin, or none")
        prompt, chosen, rejected = chosen[:shared], chosen[shared], rejected[shared]
    made = {
        "prompt": normalize_messages(prompt, "prompt"),
        "chosen": normalize_answer(chosen, "chosen"),
        "rejected": normalize_answer(rejected, "rejected"),
    }
    if made["chosen"] == made["rejected"]:
        raise ValueError("chosen and rejected are the same answer: remove such rows")
    return made


def _is_whole_chat(answer: Any) -> bool:
    """Return whether an answer is a chat with its prompt."""
    return (
        isinstance(answer, list)
        and bool(answer)
        and isinstance(answer[0], dict)
        and answer[0].get("role") in ("user", "system", "developer")
    )


def _count_shared(chosen: list[Row], rejected: list[Row]) -> int:
    """Return with how many messages two chats begin that differ in their last one."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same chat: remove such rows")
    if len(chosen) - shared != 1 or len(rejected) - shared != 1:
        raise ValueError(
            f"expected chats that differ in their last message, got {len(chosen)} and "
            f"{len(rejected)} messages, of which the first {shared} are the same"
        )
    return shared


def _numbers(row: Row) -> dict[str, float]:
    numbers = {}
    for name in ("margin", "score_chosen", "score_rejected", *REFERENCE_COLUMNS):
        value = row.get(name)
        if value is None:
            continue
        number = None if isinstance(value, bool) else finite_number(value)
        if number is None:
            raise field_error(name, value, "a finite number (float32)")
        numbers[name] = number
    scores = [numbers.pop(name, None) for name in ("score_chosen", "score_rejected")]
    if scores[0] is not None and scores[1] is not None:
        numbers.setdefault("margin", scores[0] - scores[1])
    return numbers

"""Rows on disk: reading and writing them, and checking them one by one.

Rows follow verl's schema, so its prepared files work unchanged: `prompt` (a list of messages),
`data_source`, `reward_model` with a `ground_truth`, and optionally `extra_info`, `ability` and
`tools`. Supervised rows hold `prompt` and `response`, or a conversation as `messages`. A custom
dataset is any function or class that is called with the configured paths and gives a sequence of
such rows. Whatever their origin, rows are brought into one form.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.config.errors import ConfigError, RowError, RunError
from jaxrl_llm.config.functions import FunctionSpec, load_function
from jaxrl_llm.files import atomic_write
from jaxrl_llm.workers.values import finite_number, short_repr

# Rows of data: one form for their messages and tools, and errors that name a row and its field.
#
# Data sets write chats in several ways, and Arrow gives every struct of a column the keys of all
# others. What is read here says the same afterwards, in one form; what would be left out is
# refused.

__all__ = ["preference_rows", "sft_rows", "verl_rows"]

Row = dict[str, Any]
Item = TypeVar("Item")
Made = TypeVar("Made")

PARTS = ("text", "image", "image_url", "video")
"""Types of the parts of a message."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Under which names data sets have the reasoning of an answer."""

UNREAD = (
    *("weight", "loss_weight", "sample_weight", "loss_mask", "assistant_masks", "completion_mask"),
    *("chat_template_kwargs", "input_ids"),
)
"""Columns of supervised rows and of preferences that change what other libraries learn of them."""

LISTED = 10
"""How many bad rows an error lists; the others are counted."""


class FileRow(dict[str, Any]):
    """A row that knows where it is from.

    Attributes:
        folder: of its file, where relative paths in it begin.
        where: its file and its number in that, for messages.
    """

    folder: Path = Path()
    where: str = ""

    @classmethod
    def of(cls, row: Row, where: str, folder: Path) -> "FileRow":
        """Return a row with the place that it is from."""
        made = cls(row)
        made.where, made.folder = where, folder
        return made


def row_name(number: int, row: Any) -> str:
    """Return where a row is from, or its number in the dataset."""
    where = row.where if isinstance(row, FileRow) else ""
    return where or f"dataset row {number}"


@contextlib.contextmanager
def naming_row(where: str, number: int) -> Iterator[None]:
    """Turn whatever is raised while a row is used into a `RowError` that names it.

    Errors of the config and of the run are about no row, and stay what they are, as does a lack of
    memory.
    """
    try:
        yield
    except (ConfigError, RunError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
        if not isinstance(error, ValueError | OSError) or not text:
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        raise RowError(f"{where}: {text}", rows=(number,)) from error


def map_rows(
    function: Callable[[int, Item], Made],
    rows: Sequence[Item],
    *,
    name: Callable[[int, Item], str] = row_name,
) -> list[Made]:
    """Return what a function makes of each row, called with its number, counted from 0, and itself.

    Args:
        function: may raise anything.
        rows: of a dataset.
        name: where a row is from.

    Raises:
        RowError: lists the rows that can't be used, the first ten by name.

    >>> map_rows(lambda number, row: 1 // row, [1, 0, 2, 0], name=lambda n, _: f"a.jsonl, row {n}")
    Traceback (most recent call last):
    jaxrl_llm.config.errors.RowError: a.jsonl, row 1: ZeroDivisionError: \
integer division or modulo by zero
    a.jsonl, row 3: ZeroDivisionError: integer division or modulo by zero
    """
    made, bad = [], list[RowError]()
    for number, row in enumerate(rows):
        try:
            with naming_row(name(number, row), number):
                made.append(function(number, row))
        except RowError as error:
            bad.append(error)
    if bad:
        lines = [line for error in bad[:LISTED] for line in error.args]
        more = [f"and {len(bad) - LISTED} more rows"] if len(bad) > LISTED else []
        numbers = tuple(number for error in bad for number in error.rows)
        raise RowError(*lines, *more, rows=numbers) from bad[0]
    return made


def as_row(row: Any) -> Row:
    """Return a row without the columns that hold nothing.

    Raises:
        ValueError: it is not a dict.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected a row as a dict, got {abbreviated(row)}")
    return {name: value for name, value in row.items() if value is not None}


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that Arrow adds, which hold nothing.

    >>> without_nulls([{"name": "add", "arguments": {"a": 1, "b": None}}, None])
    [{'name': 'add', 'arguments': {'a': 1}}, None]
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def normalize_messages(messages: Any, name: str, *, parts: bool = False) -> list[Row]:
    """Return a chat in one form; see `normalize_message`.

    Raises:
        ValueError: it is not a list of messages, or one can't be used.
    """
    if not isinstance(messages, list) or not messages:
        raise field_error(name, messages, "a list of messages")
    return [normalize_message(m, f"{name}[{i}]", parts=parts) for i, m in enumerate(messages)]


def normalize_message(message: Any, name: str, *, parts: bool = False) -> Row:
    """Return a message with `role` and `content`, and no key that holds nothing.

    It keeps `name`, `tool_call_id`, `tool_calls` in OpenAI's form, whose arguments are objects, and
    the reasoning of an answer, as `reasoning_content`.

    Args:
        message: as a data set has it.
        name: of its field, for messages.
        parts: whether a content may be a list of typed parts, too.

    Raises:
        ValueError: it has another key, which nothing would read, or a value can't be used.

    >>> call = {"name": "add", "arguments": '{"a": 1}'}
    >>> message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    >>> normalize_message(message, "prompt[1]")["tool_calls"]
    [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
    """
    if not isinstance(message, dict):
        raise field_error(name, message, "an object with 'role' and 'content'")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise field_error(f"{name}.role", role, "a string")
    more = {k: v for k, v in message.items() if k not in ("role", "content") and not _is_empty(v)}
    made = _texts(more, name)
    if calls := more.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise field_error(f"{name}.tool_calls", calls, "a list of calls")
        made["tool_calls"] = [
            _normalize_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if more:
        key = next(iter(more))
        raise ValueError(
            f"field '{name}.{key}': nothing reads such a key: remove it from the messages (got "
            f"{abbreviated(more[key])})"
        )
    if (
        content is None
        and role == "assistant"
        and made.keys() & {"tool_calls", "reasoning_content"}
    ):
        content = ""
    if parts and isinstance(content, list):
        _check_parts(content, f"{name}.content")
    elif not isinstance(content, str):
        raise field_error(f"{name}.content", content, "a string")
    made = {"role": role, "content": content} | made
    check_unicode(made, name)
    return made


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _texts(more: Row, name: str) -> Row:
    """Take the keys out of a message that hold a text."""
    made = {key: more.pop(key) for key in ("name", "tool_call_id") if key in more}
    reasoning = {key: more.pop(key) for key in REASONING if key in more}
    if len({repr(text) for text in reasoning.values()}) > 1:
        raise field_error(name, reasoning, "one text of reasoning")
    for key, text in (made | reasoning).items():
        if not isinstance(text, str):
            raise field_error(f"{name}.{key}", text, "a string")
    return made | ({REASONING[0]: next(iter(reasoning.values()))} if reasoning else {})


def _normalize_call(call: Any, name: str) -> Row:
    """Return a call in OpenAI's form, from this or from `{"name", "arguments"}`."""
    if not isinstance(call, dict):
        raise field_error(name, call, "a call, with the 'name' of a function and 'arguments'")
    given = {key: value for key, value in call.items() if value is not None}
    identity, kind = given.pop("id", ""), given.pop("type", "function")
    if not isinstance(identity, str):
        raise field_error(f"{name}.id", identity, "a string")
    if kind != "function":
        raise field_error(f"{name}.type", kind, "'function'")
    if "function" in given:
        function = given.pop("function")
        if given or not isinstance(function, dict):
            raise field_error(name, call, "a 'function', with a 'name' and 'arguments'")
        name = f"{name}.function"
        given = {key: value for key, value in function.items() if value is not None}
    title, arguments = given.pop("name", None), given.pop("arguments", {})
    if not isinstance(title, str) or not title:
        raise field_error(f"{name}.name", title, "the name of a function")
    if given:
        raise field_error(name, call, "'name' and 'arguments', and nothing beside")
    if isinstance(arguments, str):
        arguments = _from_json(arguments or "{}", f"{name}.arguments")
    if not isinstance(arguments, dict):
        raise field_error(f"{name}.arguments", arguments, "an object, or its JSON")
    made = {"type": "function", "function": {"name": title, "arguments": arguments}}
    return {"id": identity} | made if identity else made


def normalize_answer(answer: Any, name: str, *, parts: bool = False) -> Row:
    """Return an answer as the assistant's message.

    Args:
        answer: a text, or the message, which may stand in a list.
        name: of its field, for messages.
        parts: as for `normalize_message`.

    Raises:
        ValueError: it is neither, or says nothing.

    >>> normalize_answer("4", "chosen")
    {'role': 'assistant', 'content': '4'}
    """
    if isinstance(answer, list) and len(answer) == 1:
        answer, name = answer[0], f"{name}[0]"
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    if not isinstance(answer, dict):
        raise field_error(name, answer, "a non-empty string or one assistant's message")
    made = normalize_message(answer, name, parts=parts)
    if made["role"] != "assistant":
        raise field_error(f"{name}.role", made["role"], "'assistant'")
    if not made["content"] and "tool_calls" not in made:
        raise field_error(name, made["content"], "a non-empty string or one assistant's message")
    return made


def with_tool_schemas(row: Row) -> Row:
    """Return a row with its tools in one form, or without a column for them where it has none."""
    tools = normalize_tools(row.get("tools", []))
    return {k: v for k, v in row.items() if k != "tools"} | ({"tools": tools} if tools else {})


def check_columns(row: Row) -> None:
    """Raise ValueError for a column that other libraries read, where it changes what is learned."""
    for name in UNREAD:
        if not _is_empty(row.get(name)):
            raise ValueError(f"field {name!r}: nothing reads such a column: remove it")


def normalize_tools(tools: Any) -> list[Row]:
    """Return the schemas of tools in OpenAI's form.

    Args:
        tools: a list of schemas, in that form or without the `function` around them; the list, or
            each schema, may be JSON.

    Raises:
        ValueError: one can't be used.

    >>> normalize_tools('[{"name": "now", "parameters": {"type": "object"}}]')
    [{'type': 'function', 'function': {'name': 'now', 'parameters': {'type': 'object'}}}]
    """
    if isinstance(tools, str):
        tools = _from_json(tools or "[]", "tools")
    if not isinstance(tools, list):
        raise field_error("tools", tools, "a list of schemas of tools, or its JSON")
    return [_normalize_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _normalize_tool(tool: Any, name: str) -> Row:
    if isinstance(tool, str):
        tool = _from_json(tool, name)
    if not isinstance(tool, dict):
        raise field_error(name, tool, "the schema of a tool")
    made = tool if "function" in tool else {"type": "function", "function": tool}
    if made.get("type", "function") != "function":
        raise field_error(f"{name}.type", made["type"], "'function'")
    function = made["function"]
    title = function.get("name") if isinstance(function, dict) else None
    if not isinstance(title, str) or not title:
        raise field_error(name, tool, "the schema of a function, with its 'name'")
    if not isinstance(function.get("parameters"), dict | None):
        expected = "a JSON schema, as an object"
        raise field_error(f"{name}.parameters", function["parameters"], expected)
    check_unicode(made, name)
    return {"type": "function"} | made


def _from_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"field {name!r}: not JSON: {error}: {abbreviated(text)}") from error


def _check_parts(parts: list[Any], name: str) -> None:
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS:
            expected = f"an object whose 'type' is one of {', '.join(PARTS)}"
            raise field_error(f"{name}[{number}]", part, expected)
        for key in ("text", "image_url"):
            if kind == key and part.get(key) is None:
                raise field_error(f"{name}[{number}].{key}", None, f"a part's {key}")
        if kind == "text" and not isinstance(part["text"], str):
            raise field_error(f"{name}[{number}].text", part["text"], "a string")


def check_unicode(value: Any, name: str) -> None:
    """Raise ValueError for a text that no tokenizer takes: half of a surrogate pair is in it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            expected = "a text of Unicode, without halves of surrogate pairs"
            raise field_error(name, value, expected) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            check_unicode(key, name)
            check_unicode(item, f"{name}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            check_unicode(item, f"{name}[{number}]")


def field_error(name: str, value: Any, expected: str) -> ValueError:
    """Return the error of a field that does not hold what is expected."""
    return ValueError(f"field {name!r}: expected {expected}, got {abbreviated(value)}")


def abbreviated(value: Any) -> str:
    """Return a value as text of at most 80 characters."""
    return "nothing" if value is None else short_repr(value, 80)


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
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter of what is nested too deep
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object, got a {type(row).__name__}")
        rows.append(row)
    return rows


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

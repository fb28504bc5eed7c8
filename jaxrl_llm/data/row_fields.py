"""Rows of data: one form for their messages and tools, and errors that name a row and its field.

Data sets write chats in several ways, and Arrow gives every struct of a column the keys of all
others. What is read here says the same afterwards, in one form; what would be left out is refused.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.config.errors import ConfigError, RowError, RunError
from jaxrl_llm.workers.values import short_repr

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

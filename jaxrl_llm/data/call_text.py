"""What the formats of calls share: the records, and reading JSON without mending it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE, BEGIN, END, INNER, LAST, MIDDLE = (chr(0xD800 + i) for i in range(7))
"""What stands for markers while an answer is read: surrogates, which no decoded text contains.

The first two are `<think>` and `</think>`, the others a format's markers in order.
"""

Tools = Sequence[Mapping[str, Any]]


class ToolCall(NamedTuple):
    """A call of a tool as a model wrote it.

    Attributes:
        name: of the tool; empty where the text has none.
        arguments: by parameter name.
        id: by which a tool's message names the call.
        error: why the text is no call, and what was expected; told to the model.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""
    error: str | None = None


class BadCall(Exception):
    """Why a text is no call; `name` is the tool's where it could be read."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def attempt(read: Callable[[], ToolCall]) -> ToolCall:
    """Return the call that `read` returns, or one that says why there is none."""
    try:
        return read()
    except BadCall as bad:
        return ToolCall(bad.name, {}, error=str(bad))
    except RecursionError:
        return ToolCall("", {}, error="the call is nested too deep; expected a flatter one")


def read_blocks(
    marked: str, end: str, read: Callable[[str], list[ToolCall]]
) -> tuple[str, list[ToolCall]]:
    """Return the text outside of BEGIN … END, and the calls inside.

    The last block of an answer needs no end marker if it can be read, as in vLLM.

    Args:
        marked: with markers as single characters.
        end: the marker that ends a block, for the error.
        read: from a block to its calls.
    """
    text, *parts = marked.split(BEGIN)
    calls = list[ToolCall]()
    for number, part in enumerate(parts, 1):
        inside, closed, after = part.partition(END)
        found = read(inside)
        if not closed and (number < len(parts) or any(call.error for call in found)):
            reason = f"the call is not closed: expected {end} after {quote(inside)}"
            found = [ToolCall("", {}, error=reason)]
        text, calls = text + after, calls + found
    return text, calls


def load_json(text: str, expected: str) -> Any:
    """Return the value of a text of JSON in which nothing is doubtful.

    Args:
        text: one value and nothing after it.
        expected: what it should look like, for the error.

    Raises:
        BadCall: it is no JSON, has a key twice, a number that is not finite, or half a character.

    >>> load_json('{"a": 1, "a": 2}', "an object")
    Traceback (most recent call last):
    jaxrl_llm.data.call_text.BadCall: the key 'a' is there twice; expected an object
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict[str, Any]()
        for key, item in pairs:
            if key in value:
                raise BadCall(f"the key {key!r} is there twice; expected {expected}")
            value[key] = item
        return value

    try:
        value = json.loads(text, object_pairs_hook=once)
        check_value(value, expected)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"no JSON: {error}; expected {expected}") from error
    return value


def check_value(value: Any, expected: str) -> None:
    """Refuse numbers that are not finite, and texts that no encoding can write.

    Raises:
        BadCall: there is one in the value.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_value(key, expected)
            check_value(item, expected)
    elif isinstance(value, list):
        for item in value:
            check_value(item, expected)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadCall(f"the number {value} is not finite; expected {expected}")
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise BadCall(f"{value!r} holds half of a surrogate pair; expected {expected}")


def quote(value: Any) -> str:
    """Return the first 80 characters of a value, for an error."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def json_call(value: Any, key: str, optional: Sequence[str] = ()) -> ToolCall:
    """Return the call of `{"name": ..., key: {...}}`.

    Args:
        value: of which JSON.
        key: under which the arguments stand.
        optional: keys that may be there, too.

    Raises:
        BadCall: it is another object, or none.
    """
    expected = f'{{"name": "...", "{key}": {{...}}}}'
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise BadCall(f"got {quote(value)}, expected {expected}")
    if set(value) - {*optional} != {"name", key}:
        raise BadCall(f"got the keys {sorted(value)}, expected {expected}", name)
    if not isinstance(value[key], dict):
        raise BadCall(f"{key}: got {quote(value[key])}, expected an object", name)
    return ToolCall(name, value[key])


def dump_json(value: Any) -> str:
    """Return a value as JSON, every letter as itself."""
    return json.dumps(value, ensure_ascii=False)


def count_common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items two sequences begin with that are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def joined_contents(one: Any, other: Any) -> Any:
    """Return the contents of two messages as those of one; parts follow each other.

    >>> joined_contents("a", "b"), len(joined_contents("a", [{"type": "image"}]))
    ('a\\n\\nb', 2)
    """
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in (one, other))
    return [part for content in parts for part in content]

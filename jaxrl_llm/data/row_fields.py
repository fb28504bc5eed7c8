"""What the fields of rows hold, and how an error names one that holds something else."""

from typing import Any

PARTS = ("text", "image", "image_url", "video")
"""Types of the parts of a message."""


def check_messages(row: Any, where: str, *, parts: bool = False) -> None:
    """Raise ValueError unless a row's prompt is a list of messages with role and content.

    Args:
        row: to check.
        where: it stands, for messages.
        parts: whether a content may be a list of typed parts, too.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a row as a dict, got {abbreviated(row)}")
    messages = row.get("prompt")
    if not isinstance(messages, list) or not messages:
        raise field_error(where, "prompt", messages, "a list of messages")
    for number, message in enumerate(messages):
        name = f"prompt[{number}]"
        if not isinstance(message, dict):
            raise field_error(where, name, message, "an object with 'role' and 'content'")
        is_list = parts and isinstance(message.get("content"), list)
        if is_list:
            _check_parts(message["content"], f"{name}.content", where)
        for key in ("role",) if is_list else ("role", "content"):
            if not isinstance(message.get(key), str):
                raise field_error(where, f"{name}.{key}", message.get(key), "a string")


def _check_parts(parts: list[Any], name: str, where: str) -> None:
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS:
            expected = f"an object whose 'type' is one of {', '.join(PARTS)}"
            raise field_error(where, f"{name}[{number}]", part, expected)
        for key in ("text", "image_url"):
            if kind == key and part.get(key) is None:
                raise field_error(where, f"{name}[{number}].{key}", None, f"a part's {key}")
        if kind == "text" and not isinstance(part["text"], str):
            raise field_error(where, f"{name}[{number}].text", part["text"], "a string")


def field_error(where: str, name: str, value: Any, expected: str) -> ValueError:
    """Return the error of a field that does not hold what is expected."""
    return ValueError(f"{where}: field {name!r}: expected {expected}, got {abbreviated(value)}")


def abbreviated(value: Any) -> str:
    """Return a value as text of at most 80 characters."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

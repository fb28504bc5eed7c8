"""What the fields of rows hold, and how an error names one that holds something else."""

from typing import Any


def check_messages(row: Any, where: str) -> None:
    """Raise ValueError unless a row's prompt is a list of messages with role and content."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a row as a dict, got {abbreviated(row)}")
    messages = row.get("prompt")
    if not isinstance(messages, list) or not messages:
        raise field_error(where, "prompt", messages, "a list of messages")
    for number, message in enumerate(messages):
        name = f"prompt[{number}]"
        if not isinstance(message, dict):
            raise field_error(where, name, message, "an object with 'role' and 'content'")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise field_error(where, f"{name}.{key}", message.get(key), "a string")


def field_error(where: str, name: str, value: Any, expected: str) -> ValueError:
    """Return the error of a field that does not hold what is expected."""
    return ValueError(f"{where}: field {name!r}: expected {expected}, got {abbreviated(value)}")


def abbreviated(value: Any) -> str:
    """Return a value as text of at most 80 characters."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

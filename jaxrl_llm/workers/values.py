"""Numbers, plain data and texts as functions of users give them: checked, and shortened."""

import math
import numbers
from typing import Any

UNSCORED = "unscored"
"""The kind of an outcome without a score, and what `reward.on_error` is to make failures such."""

LARGEST_NUMBER = (2 - 2.0**-23) * 2.0**127
"""Of float32."""


def shorten(text: str, limit: int = 300) -> str:
    """Return the text with its middle left out where it is longer than `limit` characters.

    >>> shorten("abcdefgh", 5)
    'ab…gh'
    """
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def short_repr(value: Any, limit: int = 100) -> str:
    """Return the `repr` of a value, if it has one, in at most `limit` characters.

    >>> short_repr([1, 2]), short_repr(10**5000)
    ('[1, 2]', 'an int')
    """
    try:
        return shorten(repr(value), limit)
    except Exception:  # of an int with too many digits, or of a class of the user's
        name = type(value).__name__
        return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def finite_number(value: Any) -> float | None:
    """Return a number that float32 can hold, in which scores are used; None where it is none.

    What a function of the user's returns, what a row holds and what a model has written goes
    through here: `float` raises an OverflowError for an int of 309 digits or more.

    >>> finite_number(True), finite_number(10**400), finite_number(1e39), finite_number("1")
    (1.0, None, None, None)
    """
    try:
        number = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        number = float(number) if isinstance(number, numbers.Real) else math.nan
    except Exception:  # of an int beyond float64, or of a class of the user's
        return None
    return number if abs(number) <= LARGEST_NUMBER else None


def to_plain(value: Any) -> Any:
    """Return a value as JSON may hold it, such as the number in a scalar of numpy or torch.

    Raises:
        TypeError: it is no plain data.
    """
    if hasattr(value, "item"):  # numpy and torch scalars
        return value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    if value is None or isinstance(value, str | dict | list | tuple):
        return value
    raise TypeError(f"a {type(value).__name__} is not plain data")


def memory_limit(error: BaseException | None, memory_gb: int | float | None, keys: str) -> str:
    """Return what a process may take, if that is the cause of an error; else nothing.

    >>> memory_limit(MemoryError(), 4, "reward.")
    '; it may take 4 GB (reward.memory_gb)'
    """
    is_cause = memory_gb is not None and isinstance(error, MemoryError)
    return f"; it may take {memory_gb:g} GB ({keys}memory_gb)" if is_cause else ""

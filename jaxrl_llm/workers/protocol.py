"""What goes between a pool and its workers: pickles there, and lines of JSON back.

Nothing in a line is taken on trust: a user's function may have written it.
"""

import json
import math
import numbers
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

UNSCORED = "unscored"
"""The kind of an outcome without a score, and what `reward.on_error` is to make failures such."""

MAX_LOAD_ERROR_CHARS = 2000
LARGEST_NUMBER = (2 - 2.0**-23) * 2.0**127
"""Of float32."""

Serve = Callable[[BinaryIO, BinaryIO], None]
"""Reads requests and writes answers until there are no more, which is an EOFError or an OSError."""


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


def encode_load_error(message: str | None) -> bytes:
    """Return a worker's first line: what is wrong with what it should run, or null.

    >>> encode_load_error(None)
    b'{"load_error": null}\\n'
    """
    shortened = None if message is None else shorten(message, MAX_LOAD_ERROR_CHARS)
    return json.dumps({"load_error": shortened}).encode() + b"\n"


def decode_load_error(line: bytes) -> str | None:
    """Return what a worker's first line says is wrong with what it should run; None if nothing is.

    Raises:
        ValueError: it is another line.

    >>> decode_load_error(b'{"load_error": null}')
    """
    try:
        first = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(first, dict) or first.keys() != {"load_error"}:
        raise ValueError(f"expected an object with load_error, got {shorten(repr(first))}")
    message = first["load_error"]
    return None if message is None else shorten(str(message), MAX_LOAD_ERROR_CHARS)


def serve_requests(
    fd: int,
    load: Callable[[Any], Serve],
    describe_load_error: Callable[[Exception], str],
) -> None:
    """Answer lists of `(number, request)` until the pool closes the connection.

    The pool sends pickles: first a spec, then the lists. It gets lines, as what runs here is not
    trusted and could write on the connection, too: first what is wrong with the spec or null, then
    an answer for each request.

    Args:
        fd: the file descriptor of our end of the connection.
        load: from the spec to what answers.
        describe_load_error: returns what is told of an error of `load`.
    """
    with (
        suppress(EOFError, OSError),
        open(fd, "rb") as requests,
        open(fd, "wb", closefd=False) as out,
    ):
        serve, load_error = None, None
        try:
            serve = load(pickle.load(requests))
        except EOFError:
            raise
        except Exception as error:  # also of a function given from Python, which is unpickled
            load_error = describe_load_error(error)
        out.write(encode_load_error(load_error))
        out.flush()
        if serve is not None:
            serve(requests, out)


def answering_in_turn(answer: Callable[[int, Any], bytes]) -> Serve:
    """Return what answers one request after another.

    Args:
        answer: (number, request) -> a line.
    """

    def serve(requests: BinaryIO, out: BinaryIO) -> None:
        while True:
            for number, request in pickle.load(requests):
                out.write(answer(number, request))
                out.flush()

    return serve

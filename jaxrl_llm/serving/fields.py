"""The fields of a request's JSON, read one by one; what is left over is refused.

By hand: pydantic took 538 lines for 540 here and in `requests`, and reordered tool calls' keys.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

NOTHING_CHANGES = {"user", "store", "metadata", "safety_identifier", "service_tier"}
NOTHING_CHANGES |= {"prompt_cache_key", "prompt_cache_retention"}
"""Fields that have no effect on an answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Fields that are not supported, and the values that ask for nothing."""

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
KINDS |= {list: "a list", dict: "an object"}


class APIError(Exception):
    """A request that is answered with an error.

    Args:
        message: what was wrong, what was got and what was expected.
        param: the field.
        status: of HTTP.
        code: OpenAI's word for it, where there is one.
        headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what the answer says."""
        super().__init__(message)
        self.message, self.param = encodable(message), param and encodable(param)
        self.status, self.code = status, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Return the answer in OpenAI's format.

        >>> APIError("n=0, expected 1 or more", param="n").body["error"]["type"]
        'invalid_request_error'
        """
        kinds = {429: "rate_limit_error", 500: "server_error", 504: "timeout_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class Fields:
    """The fields of a JSON object; `null` is as good as none.

    >>> fields = Fields({"n": 2, "seed": None, "user": "me"})
    >>> fields.take("n", int, 1), fields.take("seed", int)
    (2, None)
    >>> fields.end()
    """

    def __init__(self, tree: Mapping[str, Any], prefix: str = "") -> None:
        """Take an object; `prefix` is said before its names."""
        self._left = {name: value for name, value in tree.items() if value is not None}
        self._prefix = prefix

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field, or the default where there is none.

        Raises:
            APIError: it is of another kind.
        """
        if name not in self._left:
            return default
        value = self._left.pop(name)
        if not is_a(value, kind):
            raise self.refuse(name, value, KINDS[kind])
        return float(value) if kind is float else value

    def between(
        self, name: str, kind: type, default: Any, low: int | float, high: int | float
    ) -> Any:
        """Return a number from `low` to `high`.

        Raises:
            APIError: it is none.
        """
        value = self.take(name, kind, default)
        if value is not None and not low <= value <= high:
            expected = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise self.refuse(name, value, expected)
        return value

    def has(self, name: str) -> bool:
        """Tell whether there is such a field, which was not taken yet."""
        return name in self._left

    def any_of(self, name: str) -> Any:
        """Return a field of any kind, or None."""
        return self._left.pop(name, None)

    def refuse(self, name: str, value: Any, expected: str) -> APIError:
        """Return the refusal of a value."""
        return APIError(
            f"{self._prefix}{name}: got {shown(value)}, expected {expected}",
            param=self._prefix + name,
        )

    def end(self) -> None:
        """Refuse what was not taken, unless it changes nothing.

        Raises:
            APIError: a field is unknown or asks for what is not supported.
        """
        for name, value in self._left.items():
            if name in NOTHING_CHANGES and not self._prefix:
                continue
            if name not in NEUTRAL or self._prefix:
                raise APIError(
                    f"unknown field {self._prefix + name!r}: it is not supported; remove it",
                    param=self._prefix + name,
                )
            if not any(value == neutral for neutral in NEUTRAL[name]):
                raise APIError(
                    f"{name}: got {shown(value)}, but it is not supported; remove it", param=name
                )


def is_a(value: Any, kind: type) -> bool:
    """Tell whether a JSON value is of a kind; numbers must be finite, and true is no number.

    >>> is_a(1, float), is_a(True, int), is_a(float("nan"), float)
    (True, False, False)
    """
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and abs(value) < 1e300
    return isinstance(value, kind)


def encodable(text: str) -> str:
    r"""Return a text without halves of surrogate pairs, which JSON may hold and UTF-8 may not.

    >>> encodable("\ud800")
    '\\ud800'
    """
    return text.encode(errors="backslashreplace").decode()


def shown(value: Any) -> str:
    """Return a value as an error shows it: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


HALF_OF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes half of a surrogate pair."""


def strict_json(text: str | bytes) -> Any:
    r"""Return the value of a JSON text, which the standard allows and UTF-8 can hold.

    Python's own reader also takes NaN, numbers that are too large, and halves of surrogate pairs,
    with which neither a tokenizer nor an answer can do anything.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.

    >>> strict_json(r'["\ud83d\ude00"]')
    ['😀']
    >>> strict_json("1e999")
    Traceback (most recent call last):
    ValueError: got 1e999, expected finite numbers
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    if HALF_OF_PAIR.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"got {text}, expected finite numbers")


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        APIError: it is none.

    >>> parse_body(b'{"n": 1}')
    {'n': 1}
    """
    try:
        tree = strict_json(body)
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise APIError(f"the body is {shown(tree)}, expected a JSON object")
    return tree

"""Interpreters of a model's code: limits, results, and the level that a config names."""

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.sandbox.jail import CodeLimits

Level = Literal["expression", "process", "service"]
"""How code is kept from the machine.

`expression` computes arithmetic and nothing else. `process` runs CPython behind limits of Linux's
kernel. `service` sends the code to a SandboxFusion server.
"""

Failure = Literal["error", "timeout", "memory", "killed", "unavailable"]
"""Why code did not come to its end.

`error`: it raised or exited with a code other than 0. `timeout`: it took too long. `memory`: it
asked for more than it may have. `killed`: it broke another limit, or its interpreter was ended.
`unavailable`: the infrastructure failed, for no fault of the code's.
"""


class CodeResult(NamedTuple):
    """What came of one run of code.

    Attributes:
        output: what it printed on its standard output, and the value of its last expression where
            the level shows it.
        errors: what it wrote to its standard error, with the traceback of what it raised.
        failure: None where it came to its end.
        reason: of the failure, one line for the model.
        seconds: that it took.
    """

    output: str
    errors: str = ""
    failure: Failure | None = None
    reason: str = ""
    seconds: float = 0.0


class Interpreter(ABC):
    """Runs code at one level; a context manager. Use it from one thread at a time."""

    @abstractmethod
    def run(self, code: str, *, stdin: str = "") -> CodeResult:
        """Run code.

        Where the interpreter keeps its state, names of earlier runs are there. A run that fails
        for another reason than `error` may lose them, which `reason` says.

        Args:
            code: source.
            stdin: of the code.

        Returns:
            What came of it, also where it failed.
        """

    @abstractmethod
    def close(self) -> None:
        """End it, with all processes and files that its code has made."""

    def __enter__(self) -> "Interpreter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


WHOLE = ("memory_mb", "processes", "file_mb", "output_bytes")


def read_limits(given: Mapping[str, Any], *, wall_s: float) -> CodeLimits:
    """Return limits of code, from the keys of a config.

    Args:
        given: by name; others have their defaults.
        wall_s: the default of `wall_s`, in seconds; that of `cpu_s` is at most as much.

    Raises:
        ConfigError: a name is unknown, or a value is no number above 0.

    >>> read_limits({"memory_mb": 64}, wall_s=4.0)[:3]
    (4.0, 4.0, 64)
    """
    for name, value in given.items():
        if name not in CodeLimits._fields:
            raise ConfigError(f"there is no {name!r}; {closest(name, CodeLimits._fields)}")
        kinds = (int,) if name in WHOLE else (int, float)
        if type(value) not in kinds or not 0 < value < math.inf:
            wanted = "a whole number" if name in WHOLE else "a number"
            raise ConfigError(f"{name}: expected {wanted} above 0, got {value!r}")
    limits = CodeLimits(wall_s=wall_s)._replace(**given)
    return limits if "cpu_s" in given else limits._replace(cpu_s=min(limits[:2]))


DEFAULT_CODE_LIMITS = CodeLimits()


def open_interpreter(
    level: str,
    limits: CodeLimits = DEFAULT_CODE_LIMITS,
    *,
    keep_state: bool = False,
    url: str | None = None,
) -> Interpreter:
    """Return what runs code at a level; never one of a weaker level.

    Args:
        level: of isolation, one of `Level`.
        limits: of each run.
        keep_state: whether a run finds the names that earlier runs have bound.
        url: of the server, for `service` alone.

    Raises:
        ConfigError: there is no such level, or this machine lacks what it needs, which is named.
        ConnectionError: the server of `service` gives no answer.
    """
    if level not in get_args(Level):
        raise ConfigError(f"got sandbox {level!r}; " + closest(level, get_args(Level)))
    if (url is not None) != (level == "service"):
        wanted = "an url" if level == "service" else "no url"
        raise ConfigError(f"sandbox {level}: expected {wanted}, got {url!r}")
    module = importlib.import_module(f"jaxrl_llm.sandbox.{level}")
    return module.open_level(limits, keep_state=keep_state, url=url)


MARK = "\n[... {} bytes left out ...]\n"


class BoundedOutput:
    """The beginning and the end of what is written, of which the middle may be left out.

    Args:
        limit: bytes to keep.

    >>> output = BoundedOutput(8)
    >>> for part in (b"abcdef", b"ghijkl"):
    ...     output.write(part)
    >>> output.text()
    'abcd\\n[... 4 bytes left out ...]\\nijkl'
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = b""
        self._tail = b""
        self._left_out = 0

    def write(self, data: bytes) -> None:
        """Take more of it."""
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        tail = self._tail + data[room:] if room < len(data) else self._tail
        excess = max(0, len(tail) - self._tail_limit)
        self._tail, self._left_out = tail[excess:], self._left_out + excess

    def text(self) -> str:
        """Return it as text: what is no UTF-8 is replaced, and so are NULs."""
        if self._left_out == 0:
            return _as_text(self._head + self._tail)
        return _as_text(self._head) + MARK.format(self._left_out) + _as_text(self._tail)


def shorten_output(text: str, limit: int) -> str:
    """Return a text of which the middle is left out, if it is longer than so many bytes.

    >>> shorten_output("abcdefghijkl", 8)
    'abcd\\n[... 4 bytes left out ...]\\nijkl'
    """
    output = BoundedOutput(limit)
    output.write(text.encode("utf-8", "replace"))
    return output.text()


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")

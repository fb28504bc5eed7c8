"""The level `monty`: a subset of Python, interpreted by a process that has no access to anything.

https://github.com/pydantic/monty. Each run has a process of its own, which starts in a few
milliseconds. What a session keeps is handed from one to the next as bytes, so that a thousand open
sessions are no processes at all.
"""

import ast
import functools
import io
import math
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.sandbox.interpreter import BoundedOutput, CodeLimits, CodeResult, Failure
from jaxrl_llm.workers.protocol import shorten

MAX_RECURSION = 500
MAX_INPUT_LINES = 1_000_000
HANG_S = 30.0  # for an answer of the process that is none of the code's own time
UNCHANGED = "; names are as they were before this code"
SHOW = b"\nif _ is not None:\n    print(repr(_))\n"

CAUSES: dict[str, Failure] = {
    "TimeoutError: feed time limit": "timeout",
    "TimeoutError: sleep limit": "timeout",
    "MemoryError: memory limit": "memory",
    "MemoryError: the worker exceeded its memory limit": "memory",
}
"""How Monty says that code has met a limit, as opposed to an error of its own."""


class _Ran(NamedTuple):
    """How a run ended, and what is kept of it: None where that is lost."""

    failure: Failure | None
    reason: str
    errors: str
    state: bytes | None


class MontyInterpreter:
    """Runs code in processes of Monty.

    Random numbers are the same in each session, as are those of a session that is run again.

    Args:
        limits: of each run. What `wall_s` is more than `cpu_s`, code may sleep. `processes` and
            `file_mb` have no meaning: there are none.
        keep_state: whether names outlive a run.
    """

    def __init__(self, limits: CodeLimits, *, keep_state: bool) -> None:
        self._limits, self._keep_state = limits, keep_state
        self._state: bytes | None = None

    def run(self, code: str, *, stdin: str = "") -> CodeResult:
        """Run code, in time and memory that are bounded; the value of a last expression is shown.

        `input()` reads lines of `stdin`; there is no `sys.stdin`.
        """
        began = time.monotonic()
        output, errors = (BoundedOutput(self._limits.output_bytes) for _ in range(2))

        def printed(stream: str, text: str) -> None:
            (errors if stream == "stderr" else output).write(text.encode("utf-8", "replace"))

        ran = self._run(code.encode("utf-8", "replace").decode(), stdin, printed)
        if self._keep_state:
            self._state = self._state if ran.state is None else ran.state
        errors.write(ran.errors.encode("utf-8", "replace"))
        seconds = time.monotonic() - began
        return CodeResult(output.text(), errors.text(), ran.failure, ran.reason, seconds)

    def close(self) -> None:
        """Forget its names."""
        self._state = None

    def __enter__(self) -> "MontyInterpreter":
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def _run(self, code: str, stdin: str, printed: Callable[[str, str], None]) -> _Ran:
        import pydantic_monty

        try:
            with _pool() as pool, self._session(pool) as session:
                return self._feed(session, code, stdin, printed)
        except pydantic_monty.MontyCrashedError as error:
            return self._lost("timeout" if error.timed_out else "killed")
        except (pydantic_monty.MontyError, OSError, RuntimeError) as error:
            return _Ran("unavailable", shorten(f"{type(error).__name__}: {error}"), "", None)

    def _session(self, pool: Any) -> Any:
        limits = self._limits
        busy_s = min(limits.cpu_s, limits.wall_s)
        return pool.checkout(
            limits={
                "max_feed_duration_secs": busy_s,
                "max_total_sleep_secs": limits.wall_s - busy_s,
                "max_memory": limits.memory_mb * 1_000_000,
                "max_recursion_depth": MAX_RECURSION,
                "max_suspensions": MAX_INPUT_LINES,
            },
            os_policy={"random_start": {"seed": 0}, "sleep_system_max": math.inf},
        )

    def _feed(
        self, session: Any, code: str, stdin: str, printed: Callable[[str, str], None]
    ) -> _Ran:
        import pydantic_monty

        given = {"input": _reader(stdin, printed)}
        failure: Failure | None = None
        reason, errors = "", ""
        try:
            if self._state is not None:
                session.load_session(self._state)
            session.feed_run(show_last_value(code), external_lookup=given, print_callback=printed)
        except (pydantic_monty.MontySyntaxError, pydantic_monty.MontyRuntimeError) as error:
            reason = shorten(error.display("type-msg").partition("\n")[0])
            for beginning, limit in CAUSES.items():
                if reason.startswith(beginning):  # what has happened to its names is not known
                    return self._lost(limit)
            failure, errors = "error", error.display()
        return self._kept(session, _Ran(failure, reason, errors, None))

    def _lost(self, failure: Failure) -> _Ran:
        limits = self._limits
        reasons: dict[Failure, str] = {  # the same words in each run, whatever time it took
            "timeout": f"it took more than {limits.cpu_s:g} s, or slept too long",
            "memory": f"it needs more than {limits.memory_mb} MB",
            "killed": "its interpreter ended",
        }
        unchanged = UNCHANGED if self._keep_state else ""
        return _Ran(failure, reasons[failure] + unchanged, "", None)

    def _kept(self, session: Any, ran: _Ran) -> _Ran:
        import pydantic_monty

        if not self._keep_state:
            return ran
        with suppress(pydantic_monty.MontyRuntimeError):  # to write them down takes memory, too
            state = session.dump()
            if len(state) <= self._limits.memory_mb * 1_000_000:
                return ran._replace(state=state)
        return self._lost("memory")


def _pool() -> Any:
    import pydantic_monty

    return pydantic_monty.Monty(min_processes=1, max_processes=1, request_timeout=HANG_S)


def _reader(stdin: str, printed: Callable[[str, str], None]) -> Callable[..., str]:
    lines = (line.removesuffix("\n") for line in io.StringIO(stdin, newline=None))

    def read_line(prompt: object = "") -> str:
        printed("stdout", str(prompt))
        try:
            return next(lines)
        except StopIteration:
            raise RuntimeError("EOFError: EOF when reading a line") from None

    return read_line


def show_last_value(code: str) -> str:
    """Return code that prints the value of its last expression, as Python's prompt does.

    >>> print(show_last_value("x = 2\\nx + 1  # three"), end="")
    x = 2
    _ = (x + 1)  # three
    if _ is not None:
        print(repr(_))
    >>> show_last_value("x = 2")
    'x = 2'
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Monty may know better
        return code
    if not body or not isinstance(body[-1], ast.Expr):
        return code
    last, data = body[-1], code.encode()
    lines = [len(line) for line in data.splitlines(keepends=True)]
    start = sum(lines[: last.lineno - 1]) + last.col_offset
    end = sum(lines[: (last.end_lineno or 0) - 1]) + (last.end_col_offset or 0)
    return b"".join((data[:start], b"_ = (", data[start:end], b")", data[end:], SHOW)).decode()


@functools.cache  # once in a process: each episode opens the level
def _try() -> None:
    tried = MontyInterpreter(CodeLimits(), keep_state=False).run("6 * 7")
    if tried.output != "42\n":
        raise ConfigError(f"sandbox monty does not run on this machine: {tried.reason}")


def open_level(limits: CodeLimits, *, keep_state: bool, url: str | None) -> MontyInterpreter:
    """Return an interpreter, after it has computed something.

    Raises:
        ConfigError: the package is missing, or its program does not run.
    """
    if find_spec("pydantic_monty") is None:
        raise ConfigError("sandbox monty needs pydantic-monty; pip install 'jaxrl_llm[monty]'")
    _try()
    return MontyInterpreter(limits, keep_state=keep_state)

"""A tool that runs code of the model. Worker processes import this: no array library."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rollout.observation import BrokenTool, FailedTool
from jaxrl_llm.rollout.tools.loading import checked_by
from jaxrl_llm.sandbox.limits import read_limits
from jaxrl_llm.sandbox.loading import open_interpreter
from jaxrl_llm.sandbox.types import CodeResult

SHARE_OF_TIME = 0.8
"""Of the time limit of a call, which one run may take: the rest is to start and to answer."""

ABILITIES = {
    "expression": "Compute an arithmetic expression: numbers, parentheses and + - * / // % **.",
    "monty": "Run Python. A part of its standard library is there; files and the network are not.",
    "process": "Run Python. There is an empty folder for files, and no network.",
    "service": "Run Python.",
}
KEPT = {True: " Names stay from call to call.", False: " Nothing stays from call to call."}
SEEN = {
    "expression": "",
    "monty": " What is printed is returned, and the value of a last expression.",
    "process": " What is printed is returned, and the value of a last expression.",
    "service": " What is printed is returned.",
}


def check_python(seconds: float, **keywords: Any) -> None:
    """Open an interpreter and close it: what can't be had is an error.

    Args:
        seconds: that a call may take.
        keywords: of `python`.

    Raises:
        ConfigError: as for `python`.
        ConnectionError: a server gives no answer.
    """
    opened = python(seconds, **keywords)
    next(opened)
    opened.close()


@checked_by(check_python)
def python(
    seconds: float,
    *,
    sandbox: str,
    keep_state: bool = True,
    url: str | None = None,
    answer: str | None = None,
    **limits: Any,
) -> Generator[Callable[..., str], None, None]:
    """Give an episode an interpreter, which lives until its end.

    Args:
        seconds: that a call may take.
        sandbox: level of isolation (docs/sandbox.md).
        keep_state: whether a call finds the names that earlier ones have bound.
        url: of the server, for `service` alone.
        answer: told for every call instead, to see what a model does without the tool.
        limits: `cpu_s`, `wall_s`, `memory_mb`, `processes`, `file_mb` and `output_bytes` of each
            call (`CodeLimits`); `wall_s` is 0.8 of `seconds` at most, and if it is not given.

    Yields:
        The function that the model calls.

    Raises:
        ConfigError: there is no such level on this machine, or a limit is none.
    """
    bounds = read_limits(limits, wall_s=SHARE_OF_TIME * seconds)
    if bounds.wall_s > SHARE_OF_TIME * seconds:
        raise ConfigError(
            f"expected wall_s of at most {SHARE_OF_TIME * seconds:g}, {SHARE_OF_TIME:g} of "
            f"rollout.tool_process.timeout_s, got {bounds.wall_s:g}; raise one or lower the other"
        )
    with open_interpreter(sandbox, bounds, keep_state=keep_state, url=url) as interpreter:

        def run(code: str) -> str:
            return told_result(interpreter.run(code)) if answer is None else answer

        has_state = KEPT[keep_state] if sandbox != "expression" else ""
        run.__doc__ = (
            f"{ABILITIES[sandbox]}{has_state}{SEEN[sandbox]}\n\nArgs:\n    code: to be run.\n"
        )
        yield run


def starts_processes(function: Callable[..., Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a tool keeps processes of its own for each open episode, which it bounds.

    A limit on the processes of a worker, in which many episodes live, would end them all.

    >>> starts_processes(python, {"sandbox": "monty"})
    False
    """
    return function is python and keywords.get("sandbox") == "process"


def told_result(result: CodeResult) -> str:
    """Return what a model is told of code that came to its end: output, then errors.

    Raises:
        FailedTool: the code failed, which is told.
        BrokenTool: the infrastructure did.

    >>> told_result(CodeResult("42\\n"))
    '42'
    """
    if result.failure == "unavailable":
        raise BrokenTool(f"python: {result.reason}")
    parts = [result.output.rstrip("\n"), result.errors.rstrip("\n")]
    if result.failure is None:
        return "\n".join(filter(None, parts)) or "(no output)"
    if result.reason not in result.errors:
        parts.append(f"error: {result.reason}")
    raise FailedTool("\n".join(filter(None, parts)), kind=result.failure)

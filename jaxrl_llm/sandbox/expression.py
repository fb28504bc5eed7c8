"""The level `expression`: arithmetic, and nothing else."""

import time

from jaxrl_llm.sandbox.arithmetic import calculate
from jaxrl_llm.sandbox.types import CodeLimits, CodeResult


class ExpressionInterpreter:
    """Computes expressions, in this process: their size bounds time and memory."""

    def run(self, code: str, *, stdin: str = "") -> CodeResult:
        """Compute an expression.

        >>> ExpressionInterpreter().run("2 ** 10").output
        '1024'
        """
        began = time.monotonic()
        try:
            output, failure, reason = calculate(code), None, ""
        except ValueError as error:
            output, failure, reason = "", "error", str(error)
        return CodeResult(output, "", failure, reason, time.monotonic() - began)

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def __enter__(self) -> "ExpressionInterpreter":
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing."""


def open_level(limits: CodeLimits, *, keep_state: bool, url: str | None) -> ExpressionInterpreter:
    """Return an interpreter; expressions have no state, and bounds of their own."""
    return ExpressionInterpreter()

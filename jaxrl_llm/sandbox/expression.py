"""The level `expression`: arithmetic, and nothing else."""

import ast
import decimal
import operator
import re
import time
from collections.abc import Callable
from fractions import Fraction

from jaxrl_llm.sandbox.interpreter import CodeLimits, CodeResult, Interpreter

MAX_EXPRESSION_CHARS = 1000
MAX_NUMBER_BITS = 4096
MAX_LITERAL_EXPONENT = 400
SHOWN_DIGITS = 12  # of a number that has no end
LITERAL = re.compile(r"([0-9_]*\.?[0-9_]*)(?:[eE]([+-]?[0-9]{1,4}))?")
OPERATIONS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: of numbers, parentheses and + - * / // % **.

    Returns:
        The number; a fraction where it has no end as a decimal.

    Raises:
        ValueError: it is no such expression, or a number in it gets too large.

    >>> calculate("(17 + 4) * 0.5")
    '10.5'
    """
    text = expression.strip()
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"got {len(text)} characters, expected at most {MAX_EXPRESSION_CHARS}")
    try:
        value = _value(ast.parse(text, mode="eval").body, text)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return _decimal(value)


def _value(node: ast.AST, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _literal(ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in OPERATIONS:
            return _bounded(OPERATIONS[type(node.op)](left, right))
    part = ast.get_source_segment(text, node) or text
    raise ValueError(f"expected numbers, parentheses and + - * / // % **, got {part[:50]!r}")


def _literal(text: str) -> Fraction:
    match = LITERAL.fullmatch(text)
    if match is None or abs(int(match[2] or 0)) > MAX_LITERAL_EXPONENT:
        raise ValueError(f"expected a decimal number that is not too large, got {text[:50]!r}")
    return _bounded(Fraction(text.rstrip(".").replace("_", "")))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError(f"expected a whole number as exponent, got {exponent}")
    if abs(exponent.numerator) * max(_bits(base) - 1, 0) > MAX_NUMBER_BITS:
        raise _too_large()
    sign = -1 if base < 0 and exponent.numerator % 2 else 1
    return sign * Fraction(1) if abs(base) == 1 else Fraction(base**exponent.numerator)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_NUMBER_BITS:
        raise _too_large()
    return value


def _too_large() -> ValueError:
    return ValueError(f"a number of more than {MAX_NUMBER_BITS} bits is too large")


def _decimal(value: Fraction) -> str:
    """Return a number as a decimal, if it has an end."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        digits = max(digits, count)
    if rest != 1:
        numbers = decimal.Decimal(value.numerator), decimal.Decimal(value.denominator)
        return f"{value}, about {decimal.Context(prec=SHOWN_DIGITS).divide(*numbers)}"
    whole, part = divmod(abs(value.numerator) * 10**digits // value.denominator, 10**digits)
    return f"{'-' if value < 0 else ''}{whole}.{part:0{digits}d}"


class ExpressionInterpreter(Interpreter):
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


def open_level(limits: CodeLimits, *, keep_state: bool, url: str | None) -> ExpressionInterpreter:
    """Return an interpreter; expressions have no state, and bounds of their own."""
    return ExpressionInterpreter()

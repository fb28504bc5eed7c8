"""Answers that are programs: the tests of a row, and what runs them."""

import builtins
import functools
import importlib
import json
import math
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rewards.worker import Unscored
from jaxrl_llm.sandbox.interpreter import CodeResult, Interpreter, open_interpreter, read_limits

PYTHON = ("py", "py3", "python", "python3")
"""Labels of blocks that hold programs; a block without a label may hold one, too."""

MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""What the graders of verl and of LiveCodeBench import before a program, with all names in it.

- https://github.com/volcengine/verl/blob/main/verl/utils/reward_score/prime_code/testing_util.py
- https://github.com/LiveCodeBench/LiveCodeBench/blob/main/lcb_runner/evaluation/testing_util.py
"""

HARNESS = """
import builtins, io, json, os, sys, types

def run_program(source, after, call, name, imports):
    sys.setrecursionlimit(600_000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    for statement in imports:
        names = {}
        try:
            exec(statement, names)
        except ImportError:
            continue
        for key in names.keys() - {"__builtins__"}:
            vars(builtins).setdefault(key, names[key])
    if "/dev/stdin" in source:
        builtins.open = io.open = open_stdin
    module = sys.modules[name] = types.ModuleType(name)
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), vars(module))
        if call and not {call, "Solution"} & vars(module).keys():
            raise NameError(f"name {call!r} is not defined")
        json.JSONEncoder.default = plain_number
        exec(compile(after, "<test>", "exec", dont_inherit=True), vars(module))
    except RecursionError as error:
        raise error.with_traceback(None) from None

def open_stdin(file, *rest, _open=io.open, **more):
    return _open(os.dup(0) if str(file) == "/dev/stdin" else file, *rest, **more)

def plain_number(encoder, value):
    if type(value).__module__ == "numpy" and value.shape == ():
        return value.item()
    if hasattr(value, "as_integer_ratio"):
        above, below = value.as_integer_ratio()
        return above if below == 1 else above / below
    raise TypeError(f"a {type(value).__name__} is not JSON")
"""
"""Runs a program in a module of its own, as graders do: names that it lacks are looked up among
those of `MODULES`, integers of any length can be printed, recursion may be deep, `/dev/stdin` can
be opened, and a function may return numbers of NumPy. Lines of tracebacks are the program's."""

WALL_S = 4.0
"""Of one test, where the config says nothing: `reward.timeout_s` is for all tests of an answer."""

CLOSE = 1e-6
"""How far two numbers may differ that are the same: relatively, and near zero absolutely."""


class ProgramTest(NamedTuple):
    """One test of a program.

    Attributes:
        after: code that runs behind the program.
        stdin: of both.
        expected: what must be printed, or returned as JSON; None where it is enough to get to the
            end.
        marker: printed by `after` before what counts; empty where all that is printed counts.
        call: the function that the program must define.
    """

    after: str
    stdin: str = ""
    expected: Any = None
    marker: str = ""
    call: str = ""


def python_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    sandbox: str,
    url: str | None = None,
    partial: bool = True,
    max_tests: int | None = None,
    **limits: Any,
) -> dict[str, Any]:
    """Score the last block of Python in a reply by the tests of the row.

    It runs as in the graders of verl and LiveCodeBench: names of `MODULES` and of `typing` are
    there without an import, and `__name__` is `__main__` only where its output is compared.

    A program that meets a limit fails that test and all after it, so that one which never ends
    takes the time of one test.

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: the tests, or their JSON; see `read_tests`.
        extra_info: `last_answer`, the text of the last turn; without it, the reply is the turn.
        sandbox: level of isolation that runs the program (docs/sandbox.md).
        url: of the server, for `service` alone.
        partial: score the share of tests that are passed; else 1.0 for all of them.
        max_tests: how many are run, from the first; None runs all.
        limits: of each test (`CodeLimits`); `wall_s` is 4 if it is not given.

    Returns:
        The score; `acc` is 1.0 where all tests are passed, `passed` and `tests` are counts, and
        `error` says how the first other one failed.

    Raises:
        ValueError: the row has no tests.
        Unscored: the infrastructure failed.
    """
    tests = read_tests(ground_truth)[:max_tests]
    code = last_python_block((extra_info or {}).get("last_answer", solution_str))
    passed, error = 0, "no block of Python"
    if code is not None:
        bounds = read_limits(limits, wall_s=WALL_S)
        with _long_integers():
            longest = max(len(str(test.expected)) for test in tests)
        bounds = bounds._replace(output_bytes=max(bounds.output_bytes, 8 * longest))
        try:
            opened = open_interpreter(sandbox, bounds, url=url)
        except ConnectionError as away:  # a worker that has just started tries the server first
            raise Unscored(f"python_tests: {away}") from away
        with opened as interpreter:
            passed, error = _count_passed(
                functools.partial(_run_test, interpreter, code), tests, stop=not partial
            )
    acc = float(passed == len(tests))
    score = passed / len(tests) if partial else acc
    counts = {"passed": float(passed), "tests": float(len(tests))}
    return {"score": score, "acc": acc, "pred": None, **counts, "error": error}


def check_python_tests(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords of `python_tests` with which no program can be run on this machine.

    Raises:
        ConfigError: as `open_interpreter`; or a limit is none.
    """
    names = ("sandbox", "url", "partial", "max_tests")
    limits = {name: value for name, value in keywords.items() if name not in names}
    most = keywords.get("max_tests")
    try:
        if most is not None and most < 1:
            raise ConfigError(f"expected max_tests of 1 or more, got {most}")
        if keywords["sandbox"] == "expression":
            raise ConfigError("sandbox expression runs no programs")
        bounds = read_limits(limits, wall_s=WALL_S)
        open_interpreter(keywords["sandbox"], bounds, url=keywords.get("url")).close()
    except (ConfigError, OSError) as error:  # the latter of a server
        raise ConfigError(f"reward.function: python_tests: {error}") from error


def last_python_block(text: str) -> str | None:
    """Return the code in the last fenced block of Python, else in the last one without a label.

    Fences are Markdown's, also in a list and behind text on their line; labels may have attributes.
    A fence in a string of the program does not end it, one at the end of a line of code does. A
    block that is never closed was cut off, and does not count.

    >>> last_python_block("```python\\nx = 1\\n```\\nprints\\n```\\n1\\n```")
    'x = 1'
    >>> last_python_block("```python\\nx = 1")
    """
    lines = re.split("\r\n|[\r\n]", text)
    last: dict[bool, str] = {}
    number, knows_strings = 0, True
    while number < len(lines):
        marks, label = _opening(lines[number])
        number += 1
        if not marks:
            continue
        is_python = label in PYTHON
        may_be_python = is_python or not label
        code, end = _read_block(lines, number, marks, knows_strings and may_be_python)
        if code is None and end == len(lines) and knows_strings:  # a string that does not end
            knows_strings = False
            code, end = _read_block(lines, number, marks, knows_strings)
        if code is not None and may_be_python:
            last[is_python] = _dedent(code)
        number = end
    return last.get(True, last.get(False))


def _opening(line: str) -> tuple[str, str]:
    """Return the marks of a fence that opens a block, and its label; empty ones for another line.

    >>> _opening("1. ~~~~ {.Python}"), _opening("Run it: ```py"), _opening("It is ```x```.")
    (('~~~~', 'python'), ('```', 'py'), ('', ''))
    """
    before, marks, info = _split_fence(line)
    words = re.findall(r"^[\s{.]*([\w+#-]*)", info)
    label = words[0].lower()
    is_first = re.fullmatch(r"\s*(([-*+]|\d{1,9}[.)])\s+)?", before) is not None
    return (marks, label) if marks and (is_first or label in PYTHON) else ("", "")


def _split_fence(line: str) -> tuple[str, str, str]:
    """Return what is before the last marks of a fence in a line, these, and what is behind."""
    mark = "`" if "`" in line else "~"
    start, marks, info = line.rpartition(mark * 3)
    before = start.rstrip(mark)
    if not marks or mark in info:
        return line, "", ""
    return before, line[len(before) : len(line) - len(info)], info


def _read_block(
    lines: list[str], first: int, marks: str, knows_strings: bool
) -> tuple[list[str] | None, int]:
    """Return the lines of a block, None if nothing closes it, and the line from which to go on."""
    quote = ""
    for number in range(first, len(lines)):
        line = lines[number]
        before, found, info = _split_fence(line)
        if found and not (knows_strings and _quote_after(before, quote)):
            if found.startswith(marks) and _closes(line, info):
                return [*lines[first:number], *filter(str.strip, [before])], number + 1
            if _opening(line)[1] in PYTHON:
                return None, number
        quote = _quote_after(line, quote) if knows_strings else ""
        quote = quote if len(quote) == 3 else ""
    return None, len(lines)


def _closes(line: str, info: str) -> bool:
    """Tell whether marks close a block: a label right behind them would open one."""
    return re.match(r"\{|\.?\w", info) is None and _opening(line)[1] not in PYTHON


def _quote_after(code: str, quote: str) -> str:
    """Return what begins the string or comment that is open behind code; `quote` is before it."""
    for token in re.findall(r"""\\.|"{3}|'{3}|["'#]""", code):
        if token[0] == "\\" or quote == "#":
            continue
        if not quote:
            quote = token
        elif token.startswith(quote):
            quote = ""
    return quote


def _dedent(lines: list[str]) -> str:
    """Return lines without the indentation of the first one that is code."""
    blank = " \t"
    code = (line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    first = next(code, "")
    indent = len(first) - len(first.lstrip(blank))
    return "\n".join(x[min(indent, len(x) - len(x.lstrip(blank))) :] for x in lines)


def read_tests(ground_truth: Any) -> list[ProgramTest]:
    """Return the tests of a row, in one of the forms that data sets have.

    - `{"inputs": [...], "outputs": [...]}`: texts on standard input, and what must be printed.
    - The same with `fn_name`: lists of arguments, or texts with one in JSON on each line, and what
      the function, or the method of a class `Solution`, must return, which may stand in a list.
    - A list of statements such as `assert f(1) == 2`, also as `{"assert_case": [...]}`.

    Args:
        ground_truth: the tests, or their JSON.

    Raises:
        ValueError: it is none of these, or there are none.

    >>> read_tests({"inputs": ["1 2"], "outputs": ["3"]})[0].stdin
    '1 2'
    """
    tests = ground_truth
    if isinstance(tests, str):
        try:
            with _long_integers():
                tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"python_tests: ground_truth is no JSON: {error}") from error
    statements = tests.get("assert_case") if isinstance(tests, Mapping) else tests
    if isinstance(statements, list) and all(isinstance(text, str) for text in statements):
        read = [_statement(text) for text in statements]
    elif isinstance(tests, Mapping) and all(
        isinstance(tests.get(key), list) for key in ("inputs", "outputs")
    ):
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        name = tests.get("fn_name")
        with _long_integers():
            read = [_call(name, *pair) if name else _text(*pair) for pair in pairs]
    else:
        raise ValueError(
            "python_tests: expected inputs and outputs or a list of assert statements as "
            f"ground_truth, got {str(ground_truth)[:200]}"
        )
    if not read:
        raise ValueError("python_tests: the row has no tests")
    return read


def _statement(text: str) -> ProgramTest:
    marker = secrets.token_hex(8)
    return ProgramTest(f"{text}\nprint({marker!r})", marker=marker)


def _text(given: Any, expected: Any) -> ProgramTest:
    stdin, out = (
        "\n".join(map(str, t)) if isinstance(t, list) else str(t) for t in (given, expected)
    )
    return ProgramTest("None", stdin, out)  # the value of a last expression is not shown


def _call(name: str, given: Any, expected: Any) -> ProgramTest:
    if isinstance(given, str):
        given = [json.loads(line) for line in given.split("\n") if line.strip()]
    if isinstance(expected, str):
        with suppress(ValueError):
            expected = json.loads(expected)
    marker = secrets.token_hex(8)
    after = (
        "import json\n"
        f"try:\n    _ = Solution().{name}\nexcept NameError:\n    _ = {name}\n"
        f"print({marker!r} + json.dumps(_(*json.loads({json.dumps(given)!r}))))"
    )
    return ProgramTest(after, expected=expected, marker=marker, call=name)


@contextmanager
def _long_integers() -> Iterator[None]:
    """Let integers of more than 4,300 digits be read and written."""
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(most)


@functools.cache
def _imports() -> dict[str, str]:
    """Return the names that graders import before a program, each with the import it comes from.

    >>> _imports()["deque"], _imports()["copy"], "pow" in _imports()
    ('from collections import deque', 'import copy', False)
    """
    imports: dict[str, str] = {}
    for module in ("typing", *MODULES):  # Counter is that of collections
        given = vars(importlib.import_module(module))
        public = given.get("__all__", [name for name in given if not name.startswith("_")])
        imports |= {name: f"from {module} import {name}" for name in public}
    imports |= {module: f"import {module}" for module in MODULES}
    return {name: text for name, text in imports.items() if name not in vars(builtins)}


def _run_test(interpreter: Interpreter, code: str, test: ProgramTest) -> CodeResult:
    """Run a program and a test behind it, with what graders import of what the program names."""
    words = {*re.findall(r"\w+", code)}
    if "class Solution" not in code:
        words.discard(test.call)  # which the program must define itself
    imports = [text for name, text in _imports().items() if name in words]
    name = "solution" if test.marker else "__main__"
    given = (code, test.after, test.call, name, imports)
    return interpreter.run(f"{HARNESS}\nrun_program{given!r}\n", stdin=test.stdin)


def _count_passed(
    run: Callable[[ProgramTest], CodeResult], tests: Iterable[ProgramTest], *, stop: bool
) -> tuple[int, str]:
    """Return how many tests a program passes, and how it failed the first other one."""
    passed, first = 0, ""
    for number, test in enumerate(tests):
        result = run(test)
        if result.failure == "unavailable":
            raise Unscored(f"python_tests: {result.reason}")
        error = result.reason if result.failure else _difference(test, result)
        if not error:
            passed += 1
            continue
        first = first or f"test {number}: {error}"
        if stop or result.failure not in (None, "error"):
            break
    return passed, first


def _difference(test: ProgramTest, result: CodeResult) -> str:
    """Return how what came of a test differs from what was expected; empty where it does not."""
    _, marker, output = result.output.rpartition(test.marker) if test.marker else ("", "-", "")
    if not marker:
        return "it ended before the test"
    if not test.marker:
        output, expected = result.output, test.expected
        return "" if same_text(output, expected) else f"got {output[:100]!r}"
    if test.expected is None and not output.strip():
        return ""
    try:
        with _long_integers():
            value = json.loads(output)
    except (ValueError, RecursionError):
        return "it returned what is no JSON"
    options = [test.expected]
    if isinstance(test.expected, list) and len(test.expected) == 1:
        options += test.expected
    return "" if any(same_value(value, option) for option in options) else f"got {output[:100]!r}"


def same_text(got: str, expected: str) -> bool:
    """Return whether two outputs have the same words on the same lines, but for empty lines.

    >>> same_text("1.50  a\\n\\n", "1.5 a"), same_text("1\\n2", "1 2")
    (True, False)
    """
    got_lines, expected_lines = (
        [x.split() for x in t.split("\n") if x.strip()] for t in (got, expected)
    )
    return len(got_lines) == len(expected_lines) and all(
        len(a) == len(b) and all(map(_same_word, a, b))
        for a, b in zip(got_lines, expected_lines, strict=True)
    )


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    try:
        return "." in got + expected and math.isclose(
            float(got), float(expected), rel_tol=CLOSE, abs_tol=CLOSE
        )
    except ValueError:
        return False


def same_value(got: Any, expected: Any) -> bool:
    """Return whether two values of JSON are the same, numbers with a point nearly so.

    >>> same_value([1, 0.1 + 0.2], [1, 0.3]), same_value(True, 1)
    (True, False)
    """
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same_value(got[k], expected[k]) for k in got)
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        if isinstance(got, int) and isinstance(expected, int):
            return got == expected
        with suppress(OverflowError):  # of an int that no float can hold
            return math.isclose(got, expected, rel_tol=CLOSE, abs_tol=CLOSE)
    return type(got) is type(expected) and got == expected

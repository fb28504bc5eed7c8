"""Answers that are programs: the tests of a row, and what runs them."""

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rewards.worker import Unscored
from jaxrl_llm.sandbox.limits import read_limits
from jaxrl_llm.sandbox.loading import open_interpreter
from jaxrl_llm.sandbox.types import CodeResult, Interpreter

LANGUAGES = ("", "py", "python", "python3")
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
    """

    after: str
    stdin: str = ""
    expected: Any = None
    marker: str = ""


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
        longest = max(len(str(test.expected)) for test in tests)
        bounds = bounds._replace(output_bytes=max(bounds.output_bytes, 8 * longest))
        try:
            opened = open_interpreter(sandbox, bounds, url=url)
        except ConnectionError as away:  # a worker that has just started tries the server first
            raise Unscored(f"python_tests: {away}") from away
        with opened as interpreter:
            passed, error = _count_passed(interpreter, code, tests, stop=not partial)
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
    """Return the code in the last fenced block of Python, or of no named language.

    >>> last_python_block("```python\\nx = 1\\n```\\nor\\n```json\\n{}\\n```")
    'x = 1'
    >>> last_python_block("```python\\nx = 1")
    """
    code, block, language = None, [], None
    for line in text.splitlines():
        fence = line.strip()
        if language is None and fence.startswith("```"):
            block, language = [], fence.strip("`").strip().lower()
        elif language is not None and fence == "```":
            code = "\n".join(block) if language in LANGUAGES else code
            language = None
        else:
            block.append(line)
    return code


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
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"python_tests: ground_truth is no JSON: {error}") from error
    statements = tests.get("assert_case") if isinstance(tests, Mapping) else tests
    if isinstance(statements, list) and all(isinstance(text, str) for text in statements):
        read = [_statement(text) for text in statements]
    elif isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        name = tests.get("fn_name")
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
        given = [json.loads(line) for line in given.splitlines()]
    if isinstance(expected, str):
        with suppress(ValueError):
            expected = json.loads(expected)
    marker = secrets.token_hex(8)
    after = (
        "import json\n"
        f"try:\n    _ = Solution().{name}\nexcept NameError:\n    _ = {name}\n"
        f"print({marker!r} + json.dumps(_(*json.loads({json.dumps(given)!r}))))"
    )
    return ProgramTest(after, expected=expected, marker=marker)


def _count_passed(
    interpreter: Interpreter, code: str, tests: Iterable[ProgramTest], *, stop: bool
) -> tuple[int, str]:
    """Return how many tests a program passes, and how it failed the first other one."""
    passed, first = 0, ""
    for number, test in enumerate(tests):
        result = interpreter.run(f"{code}\n\n{test.after}\n", stdin=test.stdin)
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
        [x.split() for x in t.splitlines() if x.strip()] for t in (got, expected)
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

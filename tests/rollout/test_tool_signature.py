"""Schemas of tools against transformers', checks of arguments, and the calculator."""

import enum
import random
import textwrap
from typing import Any, Literal, Optional, Union

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.builtin import calculator
from jaxrl_llm.rollout.tools.tool import (
    ArgumentsError,
    check_arguments,
    parse_docstring,
    restore_types,
    tool_schema,
)

transformers = pytest.importorskip("transformers")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


NAMES = {
    **{"Any": Any, "Literal": Literal, "Optional": Optional, "Union": Union, "Color": Color},
    **{"EpisodeRow": EpisodeRow, "Random": random.Random},
}


def define(signature, docstring="Do it.\n\nArgs:\n{args}", name="tool"):
    """A function with a signature; each of its parameters is described."""
    words = [part.split(":")[0].strip("* ") for part in signature.split("->")[0].split(";")]
    args = "\n".join(f"    {word}: what {word} is." for word in words if word)
    arguments = signature.split("->")[0].replace(";", ",").strip()
    returns = f" -> {signature.split('->')[1].strip()}" if "->" in signature else ""
    text = textwrap.indent(f'"""{docstring.format(args=args)}\n"""', "    ")
    namespace = dict(NAMES)
    exec(f"def {name}({arguments}){returns}:\n{text}\n", namespace)
    return namespace[name]


def ours(function, **keywords):
    return tool_schema(function, function.__name__, key="rollout.tools", **keywords)


SIGNATURES = [
    *("x: int", "x: float", "x: str", "x: bool", "x: Any", "x: None", "x: list", "x: dict"),
    *("x: list[int]", "x: list[list[str]]", "x: dict[str, float]", "x: dict[str, list[int]]"),
    *("x: tuple[int, str]", "x: tuple", "x: list[tuple[int, int]]", "x: list[Any]"),
    *("x: Literal['a', 'b']", "x: Literal[1, 'b', None]", "x: Literal[True, False]", "x: Color"),
    *("x: int | str", "x: Union[str, float, bool]", "x: list[int] | str", "x: Color | int"),
    *("x: Optional[int] = None", "x: str | None", "x: list[str] | None = None"),
    *("x: Literal['a'] | None = None", "x: int | str | None", "x: list | tuple"),
    *("x: int; y: str = 'a'; z: float = 0.5", "x: int = 3", "", "x: int -> str"),
    *("x: int -> dict[str, int] | None", "x: 'int | None' = None", "x: int -> Random"),
]


@pytest.mark.parametrize("signature", SIGNATURES)
def test_schemas_are_transformers(signature):
    function = define(signature)
    assert ours(function) == transformers.utils.get_json_schema(function)


DOCSTRINGS = [
    "Do it.\n\nArgs:\n    x: one\n        and more: of it\n        here.\n    y: two.",
    "Do it\n over lines.\n\n More: of it.\n\nArgs:\n    x (int): one.\n    y (str, optional): two.",
    "Do it.\n\nArgs:\n    x: one.\n\n    y: two.\n\nReturns:\n    the sum\n    of both.",
    "Do it.\nArgs:\n    x: one.\n    y: two.\nReturns:\n    it\nRaises:\n    ValueError: no.",
    'Do it.\n\nArgs:\n    x: one (choices: [1, 2])\n    y: two (choices: ["a", " b "])',
    "Do it.\n\nArgs:\n    x:\n        one.\n    y: two\n    and more.\nRaises:\n    KeyError: no.",
]


@pytest.mark.parametrize("docstring", DOCSTRINGS)
def test_docstrings_are_read_as_by_transformers(docstring):
    function = define("x: int; y: str -> int", docstring)
    assert ours(function) == transformers.utils.get_json_schema(function)


def test_what_is_not_the_models_is_hidden():
    signature = "x: int; k: int = 2; row: EpisodeRow = None; rng: 'Unknown' = None; *; n: int = 1"
    function = define(signature.replace("*;", "*, "), "Do it.\n\nArgs:\n    x: what x is.")
    assert ours(function, hidden=["k"])["function"] == ours(define("x: int"))["function"]


@pytest.mark.parametrize(
    ("signature", "docstring", "message"),
    [
        ("x", "Do it.\n\nArgs:\n    x: one.", "'x' of tool 'tool' has no type; write x: str"),
        ("x: int", "", "has no docstring"),
        ("x: int", "Do it.", "does not describe its parameter 'x'"),
        ("x: Random", "Do it.\n\nArgs:\n    x: one.", "got the type <class 'random.Random'>"),
        ("x: tuple[int, ...]", "Do it.\n\nArgs:\n    x: one.", "expected str, int"),
        ("x: 'Missing'", "Do it.\n\nArgs:\n    x: one.", "name 'Missing' is not defined"),
        ("*x: int", "Do it.", r"takes \*x: int"),
        ("x: int, /", "Do it.", "takes x: int"),
        ("*, x: int", "Do it.", "takes x: int"),
    ],
)
def test_a_signature_that_says_too_little_is_refused(signature, docstring, message):
    with pytest.raises(ConfigError, match=rf"^rollout.tools: .*{message}"):
        ours(define(signature, docstring))


def test_a_lambda_is_refused():
    with pytest.raises(ConfigError, match=r"'<lambda>' is no name for a tool"):
        ours(lambda: 0)


CHECKS = [
    ("int", 3, 3),
    ("int", "3", 3),
    ("int", 3.0, 3),
    ("int", True, "expected integer, got true"),
    ("int", 3.5, "expected integer, got 3.5"),
    ("int", "x", 'expected integer, got "x"'),
    ("int", None, "expected integer, got null"),
    ("float", 3, 3.0),
    ("float", "2.5", 2.5),
    ("float", [1], "expected number, got [1]"),
    ("str", "a", "a"),
    ("str", 3, "expected string, got 3"),
    ("bool", "True", True),
    ("bool", 1, "expected boolean, got 1"),
    ("Any", {"a": [1]}, {"a": [1]}),
    ("list[int]", ["1", 2], [1, 2]),
    ("list[int]", [1, "x"], 'expected integer, got "x"'),
    ("list[int]", "1", 'expected array, got "1"'),
    ("dict[str, float]", {"a": 1}, {"a": 1.0}),
    ("dict[str, float]", {"a": "x"}, "expected number"),
    ("tuple[int, str]", [1, "a"], [1, "a"]),
    ("tuple[int, str]", [1], "expected 2 values, got [1]"),
    ("Literal['a', 1]", 1, 1),
    ("Literal['a', 1]", True, 'expected one of ["a", 1], got true'),
    ("Literal['a', 'b'] | None", None, None),
    ("int | str", "3", "3"),
    ("int | str", 3, 3),
    ("int | bool", "4", 4),
    ("list[int] | str", "a", "a"),
    ("list[int] | str", {}, "expected array or string, got {}"),
    ("int | None", None, None),
]


@pytest.mark.parametrize(("kind", "given", "expected"), CHECKS)
def test_arguments_are_checked(kind, given, expected):
    schema = ours(define(f"x: {kind}"))
    try:
        checked = check_arguments(schema, {"x": given})["x"]
        assert (checked, type(checked)) == (expected, type(expected))
    except ArgumentsError as error:
        assert str(error).startswith("tool: 'x': ")
        assert isinstance(expected, str) and expected in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "tool needs a value for first, second"),
        ({"first": 1, "secnd": 2}, "tool takes no 'secnd'; did you mean 'second'?"),
        ({"first": 1, "second": 2, "row": 3}, "tool takes no 'row'"),
    ],
)
def test_names_of_arguments_are_checked(arguments, message):
    schema = ours(define("first: int; second: int; row: Any = None; last: int = 2"))
    with pytest.raises(ArgumentsError) as caught:
        check_arguments(schema, arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("Color", "red", Color.RED),
        ("list[Color] | None", ["blue"], [Color.BLUE]),
        ("dict[str, tuple[int, int]]", {"a": [1, 2]}, {"a": (1, 2)}),
        ("int | Color", 3, 3),
    ],
)
def test_functions_get_the_types_that_they_name(kind, given, expected):
    assert restore_types(define(f"x: {kind}"), {"x": given}) == {"x": expected}


def test_long_values_are_shortened_in_messages():
    schema = ours(define("x: int"))
    with pytest.raises(ArgumentsError) as caught:
        check_arguments(schema, {"x": "y" * 10**6})
    assert len(str(caught.value)) < 200


def test_a_docstring_without_sections():
    assert parse_docstring("Do it: now.") == ("Do it: now.", {}, None)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("4817*396", str(4817 * 396)),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** -3", "0.125"),
        ("(-1) ** 99999999999", "-1"),
        ("1e3 / 3", "1000/3, about 333.333333333"),
        ("10 ** 400 / 3", f"{10**400}/3, about 3.33333333333E+399"),
    ],
)
def test_the_calculator_is_exact(expression, expected):
    assert calculator(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1 +", "x", "f(1)", "().__class__", "'a' * 9", "1 if 1 else 2", "[1]", "1, 2"),
        *("9 ** 9 ** 9", "10 ** 5000", "1e999999999", "1e-9999", "2 ** 0.5", "1 / 0", "0 ** -1"),
        *("1" * 1001, "(" * 300 + "1" + ")" * 300, "True", "1j", "0x10", "2 ^ 3", "~1"),
        *("*".join(["9" * 60] * 16) + "**9", "lambda: 1", "__import__('os')", "1 < 2"),
    ],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(ValueError, match=r"."):
        calculator(expression)


def test_types_of_a_callable_object():
    class Add:
        """Add one.

        Args:
            x: a number.
        """

        def __call__(self, x: int) -> int:
            return x + 1

    schema = tool_schema(Add(), "add", key="rollout.tools")
    assert schema["function"]["parameters"]["properties"]["x"]["type"] == "integer"

import enum
import random
import textwrap
from typing import Any, Literal, Optional, Union

import pytest

from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.builtin import calculator
from jaxrl_llm.rollout.tools.tool import (
    ArgumentsError,
    check_arguments,
    parse_docstring,
    restore_types,
    tool_schema,
)
from tests.refusals import refuses

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
    given, _, returned = signature.partition("->")
    words = [part.split(":")[0].strip("* ") for part in given.split(";")]
    args = "\n".join(f"    {word}: what {word} is." for word in words if word)
    text = textwrap.indent(f'"""{docstring.format(args=args)}\n"""', "    ")
    returns = f" -> {returned.strip()}" if returned else ""
    namespace = dict(NAMES)
    exec(f"def {name}({given.replace(';', ',').strip()}){returns}:\n{text}\n", namespace)
    return namespace[name]


def ours(function, **keywords):
    name = getattr(function, "__name__", "tool")
    return tool_schema(function, name, key="rollout.tools", **keywords)


SIGNATURES = [
    *("x: float", "x: str", "x: bool", "x: Any", "x: None", "x: list", "x: dict", ""),
    *("x: list[list[str]]", "x: dict[str, list[int]]", "x: tuple", "x: list[tuple[int, int]]"),
    *("x: Literal[1, 'b', None]", "x: Literal[True, False]", "x: Literal['a'] | None = None"),
    *("x: Union[str, float, bool]", "x: list[int] | str", "x: Color | int", "x: list | tuple"),
    *("x: Optional[int] = None", "x: int | str | None", "x: 'int | None' = None"),
    *("x: int; y: str = 'a'; z: float = 0.5", "x: int -> dict[str, int] | None"),
]
DOCSTRINGS = [
    "Do it\n over lines.\n\n More: of it.\n\nArgs:\n    x (int): one.\n    y (str, optional): two.",
    "Do it.\n\nArgs:\n    x: one.\n\n    y: two.\n\nReturns:\n    the sum\n    of both.",
    'Do it.\n\nArgs:\n    x: one (choices: [1, 2])\n    y: two (choices: ["a", " b "])',
    "Do it.\n\nArgs:\n    x:\n        one.\n    y: two\n    and more.\nRaises:\n    KeyError: no.",
]


def test_schemas_are_transformers(subtests):
    functions = [define(signature) for signature in SIGNATURES]
    functions += [define("x: int; y: str -> int", docstring) for docstring in DOCSTRINGS]
    for function in functions:
        with subtests.test(function=str(function.__annotations__)):
            assert ours(function) == transformers.utils.get_json_schema(function)
    assert parse_docstring("Do it: now.") == ("Do it: now.", {}, None)


def test_what_is_not_the_models_is_hidden_and_callable_objects_have_types():
    signature = "x: int; k: int = 2; row: EpisodeRow = None; rng: 'Unknown' = None; *; n: int = 1"
    function = define(signature.replace("*;", "*, "), "Do it.\n\nArgs:\n    x: what x is.")
    plain = define("x: int")
    assert ours(function, hidden=["k"])["function"] == ours(plain)["function"]

    class Add:
        """Add one.\n\nArgs:\n    x: a number."""

        def __call__(self, x: int) -> int:
            return x + 1

    properties = ours(Add())["function"]["parameters"]["properties"]
    assert properties["x"]["type"] == "integer"


def test_a_signature_that_says_too_little_is_refused(subtests):
    one = "Do it.\n\nArgs:\n    x: one."
    cases = [("x: int", ""), ("x: int", "Do it."), ("*x: int", "Do it."), ("*, x: int", "Do it.")]
    cases += [("x: int, /", "Do it."), ("x", one), ("x: Random", one), ("x: 'Missing'", one)]
    cases.append(("x: tuple[int, ...]", one))
    for function in (*(define(*case) for case in cases), lambda: 0):
        with subtests.test(function=str(function.__annotations__)), refuses("rollout.tools"):
            ours(function)


WRONG = object()
CHECKS = [
    *(("int", 3, 3), ("int", "3", 3), ("int", 3.0, 3), ("int", True, WRONG), ("int", 3.5, WRONG)),
    *(("int", None, WRONG), ("float", 3, 3.0), ("float", "2.5", 2.5), ("str", 3, WRONG)),
    *(("bool", "True", True), ("bool", 1, WRONG), ("Any", {"a": [1]}, {"a": [1]})),
    *(("list[int]", ["1", 2], [1, 2]), ("list[int]", [1, "x"], WRONG), ("list[int]", "1", WRONG)),
    *(("dict[str, float]", {"a": 1}, {"a": 1.0}), ("dict[str, float]", {"a": "x"}, WRONG)),
    *(("tuple[int, str]", [1, "a"], [1, "a"]), ("tuple[int, str]", [1], WRONG)),
    *(("Literal['a', 1]", 1, 1), ("Literal['a', 1]", True, WRONG)),
    *(("Literal['a', 'b'] | None", None, None), ("int | str", "3", "3"), ("int | str", 3, 3)),
    *(("int | bool", "4", 4), ("list[int] | str", "a", "a"), ("list[int] | str", {}, WRONG)),
    *(("int | None", None, None), ("int", "y" * 10**6, WRONG)),
]


def test_arguments_are_checked(subtests):
    for kind, given, expected in CHECKS:
        with subtests.test(kind, given=str(given)[:20]):
            schema = ours(define(f"x: {kind}"))
            if expected is WRONG:
                with pytest.raises(ArgumentsError, match="'x'") as caught:
                    check_arguments(schema, {"x": given})
                assert len(str(caught.value)) < 200
            else:
                checked = check_arguments(schema, {"x": given})["x"]
                assert (checked, type(checked)) == (expected, type(expected))
    schema = ours(define("first: int; second: int; row: Any = None; last: int = 2"))
    for arguments, name in (
        *(({}, "second"), ({"first": 1, "secnd": 2}, "secnd")),
        ({"first": 1, "second": 2, "row": 3}, "row"),
    ):
        with pytest.raises(ArgumentsError, match=name):
            check_arguments(schema, arguments)


def test_functions_get_the_types_that_they_name():
    for kind, given, expected in (
        *(("list[Color] | None", ["blue"], [Color.BLUE]), ("int | Color", 3, 3)),
        ("dict[str, tuple[int, int]]", {"a": [1, 2]}, {"a": (1, 2)}),
    ):
        assert restore_types(define(f"x: {kind}"), {"x": given}) == {"x": expected}


EXACT = {
    **{"4817*396": str(4817 * 396), "0.1 + 0.2": "0.3", "-7 // 2": "-4", "-7 % 3": "2"},
    **{"2 ** -3": "0.125", "(-1) ** 99999999999": "-1", "1e3 / 3": "1000/3, about 333.333333333"},
    "10 ** 400 / 3": f"{10**400}/3, about 3.33333333333E+399",
}
INEXACT = [
    *("", "1 +", "f(1)", "().__class__", "'a' * 9", "1, 2", "9 ** 9 ** 9", "10 ** 5000"),
    *("1e999999999", "1e-9999", "2 ** 0.5", "1 / 0", "0 ** -1", "True", "1j", "2 ^ 3", "~1"),
    *("1" * 1001, "(" * 300 + "1" + ")" * 300, "*".join(["9" * 60] * 16) + "**9", "1 < 2"),
]


def test_the_calculator_is_exact_and_refuses_everything_else(subtests):
    assert {expression: calculator(expression) for expression in EXACT} == EXACT
    for expression in INEXACT:
        with subtests.test(expression[:30]), pytest.raises(ValueError, match=r"."):
            calculator(expression)

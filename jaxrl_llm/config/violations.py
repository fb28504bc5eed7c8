"""What pydantic finds wrong with a config, as lines that name the key, the value and the fix."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from jaxrl_llm.config.functions import closest
from jaxrl_llm.config.groups import group_of
from jaxrl_llm.config.renamed import renamed

EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a group of keys",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "is_instance_of": "a function's name or {fn: NAME, keyword: …}",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "too_short": "at least one",
}
"""What is expected, by pydantic's name of the error."""

BOUNDS = {
    "greater_than": "a number above {gt:.15g}",
    "greater_than_equal": "{ge:.15g} or more",
    "less_than": "a number below {lt:.15g}",
    "less_than_equal": "{le:.15g} or less",
}


LONGEST = 120
"""Of a value that a message shows, in characters."""


def violations(cls: type[Any], error: ValidationError, prefix: str = "") -> list[str]:
    """Return a line for each thing that is wrong.

    Args:
        cls: of the config.
        error: as pydantic raised it.
        prefix: of the keys' names, with a dot.
    """
    return [line for item in error.errors() for line in _lines(cls, dict(item), prefix)]


def _lines(cls: type[Any], error: Mapping[str, Any], prefix: str) -> list[str]:
    path = [str(part) for part in error["loc"] if not isinstance(part, int)]
    name, kind = prefix + ".".join(path), error["type"]
    if kind == "value_error":  # of rules
        return [f"{name}: {line}" if name else line for line in error["ctx"]["error"].args]
    group = _group(cls, path[:-1])
    field = group.__pydantic_fields__.get(path[-1])
    if kind == "unexpected_keyword_argument" or field is None:
        unknown = f"unknown key {name!r}; {closest(path[-1], group.__pydantic_fields__)}"
        return [renamed(name) or unknown]
    if kind == "missing":
        return [f"{name} is missing: {field.description}"]
    return [f"{name}: expected {_expected(error, field.annotation)}, got {_shown(error['input'])}"]


def _group(cls: type[Any], path: list[str]) -> type[Any]:
    for name in path:
        cls = group_of(cls.__pydantic_fields__[name].annotation) or cls
    return cls


def _expected(error: Mapping[str, Any], annotation: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        expected = context["expected"].replace("'", "")
    elif kind in BOUNDS:
        expected = BOUNDS[kind].format(**context)
    else:
        expected = EXPECTED.get(kind) or error["msg"]
    return f"{expected}, or null" if type(None) in get_args(annotation) else expected


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text, kind = repr(value), type(value).__name__
    return f"{text} ({kind})" if len(text) <= LONGEST else f"a {kind}"

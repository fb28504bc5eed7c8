"""The types of config keys, and how a group of keys is declared.

A group is a frozen dataclass of pydantic's; the text below a key says what it is for. Types are
strict: YAML's `yes` or a quoted "3" is no number. An int is taken for a float.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, closest

Item = TypeVar("Item")

STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)


class _ConfigErrors(type):
    """The type of groups: what pydantic refuses when one is made is a ConfigError."""

    def __call__(cls, *args: Any, **kwargs: Any):  # the result's type is the class's
        """Make a group."""
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError(*violations(cls, error)) from None


@functools.cache
def texts_below_keys(module: str) -> dict[str, dict[str, str]]:
    """Return the texts that stand below the keys of a module's classes, by class and key."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # there is no source, as of a class in a shell
        return {}
    return {
        group.name: {
            ast.unparse(key.target if isinstance(key, ast.AnnAssign) else key.targets[0]): " ".join(
                text.value.value.split()
            )
            for key, text in itertools.pairwise(group.body)
            if isinstance(key, ast.AnnAssign | ast.Assign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for group in tree.body
        if isinstance(group, ast.ClassDef)
    }


class Section(metaclass=_ConfigErrors):
    """The base of all groups of keys, whole configs included.

    Raises:
        ConfigError: a line for each value that is wrong; if there is none, for each contradiction.
    """

    __pydantic_fields__: ClassVar[dict[str, FieldInfo]]

    def __init_subclass__(cls) -> None:
        """Give each key the text below it as its description."""
        for name, text in texts_below_keys(cls.__module__).get(cls.__name__, {}).items():
            annotated = Annotated[cls.__annotations__[name], Field(description=text)]
            cls.__annotations__[name] = annotated

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let a mapping stand for a group, which strict types would refuse."""
        schema = handler(source)
        inner = handler.resolve_ref_schema(schema)
        while inner["type"] != "dataclass":
            inner = inner["schema"]
        inner["strict"] = False
        return schema


def function_key(
    home: str,
    default: FunctionSpec | tuple[FunctionSpec, ...] | str | None,
    *,
    passed: tuple[str, ...] | None = None,
    several: bool = False,
) -> Any:
    """Declare a key that names a function.

    Args:
        home: module in which a bare name is looked up.
        default: the function, by name or with keywords; several where the key is a list.
        passed: parameters that a config may not set; None where they are the positional ones
            without a default.
        several: whether a list may stand in the place of one, as for `OneOrMore`.
    """
    spec = FunctionSpec(default) if isinstance(default, str) else default
    home_of_names = {"home": home, "passed": passed and list(passed), "several": several}
    return Field(spec, json_schema_extra={"function": home_of_names})


def _as_spec(value: Any) -> Any:
    if isinstance(value, tuple) and callable(getattr(value, "update", None)):  # optax is slow
        raise PydanticCustomError(
            "optax_transformation",
            "a function of the learning rate, as in "
            "lambda learning_rate: optax.adamw(learning_rate)",
        )
    if callable(value):
        return FunctionSpec.of(value)
    if isinstance(value, str):
        return FunctionSpec(value)
    if isinstance(value, Mapping) and "fn" in value:
        keywords = {str(k): v for k, v in value.items() if k != "fn"}
        if callable(value["fn"]):
            spec = FunctionSpec.of(value["fn"])
            return dataclasses.replace(spec, kwargs={**spec.kwargs, **keywords})
        if isinstance(value["fn"], str):
            return FunctionSpec(value["fn"], keywords)
    return value


def _one_or_more(value: Any) -> FunctionSpec | tuple[FunctionSpec, ...]:
    specs = [_as_spec(item) for item in value] if isinstance(value, list | tuple) else None
    result = _as_spec(value) if specs is None else tuple(specs)
    for spec in (result,) if specs is None else specs or (None,):
        if not isinstance(spec, FunctionSpec):
            raise PydanticCustomError(
                "functions", "a function's name, {fn: NAME, keyword: …}, or a list of such"
            )
    return result


def _one_or_more_as_config(value: FunctionSpec | tuple[FunctionSpec, ...]) -> Any:
    return [s.as_config() for s in value] if isinstance(value, tuple) else value.as_config()


def _text_or_texts(value: Any) -> str | dict[str, str]:
    texts = list(value.values()) if isinstance(value, Mapping) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("texts", "a text, or a mapping from data_source to texts")
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _with_text_keys(value: Any) -> Any:
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value


def _no_nan(value: float) -> float:
    if value != value:
        raise PydanticCustomError("float_type", "NaN is no setting")
    return value


Number = Annotated[float, AfterValidator(_no_nan)]
"""A float that is no NaN."""

Function = Annotated[
    InstanceOf[FunctionSpec], BeforeValidator(_as_spec), PlainSerializer(FunctionSpec.as_config)
]
"""A function's name, or `{fn: NAME, keyword: value, …}`."""

OneOrMore = Annotated[
    FunctionSpec | tuple[FunctionSpec, ...],
    PlainValidator(_one_or_more),
    PlainSerializer(_one_or_more_as_config),
]
"""A function as above, or a list of such."""

PerSource = Annotated[
    str | dict[str, str],
    PlainValidator(_text_or_texts, json_schema_input_type=str | dict[str, str]),
]
"""A text, or one for each data_source."""

Several = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]
"""A list; one item may stand for a list of one."""

Table = Annotated[dict[str, Any], BeforeValidator(_with_text_keys)]
"""A mapping whose keys are not ours."""


def group_of(annotation: Any) -> Any:
    """Return the group of keys that an annotation names, `T` or `T | None`, or None.

    >>> group_of(int) is None
    True
    """
    options = (annotation, *get_args(annotation))
    groups = [t for t in options if isinstance(t, type) and hasattr(t, "__pydantic_fields__")]
    return groups[0] if groups else None


# What pydantic finds wrong with a config, as lines that name the key, the value and the fix.


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
        return [f"unknown key {name!r}; {closest(path[-1], group.__pydantic_fields__)}"]
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

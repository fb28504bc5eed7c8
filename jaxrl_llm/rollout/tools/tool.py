"""Tools: functions that a model calls, their schemas, arguments and results, and what runs them.

Worker processes import this: no array library.
"""

import asyncio
import base64
import enum
import functools
import inspect
import io
import json
import random
import re
import sys
import threading
import traceback
import types
import typing
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at
from jaxrl_llm.config.functions import (
    FunctionSpec,
    closest,
    find_function,
    load_function,
    split_name,
)
from jaxrl_llm.rollout.observation import BrokenTool, EpisodeRow, FailedTool, Observation
from jaxrl_llm.workers.supervisor import Serve, answering_in_turn, serve_requests
from jaxrl_llm.workers.values import finite_number, memory_limit, short_repr, shorten, to_plain

INJECTED = ("state", "row", "rng", "seconds")
"""Names of parameters that are passed by the trainer, and hidden from the model."""

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
CONTAINERS = {list: "array", tuple: "array", dict: "object"}
NAMES = SCALARS | CONTAINERS
SECTION = re.compile(r"\s*(Args|Returns|Raises):\s*")
ENTRY = re.compile(r"([ \t]*)(\w+)(?:[ \t]*\([^()]*\))?:(.*)")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class ArgumentsError(ValueError):
    """A model's arguments do not fit a tool; the message is for the model."""


def tool_schema(
    function: Callable[..., Any], name: str, *, hidden: Collection[str] = (), key: str
) -> dict[str, Any]:
    """Return what OpenAI's format says of a tool, as `transformers.utils.get_json_schema` does.

    The parameters need type annotations, and the docstring, in Google's style, has to describe each
    of them. The differences: parameters of `INJECTED`, `hidden` ones and those that can only be
    given by keyword, which are a config's, are left out; `*args`, `**kwargs` and parameters that
    can't be given by keyword are refused; a heading of the docstring stands on a line of its own.

    Args:
        function: the tool.
        name: by which the model calls it.
        hidden: parameters that the config gives.
        key: of the config, for messages.

    Raises:
        ConfigError: the signature or the docstring lacks something.

    >>> def double(x: int):
    ...     '''Double a number.
    ...
    ...     Args:
    ...         x: the number.
    ...     '''
    >>> tool_schema(double, "double", key="rollout.tools")["function"]["parameters"]["properties"]
    {'x': {'type': 'integer', 'description': 'the number.'}}
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"{key}: {name!r} is no name for a tool; define it with def")
    documentation = (inspect.getdoc(function) or "").strip()
    if not documentation:
        raise ConfigError(f"{key}: tool {name!r} has no docstring, which is told to the model")
    description, described, returns = parse_docstring(documentation)
    visible = _visible_parameters(function, name, hidden, key)
    hints = _type_hints(function, visible, name, key)
    properties = {}
    for parameter in visible:
        if parameter not in described:
            raise ConfigError(
                f"{key}: the docstring of tool {name!r} does not describe its parameter"
                f" {parameter!r}; add it below 'Args:'"
            )
        try:
            properties[parameter] = type_schema(hints[parameter])
        except TypeError as error:
            raise ConfigError(f"{key}: parameter {parameter!r} of tool {name!r}: {error}") from None
        properties[parameter] |= _described(described[parameter])
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    required = [n for n, p in visible.items() if p.default is p.empty]
    if required:
        parameters["required"] = required
    schema = {"name": name, "description": description, "parameters": parameters}
    with suppress(TypeError, KeyError):  # a type that JSON does not have is not told
        schema["return"] = type_schema(hints["return"]) | (
            {"description": returns} if returns is not None else {}
        )
    return {"type": "function", "function": schema}


def injected_names(function: Callable[..., Any], names: Collection[str] = INJECTED) -> list[str]:
    """Return which of the names a function asks for.

    >>> injected_names(lambda query, rng: None)
    ['rng']
    """
    try:
        return [n for n in inspect.signature(function).parameters if n in names]
    except ValueError:  # a builtin without a signature
        return []


def _visible_parameters(
    function: Callable[..., Any], name: str, hidden: Collection[str], key: str
) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise ConfigError(f"{key}: tool {name!r} has no signature: {error}") from error
    visible = {n: p for n, p in parameters.items() if n not in hidden and n not in INJECTED}
    for parameter in list(visible.values()):
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty:
            del visible[parameter.name]
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ConfigError(f"{key}: tool {name!r} takes {parameter}, which a model can't give")
        if parameter.annotation is parameter.empty:
            raise ConfigError(
                f"{key}: parameter {parameter.name!r} of tool {name!r} has no type; "
                f"write {parameter.name}: str, or whatever it is"
            )
    return visible


def _type_hints(
    function: Callable[..., Any], visible: Collection[str], name: str, key: str
) -> dict[str, Any]:
    function = _innermost(function)
    owner = function if inspect.isroutine(function) else type(function).__call__
    annotations = {
        n: a for n, a in inspect.get_annotations(owner).items() if n in visible or n == "return"
    }
    stub = types.SimpleNamespace(__annotations__=annotations)
    try:
        return typing.get_type_hints(stub, getattr(owner, "__globals__", {}))
    except NameError as error:
        raise ConfigError(f"{key}: a type in the signature of tool {name!r}: {error}") from error


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _described(description: str) -> dict[str, Any]:
    """Return the description, and the values that it lists as `(choices: [...])` at its end."""
    choices = CHOICES.search(description)
    if choices is None:
        return {"description": description}
    values = json.loads(choices[1])
    return {
        "enum": [value.strip() if isinstance(value, str) else value for value in values],
        "description": description[: choices.start()].strip(),
    }


def type_schema(annotation: Any) -> dict[str, Any]:
    """Return the JSON schema of a type.

    Raises:
        TypeError: JSON has no such type.

    >>> type_schema(list[int] | None)
    {'type': 'array', 'items': {'type': 'integer'}, 'nullable': True}
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return {}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _values_schema([member.value for member in annotation], annotation)
    if origin in (typing.Union, types.UnionType):
        return _union_schema(inner)
    if origin is typing.Literal:
        return _values_schema(list(inner), annotation)
    plain = (origin or annotation) if not inner else None  # typing.List is a list of anything
    if isinstance(plain, type) and plain in NAMES:
        return {"type": NAMES[plain]}
    if inner and origin in CONTAINERS:
        return _container_schema(origin, inner, annotation)
    raise _no_type(annotation)


def _container_schema(kind: type, inner: Sequence[Any], annotation: Any) -> dict[str, Any]:
    if kind is list:
        return {"type": "array", "items": type_schema(inner[0])}
    if kind is dict:
        return {"type": "object", "additionalProperties": type_schema(inner[1])}
    if len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [type_schema(each) for each in inner]}
    raise _no_type(annotation)


def _no_type(annotation: Any) -> TypeError:
    return TypeError(
        f"got the type {annotation!r}, expected str, int, float, bool, Literal, an Enum, or a list,"
        " tuple of several, dict or union of these"
    )


def _values_schema(values: list[Any], annotation: Any) -> dict[str, Any]:
    if not values or any(type(value) not in SCALARS for value in values):
        raise TypeError(f"got {annotation!r}, expected values of types that JSON has")
    kinds = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union_schema(kinds: Sequence[Any]) -> dict[str, Any]:
    options = [type_schema(kind) for kind in kinds if kind is not type(None)]
    nullable = {"nullable": True} if type(None) in kinds else {}
    if len(options) == 1:
        return options[0] | nullable
    if any(option.keys() != {"type"} or not isinstance(option["type"], str) for option in options):
        return {"anyOf": options} | nullable
    names = sorted({option["type"] for option in options})
    return {"type": names[0] if len(names) == 1 else names} | nullable


def parse_docstring(documentation: str) -> tuple[str, dict[str, str], str | None]:
    """Return a Google docstring's description, what it says of each parameter, and of the result.

    >>> parse_docstring("Add.\\n\\nArgs:\\n    x: one\\n        number.\\nReturns:\\n    the sum")
    ('Add.', {'x': 'one number.'}, 'the sum')
    """
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(documentation).splitlines():
        heading = SECTION.fullmatch(line)
        if heading and heading[1] not in sections:
            current = heading[1]
            sections[current] = []
        else:
            sections[current].append(line)
    described: dict[str, list[str]] = {}
    margin, entry = None, None
    for line in sections.get("Args", []):
        match = ENTRY.fullmatch(line)
        if match and (margin is None or len(match[1]) <= margin):
            margin, entry = len(match[1]), match[2]
            described[entry] = [match[3].strip()]
        elif entry is not None and line.strip():
            described[entry].append(line.strip())
    texts = {name: " ".join(lines).strip() for name, lines in described.items()}
    returns = "\n".join(sections["Returns"]).strip() if "Returns" in sections else None
    return "\n".join(sections[""]).strip(), texts, returns


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments in the types of a tool's schema.

    Numbers and booleans may be written as texts, as some formats of calls have nothing else, and
    whole numbers as 2.0.

    Args:
        schema: of `tool_schema`.
        arguments: by name.

    Raises:
        ArgumentsError: one is unknown, missing or of another type.

    >>> properties = {"x": {"type": "integer"}}
    >>> schema = {"function": {"name": "f", "parameters": {"properties": properties}}}
    >>> check_arguments(schema, {"x": "2"})
    {'x': 2}
    >>> check_arguments(schema, {"x": "two"})
    Traceback (most recent call last):
    jaxrl_llm.rollout.tools.tool.ArgumentsError: f: 'x': expected integer, got "two"
    """
    name, parameters = schema["function"]["name"], schema["function"]["parameters"]
    properties = parameters["properties"]
    for argument in arguments:
        if argument not in properties:
            raise ArgumentsError(f"{name} takes no {argument!r}; {closest(argument, properties)}")
    missing = [n for n in parameters.get("required", []) if n not in arguments]
    if missing:
        raise ArgumentsError(f"{name} needs a value for {', '.join(missing)}")
    return {
        argument: _checked(properties[argument], value, f"{name}: {argument!r}")
        for argument, value in arguments.items()
    }


def _checked(schema: Mapping[str, Any], value: Any, where: str) -> Any:
    if value is None and schema.get("nullable"):
        return None
    if "enum" in schema:
        for choice in schema["enum"]:
            if type(choice) is type(value) and choice == value:
                return value
        raise _mismatch(where, f"one of {_shown(schema['enum'], 1000)}", value)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    options = schema.get("anyOf") or [{**schema, "type": kind} for kind in kinds]
    if not options:  # any type
        return value
    for convert in (False, True):
        for option in options:
            with suppress(ArgumentsError):
                if "anyOf" in schema:
                    return _checked(option, value, where)
                return _as_kind(option, value, where, convert=convert)
    if len(options) == 1:
        return _as_kind(options[0], value, where, convert=True)
    named = [str(option.get("type", "any")) for option in options]
    raise _mismatch(where, " or ".join(named), value)


def _as_kind(schema: Mapping[str, Any], value: Any, where: str, *, convert: bool) -> Any:
    """Return a value as one type of JSON."""
    kind = schema["type"]
    own = type(value)
    if kind == "array" and own is list:
        prefix = schema.get("prefixItems")
        if prefix is not None and len(prefix) != len(value):
            raise _mismatch(where, f"{len(prefix)} values", value)
        items = prefix or [_inner(schema, "items")] * len(value)
        return [_checked(s, v, where) for s, v in zip(items, value, strict=True)]
    if kind == "object" and own is dict:
        inner = _inner(schema, "additionalProperties")
        return {name: _checked(inner, v, where) for name, v in value.items()}
    plain = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None)}
    if own is plain.get(kind):
        return value
    if kind == "number" and own is int:
        with suppress(OverflowError):
            return float(value)
    if convert and kind == "integer" and own is float and value.is_integer():
        return int(value)
    if convert and own is str and kind in ("integer", "number"):
        with suppress(ValueError):
            return plain[kind](value)
    if convert and kind == "boolean" and own is str and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _mismatch(where, kind, value)


def _inner(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = schema.get(key)
    return inner if isinstance(inner, Mapping) else {}  # a schema may also be true or false


def _mismatch(where: str, expected: str, value: Any) -> ArgumentsError:
    return ArgumentsError(f"{where}: expected {expected}, got {_shown(value, 100)}")


def _shown(value: Any, limit: int) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= limit else f"{text[:limit]}…"


def restore_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked arguments as a function expects them: members of Enums, tuples.

    >>> def f(x: tuple[int, int]): ...
    >>> restore_types(f, {"x": [1, 2]})
    {'x': (1, 2)}
    """
    hints = _type_hints(function, arguments.keys(), "", "")
    return {n: _restored(hints[n], v) if n in hints else v for n, v in arguments.items()}


def _restored(annotation: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation(value)
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            restored = value
            with suppress(ValueError):
                restored = _restored(option, value)
            if restored is not value:
                return restored
    if isinstance(value, list) and (origin or annotation) is list and inner:
        return [_restored(inner[0], v) for v in value]
    if isinstance(value, list) and (origin or annotation) is tuple:
        kinds = inner or [Any] * len(value)
        return tuple(_restored(kind, v) for kind, v in zip(kinds, value, strict=False))
    if isinstance(value, dict) and origin is dict:
        return {name: _restored(inner[1], v) for name, v in value.items()}
    return value


TOOLS_MODULE = "jaxrl_llm.rollout.tools.builtin"
ENVIRONMENTS_MODULE = "jaxrl_llm.rollout.agents.environments"
TOOLS_KEY, ENVIRONMENT_KEY = "rollout.tools", "rollout.environment"
Tool = TypeVar("Tool", bound=Callable[..., Any])
ENVIRONMENT_NAMES = (*INJECTED, "ground_truth", "extra_info", "data_source")
"""Names of an environment's parameters that are passed by the trainer."""


class LoadedTool(NamedTuple):
    """A tool that a config names.

    Attributes:
        name: by which the model calls it.
        definition: the function itself, from which a model is told.
        function: with the config's keywords bound.
        is_fixture: whether it is opened for each episode, and yields the function to call.
        is_async: whether it runs in the trainer's event loop.
        injected: which of the reserved names it asks for.
        schema: what the model is told; None: what `definition` says.
        ends: whether the attribute `end` of the function that is yielded is called at the end of an
            episode; it returns what is added to the reward of the last turn.
    """

    name: str
    definition: Callable[..., Any]
    function: Callable[..., Any]
    is_fixture: bool
    is_async: bool
    injected: tuple[str, ...]
    schema: dict[str, Any] | None = None
    ends: bool = False

    @property
    def is_stateful(self) -> bool:
        """Whether its calls depend on earlier ones of the episode."""
        return self.is_fixture or "state" in self.injected


def toolset_tool(
    function: Mapping[str, Any],
    open: Callable[..., Generator[Callable[..., Any], None, None]],
    *,
    ends: bool = False,
) -> LoadedTool:
    """Return a tool of those that one function of a config gives, see `marked`.

    Args:
        function: what the model is told, of OpenAI's format: its name, description and parameters.
        open: a generator function, opened for each episode, that yields the function to call.
        ends: whether that function has an `end`.
    """
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    schema = {"type": "function", "function": {**function, "parameters": parameters}}
    injected = tuple(injected_names(open))
    return LoadedTool(function["name"], open, open, True, False, injected, schema, ends)


def marked(**marks: Any) -> Callable[[Tool], Tool]:
    """Set attributes of a tool.

    Args:
        marks: `is_toolset`: it gives tools, and is called with the config's keywords. `check` is
            called before anything is loaded, as the tool is opened. `prepare` is called once before
            workers start, with the config's keywords.
    """

    def mark(tool: Tool) -> Tool:
        vars(tool).update(marks)
        return tool

    return mark


def check_tool(spec: FunctionSpec, seconds: float) -> None:
    """Refuse a tool that this machine can't have; most need nothing of it.

    Args:
        spec: names the tool.
        seconds: that a call may take.

    Raises:
        ConfigError: it can't.
    """
    check = getattr(find_function(spec, TOOLS_MODULE, key=TOOLS_KEY), "check", None)
    if check is None:
        return
    try:
        check(seconds, **spec.kwargs)
    except (ConfigError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{TOOLS_KEY}: {spec.fn}: {error}") from error


def prepare_tool(spec: FunctionSpec) -> None:
    """Do what a tool needs once, before workers start; most need nothing.

    Raises:
        ConfigError: it failed.
    """
    prepare = getattr(find_function(spec, TOOLS_MODULE, key=TOOLS_KEY), "prepare", None)
    if prepare is not None:
        with config_errors_at(f"{TOOLS_KEY}: {spec.fn}"):
            prepare(**spec.kwargs)


def load_tools(spec: FunctionSpec) -> list[LoadedTool]:
    """Return the tools that an entry of a config gives: one, or those of a toolset.

    Raises:
        ConfigError: as for `load_tool`; a toolset can't give its tools.

    >>> [tool.name for tool in load_tools(FunctionSpec("calculator"))]
    ['calculator']
    """
    if not hasattr(find_function(spec, TOOLS_MODULE, key=TOOLS_KEY), "is_toolset"):
        return [load_tool(spec)]
    bound = load_function(spec, TOOLS_MODULE, key=TOOLS_KEY)
    with config_errors_at(TOOLS_KEY):
        return bound()


def load_tool(spec: FunctionSpec) -> LoadedTool:
    """Return the tool that a config names.

    Raises:
        ConfigError: there is no such function, or it does not take its keywords.

    >>> load_tool(FunctionSpec("calculator")).is_stateful
    False
    """
    function = find_function(spec, TOOLS_MODULE, key=TOOLS_KEY)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise ConfigError(f"{TOOLS_KEY}: {spec.fn!r} has no signature: {error}") from error
    is_fixture = is_generator_function(function)
    if inspect.isasyncgenfunction(function):
        raise ConfigError(f"{TOOLS_KEY}: {spec.fn!r} is an async generator; expected a plain def")
    by_model = [
        name
        for name, p in parameters.items()
        if name in INJECTED or (p.kind is not p.KEYWORD_ONLY and name not in spec.kwargs)
    ]
    bound = load_function(
        spec, TOOLS_MODULE, passed=INJECTED if is_fixture else by_model, key=TOOLS_KEY
    )
    call = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    name, injected = split_name(spec.fn)[1], tuple(injected_names(function))
    return LoadedTool(name, function, bound, is_fixture, is_async, injected)


@functools.cache
def background_loop(name: str) -> asyncio.AbstractEventLoop:
    """Return the loop in which this process runs what tools of a kind await, in its own thread.

    Kinds share none: a coroutine that blocks would hold up sessions of other tools.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


def is_generator_function(function: Callable[..., Any]) -> bool:
    """Return whether a function is a generator function, below its decorators.

    >>> @functools.cache
    ... def count():
    ...     yield 1
    >>> is_generator_function(functools.partial(count))
    True
    """
    return inspect.isgeneratorfunction(_innermost(function))


def load_environment(spec: FunctionSpec) -> Callable[..., Generator[Any, str, Any]]:
    """Return the environment that a config names, its keywords bound.

    Raises:
        ConfigError: there is no such generator function, or it does not take its keywords.
    """
    function = load_function(
        spec, ENVIRONMENTS_MODULE, passed=ENVIRONMENT_NAMES, key=ENVIRONMENT_KEY
    )
    if not is_generator_function(function):
        raise ConfigError(
            f"{ENVIRONMENT_KEY}: {spec.fn!r} is no generator function; expected a def with"
            " answer = yield Observation(...)"
        )
    return function


class ToolError(RunError):
    """Tools can't be run at all: no worker starts, the pool is closed, a journal is wrong."""


class ToolResult(NamedTuple):
    """What came of one call, or of one step of an environment.

    Attributes:
        name: of the tool; `environment` for a step.
        text: told to the model.
        reward: added to the reward of the turn that is answered.
        end: whether the episode ends here.
        failure: None; `failed`, `timeout` or `died`, of which the model is told; `broken` where the
            infrastructure failed, after all retries; of one attempt also `retry`, where another may
            do better.
        score: what an environment returned at its end.
        seconds: that it took.
        images: told with the text: for each the place in it, in characters and in rising order, and
            the base64 of its file.
        error: what kind of error it was, until it is counted; empty for none.
        trace: where that was raised, if it is the first of its kind.
    """

    name: str = ""
    text: str = ""
    reward: float = 0.0
    end: bool = False
    failure: str | None = None
    score: float | None = None
    seconds: float = 0.0
    images: tuple[tuple[int, str], ...] = ()
    error: str = ""
    trace: str = ""

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """What a message that tells it has as content: a text, or parts of text and images."""
        return [*self._parts()] if self.images else self.text

    def _parts(self) -> Iterator[dict[str, Any]]:
        ends = [*(place for place, _ in self.images), len(self.text)]
        start = 0
        for end, image in zip(ends, [*self.images, None], strict=True):
            if end > start:
                yield {"type": "text", "text": self.text[start:end]}
            if image is not None:
                yield {"type": "image", "image": base64.b64decode(image[1])}
            start = end


TYPES = typing.get_type_hints(ToolResult) | {"images": list}
"""Of the fields of a result, as JSON has them."""


def read_result(fields: Any) -> ToolResult | None:
    """Return a result as JSON has it; None where it is none.

    >>> read_result(ToolResult("add", "3")._asdict() | {"images": []}).text
    '3'
    """
    if not isinstance(fields, dict) or fields.keys() != TYPES.keys():
        return None
    if not all(isinstance(fields[name], kind) for name, kind in TYPES.items()):
        return None
    if any(finite_number(v) is None for v in fields.values() if isinstance(v, float)):
        return None
    images = checked_images(fields["images"])
    return None if images is None else ToolResult(**{**fields, "images": images})


def checked_images(value: Any) -> tuple[tuple[int, str], ...] | None:
    """Return images as JSON has them in the form of `ToolResult`; None where they are none.

    >>> checked_images([[0, "aGk="]]), checked_images([[2, "aGk="], [1, "aGk="]])
    (((0, 'aGk='),), None)
    """
    if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
        return None
    if any([type(part) for part in item] != [int, str] for item in value):
        return None
    places = [place for place, _ in value]
    if places != sorted(places) or min(places, default=0) < 0:
        return None
    try:
        for _, image in value:
            base64.b64decode(image, validate=True)
    except ValueError:
        return None
    return tuple((place, image) for place, image in value)


# The worker side of the pool of tools: load them, then answer requests until told to stop.
#
# A worker is the child of a fresh interpreter, its supervisor, and runs `run_tools`. It imports
# neither jax nor the program that started it.

KEYS = "rollout.tool_process."  # how the config's keys for the limits begin
MAX_RESULT_CHARS = 1_000_000
MAX_IMAGE_CHARS = 16_000_000  # of all images of a result, in base64
MAX_TRACE_CHARS = 4000
INFRASTRUCTURE = (BrokenTool, ConnectionError)
"""What is nobody's fault, and tried again."""


class ToolRequest(NamedTuple):
    """What a worker is asked.

    Attributes:
        kind: `open` or `close` an episode, `call` a tool, `step` the environment, `end` the tools
            that were called, or tell the `schema` of a tool.
        episode: its number.
        number: of the call or step in its episode.
        name: of the tool.
        arguments: of the tool; `answer` of a step.
        row: of the episode, where it is opened, or where a call needs no opened one.
        seed: of the episode, likewise.
    """

    kind: str
    episode: int = -1
    number: int = 0
    name: str = ""
    arguments: dict[str, Any] | None = None
    row: EpisodeRow | None = None
    seed: int = 0


class ResultError(ValueError):
    """A tool or an environment gave something that can't be told; the message says what."""


def to_result(value: Any) -> ToolResult:
    """Return what a tool or an environment gave as it is told.

    Raises:
        ResultError: it is no text, no image and no plain data, too long, or the reward is no
            finite number.

    >>> to_result({"sum": 3}).text, to_result(Observation("no", reward=-1)).reward
    ('{"sum": 3}', -1.0)
    """
    observation = value if isinstance(value, Observation) else Observation(value)
    text, images = _to_parts(observation.text)
    if len(text) > MAX_RESULT_CHARS:
        raise ResultError(f"the result has {len(text)} characters, of {MAX_RESULT_CHARS} allowed")
    if (size := sum(len(image) for _, image in images)) > MAX_IMAGE_CHARS:
        raise ResultError(
            f"the images of the result have {size} characters in base64, of {MAX_IMAGE_CHARS} "
            "allowed"
        )
    reward = checked_number(observation.reward, "reward")
    return ToolResult("", text, reward, bool(observation.end), images=images)


def _to_parts(value: Any) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return what is told as a text, and as images with their places in it."""
    items = [_of_part(item) for item in value] if isinstance(value, list | tuple) else [value]
    if not any(map(_is_image, items)):
        return _to_text(value), ()
    text, images, after_text = "", list[tuple[int, str]](), False
    for item in items:
        if _is_image(item):
            images.append((len(text), _encode_image(item)))
        else:
            text += "\n" * after_text + _to_text(item)
        after_text = not _is_image(item)
    return text, tuple(images)


def _of_part(item: Any) -> Any:
    """Return what a typed part of a message holds; anything else as it is."""
    kind = item.get("type") if isinstance(item, dict) else None
    return item.get(kind, item) if kind in ("text", "image") else item


def _is_image(value: Any) -> bool:
    if isinstance(value, bytes):
        return True
    shape = getattr(value, "shape", ())
    if len(shape) == 3 and shape[2] in (3, 4):
        return str(getattr(value, "dtype", "")) == "uint8"
    pillow = sys.modules.get("PIL.Image")  # where it is not, there are none of its images
    return pillow is not None and isinstance(value, pillow.Image)


def _encode_image(value: Any) -> str:
    """Return an image as the base64 of a file; PIL's and arrays as PNG."""
    if not isinstance(value, bytes):
        from PIL import Image

        try:
            image = value if isinstance(value, Image.Image) else Image.fromarray(value)
            kept = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA")
            file = io.BytesIO()
            (image if kept else image.convert("RGB")).save(file, "PNG", compress_level=1)
        except (OSError, ValueError, TypeError) as error:
            raise ResultError(f"an image of the result can't be encoded: {error}") from None
        value = file.getvalue()
    return base64.b64encode(value).decode()


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=to_plain)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ResultError(
                f"expected text or plain data as result, got a {type(value).__name__}: {error}"
            ) from None
    return value.encode("utf-8", "replace").decode()


def checked_number(value: Any, name: str) -> float:
    """Return a number that a function gave.

    Raises:
        ResultError: it is none, or not finite.

    >>> checked_number(True, "reward")
    1.0
    """
    if (number := finite_number(value)) is None:
        raise ResultError(f"expected a finite number (float32) as {name}, got {short_repr(value)}")
    return number


def error_text(message: str) -> str:
    """Return what the model is told of a failure, on one line.

    >>> error_text("KeyError: 'x'")
    "error: KeyError: 'x'"
    """
    return f"error: {shorten(' '.join(message.split()))}".encode("utf-8", "replace").decode()


def failed_result(error: BaseException, *, failure: str, trace: str = "") -> ToolResult:
    """Return the result where something was raised."""
    if isinstance(error, FailedTool):
        text = shorten(error.text, MAX_RESULT_CHARS).encode("utf-8", "replace").decode()
        trace = text[-MAX_TRACE_CHARS:]
        return ToolResult(text=text, failure=failure, error=error.kind, trace=trace)
    kind, message = type(error).__name__, str(error)
    if isinstance(error, ResultError):
        kind = "result"
    else:
        message = f"{kind}: {error}" if message.strip() else kind
    return ToolResult(text=error_text(message), failure=failure, error=kind, trace=trace)


def format_trace(error: BaseException, memory_gb: float | None = None) -> str:
    """Return a traceback, its middle left out where it is long."""
    traceback.clear_frames(error.__traceback__)  # they may hold all memory that we may take
    text = "".join(traceback.format_exception(error)).rstrip()
    return shorten(text, MAX_TRACE_CHARS) + memory_limit(error, memory_gb, KEYS)


ENVIRONMENT = "environment"
CLEAN_UP = "clean-up"
DONE = object()


class SetUpError(Exception):
    """A tool that is opened for each episode could not be."""


class OpenEpisode:
    """What lives in a worker for an episode.

    Args:
        row: of data.
        seed: of the episode.
    """

    def __init__(self, row: EpisodeRow, seed: int) -> None:
        self.row, self.seed = row, seed
        self.state: dict[str, Any] = {}
        self.tools: dict[str, tuple[Generator[Any, None, None], Callable[..., Any]]] = {}
        self.environment: Generator[Any, Any, Any] | None = None

    def given(self, names: tuple[str, ...], seconds: float, key: str | int) -> dict[str, Any]:
        """Return the values of reserved names that a function asks for.

        Args:
            names: that it asks for.
            seconds: the time limit.
            key: of its random numbers: the number of a call, or the name of what is opened.
        """
        values = {"state": self.state, "row": self.row, "seconds": seconds}
        if "rng" in names:
            values["rng"] = random.Random(f"{self.seed} {key}")
        return {n: values[n] if n in values else getattr(self.row, n) for n in names}

    def close(self) -> list[BaseException]:
        """Clean up, once, whatever was opened; return what that raised."""
        actions = [] if self.environment is None else [self.environment.close]
        opened = reversed(self.tools.values())
        actions += [functools.partial(_finish, generator) for generator, _ in opened]
        self.environment, self.tools = None, {}
        errors: list[BaseException] = []
        for action in actions:
            try:
                action()
            except (Exception, SystemExit) as error:
                errors.append(error)
        return errors


def _finish(generator: Generator[Any, None, None]) -> None:
    if next(generator, DONE) is not DONE:
        generator.close()
        raise RuntimeError("it yields twice; expected one yield, of the function to call")


class Toolbox:
    """The tools and the environment of a worker, and the episodes that live there.

    Args:
        tools: that the config names, but async ones.
        environment: that it names; None: there is none.
        seconds: the time limit of a call.
        example_row: with which generator functions are opened to see what they yield.
        memory_gb: what the process may take, for messages; None where nothing limits it.

    Raises:
        ConfigError: a function can't be loaded.
    """

    def __init__(
        self,
        tools: Sequence[FunctionSpec],
        environment: FunctionSpec | None,
        seconds: float,
        example_row: EpisodeRow,
        *,
        memory_gb: float | None = None,
    ) -> None:
        self._tools = {tool.name: tool for given in tools for tool in load_tools(given)}
        self._environment = environment and load_environment(environment)
        self._seconds, self._example_row = seconds, example_row
        self._memory_gb = memory_gb
        self._episodes: dict[int, OpenEpisode] = {}
        self._traced: set[tuple[str, str]] = set()

    def answer(self, request: ToolRequest) -> ToolResult:
        """Do what is asked; whatever the functions raise is part of the result."""
        try:
            match request.kind:
                case "open":
                    errors = self._close(request.episode)
                    self._episodes[request.episode] = self._new_episode(request)
                    return self._cleaned_up(errors)
                case "close":
                    return self._cleaned_up(self._close(request.episode))
                case "call":
                    return self._call(request)
                case "step":
                    return self._step(request)
                case "end":
                    return self._end(request)
                case _:
                    return self._schema(request)
        except SetUpError as error:
            cause = error.__cause__ or error
            return self._failed(request, cause, failure="broken")
        except (Exception, SystemExit) as error:
            failure = "broken" if request.kind in ("step", "end") else "failed"
            return self._failed(request, error, failure=failure)

    def close(self) -> list[BaseException]:
        """Clean up all episodes; return what that raised."""
        return [error for number in list(self._episodes) for error in self._close(number)]

    def _failed(self, request: ToolRequest, error: BaseException, *, failure: str) -> ToolResult:
        if isinstance(error, INFRASTRUCTURE):
            failure = "retry"
        key = (request.name, type(error).__name__)
        trace = "" if key in self._traced else format_trace(error, self._memory_gb)
        self._traced.add(key)
        return failed_result(error, failure=failure, trace=trace)

    def _cleaned_up(self, errors: list[BaseException]) -> ToolResult:
        if not errors:
            return ToolResult()
        return ToolResult(error=CLEAN_UP, trace="\n".join(format_trace(error) for error in errors))

    def _new_episode(self, request: ToolRequest) -> OpenEpisode:
        return OpenEpisode(request.row or self._example_row, request.seed)

    def _close(self, number: int) -> list[BaseException]:
        episode = self._episodes.pop(number, None)
        return [] if episode is None else episode.close()

    def _call(self, request: ToolRequest) -> ToolResult:
        tool = self._tools[request.name]
        episode = self._episodes.get(request.episode) or self._new_episode(request)
        function, names = tool.function, tool.injected
        if tool.is_fixture:
            function = self._opened(episode, tool)
            names = tuple(injected_names(function))
        given = episode.given(names, self._seconds, request.number)
        return to_result(function(**restore_types(function, request.arguments or {}), **given))

    def _opened(self, episode: OpenEpisode, tool: LoadedTool) -> Callable[..., Any]:
        """Return the function that a tool yields for an episode, after its set-up."""
        if tool.name not in episode.tools:
            try:
                generator = tool.function(**episode.given(tool.injected, self._seconds, tool.name))
                function = next(generator, None)
            except (Exception, SystemExit) as error:
                raise SetUpError from error
            if not callable(function) or inspect.iscoroutinefunction(function):
                generator.close()
                raise SetUpError(f"{tool.name}: expected it to yield a def, got {function!r}")
            episode.tools[tool.name] = generator, function
        return episode.tools[tool.name][1]

    def _step(self, request: ToolRequest) -> ToolResult:
        episode = self._episodes[request.episode]
        assert self._environment is not None, "the pool refuses steps without one"
        try:
            if episode.environment is None:
                names = tuple(injected_names(self._environment, ENVIRONMENT_NAMES))
                given = episode.given(names, self._seconds, ENVIRONMENT)
                episode.environment = self._environment(**given)
                value = next(episode.environment)
            else:
                value = episode.environment.send((request.arguments or {})["answer"])
        except StopIteration as stop:
            score = None if stop.value is None else checked_number(stop.value, "score")
            return ToolResult(end=True, score=score)
        return to_result(value)

    def _end(self, request: ToolRequest) -> ToolResult:
        """Return the rewards at an episode's end of the tools that it has called."""
        opened = self._episodes[request.episode].tools.items()
        rewards = [
            checked_number(vars(function)["end"](), "reward")
            for name, (_, function) in opened
            if self._tools[name].ends
        ]
        return ToolResult(reward=sum(rewards))

    def _schema(self, request: ToolRequest) -> ToolResult:
        tool, episode = self._tools[request.name], OpenEpisode(self._example_row, request.seed)
        try:
            schema = tool_schema(self._opened(episode, tool), tool.name, key=TOOLS_KEY)
        except ConfigError as error:
            return ToolResult(text=str(error), failure="failed")
        finally:
            errors = episode.close()
        return self._cleaned_up(errors)._replace(text=json.dumps(schema))


MakeToolbox = Callable[..., Toolbox]
"""A partial `Toolbox`, which a worker is sent, and calls with its `memory_gb`."""

FAILURES = (None, "failed", "broken", "retry")


def encode_tool_result(number: int, result: ToolResult) -> bytes:
    """Return the line that tells the pool what came of a request.

    >>> encode_tool_result(3, ToolResult("", "4"))[:37]
    b'{"number": 3, "name": "", "text": "4"'
    """
    return json.dumps({"number": number, **result._asdict()}).encode() + b"\n"


def decode_tool_result(line: bytes, number: int) -> ToolResult | None:
    """Return what a line tells of a request; None where it is no answer to this request.

    Nothing is taken on trust: a tool may have written the line itself.

    >>> decode_tool_result(encode_tool_result(3, ToolResult("", "4")), 3).text
    '4'
    >>> decode_tool_result(b"garbage", 3)
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or type(fields.get("number")) is not int:
        return None
    if fields.pop("number") != number or (result := read_result(fields)) is None:
        return None
    sound = (
        len(result.text) <= MAX_RESULT_CHARS
        and sum(len(image) for _, image in result.images) <= MAX_IMAGE_CHARS
        and all(place <= len(result.text) for place, _ in result.images)
        and result.failure in FAILURES
    )
    if not sound:
        return None
    trace = result.trace[-2 * MAX_TRACE_CHARS :]
    return result._replace(text=result.text.encode("utf-8", "replace").decode(), trace=trace)


def run_tools(fd: int, *, memory_gb: float | None) -> None:
    """Answer lists of `(number, ToolRequest)` until the pool closes the connection.

    The pool sends a `MakeToolbox` first.

    Args:
        fd: the file descriptor of our end of the connection.
        memory_gb: what this process may take, for messages.
    """

    def load(make_toolbox: MakeToolbox) -> Serve:
        toolbox = make_toolbox(memory_gb=memory_gb)

        def answer(number: int, request: ToolRequest) -> bytes:
            return encode_tool_result(number, toolbox.answer(request))

        return answering_in_turn(answer)

    def describe(error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error) + memory_limit(error.__cause__, memory_gb, KEYS)
        return f"{type(error).__name__}: {error}{memory_limit(error, memory_gb, KEYS)}"

    serve_requests(fd, load, describe)

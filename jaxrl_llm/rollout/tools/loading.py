"""The tools and the environment that a config names. Worker processes import this."""

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec, find_function, load_function, split_name
from jaxrl_llm.rollout.tools.signature import INJECTED, injected_names

TOOLS_MODULE = "jaxrl_llm.rollout.tools.functions"
ENVIRONMENTS_MODULE = "jaxrl_llm.rollout.environments"
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
        ends: whether the function that is yielded has an `end`, see `ToolsetTool`.
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


class ToolsetTool(NamedTuple):
    """A tool of those that one function of a config gives, see `toolset`.

    Attributes:
        schema: what the model is told, in OpenAI's format.
        open: a generator function, opened for each episode, that yields the function to call.
        ends: whether the attribute `end` of that function is called at the end of an episode; it
            returns what is added to the reward of the last turn.
    """

    schema: dict[str, Any]
    open: Callable[..., Generator[Callable[..., Any], None, None]]
    ends: bool = False


def toolset(function: Callable[..., list[ToolsetTool]]) -> Callable[..., list[ToolsetTool]]:
    """Mark a function that gives tools: it is called with the config's keywords."""
    function.is_toolset = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def prepared_by(prepare: Callable[..., None]) -> Callable[[Tool], Tool]:
    """Have something done once before workers start: it is called with the config's keywords."""

    def mark(tool: Tool) -> Tool:
        tool.prepare = prepare  # pyright: ignore[reportFunctionMemberAccess]
        return tool

    return mark


def checked_by(check: Callable[..., None]) -> Callable[[Tool], Tool]:
    """Have something checked before anything is loaded: it is called as the tool is opened."""

    def mark(tool: Tool) -> Tool:
        tool.check = check  # pyright: ignore[reportFunctionMemberAccess]
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
        given = bound()
    return [
        LoadedTool(
            *(tool.schema["function"]["name"], tool.open, tool.open, True, False),
            *(tuple(injected_names(tool.open)), tool.schema, tool.ends),
        )
        for tool in given
    ]


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


def is_generator_function(function: Callable[..., Any]) -> bool:
    """Return whether a function is a generator function, below its decorators.

    >>> @functools.cache
    ... def count():
    ...     yield 1
    >>> is_generator_function(functools.partial(count))
    True
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.isgeneratorfunction(inspect.unwrap(function))


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

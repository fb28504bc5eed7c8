"""verl's tools: classes that a YAML file lists. Worker processes import this: no array library.

verl's functions with `@function_tool` need nothing: name them in `rollout.tools` as they are.
"""

import asyncio
import functools
import inspect
import numbers
import random
import sys
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import ConfigError, described_error
from jaxrl_llm.config.functions import FunctionSpec, find_function
from jaxrl_llm.rollout.observation import EpisodeRow, Observation
from jaxrl_llm.rollout.tools.tool import (
    TOOLS_KEY,
    LoadedTool,
    background_loop,
    marked,
    toolset_tool,
)

SCHEMAS = "verl.tools.schemas"


@marked(is_toolset=True)
def verl_tools(*, path: str) -> list[LoadedTool]:
    """Give the tools of a file of verl's, `tools: [{class_name, config, tool_schema}]`.

    A class has the coroutines of verl's `BaseTool`, and need not derive from it. `create` runs once
    for an episode, at the first call, with `extra_info.tools_kwargs.<tool>.create_kwargs` of the
    row; `execute` answers a call, and its reward is that turn's; at the end what `calc_reward`
    returns is added to the reward of the last turn, and `release` runs, whatever has happened.
    There is no `agent_data`.

    Args:
        path: of the YAML file. `class_name` may also be `my_file.py:MyTool`.

    Returns:
        The tools, in the file's order.

    Raises:
        ConfigError: the file or one of its entries does not fit.
    """
    return [_to_tool(make_tool(e, path), e.get("tool_schema"), path) for e in entries(path)]


def entries(path: str) -> list[dict[str, Any]]:
    """Return what a file of verl's lists, its classes loaded.

    Raises:
        ConfigError: it is no such file, or a class is not there.
    """
    import yaml

    key = f"{TOOLS_KEY}: {path}"
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error
    listed = tree.get("tools") if isinstance(tree, Mapping) else None
    if not isinstance(listed, list) or not all(
        isinstance(entry, Mapping) and isinstance(entry.get("class_name"), str) for entry in listed
    ):
        raise ConfigError(f"{key}: expected 'tools: [{{class_name, config, tool_schema}}, …]'")
    loaded = []
    for entry in listed:
        config = dict(entry.get("config") or {})
        if config.get("type", "native") != "native":
            raise ConfigError(f"{key}: got a tool of type {config['type']!r}, expected 'native'")
        tool_class = find_function(FunctionSpec(entry["class_name"]), "", key=key)
        loaded.append({**entry, "config": config, "class": tool_class})
    return loaded


def make_tool(entry: Mapping[str, Any], path: str) -> Any:
    """Return an entry's tool, made as verl makes it.

    Raises:
        ConfigError: its class can't be made.
    """
    schema, verl = entry.get("tool_schema"), sys.modules.get(SCHEMAS)
    if schema is not None:  # a class of verl's has imported verl's schemas
        schema = (
            verl.OpenAIFunctionToolSchema.model_validate(schema) if verl else as_attributes(schema)
        )
    try:
        return entry["class"](config=entry["config"], tool_schema=schema)
    except Exception as error:
        name = entry["class_name"]
        raise ConfigError(f"{TOOLS_KEY}: {path}: {name}: {described_error(error)}") from error


def _to_tool(tool: Any, schema: Any, path: str) -> LoadedTool:
    schema = tool.tool_schema if schema is None else schema
    dump = getattr(schema, "model_dump", None)
    plain = dict(dump(exclude_unset=True, exclude_none=True) if dump else schema)
    function = dict(plain.get("function") or {})
    if not isinstance(function.get("name"), str):
        raise ConfigError(f"{TOOLS_KEY}: {path}: a tool_schema has no function.name, got {plain}")
    return toolset_tool(function, functools.partial(_episode, tool, function["name"]), ends=True)


def _episode(
    tool: Any, name: str, row: EpisodeRow, rng: random.Random
) -> Generator[Callable[..., Any], None, None]:
    given = (row.extra_info.get("tools_kwargs") or {}).get(name) or {}
    given = {method: dict(given.get(f"{method}_kwargs") or {}) for method in METHODS}
    created = given["create"]
    if _takes(tool.create, "create_kwargs"):  # as verl's agent loop passes them
        created = {**created, "create_kwargs": given["create"]}
    instance = uuid.UUID(int=rng.getrandbits(128)).hex
    result = awaited(tool.create(instance, **created))
    instance = result[0] if isinstance(result, tuple) else result or instance

    def call(**parameters: Any) -> Observation:
        answer = awaited(tool.execute(instance, parameters, **given["execute"]))
        response, reward, *_ = answer if isinstance(answer, tuple) else (answer, 0.0)
        return Observation(response_content(response), reward or 0.0)

    def end() -> Any:
        reward = awaited(tool.calc_reward(instance, **given["calc_reward"]))
        return reward if isinstance(reward, numbers.Real) else 0.0

    call.end = end  # pyright: ignore[reportFunctionMemberAccess]
    try:
        yield call
    finally:
        awaited(tool.release(instance, **given["release"]))


METHODS = ("create", "execute", "calc_reward", "release")


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def response_content(response: Any) -> Any:
    """Return what a tool's response tells: images, and behind them the text, as verl does.

    What is no `ToolResponse` stays as it is.

    Raises:
        ValueError: it has videos.
    """
    if getattr(response, "video", None):
        raise ValueError("got videos as a response, expected images and text")
    text = getattr(response, "text", response)
    if not (images := getattr(response, "image", None)):
        return text
    given = images if isinstance(images, list | tuple) else [images]
    return [*given, *([text] if text else [])]


class Tree(dict[str, Any]):
    """A mapping whose keys are attributes, as verl's code reads its configs and schemas."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{name!r}; there are {', '.join(self) or 'none'}") from None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the mapping, as pydantic's models do."""
        return dict(self)


def as_attributes(value: Any) -> Any:
    """Return plain data with a `Tree` in place of each mapping.

    >>> as_attributes({"function": {"name": "add"}}).function.name
    'add'
    """
    if isinstance(value, Mapping):
        return Tree({str(key): as_attributes(inner) for key, inner in value.items()})
    return [as_attributes(inner) for inner in value] if isinstance(value, list | tuple) else value


def awaited(value: Any) -> Any:
    """Return what a method has returned, or its coroutine returns."""
    if not inspect.iscoroutine(value):
        return value
    return asyncio.run_coroutine_threadsafe(value, background_loop("verl_tools")).result()

"""What an editor and a shell are told of a config: its JSON Schema, and completions of words."""

import argparse
import importlib
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter

from jaxrl_llm.config.functions import public_functions
from jaxrl_llm.config.load import PACKAGED
from jaxrl_llm.config.sections import Section

# Completion of words by argcomplete.


ASKED = "_ARGCOMPLETE"
"""The variable by which the shell asks for completions, and for nothing else."""


def complete_words(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks how the last word may end, and end the process; else do nothing."""
    if ASKED not in os.environ:
        return
    import argcomplete  # which only shells need

    for action in parser._actions:
        if action.dest == "config":
            action.completer = _configs  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")


def _configs(prefix: str, **_: Any) -> dict[str, str]:
    """Return the names of packaged configs, and the YAML files and folders that begin so."""
    from argcomplete.completers import FilesCompleter

    packaged = (str(p.relative_to(PACKAGED).with_suffix("")) for p in PACKAGED.rglob("*.yaml"))
    files = FilesCompleter(allowednames=("yaml", "yml"))(prefix)
    named = {name: "packaged" for name in packaged if name.startswith(prefix)}
    return dict(sorted({**{str(path): "" for path in files}, **named}.items()))


# JSON Schema.


DIALECT = "https://json-schema.org/draft/2020-12/schema"
OWN = {"type": "string", "pattern": "[.:]", "description": "pkg.mod:name or my_file.py:name"}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def json_schema(cls: type[Section]) -> dict[str, Any]:
    """Return the JSON Schema of a config's file.

    No key is required, as a base or the command line may give it.
    """
    schema = TypeAdapter(cls).json_schema()
    groups = schema.pop("$defs")
    groups.pop("FunctionSpec", None)
    kinds: dict[str, Any] = {}
    for group in (schema, *groups.values()):
        group.pop("required", None)
        group["properties"] = {
            name: _key(dict(key), kinds) for name, key in group["properties"].items()
        }
    schema["properties"]["base"] = {"type": "string", "description": "a config to stand on"}
    return {"$schema": DIALECT, **schema, "$defs": groups | kinds}


def _key(key: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Return a key with its short forms: one item for a list, nothing for a group."""
    key.pop("title", None)
    if kind := key.pop("function", None):
        name = " ".join([kind["home"], *(kind["passed"] or [])])
        if name not in kinds:
            kinds[name] = _functions(kind["home"], kind["passed"])
        one = {"$ref": f"#/$defs/{name}"}
        several = kind.get("several") or "items" in str(key)
        default = key.get("default")
        if isinstance(default, dict):
            key["default"] = _spec(default)
        elif isinstance(default, list):
            key["default"] = [_spec(one) for one in default]
        forms = [one, *([{"type": "array", "items": one}] if several else [])]
        nullable = [] if default else [{"type": "null"}]
        rest = {k: v for k, v in key.items() if k in ("default", "description")}
        return {**rest, "anyOf": [*forms, *nullable]}
    if key.get("type") == "array":
        rest = {k: key.pop(k) for k in ("default", "description") if k in key}
        return {**rest, "anyOf": [key["items"], key]}
    if "$ref" in key:
        return {"anyOf": [{"$ref": key.pop("$ref")}, {"type": "null"}], **key}
    return key


def _spec(default: dict[str, Any]) -> dict[str, Any]:
    """Return a function that is a default as a file would hold it."""
    return {"fn": default["fn"], **default.get("kwargs", default)}


def _functions(home: str, passed: Sequence[str] | None) -> dict[str, Any]:
    """Return the schema of a function that is named by a config."""
    module = importlib.import_module(home)
    names = [name for name in public_functions(module) if _serves(getattr(module, name), passed)]
    forms = [_call(name, getattr(module, name), passed) for name in sorted(names)]
    own = {"type": "object", "properties": {"fn": OWN}, "required": ["fn"]}
    keywords = {"type": "object", "not": {"required": ["fn"]}}  # of the default's function
    return {"anyOf": [{"type": "string", "enum": sorted(names)}, OWN, *forms, own, keywords]}


def _serves(function: Callable[..., Any], passed: Sequence[str] | None) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return False
    if function.__module__.startswith("optax") and not passed:
        return function.__name__.endswith("_schedule")
    return set(passed or ()) <= set(parameters)


def _call(name: str, function: Callable[..., Any], passed: Sequence[str] | None) -> dict[str, Any]:
    """Return the schema of `{fn: name, keyword: value, …}`."""
    parameters = inspect.signature(function).parameters.values()
    if passed is None:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        passed = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    settable = {p.name: p for p in parameters if p.name not in passed and p.kind.name[:3] != "VAR"}
    return {
        "type": "object",
        "properties": {"fn": {"const": name}} | {k: _keyword(p) for k, p in settable.items()},
        "required": ["fn"],
        "additionalProperties": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def _keyword(parameter: inspect.Parameter) -> dict[str, Any]:
    annotation = parameter.annotation
    union = get_origin(annotation) in (types.UnionType, typing.Union)
    options = get_args(annotation) if union else (annotation,)
    names = [JSON_TYPES.get(t) if isinstance(t, type) else None for t in options]
    plain = {"type": names if len(names) > 1 else names[0]} if all(names) else {}
    shown = isinstance(parameter.default, bool | int | float | str)
    shown = shown and parameter.default not in (math.inf, -math.inf)
    return {**plain, **({"default": parameter.default} if shown else {})}

"""From a YAML file and `a.b=c` overrides to frozen records, with every key checked.

A config is a tree of frozen dataclasses; `key(default, "meaning")` declares a leaf, so that
`--help` can print every key with its default and its meaning. Functions are `FunctionSpec`s.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jaxrl_llm.functions import ConfigError, FunctionSpec, closest

Config = TypeVar("Config")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-6` is a float (YAML 1.1 reads a string)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def key(default: Any, meaning: str) -> Any:
    """Declare a config key with a default and its meaning (printed by `--help`)."""
    if isinstance(default, FunctionSpec | dict | list):
        return dataclasses.field(default_factory=lambda: default, metadata={"help": meaning})
    return dataclasses.field(default=default, metadata={"help": meaning})


def required(meaning: str) -> Any:
    """Declare a config key that has no default."""
    return dataclasses.field(metadata={"help": meaning})


def section(cls: type) -> Any:
    """Declare a nested group of keys."""
    return dataclasses.field(default_factory=cls)


def load(cls: type[Config], path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `a.b.c=value` overrides and build the record.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key, wrong type, missing key.
    """
    tree = read_yaml(path)
    for override in overrides:
        apply_override(tree, override)
    return build(cls, tree)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"can't read {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: got {type(tree).__name__}, wanted a mapping of keys to values")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` (the value is YAML) in a nested mapping, in place.

    >>> tree = {"loss": "ppo_clip"}
    >>> apply_override(tree, "loss.clip_high=0.28"); tree
    {'loss': {'fn': 'ppo_clip', 'clip_high': 0.28}}
    """
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"override {override!r}: wanted key=value, as in seed=1")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML") from error
    *groups, leaf = name.split(".")
    for group in groups:
        child = tree.get(group)
        if child is None:
            child = {}
        elif isinstance(child, str):  # the short form of a function
            child = {"fn": child}
        elif not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {group!r} is a value, not a group of keys")
        tree[group] = child
        tree = child
    tree[leaf] = value


def build(cls: type[Config], tree: Mapping[str, Any], prefix: str = "") -> Config:
    """Build the frozen record `cls` from a nested mapping.

    Raises:
        ConfigError: unknown key (with the nearest real one), wrong type or missing key.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    values = {}
    for name, value in tree.items():
        if name not in fields:
            raise ConfigError(f"unknown key {prefix + str(name)!r}; {closest(str(name), fields)}")
        values[name] = _convert(hints[name], value, prefix + name)
    for name, field in fields.items():
        if name in values or field.default is not dataclasses.MISSING:
            continue
        if field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing: {field.metadata['help']}")
        if dataclasses.is_dataclass(hints[name]) and hints[name] is not FunctionSpec:
            values[name] = _convert(hints[name], None, prefix + name)
    return cls(**values)


def _convert(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in hint.__args__:
            return None
        options = [h for h in hint.__args__ if h is not type(None)]
        for option in options[:-1]:
            try:
                return _convert(option, value, name)
            except ConfigError:
                continue
        return _convert(options[-1], value, name)
    if dataclasses.is_dataclass(hint) and hint is not FunctionSpec:
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name}: got {value!r}, wanted a group of keys")
        return build(typing.cast(type, hint), value or {}, f"{name}.")
    if hint is FunctionSpec:
        return _function_spec(value, name)
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(hint.__args__[0], item, name) for item in items)
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: got {value!r}, wanted a mapping")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        got = "nothing" if value is None else f"{value!r} ({type(value).__name__})"
        raise ConfigError(f"{name}: got {got}, wanted {_words(hint)}")
    return value


def _function_spec(value: Any, name: str) -> FunctionSpec:
    if isinstance(value, str):
        return FunctionSpec(value)
    if isinstance(value, Mapping) and isinstance(value.get("fn"), str):
        return FunctionSpec(value["fn"], {str(k): v for k, v in value.items() if k != "fn"})
    raise ConfigError(
        f"{name}: got {value!r}, wanted a function's name or {{fn: NAME, keyword: …}}"
    )


def _words(hint: Any) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return plain.get(hint, str(hint))


def as_tree(config: Any) -> Any:
    """Return the nested mapping that builds `config` again: the resolved config."""
    if isinstance(config, FunctionSpec):
        return config.as_config()
    if dataclasses.is_dataclass(config):
        return {f.name: as_tree(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, tuple):
        return [as_tree(item) for item in config]
    return config


def to_yaml(config: Any) -> str:
    """Return the resolved config as YAML."""
    return yaml.safe_dump(as_tree(config), sort_keys=False, allow_unicode=True, width=100)


def changes(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Return `key: before -> after` for every leaf in which two nested mappings differ.

    >>> changes({"a": {"b": 1}}, {"a": {"b": 2}})
    ['a.b: 1 -> 2']
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = [*before, *(n for n in after if n not in before)]
        return [
            line
            for n in names
            for line in changes(before.get(n), after.get(n), f"{prefix}.{n}" if prefix else str(n))
        ]
    return [] if before == after else [f"{prefix}: {before} -> {after}"]


def describe(cls: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (key, default, meaning) for every key of a config, in order."""
    rows = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        groups = [
            h
            for h in (hint, *getattr(hint, "__args__", ()))
            if dataclasses.is_dataclass(h) and h is not FunctionSpec
        ]
        if groups:
            rows += describe(typing.cast(type, groups[0]), f"{prefix}{field.name}.")
            continue
        if field.default is not dataclasses.MISSING:
            default = yaml.safe_dump(as_tree(field.default), default_flow_style=True)
        elif field.default_factory is not dataclasses.MISSING:
            default = yaml.safe_dump(as_tree(field.default_factory()), default_flow_style=True)
        else:
            default = "(required)"
        default = default.removesuffix("\n").removesuffix("\n...")
        rows.append((prefix + field.name, default, field.metadata["help"]))
    return rows

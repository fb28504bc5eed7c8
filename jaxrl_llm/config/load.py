"""From a YAML file and `a.b=c` overrides to frozen records, with every key checked.

A config is a tree of frozen dataclasses; `key(default, "meaning")` declares a leaf, so that
`--help` can print every key with its default and its meaning. Functions are `FunctionSpec`s.
"""

import copy
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, closest
from jaxrl_llm.config.renamed import renamed

Config = TypeVar("Config")


class _Loader(yaml.SafeLoader):
    """YAML with version 1.2's `1e-6` (a text in 1.1), and without keys that come twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that comes twice, of which YAML would silently keep the last."""
        seen = set()
        for name in (n for n, _ in node.value if isinstance(n, yaml.ScalarNode)):
            if (name.tag, name.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name.value!r} comes twice", problem_mark=name.start_mark
                )
            seen.add((name.tag, name.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """The inverse of `_Loader`: the text "1e-6" gets quotes."""


for _end in (_Loader, _Dumper):
    _end.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def key(default: Any, meaning: str) -> Any:
    """Declare a config key with a default and its meaning (printed by `--help`)."""
    if isinstance(default, FunctionSpec | dict | list):
        copies = functools.partial(copy.deepcopy, default)
        return dataclasses.field(default_factory=copies, metadata={"help": meaning})
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


def read_yaml(path: str | Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file."""
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"can't read {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date such as 1-1-99
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: got {type(tree).__name__}, wanted a mapping of keys to values")
    return tree


def apply_override(tree: dict[Any, Any], override: str) -> None:
    """Set `a.b.c=value` (the value is YAML) in a nested mapping, in place.

    >>> tree = {"loss": "ppo_clip"}
    >>> apply_override(tree, "loss.clip_high=0.28"); tree
    {'loss': {'fn': 'ppo_clip', 'clip_high': 0.28}}
    """
    name, equals, text = override.partition("=")
    *groups, leaf = name.split(".")
    if not equals or not all((*groups, leaf)):
        raise ConfigError(f"override {override!r}: wanted key=value, as in seed=1")
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"override {override!r}: the value is not YAML") from error
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


def build(cls: type[Config], tree: Mapping[Any, Any], prefix: str = "") -> Config:
    """Build the frozen record `cls` from a nested mapping.

    Raises:
        ConfigError: unknown key (with the nearest real one), wrong type or missing key.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    values = {}
    for name, value in tree.items():
        if name not in fields:
            unknown = f"unknown key {prefix + str(name)!r}; {closest(str(name), fields)}"
            raise ConfigError(renamed(f"{prefix}{name}") or unknown)
        values[name] = _convert(
            hints[name], _with_default(hints[name], fields[name], value), prefix + name
        )
    for name, field in fields.items():
        if name in values or field.default is not dataclasses.MISSING:
            continue
        if field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing: {field.metadata['help']}")
        if dataclasses.is_dataclass(hints[name]) and hints[name] is not FunctionSpec:
            values[name] = _convert(hints[name], None, prefix + name)
    return cls(**values)


def _with_default(hint: Any, field: dataclasses.Field, value: Any) -> Any:
    """Let keywords without a name, as in `loss.clip_high=0.3`, go to the default's function."""
    make = field.default_factory
    named = not isinstance(value, Mapping) or "fn" in value
    if named or hint is not FunctionSpec or make is dataclasses.MISSING:
        return value
    return {**as_tree(make()), **value}


def _convert(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType):  # `T | None`
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
        if value is None:
            return None
    if hint is FunctionSpec:
        return _function_spec(value, name)
    if dataclasses.is_dataclass(hint):
        tree = {} if value is None else value
        return build(typing.cast(type, hint), _mapping(tree, name, "a group of keys"), f"{name}.")
    if typing.get_origin(hint) is dict:
        return {str(k): v for k, v in _mapping(value, name, "a mapping").items()}
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(typing.get_args(hint)[0], item, name) for item in items)
    return _scalar(hint, value, name)


def _mapping(value: Any, name: str, wanted: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: got {_shown(value)}, wanted {wanted}")
    return value


def _scalar(hint: type, value: Any, name: str) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if not fits or value != value:  # NaN is no setting
        raise ConfigError(f"{name}: got {_shown(value)}, wanted {_words(hint)}")
    return value


def _function_spec(value: Any, name: str) -> FunctionSpec:
    if isinstance(value, str):
        return FunctionSpec(value)
    if isinstance(value, Mapping) and isinstance(value.get("fn"), str):
        return FunctionSpec(value["fn"], {str(k): v for k, v in value.items() if k != "fn"})
    raise ConfigError(
        f"{name}: got {_shown(value)}, wanted a function's name or {{fn: NAME, keyword: …}}"
    )


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _words(hint: type) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return plain[hint]


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
    tree = as_tree(config)
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


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


def describe(cls: type, prefix: str = "", *, optional: bool = False) -> list[tuple[str, str, str]]:
    """Return (key, default, meaning) for every key of a config, in order.

    A default is YAML on one line; a key without one has "(required)" in its place.

    Args:
        cls: of the config.
        prefix: of the keys.
        optional: also the keys of groups that are null by default.
    """
    rows = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and hint is not FunctionSpec:
            rows += describe(typing.cast(type, hint), f"{prefix}{field.name}.", optional=optional)
            continue
        if field.default is not dataclasses.MISSING:
            default = _one_line(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = _one_line(field.default_factory())
        else:
            default = "(required)"
        rows.append((prefix + field.name, default, field.metadata["help"]))
        for group in typing.get_args(hint) if optional else ():
            if dataclasses.is_dataclass(group) and group is not FunctionSpec:
                rows += describe(typing.cast(type, group), f"{prefix}{field.name}.", optional=True)
    return rows


def _one_line(value: Any) -> str:
    text = yaml.dump(
        as_tree(value), Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6
    )
    return text.removesuffix("\n").removesuffix("\n...")

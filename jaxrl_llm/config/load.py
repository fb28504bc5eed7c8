"""From a YAML file and `a.b=c` overrides to frozen records, with every key checked.

A config is a tree of frozen dataclasses (`sections.py`), so that `--help` can print every key with
its default and its meaning. Functions are `FunctionSpec`s.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, closest
from jaxrl_llm.config.sections import Section, group_of, violations

Config = TypeVar("Config", bound=Section)


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
    """The inverse of `_Loader`: the text "1e-6" gets quotes, and so do uncommon ends of lines."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quote a text that has ends of lines which YAML reads as spaces."""
        quoted = not {"\x85", "\u2028", "\u2029"}.isdisjoint(data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if quoted else None)


_Dumper.add_representer(str, _Dumper.represent_str)


for _end in (_Loader, _Dumper):
    _end.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def read_yaml(path: str | Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file."""
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"can't read {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date such as 1-1-99
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: got {type(tree).__name__}, expected a mapping of keys to values"
        )
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
        raise ConfigError(f"override {override!r}: expected key=value, as in seed=1")
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


def from_tree(cls: type[Config], tree: Mapping[Any, Any], prefix: str = "") -> Config:
    """Build the frozen record `cls` from a nested mapping.

    Args:
        cls: of the config.
        tree: its keys.
        prefix: of the keys' names in messages, with a dot.

    Raises:
        ConfigError: a line for each unknown key (with the nearest real one), wrong type, value out
            of bounds and missing key; where there is none, for each contradiction between keys.
    """
    try:
        return TypeAdapter(cls).validate_python(_complete(cls, tree))
    except ValidationError as error:
        raise ConfigError(*violations(cls, error, prefix)) from None


def _complete(cls: type[Section], tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the mapping with text keys, empty groups for missing ones, and functions' names.

    A group that is null counts as missing. Keywords without a name, as in `loss.clip_high=0.3`, go
    to the default's function.
    """
    values = {str(name): value for name, value in tree.items()}
    for name, field in cls.__pydantic_fields__.items():
        value = values.get(name)
        if group := group_of(field.annotation):
            if value is None and field.default is not None:
                value = {}
            if isinstance(value, Mapping):
                values[name] = _complete(group, value)
        elif isinstance(field.default, FunctionSpec) and isinstance(value, Mapping):
            named = "fn" in value
            values[name] = value if named else {**field.default.as_config(), **value}
    return values


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


def dotted_items(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested mappings with dots, and their values; an empty mapping is a value.

    >>> dict(dotted_items({"a": {"b": 1, "c": {}}, "d": None}))
    {'a.b': 1, 'a.c': {}, 'd': None}
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from dotted_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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


def describe(
    cls: type[Section], prefix: str = "", *, optional: bool = False
) -> list[tuple[str, str, str]]:
    """Return (key, default, meaning) for every key of a config, in order.

    A default is YAML on one line; a key without one has "(required)" in its place.

    Args:
        cls: of the config.
        prefix: of the keys.
        optional: also the keys of groups that are null by default.
    """
    rows = []
    for name, field in cls.__pydantic_fields__.items():
        group = group_of(field.annotation)
        if group is None or field.default is None:
            default = "(required)" if field.is_required() else _one_line(field.default)
            rows.append((prefix + name, default, field.description or ""))
        if group is not None and (optional or field.default is not None):
            rows += describe(group, f"{prefix}{name}.", optional=optional)
    return rows


def _one_line(value: Any) -> str:
    text = yaml.dump(
        as_tree(value), Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6
    )
    return text.removesuffix("\n").removesuffix("\n...")


# Config files, packaged ones included.


PACKAGED = Path(__file__).resolve().parents[1] / "configs"
"""The folder of the configs that the package brings."""


def load(
    cls: type[Config], path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """Read a config file, apply overrides and build the record.

    Args:
        cls: of the config.
        path: of the file, or the name of a packaged config.
        overrides: `a.b.c=value` as on the command line, or `{"a.b.c": value}`. There, a value may
            be a mapping of keys, and a function may stand where a config names one.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key, wrong type, missing key.
    """
    tree = read_config(path)
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            tree = merged(tree, nested(name, value))
    else:
        for override in overrides:
            apply_override(tree, override)
    return from_tree(cls, tree)


def read_config(name: str | Path) -> dict[Any, Any]:
    """Return the keys in a config file, on top of those of the file that its `base` names.

    Raises:
        ConfigError: no such file, or one that can't be read; a base that has a base.
    """
    path = find_config(name)
    tree = read_yaml(path)
    if "base" in tree:
        base = path.parent / str(tree.pop("base"))
        below = read_yaml(base)
        if "base" in below:
            raise ConfigError(f"base: {str(base)!r} has a base of its own: expected one level")
        tree = merged(below, tree)
    inside = path.resolve().is_relative_to(PACKAGED.resolve())
    return with_packaged_paths(tree) if inside else tree


def find_config(name: str | Path) -> Path:
    """Return the file of this path, else the packaged config of this name, `.yaml` or not.

    A folder, such as a run's, does not hide a config of its name.

    >>> find_config("recipes/dapo").name
    'dapo.yaml'
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    short = str(name).removeprefix("configs/").removesuffix(".yaml")
    if (PACKAGED / f"{short}.yaml").is_file():
        return PACKAGED / f"{short}.yaml"
    if path.is_absolute() or path.is_dir():
        return path
    known = [str(p.relative_to(PACKAGED).with_suffix("")) for p in PACKAGED.rglob("*.yaml")]
    raise ConfigError(
        f"can't read {str(name)!r}: No such file, nor a packaged config; {closest(short, known)}"
    )


def merged(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return nested mappings put on top of each other.

    A function that is named replaces another; keywords without a name go to the function below.

    >>> merged({"a": {"x": 1, "y": 2}, "b": {"fn": "f", "k": 1}}, {"a": {"y": 3}, "b": {"fn": "g"}})
    {'a': {'x': 1, 'y': 3}, 'b': {'fn': 'g'}}
    >>> merged({"loss": "ppo_clip"}, {"loss": {"clip_high": 0.28}})
    {'loss': {'fn': 'ppo_clip', 'clip_high': 0.28}}
    """
    values = dict(below)
    for name, value in above.items():
        old = values.get(name)
        if isinstance(old, str) or callable(old):  # a function, if keywords come on top
            old = {"fn": old}
        named = not isinstance(value, Mapping) or "fn" in value
        values[name] = merged(old, value) if isinstance(old, Mapping) and not named else value
    return values


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return the mapping that holds one value, at the key `a.b.c`.

    >>> nested("loss.cap", 2)
    {'loss': {'cap': 2}}
    """
    first, *rest = str(name).split(".", 1)
    return {first: nested(rest[0], value) if rest else value}


def with_packaged_paths(tree: Any) -> Any:
    """Return a packaged config whose paths in `configs/` lead to the package, where none are here.

    >>> with_packaged_paths({"path": "configs/no_such_folder"})
    {'path': 'configs/no_such_folder'}
    """
    if isinstance(tree, dict):
        return {name: with_packaged_paths(value) for name, value in tree.items()}
    if not isinstance(tree, str) or not tree.startswith("configs/"):
        return tree
    path, colon, function = tree.partition(":")
    packaged = PACKAGED / path.removeprefix("configs/")
    if Path(path).exists() or not packaged.exists():
        return tree
    return f"{packaged}{colon}{function}"


# What in a config is for nobody else: no page, model card or tracker gets it.


HIDDEN = "(not published)"
"""What stands in place of a secret."""

SECRET = re.compile(
    r"secret|passw(or)?d|credential|authorization|(api|access|private)_?key|(^|[_-])token$",
    re.IGNORECASE,
)
"""What a key is called that has a secret."""

LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""The user and password in an address."""


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, as nested mappings, with `(not published)` in place of its secrets.

    They are the values of environment variables (`env`) and of keys such as `api_key` or
    `hf_token`, and the logins in addresses. Functions of one's own may have such keys.

    >>> without_secrets({"env": {"HF_TOKEN": "hf_x"}, "max_new_tokens": 8, "api_key": None})
    {'env': {'HF_TOKEN': '(not published)'}, 'max_new_tokens': 8, 'api_key': None}
    >>> without_secrets({"trackers": [{"fn": "mlflow", "tracking_uri": "http://me:pass@host"}]})
    {'trackers': [{'fn': 'mlflow', 'tracking_uri': 'http://(not published)@host'}]}
    """
    return {key: _shown(value, _is_secret(key, value)) for key, value in tree.items()}


def _shown(value: Any, is_hidden: bool) -> Any:
    if isinstance(value, Mapping):
        return {k: _shown(v, is_hidden or _is_secret(k, v)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item, is_hidden) for item in value]
    if is_hidden and value is not None:
        return HIDDEN
    return LOGIN.sub(HIDDEN, value) if isinstance(value, str) else value


def _is_secret(key: Any, value: Any) -> bool:
    return (key == "env" and isinstance(value, Mapping)) or bool(SECRET.search(str(key)))

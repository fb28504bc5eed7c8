"""Config files: found by path or by the name of a packaged one, and put on top of their base."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.config.keys import Section
from jaxrl_llm.config.load import apply_override, from_tree, read_yaml

Config = TypeVar("Config", bound=Section)

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

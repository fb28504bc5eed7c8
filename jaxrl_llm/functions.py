"""Functions named by a config: `{fn: NAME, keyword: value, …}`.

A bare NAME is looked up in the module that owns the kind, `pkg.mod:name` (or `pkg.mod.name`) is
imported, and `my_file.py:name` is loaded from the user's file. The other keys are the function's
keyword arguments. This module imports no array library, so that worker processes start fast.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


class ConfigError(ValueError):
    """A config that can't be run; the message is one line that names the key and the fix."""


@dataclass(frozen=True)
class FunctionSpec:
    """A function by name, with the keyword arguments that a config gives it."""

    fn: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def as_config(self) -> dict[str, Any]:
        """Return the mapping that a YAML file would hold."""
        return {"fn": self.fn, **self.kwargs}


def closest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, else all of them.

    >>> closest("clip_hihg", ["clip_low", "clip_high"])
    "did you mean 'clip_high'? (known: clip_high, clip_low)"
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    listing = f"known: {', '.join(known) or 'none'}"
    return f"did you mean {near[0]!r}? ({listing})" if near else listing


def load_function(
    spec: FunctionSpec, home: str, *, passed: Iterable[str] | None = (), key: str = "fn"
) -> Callable[..., Any]:
    """Return the function that `spec` names with its keyword arguments bound.

    Args:
        spec: the name and the keyword arguments.
        home: the module in which a bare name is looked up.
        passed: parameters that the caller passes itself, so that a config may not; None where
            they are the positional ones without a default (fields of a batch).
        key: the config key, for messages.

    Returns:
        The function, or a `functools.partial` of it where there are keyword arguments.

    Raises:
        ConfigError: no such module, file or name; an unknown, missing or mistyped keyword.

    >>> spec = FunctionSpec("math:isclose", {"rel_tol": 0.5})
    >>> load_function(spec, home="math")(1.0, 1.4)
    True
    """
    function = _find(spec.fn, home, key)
    check_keywords(function, spec, passed=passed, key=key)
    return functools.partial(function, **spec.kwargs) if spec.kwargs else function


def _find(name: str, home: str, key: str) -> Callable[..., Any]:
    where, colon, attribute = name.rpartition(":")
    if colon and where.endswith(".py"):
        module = _module_from_file(Path(where), key)
    elif colon or "." in name:
        where, attribute = (where, attribute) if colon else tuple(name.rsplit(".", 1))
        module = _import(where, key)
    else:
        module = _import(home, key)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"{key}: no function {attribute!r} in {module.__name__}; "
            + closest(attribute, _public_functions(module))
        )
    return found


def _import(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}: can't import {name!r}: {error}") from error


def _module_from_file(path: Path, key: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{key}: no file {str(path)!r}")
    name = f"jaxrl_llm_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{key}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _public_functions(module: ModuleType) -> list[str]:
    def own(value: Any) -> bool:
        if isinstance(value, functools.partial):
            value = value.func
        home = getattr(value, "__module__", None) or ""
        return inspect.isroutine(value) and home.split(".")[0] == module.__name__.split(".")[0]

    return [n for n, v in vars(module).items() if not n.startswith("_") and own(v)]


def check_keywords(
    function: Callable[..., Any], spec: FunctionSpec, *, passed: Iterable[str] | None, key: str
) -> None:
    """Raise ConfigError where `spec.kwargs` does not fit the function's signature."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature: the call itself will check
        return
    named = {
        n: p for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    if passed is None:
        passed = [
            n for n, p in named.items() if p.kind is not p.KEYWORD_ONLY and p.default is p.empty
        ]
    settable = {n: p for n, p in named.items() if n not in set(passed)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in spec.kwargs.items():
        if name in settable:
            _check_plain_type(f"{key}.{name}", value, settable[name].annotation)
        elif name in named:
            raise ConfigError(f"{key}: {spec.fn!r} is given {name!r} by the trainer; remove it")
        elif not open_ended:
            raise ConfigError(f"{key}: {spec.fn!r} takes no {name!r}; {closest(name, settable)}")
    missing = [n for n, p in settable.items() if p.default is p.empty and n not in spec.kwargs]
    if missing:
        raise ConfigError(f"{key}: {spec.fn!r} needs a value for {', '.join(missing)}")


def _check_plain_type(key: str, value: Any, annotation: Any) -> None:
    if annotation not in (bool, int, float, str):
        return
    accepted: tuple[type, ...] = (int, float) if annotation is float else (annotation,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and annotation is not bool):
        raise ConfigError(
            f"{key}: got {value!r} ({type(value).__name__}), wanted a {annotation.__name__}"
        )

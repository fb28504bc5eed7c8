"""The source of users' functions, by which a continued run is known to have the same ones.

A function's source is its own text and that of what it uses by name of its module: functions,
classes and plain values. Comments and line breaks do not count. Of other packages `versions.json`
has the versions.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config.functions import FunctionSpec, split_name
from jaxrl_llm.config.keys import group_of

PLAIN = (bool, int, float, complex, str, bytes, type(None))
INSTALLED = ("site-packages", "dist-packages")


class UserFunction(NamedTuple):
    """A function that is none of an installed package.

    Attributes:
        name: as the config has it.
        source: its text, and that of what it uses of its module.
    """

    name: str
    source: str

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def user_functions(config: Any, prefix: str = "") -> dict[str, UserFunction]:
    """Return the users' functions that a config names or holds, by their keys."""
    functions: dict[str, UserFunction] = {}
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if group_of(type(value)) is not None and not isinstance(value, FunctionSpec):
            functions |= user_functions(value, f"{key}.")
        items = enumerate(value) if isinstance(value, tuple) else [("", value)]
        for number, item in items:
            source = source_of(item) if isinstance(item, FunctionSpec) else None
            if source is not None:
                functions[f"{key}.{number}".rstrip(".")] = UserFunction(item.fn, source)
    return functions


def source_of(spec: FunctionSpec) -> str | None:
    """Return the source of a user's function, without importing it; None for a package's function.

    >>> source_of(FunctionSpec("grpo")) is None
    True
    >>> print(source_of(FunctionSpec.of(lambda scores: scores)).splitlines()[0])
    # no source; compiled:
    """
    if spec.given is not None:
        return _of_object(spec.given)
    where, attribute = split_name(spec.fn)
    if not where:
        return None
    path = Path(where) if where.endswith(".py") else _file_of(where)
    if path is None or not path.is_file() or not set(INSTALLED).isdisjoint(path.parts):
        return None
    text = path.read_text(encoding="utf-8")
    try:
        top = _top_level(ast.parse(text))
    except SyntaxError:
        return text
    return _reachable(attribute, top.get) or text  # the name may be an import or computed


def _file_of(module: str) -> Path | None:
    """Return the file of a module that is no part of this library."""
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def _of_object(function: Any) -> str:
    """Return the source of a function, class or callable object that this process has defined."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, type) and not inspect.isroutine(function):
        function = type(function)
    module = inspect.getmodule(function)
    known = {**vars(module)} if module else {}
    for method in _functions_of(function):
        known |= method.__globals__
        known |= {k: v for k, v in inspect.getclosurevars(method).nonlocals.items()}
    known[function.__name__] = function

    def text(name: str) -> str | None:
        value = known.get(name)
        if isinstance(value, PLAIN) or (
            isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value)
        ):
            return f"{name} = {value!r}" if name in known else None
        is_own = getattr(value, "__module__", None) == function.__module__
        if not is_own or not (inspect.isfunction(value) or inspect.isclass(value)):
            return None
        try:
            return _normalized(_text(value))
        except (OSError, SyntaxError, TypeError):
            return None

    return _reachable(function.__name__, text) or _compiled(function)


def _functions_of(value: Any) -> list[Any]:
    """Return a function, or the methods that a class defines."""
    values = vars(value).values() if inspect.isclass(value) else [value]
    return [v for v in values if inspect.isfunction(v)]


def _text(value: Any) -> str:
    """Return the text of a function or class.

    Raises:
        OSError, SyntaxError, TypeError: there is none.
    """
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # of a notebook's class, before Python 3.13
        cell = ast.parse("".join(inspect.findsource([*_functions_of(value), value][0])[0]))
    classes = [n for n in cell.body if isinstance(n, ast.ClassDef) and n.name == value.__name__]
    if not classes:
        raise OSError(f"no source of {value}")
    return ast.unparse(classes[-1])


def _compiled(function: Callable[..., Any]) -> str:
    """Return what there is of a function whose source is not known, as that of a lambda."""
    codes = [code] if (code := getattr(function, "__code__", None)) else []
    parts = [function.__qualname__]
    while codes:
        code = codes.pop()
        inner = [c for c in code.co_consts if inspect.iscode(c)]
        values = [c for c in code.co_consts if not inspect.iscode(c)]
        parts += [code.co_code.hex(), repr((code.co_names, values))]
        codes += inner
    return "\n".join(["# no source; compiled:", *(f"# {part}" for part in parts)]) + "\n"


def _top_level(module: ast.Module) -> Mapping[str, str]:
    """Return the functions, classes and plain values of a module, normalized, by name."""
    texts = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            texts[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = repr(ast.literal_eval(node.value))
            except ValueError:
                value = ast.unparse(node.value)
            texts[node.targets[0].id] = f"{node.targets[0].id} = {value}"
    return texts


def _normalized(text: str) -> str:
    (node,) = ast.parse(text).body
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise SyntaxError("a lambda, which stands somewhere in a line")
    return ast.unparse(node)


def _reachable(name: str, text_of: Callable[[str], str | None]) -> str:
    """Return the text of a name, and of all names that it uses; empty where it has none."""
    texts: dict[str, str] = {}
    names = [name]
    while names:
        text = text_of(one) if (one := names.pop()) not in texts else None
        if text is not None:
            texts[one] = text
            names += {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
        elif one == name:
            return ""
    others = sorted(n for n in texts if n != name)
    return "\n\n\n".join(texts[n] for n in (*others, name)) + "\n"

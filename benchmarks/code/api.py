"""Write docs/api.md: every public name with its signature and the first line of its docstring.

    python -m benchmarks.code.api

`tests/repository/test_api.py` fails where the page and the library differ: a public name that
changes is a promise that changes.
"""

import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import parser_of

PAGE = Path(__file__).resolve().parents[2] / "docs/api.md"
PARTS = ("algorithms", "data", "evaluation", "models", "rewards", "rollout", "sharding")
"""The packages that export names besides `jaxrl_llm` itself."""

HEAD = """\
# Public names

What can be imported from `jaxrl_llm` and its packages, as `from jaxrl_llm.rollout import lay_out`.
Only these names are meant for other code: a change of theirs has a line in CHANGELOG.md, anything
else may change at any time. Shapes, units and errors are in the docstrings: `help(lay_out)`.

`jaxrl_llm.train` is always the function, although `python -m jaxrl_llm.train` is a program of the
same name; so are `sft`, `evaluate` and `serve`. `from jaxrl_llm.train import main` is the program.

`python -m benchmarks.code.api` writes this page from the code.
"""


def page() -> str:
    """Return the text of docs/api.md."""
    names = ("jaxrl_llm", *(f"jaxrl_llm.{part}" for part in PARTS))
    return HEAD + "".join(section(name) for name in names)


def section(package: str) -> str:
    """Return the section of a package."""
    module = importlib.import_module(package)
    lines = [line for name in module.__all__ for line in entry(name, getattr(module, name))]
    return "\n".join([f"\n## {package}", "", first_line(module), "", *lines, ""])


def entry(name: str, value: Any) -> Iterator[str]:
    """Yield the line of a name, and those of a class's methods."""
    if not callable(value):
        kind = type(value).__name__
        yield f"- `{name}`: a {'dict' if kind == 'dict' else kind}."
        return
    if is_config(value):
        yield f"- `{name}(**keys)`: {first_line(value)} Keys: `python -m {program(name)} --help`."
        return
    yield f"- `{name}{signature(value)}`: {first_line(value)}"
    for method, function in public_methods(value) if inspect.isclass(value) else ():
        what = signature(function) if callable(function) else ""
        yield f"  - `.{method}{what}`: {first_line(function)}"


def public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield methods and properties that a class itself defines, and that have a docstring."""
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if name.startswith("_") or is_plain(function) or not inspect.getdoc(function):
            continue
        if not first_line(function).startswith("See "):  # where the protocol has it
            yield name, function


def is_plain(value: Any) -> bool:
    """Tell whether a class's attribute is a default or a field, no method or property."""
    return not (inspect.isfunction(value) or hasattr(value, "__get__")) or is_field(value)


def is_field(value: Any) -> bool:
    """Tell whether it is the field of a NamedTuple."""
    return type(value).__name__ == "_tuplegetter"


def is_config(value: Any) -> bool:
    """Tell whether it is a whole config, whose keys have pages of their own."""
    return hasattr(value, "__pydantic_fields__")


def is_error(value: Any) -> bool:
    """Tell whether it is a class of exceptions."""
    return inspect.isclass(value) and issubclass(value, Exception)


def program(name: str) -> str:
    """Return the program of a config.

    >>> program("TrainConfig")
    'jaxrl_llm.train'
    """
    return f"jaxrl_llm.{name.removesuffix('Config').lower()}"


def signature(value: Any) -> str:
    """Return parameters and defaults, without types.

    >>> signature(lambda a, *, b=None: a)
    '(a, *, b=None)'
    """
    if getattr(value, "_is_protocol", False) or is_error(value):
        return ""  # nobody makes one by its fields
    parameters = inspect.signature(value).parameters.values()
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty, default=readable(parameter.default))
        for parameter in parameters
        if parameter.name != "self"
    ]
    return str(inspect.Signature(bare))


class Shown:
    """A default as it is written."""

    def __init__(self, text: str) -> None:
        """Keep the text."""
        self.text = text

    def __repr__(self) -> str:
        """Return the text."""
        return self.text


def readable(default: Any) -> Any:
    """Return a default whose text is the same everywhere."""
    if default is inspect.Parameter.empty or isinstance(default, str | int | float | bool | None):
        return default
    if isinstance(default, tuple) and all(isinstance(part, str | int | float) for part in default):
        return default
    return Shown(getattr(default, "__name__", "…"))


def first_line(value: Any) -> str:
    """Return the first line of a docstring."""
    text = inspect.getdoc(value) or ""
    return text.partition("\n")[0]


def main(words: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.parse_args(words).out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

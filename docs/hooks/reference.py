"""Generate the pages of the reference: the public names, and the keys of every program's config."""

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from mkdocs.structure.files import File, Files

from jaxrl_llm.config.load import describe
from jaxrl_llm.config.programs import (
    EvaluateConfig,
    PreferConfig,
    ServeConfig,
    SftConfig,
    TrainConfig,
)
from jaxrl_llm.config.sections import Section

PARTS = ("algorithms", "data", "evaluation", "models", "rewards", "rollout", "sharding")
CONFIGS = {
    "train": TrainConfig,
    "sft": SftConfig,
    "prefer": PreferConfig,
    "evaluate": EvaluateConfig,
    "serve": ServeConfig,
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for package in ("jaxrl_llm", *(f"jaxrl_llm.{part}" for part in PARTS)):
        lines = "\n".join(package_page(package))
        files.append(File.generated(config, f"reference/{package}.md", content=lines))
    for program, cls in CONFIGS.items():
        lines = "\n".join(keys_page(program, cls))
        files.append(File.generated(config, f"reference/keys_{program}.md", content=lines))
    return files


def package_page(package: str) -> Iterator[str]:
    """Yield the lines of a package's page: a directive of mkdocstrings for each public name."""
    module: Any = importlib.import_module(package)
    yield from (f"# {package}", "", (module.__doc__ or "").strip(), "")
    configs = {cls.__name__: program for program, cls in CONFIGS.items()}
    by_module: dict[str, list[str]] = {}
    for name, defined in module.__exports__.items():
        by_module.setdefault(defined, []).append(name)
    for defined, names in by_module.items():
        yield from (f"## {defined.removeprefix('jaxrl_llm.')}", "")
        for name in names:
            if name in configs:
                page = f"keys_{configs[name]}.md"
                yield from (f"### {name}", "", f"Its fields are the [config keys]({page}).", "")
            else:
                yield from (f"::: {defined}.{name}", "")


def keys_page(program: str, cls: type[Section]) -> Iterator[str]:
    """Yield the lines of the page of a program's keys: a table for each section of the config."""
    yield from (f"# Config keys of `jaxrl_llm.{program}`", "")
    yield f"`python -m jaxrl_llm.{program} --help` prints them, too. A key without a default is"
    yield "required. A group whose default is null is read only if the config has it."
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for row in describe(cls, optional=True):
        groups.setdefault(row[0].partition(".")[0] if "." in row[0] else "", []).append(row)
    for group, rows in groups.items():
        yield from ("", f"## {f'`{group}`' if group else 'The run'}", "", *table(rows))


def table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of a table of keys."""
    yield from ("| key | default | meaning |", "|---|---|---|")
    for key, default, meaning in rows:
        shown = "" if default == "(required)" else f"`{escaped(default)}`"
        yield f"| `{key}` | {shown} | {escaped(meaning)} |"


def escaped(text: str) -> str:
    """Return a text without what would end a table's cell."""
    return text.replace("|", "\\|")

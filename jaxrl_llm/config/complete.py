"""Completion of a program's command line by the shell: options, configs, keys and their values."""

import argparse
import json
import os
import typing
from collections.abc import Callable, Iterator
from typing import Any

from pydantic.fields import FieldInfo

from jaxrl_llm.config.files import PACKAGED
from jaxrl_llm.config.groups import group_of
from jaxrl_llm.config.keys import Section
from jaxrl_llm.config.load import describe

ASKED = "_ARGCOMPLETE"
"""The variable by which the shell asks for completions, and for nothing else."""


def complete_words(parser: argparse.ArgumentParser, cls: type[Section] | None = None) -> None:
    """Answer a shell that asks how the last word may end, and end the process; else do nothing.

    Args:
        parser: of the command line; a `--config` names a config, `overrides` are keys.
        cls: of the config whose keys these are.
    """
    if ASKED not in os.environ:
        return
    completers: dict[str, Callable[..., Any]] = {"config": _configs}
    if cls is not None:
        completers["overrides"] = lambda prefix, **_: override_words(cls, prefix)
    for action in parser._actions:
        if action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]
    _finder(cls)(parser, always_complete_options="long")


def _finder(cls: type[Section] | None) -> Any:
    """Return what completes; keys also after an option that follows keys."""
    from argcomplete.finders import CompletionFinder  # which only shells need

    class KeyFinder(CompletionFinder):
        """Takes options and keys in any order, as the programs do."""

        def collect_completions(self, active_parsers: Any, parsed_args: Any, cword_prefix: str):
            """Add keys, where nothing but an option's name was found."""
            found = super().collect_completions(active_parsers, parsed_args, cword_prefix)
            if cls is not None and all(word.startswith("-") for word in found):
                words = override_words(cls, cword_prefix)
                self._display_completions.update(words)
                found += words
            return found

    return KeyFinder()


def _configs(prefix: str, **_: Any) -> dict[str, str]:
    """Return the names of packaged configs, and the YAML files and folders that begin so."""
    from argcomplete.completers import FilesCompleter

    packaged = (str(p.relative_to(PACKAGED).with_suffix("")) for p in PACKAGED.rglob("*.yaml"))
    files = FilesCompleter(allowednames=("yaml", "yml"))(prefix)
    named = {name: "packaged" for name in packaged if name.startswith(prefix)}
    return dict(sorted({**{str(path): "" for path in files}, **named}.items()))


def override_words(cls: type[Section], prefix: str) -> dict[str, str]:
    """Return the words `key=` that begin so, with what they mean; after the `=`, its values.

    A value is any that can be listed: names of functions, choices, true and false.

    >>> from jaxrl_llm.config.sft import SftConfig
    >>> override_words(SftConfig, "see")
    {'seed=': 'seed of the data order and of random weights'}
    >>> override_words(SftConfig, "compilation_cache=")
    {'compilation_cache=false': '', 'compilation_cache=true': ''}
    """
    key, equals, _ = prefix.partition("=")
    if not equals:
        groups = {*_groups(cls)}
        keys = describe(cls, optional=True)
        words = {f"{name}=": meaning for name, _, meaning in keys if name not in groups}
    else:
        field = _field(cls, key)
        words = {f"{key}={value}": "" for value in (_values(field) if field else ())}
    return {word: meaning for word, meaning in sorted(words.items()) if word.startswith(prefix)}


def _groups(cls: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in cls.__pydantic_fields__.items():
        if group := group_of(field.annotation):
            yield prefix + name
            yield from _groups(group, f"{prefix}{name}.")


def _field(cls: type[Section], key: str) -> FieldInfo | None:
    *groups, leaf = key.split(".")
    for name in groups:
        field = cls.__pydantic_fields__.get(name)
        group = field and group_of(field.annotation)
        if group is None:
            return None
        cls = group
    return cls.__pydantic_fields__.get(leaf)


def _values(field: FieldInfo) -> Iterator[str]:
    """Yield the values that can be listed: names of functions, choices, true and false."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "function" in extra:
        yield from _function_names(extra["function"])
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if kind is bool:
            yield from ("true", "false")
        elif typing.get_origin(kind) is typing.Literal:
            yield from map(str, typing.get_args(kind))


def _function_names(kind: Any) -> list[str]:
    """Return the names that a key may have by itself, as the packaged schemas list them.

    To ask the module of the functions would be to import jax.
    """
    of_kind = " ".join([kind["home"], *(kind["passed"] or [])])
    for path in sorted((PACKAGED / "schema").glob("*.json")):
        kinds = json.loads(path.read_text(encoding="utf-8"))["$defs"]
        if of_kind in kinds:
            return kinds[of_kind]["anyOf"][0]["enum"]
    return []

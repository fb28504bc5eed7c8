"""A small config with every kind of key, and the names of a config's keys."""

import dataclasses
import typing

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.functions import LOSSES, FunctionSpec
from jaxrl_llm.config.sections import (
    STRICT,
    Function,
    Number,
    Section,
    Several,
    Table,
    function_key,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Group(Section):
    """A nested group."""

    rate: Number = 1e-3
    """a number"""
    limit: Number | None = None
    """a number or nothing"""
    loss: Function = function_key(LOSSES, FunctionSpec("ppo_clip", {"clip_low": 0.1}))
    """a function"""
    other: Function | None = function_key(LOSSES, None)
    """a function or nothing"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Whole(Section):
    """Every kind of key."""

    name: str
    """a text"""
    count: int = 3
    """a whole number"""
    most: int | None = None
    """a whole number or nothing"""
    flag: bool = False
    """yes or no"""
    files: Several[str] = ()
    """texts"""
    table: Table = Field(default={})
    """a mapping"""
    project: str | None = None
    """a text or nothing"""
    group: Group = Field(default_factory=Group)


def leaves(cls, prefix=""):
    """List the dotted names of a config class's keys."""
    names = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and hint is not FunctionSpec:
            names += leaves(hint, f"{prefix}{field.name}.")
        else:
            names.append(prefix + field.name)
    return names

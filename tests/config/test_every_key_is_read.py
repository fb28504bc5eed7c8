"""Every key of a config is read somewhere outside its declaration."""

import ast
import dataclasses
import typing
from pathlib import Path

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.programs import (
    EvaluateConfig,
    PreferConfig,
    ServeConfig,
    SftConfig,
    TrainConfig,
)
from tests.config.example import Whole, leaves

SOURCE = Path(__file__).resolve().parents[2] / "jaxrl_llm"
CONFIGS = [TrainConfig, SftConfig, PreferConfig, EvaluateConfig, ServeConfig]


def sections(cls):
    """Return the groups of keys that a config is made of, itself and their bases included."""
    classes = {base.__name__: base for base in cls.__mro__ if dataclasses.is_dataclass(base)}
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and part is not FunctionSpec:
                classes |= sections(part)
    return classes


SECTIONS = {name for cls in CONFIGS for name in sections(cls)}


def names_in(expression):
    """Return the names in an expression, quoted ones included, as annotations may be."""
    nodes = [*ast.walk(expression)] if expression else []
    quoted = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {*quoted}


def reads(sources):
    """Return pairs of what a key is read from and the key.

    The former is the class with which a parameter or an attribute is annotated, or the name of
    what holds the key: `config.optim.schedule` gives (optim, schedule).
    """
    trees = [ast.parse(source) for source in sources]
    held = {}  # attributes by name: the groups that they are annotated with
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            held.setdefault(node.target.id, set()).update(names_in(node.annotation) & SECTIONS)
    pairs = set()

    def owners(node, scope):
        if isinstance(node, ast.Name):
            return scope.get(node.id, set()) | {node.id}
        if isinstance(node, ast.Attribute):
            return {node.attr} | held.get(node.attr, set())
        return set()

    def visit(node, scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            scope = scope | {a.arg: names_in(a.annotation) & SECTIONS for a in arguments}
            for name, value in assigned(node):
                scope[name] = scope.get(name, set()) | owners(value, scope)
        if isinstance(node, ast.Attribute):
            pairs.update((owner, node.attr) for owner in owners(node.value, scope))
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    for tree in trees:
        visit(tree, {})
    return pairs


def assigned(function):
    """List what a function's variables are set to."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            are_many = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if are_many else [(target, value)]
            yield from ((name.id, given) for name, given in pairs if isinstance(name, ast.Name))


def unread(cls, pairs):
    """Return the keys of a config that are read from none of their groups."""
    missing = []
    for name in leaves(cls):
        *groups, leaf = name.split(".")
        section = cls
        for group in groups:
            section = typing.get_type_hints(section)[group]
        owners = {base.__name__ for base in section.__mro__} | {*groups[-1:]}
        if not {(owner, leaf) for owner in owners} & pairs:
            missing.append(name)
    return missing


def test_every_key_is_read_outside_its_declaration():
    files = [p for p in SOURCE.rglob("*.py") if SOURCE / "config" not in p.parents]
    pairs = reads([path.read_text() for path in files])
    assert [key for cls in CONFIGS for key in unread(cls, pairs)] == []
    assert unread(Whole, pairs) == leaves(Whole), "of a config that nothing reads"

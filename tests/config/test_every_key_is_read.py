import ast
import collections
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

ROOT = Path(__file__).resolve().parents[2]


def sections(cls):
    """Return the groups of keys that a config is made of, itself and their bases included."""
    classes = {base.__name__: base for base in cls.__mro__ if dataclasses.is_dataclass(base)}
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and part is not FunctionSpec:
                classes |= sections(part)
    return classes


CONFIGS = [TrainConfig, SftConfig, PreferConfig, EvaluateConfig, ServeConfig]
SECTIONS = {name: section for cls in CONFIGS for name, section in sections(cls).items()}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Reads(ast.NodeVisitor):
    """Follows variables annotated with a config class, and notes which keys are read from them.

    `names` holds dotted names that begin with a class: a function of a `TrainConfig` that reads
    `config.optim.schedule` gives `TrainConfig.optim.schedule`, one of an `OptimConfig` gives
    `OptimConfig.schedule`. The source's own classes are followed, too, to the configs that they
    hold: of those a value is known by the class's name.
    """

    def __init__(self, sources):
        self.names = set()
        self.variables, self.inside = {}, None
        trees = [ast.parse(source) for source in sources]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.bases = {
            node.name: [name for base in node.bases for name in names_in(base)]
            for node in nodes
            if isinstance(node, ast.ClassDef)
        }
        self.attributes = collections.defaultdict(list)  # by the names of a class and its attribute
        for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    self.hold(node.name, line.target.id, self.annotated(line.annotation))
                if isinstance(line, FUNCTIONS):  # a property, or a method that is called
                    self.hold(node.name, line.name, self.annotated(line.returns))
        for tree in (*trees, *trees):  # the second time with all attributes that are assigned
            self.visit(tree)

    def annotated(self, annotation):
        known = {name: name for name in self.bases} | SECTIONS
        return [(name, known[name]) for name in names_in(annotation) if name in known]

    def hold(self, owner, name, values):
        known = self.attributes[owner, name]
        known += [value for value in values if value not in known]

    def held(self, owner, name):
        """Return what an attribute of a class of the source may be."""
        return self.attributes.get((owner, name)) or [
            value for base in self.bases.get(owner, ()) for value in self.held(base, name)
        ]

    def sections(self, node):
        """Return the groups of keys that an expression may be, noting the keys read on the way."""
        if isinstance(node, ast.Name):
            return self.variables.get(node.id, [])
        if isinstance(node, ast.Call):
            made = isinstance(node.func, ast.Name) and node.func.id in self.bases
            return self.annotated(node.func) if made else self.sections(node.func)
        if not isinstance(node, ast.Attribute):
            return []
        results = []
        for label, cls in self.sections(node.value):
            if isinstance(cls, str):
                results += self.held(cls, node.attr)
                continue
            hint = typing.get_type_hints(cls).get(node.attr)
            if hint is not None:
                self.names.add(f"{label}.{node.attr}")
                results += [(f"{label}.{node.attr}", hint)] if hint in SECTIONS.values() else []
        return results

    def visit_Attribute(self, node):
        self.sections(node)
        self.generic_visit(node)

    def visit_ClassDef(self, node):
        outside, self.inside = self.inside, node.name
        self.generic_visit(node)
        self.inside = outside

    def visit_FunctionDef(self, node):
        outside = self.variables
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        self.variables = outside | {a.arg: self.annotated(a.annotation) for a in arguments}
        if arguments and arguments[0].arg == "self" and self.inside:
            self.variables["self"] = [(self.inside, self.inside)]
        self.generic_visit(node)
        self.variables = outside

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            if both and not any(isinstance(e, ast.Starred) for e in target.elts + node.value.elts):
                pairs = zip(target.elts, node.value.elts, strict=True)
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    self.variables[name.id] = self.sections(value)
                elif isinstance(name, ast.Attribute):
                    for _, owner in self.sections(name.value):
                        if isinstance(owner, str):
                            self.hold(owner, name.attr, self.sections(value))


def names_in(expression):
    """Return the names in an expression, quoted ones included, as annotations may be."""
    nodes = [*ast.walk(expression)] if expression else []
    quoted = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [node.id for node in nodes if isinstance(node, ast.Name)] + quoted


def unread(cls, names_read):
    """Return the keys of a config that no function reads, from it or from a group passed to it."""
    missing = []
    for name in leaves(cls):
        *groups, leaf = name.split(".")
        section, labels = cls, {c.__name__ for c in cls.__mro__}
        for group in groups:
            reached = {f"{label}.{group}" for label in labels} & names_read
            section = typing.get_type_hints(section)[group]
            labels = reached | ({c.__name__ for c in section.__mro__} if reached else set())
        if not {f"{label}.{leaf}" for label in labels} & names_read:
            missing.append(name)
    return missing


def test_every_key_is_read_outside_its_declaration():
    source = ROOT / "jaxrl_llm"
    files = [p for p in source.rglob("*.py") if source / "config" not in p.parents]
    names = Reads([path.read_text() for path in files]).names
    assert [key for cls in CONFIGS for key in unread(cls, names)] == []
    assert unread(Whole, names) == leaves(Whole), "of a config that nothing reads"

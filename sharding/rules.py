"""One table from the logical axes of arrays to the axes of a device mesh.

A layout of the whole parameter tree is this table, so another layout is another table.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.sharding.mesh import AXES

Rules: TypeAlias = Mapping[str, str | tuple[str, ...] | None]

DEFAULT_RULES: Rules = {
    "layers": "stage",
    "vocab": "tensor",
    "embed": ("fsdp", "context", "expert"),
    "norm": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "delta_heads": "tensor",
    "head_dim": None,
    "ff": "tensor",
    "experts": "expert",
    "expert_embed": ("fsdp", "context"),
    "expert_ff": "tensor",
    "routes": None,
    "label": None,
    "rank": None,
    "latent": None,
}


UNSPLIT = "_"
"""How the logical names of dimensions begin that no rule splits."""

ROLLOUT_RULES: Rules = {**DEFAULT_RULES, "embed": "fsdp", "expert_embed": "fsdp"}
"""Rules of the engine: what is split only to save memory would be gathered for every token."""


@runtime_checkable
class Declared(Protocol):
    """Anything with a shape and a logical name per dimension, such as `models.arrays.ArrayDecl`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical name of each dimension."""
        ...


class Fallback(NamedTuple):
    """A dimension that is split less than its rule says, because the mesh axes don't divide it."""

    axis: str
    size: int
    mesh_axes: tuple[str, ...]
    devices: int


def partition_spec(
    axes: tuple[str, ...], rules: Rules, mesh: Mesh | AbstractMesh, shape: tuple[int, ...]
) -> tuple[PartitionSpec, tuple[Fallback, ...]]:
    """Map an array's logical axes to a partition of a mesh.

    A mesh axis that `mesh` does not have counts as an axis of one device.

    Args:
        axes: Logical name of each dimension.
        rules: Logical name to mesh axis, several mesh axes, or None for "never sharded". A name
            that begins with `UNSPLIT` needs no rule, and is never sharded.
        mesh: The devices.
        shape: Size of each dimension.

    Returns:
        The partition, and one `Fallback` per dimension that the axes of its rule do not divide. Of
        several axes those are kept, in their order, that do.

    Raises:
        ValueError: A logical axis has no rule, a rule names no known mesh axis, or two dimensions
            claim the same mesh axis.

    >>> mesh = jax.sharding.AbstractMesh((1, 2), ("fsdp", "tensor"))
    >>> partition_spec(("embed", "ff"), DEFAULT_RULES, mesh, (8, 4))[0] == jax.P(None, "tensor")
    True
    >>> partition_spec(("embed", "heads"), DEFAULT_RULES, mesh, (8, 3))[1]
    (Fallback(axis='heads', size=3, mesh_axes=('tensor',), devices=2),)
    """
    parts: list[str | tuple[str, ...] | None] = []
    fallbacks: list[Fallback] = []
    for axis, size in zip(axes, shape, strict=True):
        names = tuple(name for name in _mesh_axes(axis, rules) if mesh.shape.get(name, 1) > 1)
        kept: tuple[str, ...] = ()
        for name in names:
            if size % math.prod(mesh.shape[n] for n in (*kept, name)) == 0:
                kept += (name,)
        if kept != names:
            devices = math.prod(mesh.shape[name] for name in names)
            fallbacks.append(Fallback(axis, size, names, devices))
        parts.append(kept[0] if len(kept) == 1 else kept or None)
    _check_claims(axes, parts)
    return PartitionSpec(*parts), tuple(fallbacks)


def shardings(declarations: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Lay a tree of declared arrays out over a mesh.

    Args:
        declarations: A tree whose leaves are `Declared`, such as `models.parameters.declare(spec)`.
        mesh: The devices.
        rules: Logical to mesh axes.

    Returns:
        The same tree with a `NamedSharding` for each leaf. What could not be sharded as the rules
        ask is listed by `fallbacks`.

    Raises:
        ValueError: As `partition_spec`.

    >>> from types import SimpleNamespace
    >>> table = SimpleNamespace(shape=(4, 6), axes=("vocab", "embed"))
    >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> shardings({"embed": table}, mesh)["embed"].spec == jax.P(None, None)
    True
    """

    def place(decl: Declared) -> NamedSharding:
        spec, _ = partition_spec(decl.axes, rules, mesh, decl.shape)
        return NamedSharding(mesh, spec)

    return jax.tree.map(place, declarations)


def fallbacks(
    declarations: Any, mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES
) -> dict[str, tuple[Fallback, ...]]:
    """List, by path, the arrays that `shardings` can't split as the rules say.

    Args:
        declarations: As for `shardings`.
        mesh: The devices.
        rules: Logical to mesh axes.

    Returns:
        Path to fallbacks, for the arrays that have any; empty when the rules hold everywhere.

    >>> from types import SimpleNamespace
    >>> table = SimpleNamespace(shape=(5, 6), axes=("vocab", "embed"))
    >>> mesh = jax.sharding.AbstractMesh((2,), ("tensor",))
    >>> fallbacks({"embed": table}, mesh)
    {'embed': (Fallback(axis='vocab', size=5, mesh_axes=('tensor',), devices=2),)}
    """
    missing = {}
    for path, decl in jax.tree_util.tree_leaves_with_path(declarations):
        _, missed = partition_spec(decl.axes, rules, mesh, decl.shape)
        if missed:
            missing[jax.tree_util.keystr(path, simple=True, separator="/")] = missed
    return missing


def _mesh_axes(axis: str, rules: Rules) -> tuple[str, ...]:
    if axis.startswith(UNSPLIT):
        return ()
    if axis not in rules:
        raise ValueError(f"no rule for the logical axis {axis!r}; rules exist for {sorted(rules)}")
    rule = rules[axis]
    names = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
    unknown = [name for name in names if name not in AXES]
    if unknown:
        raise ValueError(
            f"the rule for {axis!r} names the mesh axes {unknown}; the mesh axes are {AXES}"
        )
    return names


def _check_claims(axes: tuple[str, ...], parts: list[str | tuple[str, ...] | None]) -> None:
    owner: dict[str, str] = {}
    for axis, part in zip(axes, parts, strict=True):
        for name in () if part is None else (part,) if isinstance(part, str) else part:
            if name in owner:
                raise ValueError(
                    f"the mesh axis {name!r} is claimed by both {owner[name]!r} and {axis!r} of an "
                    f"array with axes {axes}; give one of them another rule"
                )
            owner[name] = axis

"""Meshes, the rules from logical axes to mesh axes, and where activations stand on a mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXES = ("stage", "expert", "data", "fsdp", "context", "tensor")
"""The mesh axes, outermost first: neighbours along the last one are the closest devices."""

BATCH = ("expert", "data", "fsdp")
"""The mesh axes over which a batch is split."""


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices out as a mesh.

    Args:
        sizes: devices along each axis; one of them may be -1 and takes what is left.
        devices: default all of this process's platform.

    Raises:
        ValueError: an unknown axis, or sizes that don't multiply to the number of devices.

    >>> mesh = make_mesh({"data": 1, "fsdp": -1, "tensor": 1}, jax.devices()[:1])
    >>> mesh.shape["fsdp"], mesh.shape["stage"]
    (1, 1)
    """
    unknown = set(sizes) - set(AXES)
    if unknown:
        raise ValueError(f"a mesh has the axes {AXES}, got sizes for {sorted(unknown)}")
    devices = jax.devices() if devices is None else devices
    given = [sizes.get(axis, 1) for axis in AXES]
    fixed = math.prod(s for s in given if s != -1)
    filled = [len(devices) // max(fixed, 1) if s == -1 else s for s in given]
    if min(filled) < 1 or math.prod(filled) != len(devices):
        options = [d for d in range(1, len(devices) + 1) if len(devices) % d == 0]
        asked = ", ".join(f"{a}={s}" for a, s in zip(AXES, given, strict=True) if s != 1)
        raise ValueError(
            f"mesh {asked or 'of one device'} does not cover {len(devices)} devices; each size "
            f"must be one of {options} and their product {len(devices)}"
        )
    grid = np.array(devices, dtype=object).reshape(filled)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
    """Return the number of parts into which a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def over_batch(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits an array's first axis over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


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


# One table from the logical axes of arrays to the axes of a device mesh.
#
# A layout of the whole parameter tree is this table, so another layout is another table.


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


TOKENS = (*BATCH, "context")
"""The mesh axes over which tokens are split."""

CONTEXTS = ("heads", "keys", "ring")
"""How attention sees whole rows when each device holds a part of them."""


@dataclass(frozen=True)
class Layout:
    """Split rows over the batch axes of a mesh, and each row over its `context` axis.

    Rows [R, L] are cut into pieces [R c, L/c], where c devices share a row. All but attention works
    on tokens one by one and takes pieces for rows. Attention joins them: by `heads`, every device
    gets the whole row for some of the heads (an all-to-all there and one back; DeepSpeed-Ulysses,
    https://arxiv.org/abs/2309.14509); by `keys`, each keeps its queries and gathers all keys and
    values (as Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2); by `ring`, each keeps its
    queries, and keys and values go round the devices (https://arxiv.org/abs/2310.01889).

    Args:
        mesh: The devices.
        context: One of `CONTEXTS`.
        rules: How declared arrays are split.
        kernel: What attends to packed rows on each device, with the arguments of
            `models.attention.attend`; None: that function, divided by XLA.
        grouped_kernels: What multiplies rows of experts on each device, the two functions of
            `models.kernels.GroupedKernels`; None: XLA on blocks of rows.
        longest: Most tokens of a sequence, where rows that a device has whole are longer.

    Raises:
        ValueError: There is no such way of attending.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> Layout(make_mesh({}, jax.devices()[:1])).pieces
    1
    """

    mesh: Mesh
    context: str = "heads"
    rules: Rules = field(default_factory=lambda: DEFAULT_RULES, hash=False)
    kernel: Callable[..., Array] | None = None
    grouped_kernels: tuple[Callable[..., Array], Callable[..., Array]] | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise ValueError(f"context by {self.context!r}; expected one of {', '.join(CONTEXTS)}")

    @property
    def pieces(self) -> int:
        """Return the number of devices that share a row."""
        return self.mesh.shape["context"]

    @property
    def stages(self) -> int:
        """Return the number of stages that layers are split into."""
        return self.mesh.shape["stage"]

    @property
    def shards(self) -> int:
        """Return the number of parts into which tokens are split."""
        return math.prod(self.mesh.shape[axis] for axis in TOKENS)

    def sharding(self, *parts: Any) -> NamedSharding:
        """Return a layout of one array: mesh axes for each of its dimensions."""
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def of(self, declarations: Any) -> Any:
        """Return the layout of a tree of declared arrays: a sharding for each."""
        return shardings(declarations, self.mesh, self.rules)

    def gathered(self, declarations: Any) -> Any:
        """Return the layout in which declared arrays are multiplied with tokens.

        Devices that split tokens hold parts of the arrays, but each needs the whole: only what is
        split over `tensor`, `stage` and, of experts, over `expert` stays so.
        """
        rules: dict[str, Any] = {}
        for axis, rule in self.rules.items():
            names = (rule,) if isinstance(rule, str) else rule or ()
            rules[axis] = tuple(n for n in names if n not in TOKENS or axis == "experts")
        return shardings(declarations, self.mesh, rules)

    def by_tokens(
        self,
        function: Callable[..., Any],
        *,
        in_specs: Sequence[Any],
        axes: tuple[str, ...] = TOKENS,
    ) -> Callable[..., Any]:
        """Map a function over the parts that tokens are split into, by `jax.shard_map`.

        Args:
            function: arrays -> arrays whose first axis is split as tokens are.
            in_specs: how its arguments are split over the mesh, one or a tree of partitions each.
            axes: the mesh axes over which tokens are split.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=PartitionSpec(axes),
            check_vma=False,
        )

    def split_context(self, x: Array) -> Array:
        """Cut rows [R, L, …] into pieces [R c, L/c, …]."""
        rows, length = x.shape[:2]
        return x.reshape(rows * self.pieces, length // self.pieces, *x.shape[2:])

    def merge_context(self, x: Array) -> Array:
        """Join pieces [R c, L/c, …] into rows [R, L, …]; the inverse of `split_context`."""
        rows, length = x.shape[:2]
        return x.reshape(rows // self.pieces, length * self.pieces, *x.shape[2:])

    def constrain(self, x: Array) -> Array:
        """Keep the first axis of x, pieces of rows or tokens, split over the mesh."""
        return jax.lax.with_sharding_constraint(x, self.sharding(TOKENS))

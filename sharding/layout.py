"""Where the activations of a pass over packed rows stand on a mesh."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrl_llm.sharding.mesh import BATCH
from jaxrl_llm.sharding.rules import DEFAULT_RULES, Rules, shardings

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
            `models.moe.grouped.GroupedKernels`; None: XLA on blocks of rows.
        longest: Most tokens of a sequence, where rows that a device has whole are longer.

    Raises:
        ValueError: There is no such way of attending.

    >>> from jaxrl_llm.sharding.mesh import make_mesh
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

"""Declare a parameter array: shape, logical axes, initializer, name in Hugging Face checkpoints."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Params: TypeAlias = dict[str, Any]  # nested, arrays at the leaves
Declarations: TypeAlias = dict[str, Any]  # the same nesting, an ArrayDecl at each leaf
Initializer: TypeAlias = Callable[[Any, Sequence[int], Any], Any]

NORMAL: Initializer = jax.nn.initializers.normal(stddev=0.02)
ONES: Initializer = jax.nn.initializers.ones
ZEROS: Initializer = jax.nn.initializers.zeros


def _draw_decays(key: Any, shape: Sequence[int], dtype: Any) -> Any:
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


DECAYS: Initializer = _draw_decays
"""Logarithms of the rates at which a DeltaNet forgets; as transformers draws them."""


class HfPart(NamedTuple):
    """Say that an array of ours is a part of one in a Hugging Face checkpoint.

    Published models join matrices that we keep apart, such as `qkv_proj` of Phi-3. The axes `axes`
    of ours, merged, are the entries `start`, `start + step`, … of an axis of `total` entries there.

    >>> HfPart(axes=("ff",), start=6, total=12).entries(6)
    slice(6, 12, 1)
    """

    axes: tuple[str, ...]
    start: int
    total: int
    step: int = 1

    def entries(self, size: int) -> slice:
        """Return where the `size` entries of ours are."""
        return slice(self.start, self.start + size * self.step, self.step)


@dataclass(frozen=True, kw_only=True)
class ArrayDecl:
    """Declare one parameter array and its counterpart in a Hugging Face checkpoint.

    Args:
        shape: Size of each dimension.
        axes: Logical name of each dimension, all different; `sharding.layout` maps them to a mesh.
        initializer: `(key, shape, dtype) -> array`.
        hf_name: Name in a Hugging Face checkpoint. A placeholder such as `{layers}` names a leading
            axis along which our array stacks several of theirs.
        hf_axes: The dimensions of *one* Hugging Face array, each as the tuple of our axes that are
            merged in it, in order.
        layer_numbers: For each layer of a stack, its number in the names of a Hugging Face
            checkpoint; empty means 0, 1, ….
        hf_part: Which part of the Hugging Face array ours is; None: all of it. Axes of the part
            are merged in one dimension there, next to each other.
        float32: Whether it is used in float32, whatever the dtype of the computation.

    Raises:
        ValueError: The axes do not match the shape, or `hf_name` and `hf_axes` do not cover them.

    >>> decl = ArrayDecl(shape=(3, 8, 2, 4), axes=("layers", "embed", "heads", "head_dim"),
    ...                  initializer=NORMAL, hf_name="l.{layers}.q.weight",
    ...                  hf_axes=(("heads", "head_dim"), ("embed",)))
    >>> decl.stacked, decl.hf_shape
    (('layers',), (8, 8))
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: Initializer
    hf_name: str
    hf_axes: tuple[tuple[str, ...], ...]
    layer_numbers: tuple[int, ...] = ()
    hf_part: HfPart | None = None
    float32: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes) or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"{self.hf_name}: axes must be different and one per dimension, "
                f"got axes {self.axes} for shape {self.shape}"
            )
        merged = tuple(axis for group in self.hf_axes for axis in group)
        stacked = self.axes[: len(self.axes) - len(merged)]
        if sorted(self.axes) != sorted(stacked + merged) or any(
            f"{{{axis}}}" not in self.hf_name for axis in stacked
        ):
            raise ValueError(
                f"{self.hf_name}: each of the axes {self.axes} must stand once, either in hf_axes "
                f"(got {self.hf_axes}) or, leading, as a placeholder in the name"
            )
        part = self.hf_part.axes if self.hf_part else ()
        if part and not any(
            part == group[at : at + len(part)] for group in self.hf_axes for at in range(len(group))
        ):
            raise ValueError(f"{self.hf_name}: the axes {part} of a part are not merged there")

    @property
    def stacked(self) -> tuple[str, ...]:
        """Name the leading axes that count separate Hugging Face arrays."""
        return self.axes[: len(self.axes) - sum(map(len, self.hf_axes))]

    @property
    def dimensions(self) -> int:
        """Count the dimensions of one layer's, or one expert's, array in a checkpoint."""
        return sum(group != ("experts",) for group in self.hf_axes)

    @property
    def is_stack(self) -> bool:
        """Say whether the first axis counts layers."""
        return self.axes[:1] == ("layers",)

    @property
    def layer_axes(self) -> tuple[tuple[str, ...], ...]:
        """Name the dimensions of the array of one layer, as a model without stacks has it.

        Axes that a checkpoint merges are one dimension, such as the heads and their width; they
        stand in our order, inputs before outputs. The experts of a layer are one array.

        >>> decl = ArrayDecl(shape=(3, 8, 2, 4), axes=("layers", "embed", "heads", "head_dim"),
        ...                  initializer=NORMAL, hf_name="l.{layers}.q.weight",
        ...                  hf_axes=(("heads", "head_dim"), ("embed",)))
        >>> decl.layer_axes, decl.layer_shape
        ((('embed',), ('heads', 'head_dim')), (8, 8))
        """
        lead = max(len(self.stacked), self.counts_layers)
        own, groups = self.axes[lead:], (group for group in self.hf_axes if group != ("layers",))
        merged = tuple(sorted(groups, key=lambda group: self.axes.index(group[0])))
        if sum(merged, ()) != own:  # what is merged does not lie side by side
            merged = tuple((axis,) for axis in own)
        return tuple((axis,) for axis in self.axes[self.counts_layers : lead]) + merged

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Give the sizes of `layer_axes`."""
        sizes = dict(zip(self.axes, self.shape, strict=True))
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.layer_axes)

    @property
    def counts_layers(self) -> bool:
        """Say whether the first axis counts arrays of layers, of whatever name: blocks, mergers."""
        return self.is_stack or self.stacked[:1] not in ((), ("experts",))

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Give the shape of one Hugging Face array, of which ours may be a part."""
        return tuple(math.prod(size for _, size in group) for group in self.hf_groups)

    @property
    def hf_groups(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Give names and sizes of the axes that are merged in each Hugging Face dimension.

        Those of `hf_part` are one axis there, with the name of the first.
        """
        sizes = dict(zip(self.axes, self.shape, strict=True))
        part = self.hf_part
        groups = []
        for group in self.hf_axes:
            named = [(axis, sizes[axis]) for axis in group]
            if part is not None and part.axes[0] in group:
                at = group.index(part.axes[0])
                named[at : at + len(part.axes)] = [(part.axes[0], part.total)]
            groups.append(tuple(named))
        return tuple(groups)

    def layer_number(self, index: int) -> int:
        """Return the number in a checkpoint of a layer of the stack."""
        return self.layer_numbers[index] if self.layer_numbers else index

    def hf_indices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name of each Hugging Face array and its index on our leading axes."""
        for index in np.ndindex(*self.shape[: len(self.stacked)]):
            counts = dict(zip(self.stacked, index, strict=True))
            if "layers" in counts:
                counts["layers"] = self.layer_number(counts["layers"])
            yield self.hf_name.format(**counts), index


def declarer(
    sizes: Mapping[str, int], initializer: Initializer = NORMAL, layers: tuple[int, ...] = ()
) -> Callable[..., ArrayDecl]:
    """Return what declares arrays by name, axes, Hugging Face axes and, if need be, initializer.

    Args:
        sizes: Of each axis.
        initializer: Of arrays that have no other.
        layers: Numbers of a stack's layers.

    >>> array = declarer({"ff": 6, "embed": 4})
    >>> array("down.weight", "ff embed", "embed ff").hf_shape
    (4, 6)
    """
    return functools.partial(_declared, sizes, layers, initializer)


def _declared(
    sizes: Mapping[str, int],
    layers: tuple[int, ...],
    usual: Initializer,
    name: str,
    axes: str,
    hf_axes: str,
    initializer: Initializer | None = None,
    **fields: Any,
) -> ArrayDecl:
    names = tuple(axes.split())
    return ArrayDecl(
        shape=tuple(sizes[axis] for axis in names),
        axes=names,
        initializer=usual if initializer is None else initializer,
        hf_name=name,
        hf_axes=tuple(tuple(group.split("*")) for group in hf_axes.split()),
        layer_numbers=layers,
        **fields,
    )


def by_layer(params: Params, declared: Declarations) -> Params:
    """Return parameters with each stack of layers' array as a tuple of one array per layer.

    >>> up = ArrayDecl(shape=(2, 4, 6), axes=("layers", "embed", "ff"), initializer=ONES,
    ...                hf_name="{layers}.up", hf_axes=(("ff",), ("embed",)))
    >>> [layer.shape for layer in by_layer({"up": np.ones((2, 4, 6))}, {"up": up})["up"]]
    [(4, 6), (4, 6)]
    """
    return jax.tree.map(lambda decl, x: tuple(x) if decl.is_stack else x, declared, params)

"""The weights of the engine: their layout and dtypes, and how they get there."""

from typing import Any

import jax

from jaxrl_llm.compilation import BACKGROUND, PendingProgram
from jaxrl_llm.models.arrays import ArrayDecl, by_layer
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.quantization import is_quantized, quantize_stack, quantized_dtypes
from jaxrl_llm.sharding.checksum import checksum
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import moved_bytes, reshard

_quantize_stack = jax.jit(quantize_stack, static_argnums=(1, 2))


class EngineWeights:
    """Where an engine's weights lie, each layer's arrays apart.

    Args:
        model: whose weights they are.
        layout: how they are split.
        dtype: of the computation.
        quantized: hold the layers' matrices in float8.

    Attributes:
        given_layout: of weights that need no move on their way in.
        checksum: of the weights as `load` returns them, jitted.
    """

    def __init__(self, model: Model, layout: Layout, dtype: Any, *, quantized: bool) -> None:
        """Copy nothing yet."""
        self._layout = layout
        self._declared = model.declare_quantized() if quantized else model.declare()
        self._given_dtypes = model.compute_dtypes(dtype)
        self._dtypes = quantized_dtypes(self._declared, self._given_dtypes)
        self.given_layout = layout.of(model.declare())
        self._stacked_layout = layout.of(self._declared)
        self._layers_layout = jax.tree.map(
            self._home_by_layer, self._declared, self._stacked_layout
        )
        homes = jax.tree.structure(self._declared).flatten_up_to(self._layers_layout)
        self._unstack = [
            jax.jit(tuple, out_shardings=home) if isinstance(home, tuple) else None
            for home in homes
        ]
        self.checksum: Any = jax.jit(checksum)
        self._ahead: PendingProgram | None = None

    def compile_ahead(self) -> None:
        """Begin to compile what copies weights into each layer's arrays, and their checksum."""

        def compile_copies() -> None:
            stacks = zip(*map(jax.tree.leaves, (self._declared, self._dtypes)), strict=True)
            homes = jax.tree.leaves(self._stacked_layout)
            for split, (declared, dtype), home in zip(self._unstack, stacks, homes, strict=True):
                if split is not None:
                    like = jax.ShapeDtypeStruct(declared.shape, dtype, sharding=home)
                    split.lower(like).compile()
            self.checksum.lower(self.shapes()).compile()

        self._ahead = PendingProgram("weights", compile_copies)
        BACKGROUND.add([self._ahead])

    def close(self) -> None:
        """Compile no more."""
        if self._ahead is not None:
            BACKGROUND.drop([self._ahead])

    def load(self, params: Any, *, donate: bool = False) -> tuple[Any, int]:
        """Copy weights into the engine's layout and dtype.

        Returns:
            The weights, and the bytes that travelled to devices that did not hold them.
        """
        if self._ahead is not None:
            self._ahead.result()
        narrow = self._quantize(params, donate=donate)
        moved = moved_bytes(narrow, self._stacked_layout, dtype=self._dtypes)
        whole = reshard(narrow, self._stacked_layout, dtype=self._dtypes, donate=donate)
        del narrow
        arrays, tree = jax.tree.flatten(whole)
        del whole
        for i, split in enumerate(self._unstack):
            if split is not None:
                arrays[i] = split(arrays[i])
        return jax.tree.unflatten(tree, arrays), moved

    def shapes(self) -> Any:
        """Return the weights as shapes in their layout; nothing is allocated."""
        stacked = jax.tree.map(
            lambda d, dtype: jax.ShapeDtypeStruct(d.shape, dtype), self._declared, self._dtypes
        )
        weights = jax.eval_shape(lambda arrays: by_layer(arrays, self._declared), stacked)
        return as_shapes(weights, self._layers_layout)

    def _quantize(self, params: Any, *, donate: bool) -> Any:
        """Quantize what the engine holds so, a stack of matrices after the other, where it is."""
        tree = jax.tree.structure(self._given_dtypes)
        parts = self._declared, params, self._given_dtypes
        stacks = []
        for declared, stack, dtype in zip(*map(tree.flatten_up_to, parts), strict=True):
            if not is_quantized(declared):
                stacks.append(stack)
                continue
            stacks.append(_quantize_stack(stack, declared.inputs, dtype))
            if donate:
                jax.block_until_ready(stacks[-1])
                stack.delete()
        return jax.tree.unflatten(tree, stacks)

    def _home_by_layer(self, declared: ArrayDecl, home: Any) -> Any:
        """Return the layout of an array, or of each layer's where it is a stack of layers."""
        if not declared.is_stack:
            return home
        return (self._layout.sharding(*home.spec[1:]),) * declared.shape[0]


def as_shapes(tree: Any, layout: Any) -> Any:
    """Return arrays as shapes in a layout."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout
    )

"""The vision tower in the engine: its programs, and slots for the features that it makes.

Features lie in slots, [parts, slots, …], one for each token of an image, of the part of the batch
that reads it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.models.capabilities import VisionModel
from jaxrl_llm.models.vision.inputs import VisualFeatures
from jaxrl_llm.models.vision.rows import FrameBounds, PatchRows, patch_rows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.rollout.native.sizes import Sizes
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import over_batch


class Tower:
    """What the tower of a model runs for an engine.

    Args:
        model: that has a tower.
        vision: the tower.
        sizes: of all programs.
        dtype: of the computation.
        layout: how the parts are split.
    """

    def __init__(
        self, model: VisionModel, vision: VisionSpec, sizes: Sizes, dtype: Any, layout: Layout
    ) -> None:
        """Compile nothing."""
        self._model, self.vision, self._sizes, self._layout = model, vision, sizes, layout
        self._dtype, self._by_part = jnp.dtype(dtype), over_batch(layout.mesh)

    @property
    def token_bytes(self) -> int:
        """Return how many bytes of a device the features of a token take."""
        return self.vision.out_size * (1 + len(self.vision.deep_layers)) * self._dtype.itemsize

    def shapes(self) -> VisualFeatures:
        """Return room for features as shapes in their layout; nothing is allocated."""
        return self._in_layout(jax.eval_shape(self._empty))

    def trace_features(self) -> Any:
        """Trace what makes the room."""
        return jax.jit(self._empty, out_shardings=self._by_part).trace()

    def trace_encode(self, length: int, longest: int, params: Any, jit: Callable[..., Any]) -> Any:
        """Trace what reads so many patches of each part.

        Args:
            length: patches.
            longest: most patches of a frame.
            params: shapes of the weights.
            jit: as `jax.jit`.
        """

        def encode_visuals(
            params: Any, held: VisualFeatures, patches: PatchRows, slots: Any
        ) -> Any:
            options = {"bounds": FrameBounds(longest), "layout": self._layout}
            return encode_into(params, self._model, held, patches, slots, **options)

        parts = self._sizes.parts
        patches = self._in_layout(patch_rows(self.vision, [()] * parts, length))
        slots = self._in_layout(jax.ShapeDtypeStruct((parts, length // self.vision.group), "int32"))
        run = jit(encode_visuals, donate_argnums=1, out_shardings=self._by_part)
        return run.trace(params, self.shapes(), patches, slots)

    def _empty(self) -> VisualFeatures:
        slots, deep = self._sizes.visual_tokens, len(self.vision.deep_layers)
        shape = (self._sizes.parts, slots, self.vision.out_size)
        further = jnp.zeros((shape[0], deep, *shape[1:]), self._dtype) if deep else None
        return VisualFeatures(jnp.zeros(shape, self._dtype), further)

    def _in_layout(self, arrays: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._by_part), arrays
        )


def encode_into(
    params: Any,
    model: VisionModel,
    held: VisualFeatures,
    patches: PatchRows,
    slots: Int[Array, "parts V"],
    *,
    bounds: FrameBounds,
    layout: Layout | None = None,
) -> VisualFeatures:
    """Read images and videos, and keep their features.

    Args:
        params: in the compute dtype.
        model: that has a tower.
        held: the slots of all parts.
        patches: a row for each part.
        slots: where the features go, in the order of the visuals; past the slots they are dropped.
        bounds: what is known of the frames.
        layout: how the parts are split over a mesh.
    """
    dtype = held.features.dtype
    options = {"dtype": dtype, "remat": "none", "layout": layout, "bounds": bounds}
    new = model.encode_visuals(params, patches, **options)

    def written(held: Array, at: Array, new: Array) -> Array:
        return held.at[..., at, :].set(new.astype(dtype), mode="drop")

    return jax.tree.map(lambda held, new: jax.vmap(written)(held, slots, new), held, new)

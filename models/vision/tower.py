"""Vision towers as free functions over an array tree: rows of patches in, features out."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.vision.inputs import VisualFeatures
from jaxrl_llm.models.vision.rows import FrameBounds, PatchRows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.sharding.layout import Layout

_ANY = FrameBounds()


def encode(
    params: Params,
    spec: VisionSpec,
    rows: PatchRows,
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
    remat: str = "none",
    bounds: FrameBounds = _ANY,
) -> VisualFeatures:
    """Run a vision tower over packed rows of patches.

    Args:
        params: Parameters nested as `declare_vision(spec)`, those under `vision` of a model's.
        spec: The tower.
        rows: What `patch_rows` makes.
        dtype: Of the computation, whatever the parameters' dtype.
        layout: How rows are split over a mesh, as for `models.transformer.forward`. Rows are whole,
            also where several devices share each.
        remat: Policy of `models.remat`: what of a block is stored for the backward pass.
        bounds: What is known of the frames of all rows.

    Returns:
        The features, in `dtype`; meaningless at padding.
    """
    raise NotImplementedError

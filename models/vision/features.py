"""Features of images among the tokens of rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.vision.inputs import VisualTokens
from jaxrl_llm.sharding.layout import Layout


def with_features(
    x: Float[Array, "R L D"], visual: VisualTokens, layout: Layout | None = None
) -> Float[Array, "R L D"]:
    """Put features in place of the embeddings of placeholder tokens.

    Args:
        x: Embeddings.
        visual: Which tokens have which features.
        layout: How rows are split over a mesh; where several devices share each, x and the index
            are in pieces, as `Layout.split_context` makes them.

    >>> from jaxrl_llm.models.vision.inputs import VisualFeatures
    >>> visual = VisualTokens(jnp.array([[-1, 1]]), VisualFeatures(jnp.array([[[5.0], [6.0]]])))
    >>> with_features(jnp.array([[[2.0], [3.0]]]), visual).ravel().tolist()
    [2.0, 6.0]
    """
    features = _gather(visual.given.features, visual.feature, layout)
    return jnp.where(visual.feature[..., None] >= 0, features.astype(x.dtype), x)


def deepened(
    x: Float[Array, "R L D"],
    visual: VisualTokens,
    layer: Int[Array, ""] | int,
    layout: Layout | None = None,
) -> Float[Array, "R L D"]:
    """Add to the residual stream what DeepStack has for the tokens of images after a layer.

    A scan over layers has one program for all of them, which branches by the layer's number: no
    layer without features pays for them.

    Args:
        x: The residual stream after the layer.
        visual: Which tokens have which features.
        layer: The layer's number.
        layout: As for `with_features`.

    >>> from jaxrl_llm.models.vision.inputs import VisualFeatures
    >>> given = VisualFeatures(jnp.zeros((1, 2, 1)), jnp.array([[[[5.0], [6.0]]]]))
    >>> visual = VisualTokens(jnp.array([[-1, 1]]), given)
    >>> [deepened(jnp.ones((1, 2, 1)), visual, jnp.array(n)).ravel().tolist() for n in (0, 1)]
    [[1.0, 7.0], [1.0, 1.0]]
    """
    deep = visual.given.deep
    if deep is None:
        return x

    def add(x: Array) -> Array:
        features = jax.lax.dynamic_index_in_dim(deep, layer, axis=1, keepdims=False)
        return x + _gather(features, visual.feature, layout).astype(x.dtype)

    if isinstance(layer, int):
        return add(x) if layer < deep.shape[1] else x
    return jax.lax.cond(layer < deep.shape[1], add, lambda x: x, x)


def rest_of_image(index: Int[Array, "R L"]) -> Int[Array, "R L"]:
    """Return how many tokens of its image come after each token; 0 for text.

    Args:
        index: For each token its feature, -1 for text, as in `VisualTokens`. Text stands between
            images.

    >>> rest_of_image(jnp.array([[-1, 0, 1, 2, -1, 3]])).tolist()
    [[0, 2, 1, 0, 0, 0]]
    """
    places = jnp.arange(index.shape[1])
    is_text = index < 0
    ends = jax.lax.cummin(jnp.where(is_text, places, index.shape[1]), axis=1, reverse=True)
    return jnp.where(is_text, 0, ends - 1 - places)


def _gather(
    features: Float[Array, "R V D"], index: Int[Array, "P l"], layout: Layout | None
) -> Float[Array, "P l D"]:
    """Return the feature of each token; 0 for text, from which the features get no gradient."""
    count = features.shape[1]
    in_pieces = layout is not None and layout.pieces > 1
    index = layout.merge_context(index) if layout and in_pieces else index
    # not -1, which would be the last; one past the end is dropped from the gradient's scatter
    index = jnp.where(index < 0, count, index)
    of_row = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))
    gathered = of_row(features, index)
    return layout.split_context(gathered) if layout and in_pieces else gathered

"""Prompts read in pieces, their images and videos from features that a tower has made of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.inputs import RowInputs
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.vision.inputs import VisualFeatures, VisualTokens
from jaxrl_llm.rollout.native.decode import gather_pages, page_size, scatter_pages
from jaxrl_llm.rollout.native.states import StateSlots
from jaxrl_llm.sharding.layout import Layout


class PrefillChunk(NamedTuple):
    """Parts of prompts that are read at once, one per row.

    Attributes:
        table: pages of what was read before, and room for the new ones, as `gather_pages` takes it.
        tokens: of each prompt, padded on the right.
        start: position of the first token of each.
        lengths: tokens of each; 0 for none.
        targets: where the pages go that they touch, as in `scatter_pages`.
        slots: of their states, where the model has some.
        features: where those of each token are, in the slots of its part, negative for text; None:
            the model reads text alone.
        rotary: time, height and width of each token, for a model with `has_rotary_positions`.
    """

    table: Int[Array, "B n"]
    tokens: Int[Array, "B T"]
    start: Int[Array, " B"]
    lengths: Int[Array, " B"]
    targets: Int[Array, "B m"]
    slots: StateSlots | None = None
    features: Int[Array, "B T"] | None = None
    rotary: Int[Array, "B T 3"] | None = None


def prefill(
    params: Any,
    model: Model,
    pool: Cache,
    chunk: PrefillChunk,
    held: VisualFeatures | None = None,
    *,
    layout: Layout | None = None,
) -> Cache:
    """Read a part of each prompt and keep its keys and values, and its state.

    Args:
        params: in the compute dtype.
        model: the model.
        pool: as `make_pool`.
        chunk: what to read.
        held: features of images and videos, if the model reads some.
        layout: how prompts are split over a mesh.
    """
    source, target = chunk.slots or (None, None)
    rows = gather_pages(pool, chunk.table, source)
    index, outside = jnp.arange(chunk.tokens.shape[1]), page_size(rows)
    positions = chunk.start[:, None] + index
    positions = jnp.where(index < chunk.lengths[:, None], positions, outside)
    options: dict[str, Any] = {"dtype": rows.compute_dtype, "layout": layout}
    if held is not None and chunk.features is not None:
        visual = gather_features(held, chunk.features)
        options["inputs"] = RowInputs(visual=visual, rotary=chunk.rotary)
    _, rows = model.extend(params, rows, chunk.tokens, positions, **options)
    return scatter_pages(pool, rows, chunk.start // page_size(pool), chunk.targets, target)


def gather_features(held: VisualFeatures, slots: Int[Array, "B T"]) -> VisualTokens:
    """Return the features of tokens of rows, which belong to the parts in order.

    Args:
        held: as `tower.Tower` keeps them.
        slots: within the row's part; negative for text.

    >>> held = VisualFeatures(jnp.array([[[1.0], [2.0]]]))
    >>> visual = gather_features(held, jnp.array([[-1, 1], [0, -1]]))
    >>> visual.given.features[..., 0].tolist(), visual.feature.tolist()
    ([[1.0, 2.0], [1.0, 1.0]], [[-1, 1], [0, -1]])
    """
    by_part = slots.reshape(len(held.features), -1, slots.shape[1])

    def of_part(held: Array, at: Array) -> Array:
        # slots come from `FeatureSlots`, within the part's; text reads slot 0, and is masked
        return jax.vmap(lambda at: held.at[..., at, :].get(mode="clip"))(at)

    def of_rows(held: Array) -> Array:
        return jax.lax.collapse(jax.vmap(of_part)(held, jnp.maximum(by_part, 0)), 0, 2)

    own = jnp.arange(slots.shape[1])
    return VisualTokens(jnp.where(slots >= 0, own, -1), jax.tree.map(of_rows, held))

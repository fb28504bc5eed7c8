"""The record of which experts tokens go to, beside their keys and values in a cache."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.models.moe.routing import NO_ROUTE
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.paged_attention import place_of_token

Record = tuple[Int[Array, "*B 1 S choices"], ...]
"""Nothing, or one array: for each slot the experts of all layers that have some, in order."""


def empty_record(shape: RouteShape, rows: int, length: int) -> Record:
    """Make a record of no choices.

    Args:
        shape: What is recorded of each token.
        rows: Of the cache.
        length: Slots of each.

    >>> empty_record(RouteShape(layers=2, top=4, dtype=jnp.int8), 3, 5)[0].shape
    (3, 1, 5, 8)
    """
    return (jnp.full((rows, 1, length, shape.layers * shape.top), NO_ROUTE, shape.dtype),)


def record_in_rows(
    record: Record, experts: Sequence[Int[Array, "B T top"]], positions: Int[Array, "B T"]
) -> Record:
    """Write where the next tokens of each row went; not of those at a position past the slots.

    Args:
        record: Before; nothing is written where it is empty.
        experts: Of each layer that has some.
        positions: Of the tokens.

    >>> record = empty_record(RouteShape(layers=2, top=1, dtype=jnp.int8), 1, 3)
    >>> experts = [jnp.array([[[4], [5]]]), jnp.array([[[6], [7]]])]
    >>> record_in_rows(record, experts, jnp.array([[1, 3]]))[0].tolist()
    [[[[-1, -1], [4, 6], [-1, -1]]]]
    """
    rows = jnp.arange(positions.shape[0])[:, None]
    return tuple(
        held.at[rows, 0, positions].set(_joined(experts, held), mode="drop") for held in record
    )


def record_in_pages(
    record: Record,
    experts: Sequence[Int[Array, "B 1 top"]],
    table: Int[Array, "B n"],
    positions: Int[Array, " B"],
) -> Record:
    """Write where the new token of each row went into its page, as `models.decoding.extend_pages`.

    Args:
        record: Before, of pages [parts, pages, …]; nothing is written where it is empty.
        experts: Of each layer that has some.
        table: The pages of each row, within its part.
        positions: Of the tokens; negative in an empty row, of which nothing is written.
    """

    def write(pages: Array, page: Array, slot: Array, new: Array) -> Array:
        return pages.at[page, 0, slot].set(new, mode="drop")

    def written(held: Array) -> Array:
        parts, count, _, size, _ = held.shape
        new = _joined(experts, held)[:, 0]
        arrays = (*place_of_token(table, positions, count, size), new)
        by_part = (x.reshape(parts, -1, *x.shape[1:]) for x in arrays)
        return jax.vmap(write)(held, *by_part)

    return tuple(map(written, record))


def _joined(experts: Sequence[Int[Array, "B T top"]], held: Array) -> Int[Array, "B T choices"]:
    return jnp.concatenate(experts, axis=-1).astype(held.dtype)

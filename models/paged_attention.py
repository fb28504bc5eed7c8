"""The pages of a key/value cache, and attention of decoding over them.

`models.paged_triton` reads pages where they lie, on GPUs. Here is what it computes, by gathering
them into rows, which any device can.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from jaxrl_llm.models.attention import PLAIN, Attending, attend_cache, make_scales

AT_ONCE = 4
"""Sequences that `attend_in_turn` gathers at once."""


class Pages(NamedTuple):
    """The pages of one layer, and which of them each sequence has.

    Attributes:
        keys: pages of S tokens.
        values: likewise; None: they are the first numbers of the keys, as of an absorbed latent.
        table: the pages of each sequence, in order: token j is in page j // S of them. What stands
            past the sequence's end is not read.
        key_scales: of keys in int8, as `models.attention.Scales`; None: they are no int8.
        value_scales: likewise; None: they are those of the keys, or there are none.
    """

    keys: Real[Array, "pages K H S"]
    values: Real[Array, "pages K S V"] | None
    table: Int[Array, "B n"]
    key_scales: Float[Array, "pages K G S"] | None = None
    value_scales: Float[Array, "pages K S 1"] | None = None


def attend_gathered(
    q: Float[Array, "B N H"],
    pages: Pages,
    positions: Int[Array, " B"],
    options: Attending = PLAIN,
    *,
    value_width: int | None = None,
) -> Float[Array, "B N V"]:
    """Compute `models.paged_triton.attend_pages` by gathering the pages into rows: its reference.

    Args:
        q: As `models.paged_triton.attend_pages`.
        pages: As `models.paged_triton.attend_pages`.
        positions: As `models.paged_triton.attend_pages`; the result of an empty row means nothing.
        options: As `models.paged_triton.attend_pages`.
        value_width: As `models.paged_triton.attend_pages`.

    >>> k, v = jnp.ones((3, 1, 16, 4)), jnp.ones((3, 1, 4, 16))
    >>> table, positions = jnp.array([[1, 0], [2, 9]]), jnp.array([5, 3])
    >>> attend_gathered(jnp.ones((2, 3, 16)), Pages(k, v, table), positions).shape
    (2, 3, 16)
    """
    k = _rows(pages.keys, pages.table, 3)
    if pages.values is None:
        v = k.swapaxes(2, 3)[..., :value_width]
    else:
        v = _rows(pages.values, pages.table, 2)
    if pages.key_scales is None:
        scales, q = None, q.astype(k.dtype)
    else:
        of_values = pages.value_scales
        of_values = None if of_values is None else _rows(of_values, pages.table, 2)
        scales = make_scales(_rows(pages.key_scales, pages.table, 3), of_values)
    return attend_cache(q[:, None], k, v, positions[:, None], options, scales)[:, 0]


def attend_in_turn(
    q: Float[Array, "B N H"],
    pages: Pages,
    positions: Int[Array, " B"],
    options: Attending = PLAIN,
    *,
    value_width: int | None = None,
) -> Float[Array, "B N V"]:
    """Compute `attend_gathered` for a few sequences at a time, so that few are ever gathered.

    It stands for the kernel in programs for CPUs that are compiled to see what a GPU would need.

    Args:
        q: As `attend_gathered`.
        pages: As `attend_gathered`.
        positions: As `attend_gathered`.
        options: As `attend_gathered`.
        value_width: As `attend_gathered`.

    >>> k, v = jnp.ones((3, 1, 16, 4)), jnp.ones((3, 1, 4, 16))
    >>> table, positions = jnp.array([[1, 0], [2, 9]]), jnp.array([5, 3])
    >>> attend_in_turn(jnp.ones((2, 3, 16)), Pages(k, v, table), positions).shape
    (2, 3, 16)
    """

    def attend_one(row: tuple[Array, Array, Array]) -> Array:
        q, table, position = (x[None] for x in row)
        own = pages._replace(table=table)
        return attend_gathered(q, own, position, options, value_width=value_width)[0]

    return jax.lax.map(attend_one, (q, pages.table, positions), batch_size=AT_ONCE)


def _rows(pages: Array, table: Int[Array, "B n"], axis: int) -> Array:
    """Lay the pages of each sequence side by side, along the axis of their tokens."""
    rows = pages.at[table].get(mode="fill", fill_value=0)  # a table ends in numbers past all pages
    return jax.lax.collapse(jnp.moveaxis(rows, 1, axis), axis, axis + 2)


def place_of_token(
    table: Int[Array, "B n"], positions: Int[Array, " B"], count: int, size: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return page and slot of a token of each row.

    Args:
        table: The pages of each row.
        positions: Of the tokens; negative in an empty row, whose page is one past all.
        count: Pages in all.
        size: Slots of a page.

    >>> page, slot = place_of_token(jnp.array([[3, 1], [2, 5]]), jnp.array([17, -1]), 5, 16)
    >>> page.tolist(), slot.tolist()
    ([1, 5], [1, 15])
    """
    own = jnp.take_along_axis(table, jnp.maximum(positions, 0)[:, None] // size, axis=1)[:, 0]
    return jnp.where(positions < 0, count, own), positions % size

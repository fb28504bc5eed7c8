"""States of rows in slots of the pool, beside its pages: for layers such as the gated DeltaNet."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, Shaped


class StateSlots(NamedTuple):
    """Where the states of rows are, by slots of the row's part.

    Attributes:
        source: where they are read; a number past the slots gives zeros.
        target: where they go; a number past the slots is dropped.
    """

    source: Int[Array, " B"]
    target: Int[Array, " B"]


def gather_states(held: Any, slots: Int[Array, " B"] | None) -> Any:
    """Return the states of rows.

    Args:
        held: arrays [parts, slots, …], as `Cache.states` of a pool; rows belong to the parts in
            order, as many to each.
        slots: of each row; a number past the slots gives zeros.

    >>> import jax.numpy as jnp
    >>> gather_states((jnp.array([[3.0, 4.0]]),), jnp.array([1, 2, 0]))[0].tolist()
    [4.0, 0.0, 3.0]
    """
    if slots is None:
        return ()

    def gathered(held: Shaped[Array, "parts slots ..."]) -> Shaped[Array, "B ..."]:
        by_part = slots.reshape(len(held), -1)
        rows = jax.vmap(lambda held, at: held.at[at].get(mode="fill", fill_value=0))(held, by_part)
        return jax.lax.collapse(rows, 0, 2)

    return jax.tree.map(gathered, held)


def scatter_states(held: Any, rows: Any, slots: Int[Array, " B"] | None) -> Any:
    """Write the states of rows to their slots.

    Args:
        held: as `gather_states`.
        rows: the states.
        slots: of each row, no slot twice; a number past the slots is dropped. None: nothing is
            written.

    >>> import jax.numpy as jnp
    >>> states = (jnp.array([[3.0, 4.0]]),)
    >>> scatter_states(states, (jnp.array([5.0, 6.0]),), jnp.array([1, 2]))[0].tolist()
    [[3.0, 5.0]]
    """
    if slots is None:
        return held

    def scattered(
        held: Shaped[Array, "parts slots ..."], rows: Shaped[Array, "B ..."]
    ) -> Shaped[Array, "parts slots ..."]:
        by_part = slots.reshape(len(held), -1)
        new = rows.reshape(*by_part.shape, *rows.shape[1:])
        return jax.vmap(lambda held, at, x: held.at[at].set(x, mode="drop"))(held, by_part, new)

    return jax.tree.map(scattered, held, rows)

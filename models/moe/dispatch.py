"""Send tokens to experts on one device and back, without dropping any."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.moe.routing import Routing


def dispatch(
    x: Float[Array, "T D"],
    routing: Routing,
    experts: Callable[[Array, Array], Array],
) -> Float[Array, "T D"]:
    r"""Send each token to its experts and add what they return, $\sum_{e} w_e\, f_e(x)$.

    Tokens are sorted by expert, so no expert has a capacity and no token is dropped. Sorting and
    its inverse are gathers, in the backward pass too, so the result does not depend on the order
    in which a device adds.

    Args:
        x: Tokens.
        routing: Their experts and weights; the number of experts stands for none, of a token that
            is zeros.
        experts: `(rows [M D], sizes [E]) -> [M D]`, f of consecutive groups of rows, one per
            expert, with `sizes` rows each, and zeros of zeros after them.

    Returns:
        The weighted sums, taken in float32, in the dtype of `x`.

    >>> routing = Routing(jnp.array([[1, 0]]), jnp.array([[0.5, 0.25]]), jnp.ones((1, 2)) / 2)
    >>> dispatch(jnp.array([[4.0]]), routing, lambda rows, sizes: rows).tolist()
    [[3.0]]
    """
    tokens, top = routing.experts.shape
    choices = routing.experts.reshape(-1)
    order = jnp.argsort(choices)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(choices, length=routing.probabilities.shape[1])
    out = experts(take_or_zero(jnp.repeat(x, top, axis=0), order, inverse), sizes)
    returned = take_or_zero(out, inverse, order).reshape(tokens, top, -1)
    weighted = returned.astype(jnp.float32) * routing.weights[:, :, None]
    return weighted.sum(axis=1).astype(x.dtype)


@jax.custom_vjp
def take_or_zero(
    x: Float[Array, "N D"], index: Int[Array, " M"], inverse: Int[Array, " N"]
) -> Float[Array, "M D"]:
    """Gather rows, zeros where `index` is outside; the gradient is a gather by `inverse`.

    Args:
        x: Rows.
        index: For each result its row; no row twice.
        inverse: For each row its place in the result, outside where it has none.

    Returns:
        The rows x[index].

    >>> take_or_zero(jnp.array([[5.0], [6.0]]), jnp.array([1, 2]), jnp.array([2, 0])).tolist()
    [[6.0], [0.0]]
    """
    return x.at[index].get(mode="fill", fill_value=0)


def _take_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, Array]:
    return take_or_zero(x, index, inverse), inverse


def _take_backward(inverse: Array, gradient: Array) -> tuple[Array, None, None]:
    return gradient.at[inverse].get(mode="fill", fill_value=0), None, None


take_or_zero.defvjp(_take_forward, _take_backward)

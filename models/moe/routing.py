"""Routers: which experts each token goes to.

They work in float32 on flat tokens [T D].
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


class Routing(NamedTuple):
    """Which experts each token goes to.

    `weights` multiply the experts' outputs. `probabilities` are the router's opinion of all experts
    and sum to 1 per token; they serve the balance loss and the statistics. `own` are the experts
    that the router itself would have chosen, where others were given (`replay_routes`).
    """

    experts: Int[Array, "T top"]
    weights: Float32[Array, "T top"]
    probabilities: Float32[Array, "T E"]
    own: Int[Array, "T top"] | None = None


NO_ROUTE = -1
"""Stands for the experts of a token of which no choice was recorded."""


def replay_routes(
    own: Int[Array, "T top"], routes: Int[Array, "T top"] | None
) -> Int[Array, "T top"]:
    """Return the experts that were recorded, and the router's own where none were.

    A router weighs them by its probabilities in this pass, so gradients reach it as ever. Routing
    replay: Ma et al. 2025 (https://arxiv.org/abs/2510.11370, section 4).

    Args:
        own: Experts that the router chooses.
        routes: Experts that were recorded, `NO_ROUTE` in place of those of a token that has none;
            None: the router's own are taken.

    >>> replay_routes(jnp.array([[0, 1], [0, 1]]), jnp.array([[3, 2], [-1, -1]])).tolist()
    [[3, 2], [0, 1]]
    """
    if routes is None:
        return own
    is_recorded = jnp.all(routes != NO_ROUTE, axis=-1, keepdims=True)
    return jnp.where(is_recorded, routes.astype(own.dtype), own)


def route_softmax(
    logits: Float[Array, "T E"],
    *,
    top: int,
    normalize: bool,
    routes: Int[Array, "T top"] | None = None,
) -> Routing:
    r"""Choose the `top` experts of largest probability.

    $p = \mathrm{softmax}(z)$; the weight of a chosen expert is $p_e$, or, normalized,
    $p_e / \sum_{chosen} p$ (Qwen3-MoE's `norm_topk_prob`). Normalized, it is the softmax over the
    chosen logits alone, which is how Mixtral writes it (https://arxiv.org/abs/2401.04088, section
    2.1).

    Args:
        logits: The router's output z.
        top: Experts per token.
        normalize: Whether the weights of a token sum to 1.
        routes: Experts to take instead, as for `replay_routes`.

    Returns:
        The routing.

    >>> routing = route_softmax(jnp.array([[0.0, 2.0, 2.0]]), top=2, normalize=True)
    >>> routing.experts.tolist(), routing.weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, own = jax.lax.top_k(probabilities, top)
    experts = replay_routes(own, routes)
    if routes is not None:
        weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if normalize:
        total = weights.sum(-1, keepdims=True)
        if routes is not None:  # they may have lost all of their probability since
            total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        weights = weights / total
    return Routing(experts, weights, probabilities, None if routes is None else own)


def route_sigmoid(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    *,
    top: int,
    groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
    routes: Int[Array, "T top"] | None = None,
) -> Routing:
    r"""Choose experts by sigmoid scores plus a bias, within the best groups of experts.

    $s = \sigma(z)$. A group's score is the sum of its two largest $s_e + b_e$; the `top` experts
    with the largest $s_e + b_e$ are taken from the best `top_groups` groups. The bias enters the
    choice only: the weight is `scale` times $s_e$, or, normalized, $s_e / \sum_{chosen} s$.
    DeepSeek-V3, eqs. 12-16 and section 2.1.2 (https://arxiv.org/abs/2412.19437).

    Args:
        logits: The router's output z.
        bias: Correction of each expert's score, `e_score_correction_bias`; see `update_bias`.
        top: Experts per token.
        groups: Groups of consecutive experts, all of one size, at least 2 each.
        top_groups: Groups a token may choose from.
        normalize: Whether the weights of a token sum to `scale`.
        scale: `routed_scaling_factor`.
        routes: Experts to take instead, as for `replay_routes`.

    Returns:
        The routing; its probabilities are $s_e / \sum s$ (eq. 19).

    >>> logits, bias = jnp.array([[9.0, 0.0, 1.0, 1.0]]), jnp.array([-1.0, 0.0, 0.0, 0.0])
    >>> routing = route_sigmoid(logits, bias, top=2, groups=2, top_groups=1, normalize=True,
    ...                         scale=2.5)
    >>> routing.experts.tolist(), routing.weights.tolist()
    ([[2, 3]], [[1.25, 1.25]])
    """
    tokens, experts = logits.shape
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    choice = scores + jax.lax.stop_gradient(bias.astype(jnp.float32))
    grouped = choice.reshape(tokens, groups, experts // groups)
    _, best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), top_groups)
    allowed = jax.nn.one_hot(best, groups, dtype=jnp.bool_).any(axis=1)
    inside = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
    _, own = jax.lax.top_k(inside, top)
    chosen = replay_routes(own, routes)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    probabilities = scores / scores.sum(-1, keepdims=True)
    return Routing(chosen, weights * scale, probabilities, None if routes is None else own)


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouter:
    """Route as `route_softmax`: Qwen3-MoE, and Mixtral with `normalize`.

    >>> SoftmaxRouter(normalize=True)(jnp.array([[0.0, 2.0]]), None, top=1).experts.tolist()
    [[1]]
    """

    normalize: bool

    def __call__(
        self, logits: Array, bias: Array | None, *, top: int, routes: Array | None = None
    ) -> Routing:
        """Route tokens; there is no bias."""
        return route_softmax(logits, top=top, normalize=self.normalize, routes=routes)


@dataclass(frozen=True, kw_only=True)
class SigmoidRouter:
    """Route as `route_sigmoid`: DeepSeek-V3.

    >>> router = SigmoidRouter(groups=1, top_groups=1, normalize=True, scale=1.0)
    >>> router(jnp.array([[0.0, 2.0]]), jnp.zeros(2), top=1).weights.tolist()
    [[1.0]]
    """

    groups: int
    top_groups: int
    normalize: bool
    scale: float

    def __call__(
        self, logits: Array, bias: Array | None, *, top: int, routes: Array | None = None
    ) -> Routing:
        """Route tokens.

        Raises:
            ValueError: There is no bias.
        """
        if bias is None:
            raise ValueError("sigmoid routing adds a bias to the scores, got none")
        return route_sigmoid(logits, bias, top=top, routes=routes, **vars(self))

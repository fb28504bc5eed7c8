"""Routers: which experts each token goes to.

They work in float32 on flat tokens [T D].
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int


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


class RouterStats(NamedTuple):
    """Sums over tokens, which add up over micro-batches; of one layer or stacked over several.

    `tokens` is the number of tokens, `choices` how many went to each expert, `probabilities` the
    sum of the router's probabilities and `entropy` that of their entropies. Where recorded choices
    are replayed, `replayed` is the number of these and `replaced` that of those among them that the
    router itself would not have made.
    """

    tokens: Float32[Array, "*layers"]
    choices: Float32[Array, "*layers E"]
    probabilities: Float32[Array, "*layers E"]
    entropy: Float32[Array, "*layers"]
    replayed: Float32[Array, "*layers"] | None = None
    replaced: Float32[Array, "*layers"] | None = None


def router_stats(
    routing: Routing, mask: Bool[Array, " T"], routes: Int[Array, "T top"] | None = None
) -> RouterStats:
    """Sum up what a router did, padding left out.

    Args:
        routing: Of all tokens.
        mask: False on padding.
        routes: What was recorded and replayed; None: nothing was.

    Returns:
        The sums; only `probabilities` and `entropy` have gradients.

    >>> from jaxrl_llm.models.moe.routing import route_softmax
    >>> routing = route_softmax(jnp.array([[0.0, 2.0], [1.0, 0.0]]), top=1, normalize=True)
    >>> router_stats(routing, jnp.array([True, False])).choices.tolist()
    [0.0, 1.0]
    """
    on = mask.astype(jnp.float32)
    experts = routing.probabilities.shape[1]
    chosen = jax.nn.one_hot(routing.experts, experts, dtype=jnp.float32).sum(axis=1)
    entropy = jax.scipy.special.entr(routing.probabilities).sum(axis=-1)
    stats = RouterStats(
        tokens=on.sum(),
        choices=on @ chosen,
        probabilities=(on[:, None] * routing.probabilities).sum(axis=0),
        entropy=(on * entropy).sum(),
    )
    if routes is None or routing.own is None:
        return stats
    is_recorded = mask[:, None] & jnp.all(routes != NO_ROUTE, axis=-1, keepdims=True)
    is_own = (routing.experts[:, :, None] == routing.own[:, None, :]).any(axis=-1)
    return stats._replace(
        replayed=is_recorded.sum(dtype=jnp.float32) * routes.shape[1],
        replaced=(is_recorded & ~is_own).sum(dtype=jnp.float32),
    )


def router_metrics(stats: RouterStats) -> dict[str, Array]:
    """Turn sums over tokens into metrics.

    Args:
        stats: Of one or several layers.

    Returns:
        For each layer `tokens_per_expert` [E]; `max_load`, the largest of them over their mean, 1
        when balanced and E / top when all tokens choose the same experts; and `router_entropy`,
        nats per token.

    >>> stats = RouterStats(jnp.array(4.0), jnp.array([1.0, 3.0]), jnp.array([2.0, 2.0]),
    ...                     jnp.array(2.0))
    >>> {name: metric.tolist() for name, metric in router_metrics(stats).items()}
    {'tokens_per_expert': [1.0, 3.0], 'max_load': 1.5, 'router_entropy': 0.5}
    """
    return {
        "tokens_per_expert": stats.choices,
        "max_load": stats.choices.max(-1) / jnp.maximum(stats.choices.mean(-1), 1e-20),
        "router_entropy": stats.entropy / jnp.maximum(stats.tokens, 1.0),
    }


def load_balance_loss(stats: RouterStats) -> Float32[Array, ""]:
    r"""Penalize uneven use of the experts, $E \sum_e f_e P_e$.

    $f_e$ is the number of choices of expert e per token and $P_e$ its mean probability. Switch
    Transformer, eqs. 4-6 (https://arxiv.org/abs/2101.03961), without its coefficient and with
    several choices per token, as `transformers` defines it for Qwen3-MoE and Mixtral; balanced,
    it equals the number of experts per token. Means are over the tokens of all layers together. It
    is no sum over tokens, so the losses of micro-batches do not add up to that of their sum: add
    their statistics first, or use the `balance_weights` of the whole.

    Args:
        stats: Of one or several layers; gradients pass through `probabilities`.

    Returns:
        The loss; 0 without tokens.

    >>> load_balance_loss(RouterStats(jnp.array(4.0), jnp.array([4.0, 4.0]), jnp.array([2.0, 2.0]),
    ...                               jnp.array(2.0))).tolist()
    2.0
    """
    return jnp.sum(balance_weights(stats) * stats.probabilities)


def balance_weights(stats: RouterStats) -> Float32[Array, " E"]:
    r"""Weigh the experts so that the load-balance loss is linear in the probabilities.

    $w_e = E f_e / T$ for T tokens, counted in each layer, and the loss is $\sum_e w_e \sum_t
    p_{te}$. The fractions f have no gradient, so with the weights of a whole mini-batch these sums
    over its micro-batches add up to its loss, and their gradients to its gradient.

    Args:
        stats: Of the whole mini-batch, of one or several layers.

    Returns:
        The weights; `probabilities` and `entropy` do not matter to them.

    >>> stats = RouterStats(jnp.array(4.0), jnp.array([1.0, 3.0]), jnp.zeros(2), jnp.array(0.0))
    >>> balance_weights(stats).tolist()
    [0.125, 0.375]
    """
    experts = stats.choices.shape[-1]
    tokens = jnp.maximum(stats.tokens.sum(), 1.0)
    return experts * stats.choices.reshape(-1, experts).sum(axis=0) / tokens**2


def update_bias(
    bias: Float32[Array, "*layers E"], choices: Float[Array, "*layers E"], *, rate: float = 0.001
) -> Float32[Array, "*layers E"]:
    r"""Move the bias of a sigmoid router against the load, $b_e + u\,\mathrm{sign}(\bar c - c_e)$.

    $c_e$ is the number of choices of expert e over a training batch and $\bar c$ its mean over the
    experts. Wang et al. 2024, algorithm 1 (https://arxiv.org/abs/2408.15664); the rate is that of
    DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 4.2).

    Args:
        bias: Before the update.
        choices: Choices of each expert.
        rate: Update speed u.

    Returns:
        The bias after it.

    >>> update_bias(jnp.zeros(3), jnp.array([5.0, 1.0, 3.0]), rate=0.5).tolist()
    [-0.5, 0.5, 0.0]
    """
    error = choices.mean(axis=-1, keepdims=True) - choices
    return bias + rate * jnp.sign(error)

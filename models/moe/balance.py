"""How evenly experts are used: router statistics, the balance loss, the bias of sigmoid routers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.models.moe.routing import NO_ROUTE, Routing


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

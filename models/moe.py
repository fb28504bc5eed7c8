"""Mixture of experts: route each token to a few feed-forward networks, without dropping any.

Routers work in float32 on flat tokens [T D]. `grouped_matmul` is all that the experts know about
their matrices, so a faster kernel is chosen there.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.sharding.layout import Layout

Params: TypeAlias = dict[str, Any]  # one layer's arrays


class Routing(NamedTuple):
    """Which experts each token goes to.

    `weights` multiply the experts' outputs. `probabilities` are the router's opinion of all experts
    and sum to 1 per token; they serve the balance loss and the statistics.
    """

    experts: Int[Array, "T top"]
    weights: Float32[Array, "T top"]
    probabilities: Float32[Array, "T E"]


def route_softmax(logits: Float[Array, "T E"], *, top: int, normalize: bool) -> Routing:
    r"""Choose the `top` experts of largest probability.

    $p = \mathrm{softmax}(z)$; the weight of a chosen expert is $p_e$, or, normalized,
    $p_e / \sum_{chosen} p$ (Qwen3-MoE's `norm_topk_prob`). Normalized, it is the softmax over the
    chosen logits alone, which is how Mixtral writes it (https://arxiv.org/abs/2401.04088, section
    2.1).

    Args:
        logits: The router's output z.
        top: Experts per token.
        normalize: Whether the weights of a token sum to 1.

    Returns:
        The routing.

    >>> routing = route_softmax(jnp.array([[0.0, 2.0, 2.0]]), top=2, normalize=True)
    >>> routing.experts.tolist(), routing.weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, top)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights, probabilities)


def route_sigmoid(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    *,
    top: int,
    groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
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
    _, chosen = jax.lax.top_k(inside, top)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(chosen, weights * scale, scores / scores.sum(-1, keepdims=True))


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouter:
    """Route as `route_softmax`: Qwen3-MoE, and Mixtral with `normalize`.

    >>> SoftmaxRouter(normalize=True)(jnp.array([[0.0, 2.0]]), None, top=1).experts.tolist()
    [[1]]
    """

    normalize: bool

    def __call__(self, logits: Array, bias: Array | None, *, top: int) -> Routing:
        """Route tokens; there is no bias."""
        return route_softmax(logits, top=top, normalize=self.normalize)


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

    def __call__(self, logits: Array, bias: Array | None, *, top: int) -> Routing:
        """Route tokens.

        Raises:
            ValueError: There is no bias.
        """
        if bias is None:
            raise ValueError("sigmoid routing adds a bias to the scores, got none")
        return route_sigmoid(logits, bias, top=top, **vars(self))


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Describe feed-forward layers that are mixtures of experts; a part of the model's spec.

    Args:
        experts: Number of routed experts E.
        experts_per_token: Experts that each token is sent to.
        ff_width: Feed-forward width F of one expert.
        dense_layers: How many of the first layers have a plain feed-forward instead.
        router: How tokens choose experts.
        shared_ff_width: Width of the experts that every token passes, together; 0 without them.
        hf_module: Module of a layer that holds the experts in a Hugging Face checkpoint.
        hf_projections: Names there of an expert's gate, up and down projections.

    Raises:
        ValueError: A size is not positive, a token would choose more experts than there are, or the
            groups of a `SigmoidRouter` do not divide the experts into at least 2 each, or too few
            of them are chosen from.

    >>> MoeSpec(experts=8, experts_per_token=2, ff_width=6).dense_layers
    0
    """

    experts: int
    experts_per_token: int
    ff_width: int
    dense_layers: int = 0
    router: SoftmaxRouter | SigmoidRouter = SoftmaxRouter(normalize=True)
    shared_ff_width: int = 0
    hf_module: str = "mlp"
    hf_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if self.ff_width <= 0 or min(self.dense_layers, self.shared_ff_width) < 0:
            raise ValueError(f"sizes of a mixture of experts must be positive, got {self}")
        if not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"a token is sent to 1 or more of the experts, got "
                f"experts_per_token={self.experts_per_token} of {self.experts}"
            )
        if isinstance(self.router, SigmoidRouter):
            groups, chosen = self.router.groups, self.router.top_groups
            size = self.experts // groups if groups > 0 else 0
            fits = size >= 2 and size * groups == self.experts and 0 < chosen <= groups
            if not fits or chosen * size < self.experts_per_token:
                raise ValueError(
                    "groups must divide the experts into at least 2 each, and those chosen from "
                    f"hold experts_per_token; got {self}"
                )


def grouped_matmul(
    x: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Multiply consecutive groups of rows by one matrix each: y[m] = x[m] @ matrices[group of m].

    Every group is padded to whole blocks of rows, and the blocks are one batched product with the
    gathered matrices (as MegaBlocks, https://arxiv.org/abs/2211.15841, does in a kernel). The work
    is at most about 1.5 times that of the rows, and about three times the matrices are gathered.
    `jax.lax.ragged_dot` has no kernel on CPU and multiplies all rows by all matrices.

    The gathered matrices are gathered again in the backward pass, not kept for it.

    Args:
        x: Rows, ordered by group.
        matrices: One matrix per group.
        sizes: Rows of each group; they sum to M.

    Returns:
        The products, in the dtype of `x`, to which the matrices are cast.

    >>> x, matrices = jnp.ones((3, 1)), jnp.array([[[1.0]], [[5.0]]])
    >>> grouped_matmul(x, matrices, jnp.array([2, 1]))[:, 0].tolist()
    [1.0, 1.0, 5.0]
    """
    return jax.checkpoint(_blocked_matmul)(x, matrices, sizes)


def _blocked_matmul(x: Array, matrices: Array, sizes: Array) -> Array:
    rows, groups = x.shape[0], matrices.shape[0]
    block = max(rows // (2 * groups) // 8 * 8, 8)
    blocks = (rows + min(groups, rows) * (block - 1)) // block  # the most that can be needed
    needed = -(-sizes // block)
    first_slot = (jnp.cumsum(needed) - needed) * block
    first_row = jnp.cumsum(sizes) - sizes
    group = jnp.repeat(jnp.arange(groups), sizes, total_repeat_length=rows)
    slot = first_slot[group] + jnp.arange(rows) - first_row[group]
    owner = jnp.repeat(jnp.arange(groups), needed, total_repeat_length=blocks)
    padded = jnp.zeros((blocks * block, x.shape[1]), x.dtype)
    padded = padded.at[slot].set(x, unique_indices=True, indices_are_sorted=True)
    own = matrices.at[owner].get(indices_are_sorted=True, mode="promise_in_bounds")
    products = jnp.einsum("bsd,bdf->bsf", padded.reshape(blocks, block, -1), own.astype(x.dtype))
    return products.reshape(blocks * block, -1)[slot]


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
        routing: Their experts and weights.
        experts: `(rows [M D], sizes [E]) -> [M D]`, f of consecutive groups of rows, one per
            expert, with `sizes` rows each.

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


class RouterStats(NamedTuple):
    """Sums over tokens, which add up over micro-batches; of one layer or stacked over several.

    `tokens` is the number of tokens, `choices` how many chose each expert, `probabilities` the
    sum of the router's probabilities and `entropy` that of their entropies.
    """

    tokens: Float32[Array, "*layers"]
    choices: Float32[Array, "*layers E"]
    probabilities: Float32[Array, "*layers E"]
    entropy: Float32[Array, "*layers"]


def router_stats(routing: Routing, mask: Bool[Array, " T"]) -> RouterStats:
    """Sum up what a router did, padding left out.

    Args:
        routing: Of all tokens.
        mask: False on padding.

    Returns:
        The sums; only `probabilities` and `entropy` have gradients.

    >>> routing = route_softmax(jnp.array([[0.0, 2.0], [1.0, 0.0]]), top=1, normalize=True)
    >>> router_stats(routing, jnp.array([True, False])).choices.tolist()
    [0.0, 1.0]
    """
    on = mask.astype(jnp.float32)
    experts = routing.probabilities.shape[1]
    chosen = jax.nn.one_hot(routing.experts, experts, dtype=jnp.float32).sum(axis=1)
    entropy = jax.scipy.special.entr(routing.probabilities).sum(axis=-1)
    return RouterStats(
        tokens=on.sum(),
        choices=on @ chosen,
        probabilities=(on[:, None] * routing.probabilities).sum(axis=0),
        entropy=(on * entropy).sum(),
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


def route(weights: Params, spec: MoeSpec, x: Float[Array, "T D"]) -> Routing:
    """Route tokens by one layer's router, in float32.

    Args:
        weights: One layer's arrays: `router` [D E], and `router_bias` [E] for a `SigmoidRouter`.
        spec: The experts.
        x: Tokens.

    Returns:
        The routing.

    >>> spec = MoeSpec(experts=2, experts_per_token=1, ff_width=4)
    >>> route({"router": jnp.array([[1.0, -1.0]])}, spec, jnp.array([[2.0]])).experts.tolist()
    [[0]]
    """
    logits = jnp.matmul(
        x.astype(jnp.float32),
        weights["router"].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return spec.router(logits, weights.get("router_bias"), top=spec.experts_per_token)


def mixture(
    weights: Params,
    spec: MoeSpec,
    x: Float[Array, "R L D"],
    real: Bool[Array, "R L"],
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
    lora_scale: float = 0.0,
    layout: Layout | None = None,
) -> tuple[Float[Array, "R L D"], RouterStats]:
    r"""Apply a layer's routed experts, $\sum_e w_e\,\mathrm{down}_e(a(\mathrm{gate}_e x) \odot
    \mathrm{up}_e x)$.

    Args:
        weights: One layer's arrays: `router`, perhaps `router_bias`, `expert_gate` [E D F],
            `expert_up` [E D F], `expert_down` [E F D], each with low-rank factors `{name}_lora_a`
            and `{name}_lora_b` where it has them. All but the router's are used in the dtype of x.
        spec: The experts.
        x: Normed rows.
        real: False at padding, which is left out of the statistics.
        activation: The gate's activation a.
        lora_scale: What products of low-rank factors are multiplied by.
        layout: How rows and experts are split over a mesh; tokens then go to their experts'
            devices and back (`models.exchange`).

    Returns:
        What is added to the residual stream, and the router's statistics.

    >>> spec = MoeSpec(experts=2, experts_per_token=1, ff_width=1)
    >>> weights = {"router": jnp.ones((1, 2)), "expert_gate": jnp.ones((2, 1, 1)),
    ...            "expert_up": jnp.ones((2, 1, 1)), "expert_down": jnp.ones((2, 1, 1))}
    >>> out, stats = mixture(weights, spec, jnp.ones((1, 3, 1)), jnp.array([[True, True, False]]))
    >>> out.shape, stats.tokens.tolist()
    ((1, 3, 1), 2.0)
    """
    flat = x.reshape(-1, x.shape[-1])

    def choose(weights: Params, x: Array) -> Routing:
        return route(weights, spec, x)

    def experts(matrices: Params, rows: Array, sizes: Array) -> Array:
        def grouped(name: str, rows: Array) -> Array:
            y = grouped_matmul(rows, matrices[name], sizes)
            if f"{name}_lora_a" in matrices:
                low = grouped_matmul(rows, matrices[f"{name}_lora_a"], sizes)
                y = y + grouped_matmul(low, matrices[f"{name}_lora_b"], sizes) * lora_scale
            return y

        hidden = activation(grouped("expert_gate", rows)) * grouped("expert_up", rows)
        return grouped("expert_down", hidden)

    own = {k: v for k, v in weights.items() if k.startswith(("router", "expert_"))}
    if layout is None or layout.mesh.size == 1:
        routing = choose(own, flat)
        out = dispatch(flat, routing, functools.partial(experts, own))
    else:
        from jaxrl_llm.models.exchange import exchange  # which imports this module

        out, routing = exchange(flat, own, choose, experts, layout)
    return out.reshape(x.shape), router_stats(routing, real.reshape(-1))

"""The routed experts of one layer, on one device or on several."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.moe.expert_parallel import dispatch, expert_parallel_mixture
from jaxrl_llm.models.moe.grouped import BLOCKED, GroupedKernels, group_rows, grouped_matmul
from jaxrl_llm.models.moe.routing import NO_ROUTE, RouterStats, Routing, router_stats
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.sharding.layout import Layout


def route(
    weights: Params,
    spec: MoeSpec,
    x: Float[Array, "T D"],
    routes: Int[Array, "T top"] | None = None,
) -> Routing:
    """Route tokens by one layer's router, in float32.

    Args:
        weights: One layer's arrays: `router` [D E], perhaps with a `router_logit_bias` [E], and
            `router_bias` [E] for a `SigmoidRouter`.
        spec: The experts.
        x: Tokens.
        routes: Experts to take instead, as for `models.moe.routing.replay_routes`.

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
    if "router_logit_bias" in weights:
        logits = logits + weights["router_logit_bias"].astype(jnp.float32)
    bias, top = weights.get("router_bias"), spec.experts_per_token
    return spec.router(logits, bias, top=top, routes=routes)


def mixture(
    weights: Params,
    spec: MoeSpec,
    x: Float[Array, "R L D"],
    real: Bool[Array, "R L"],
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
    lora_scale: float = 0.0,
    layout: Layout | None = None,
    routes: Int[Array, "R L top"] | None = None,
) -> tuple[Float[Array, "R L D"], RouterStats, Int[Array, "R L top"]]:
    r"""Apply a layer's routed experts, $\sum_e w_e\,\mathrm{down}_e(a(\mathrm{gate}_e x) \odot
    \mathrm{up}_e x)$.

    Args:
        weights: One layer's arrays: `router`, perhaps `router_bias`, `expert_gate` [E D F],
            `expert_up` [E D F], `expert_down` [E F D], perhaps with `{name}_bias`, `{name}_lora_a`
            and `{name}_lora_b`. All but the router's are used in the dtype of x.
        spec: The experts.
        x: Normed rows.
        real: False at padding, which is left out of the statistics.
        activation: The gate's activation a; of no effect where the experts have a `swiglu`.
        lora_scale: What products of low-rank factors are multiplied by.
        layout: How rows and experts are split over a mesh; tokens then go to their experts'
            devices and back (`models.moe.expert_parallel`). Its `grouped_kernels` multiply them.
        routes: Experts to take instead, as for `models.moe.routing.replay_routes`.

    Returns:
        What is added to the residual stream, the router's statistics, and each token's experts.

    >>> spec = MoeSpec(experts=2, experts_per_token=1, ff_width=1)
    >>> weights = {"router": jnp.ones((1, 2)), "expert_gate": jnp.ones((2, 1, 1)),
    ...            "expert_up": jnp.ones((2, 1, 1)), "expert_down": jnp.ones((2, 1, 1))}
    >>> real = jnp.array([[True, True, False]])
    >>> out, stats, experts = mixture(weights, spec, jnp.ones((1, 3, 1)), real)
    >>> out.shape, stats.tokens.tolist(), experts.shape
    ((1, 3, 1), 2.0, (1, 3, 1))
    """
    flat, given = x.reshape(-1, x.shape[-1]), None
    if routes is not None:  # what padding holds may name one expert several times
        given = jnp.where(real[:, :, None], routes, NO_ROUTE).reshape(-1, routes.shape[-1])
    combine = spec.swiglu or (lambda gate, up: activation(gate) * up)
    grouped = functools.partial(_grouped_linear, _multiplying(layout), lora_scale)

    def choose(weights: Params, x: Array, given: Array | None) -> Routing:
        return route(weights, spec, x, given)

    def experts(matrices: Params, rows: Array, sizes: Array) -> Array:
        gate, up = (grouped(matrices, name, rows, sizes) for name in ("expert_gate", "expert_up"))
        return grouped(matrices, "expert_down", combine(gate, up), sizes)

    own = {k: v for k, v in weights.items() if k.startswith(("router", "expert_"))}
    if layout is None or layout.mesh.size == 1:
        routing = choose(own, flat, given)
        out = dispatch(flat, routing, functools.partial(experts, own))
    else:
        out, routing = expert_parallel_mixture(flat, own, choose, experts, layout, given)
    chosen = routing.experts.reshape(*x.shape[:2], -1)
    return out.reshape(x.shape), router_stats(routing, real.reshape(-1), given), chosen


def _grouped_linear(
    multiply: Callable[..., Array],
    lora_scale: float,
    weights: Params,
    name: str,
    rows: Float[Array, "M D"],
    sizes: Int[Array, " E"],
) -> Float[Array, "M F"]:
    """Apply a projection of the experts to their rows: matrices, low-rank factors and biases."""
    y = multiply(rows, weights[name], sizes)
    if f"{name}_lora_a" in weights:
        low = multiply(rows, weights[f"{name}_lora_a"], sizes)
        y = y + multiply(low, weights[f"{name}_lora_b"], sizes) * lora_scale
    if f"{name}_bias" in weights:
        bias: Any = group_rows(weights[f"{name}_bias"], sizes, len(y))
        y = y + bias.astype(y.dtype)
    return y


def _multiplying(layout: Layout | None) -> Callable[..., Array]:
    """Return `grouped_matmul` by the kernels of a layout."""
    given = layout.grouped_kernels if layout else None
    kernels = BLOCKED if given is None else GroupedKernels(*given)
    return functools.partial(grouped_matmul, kernels=kernels)

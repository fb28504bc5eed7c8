"""What routers of experts add to an update: their load-balance loss, and the moves of their bias.

The load-balance loss is a product of means over the mini-batch. One of them, how often each expert
is chosen, has no gradient: a pass before the update counts it, and with that held constant the loss
is a sum over micro-batches.

The bias of sigmoid routers has no gradient. It is not the optimizer's, with its weight decay: it is
moved by what the routers chose in the mini-batch.
"""

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.moe.balance import RouterStats, load_balance_loss, router_metrics, update_bias
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.inference import balance_pass
from jaxrl_llm.training.microbatches import Fields
from jaxrl_llm.training.update import UpdateHooks


def router_hooks(
    forward: ForwardConfig, shape: RowShape, mesh: Mesh, frozen: Params | None = None
) -> UpdateHooks:
    """Return what the routers of a model add to its update; nothing where it has none.

    Args:
        forward: how the model is run.
        shape: of the micro-batches.
        mesh: the devices.
        frozen: the model's parameters that are not trained.
    """

    def change(before: Params, after: Params, router: RouterStats) -> Params:
        return move_router_bias(before, after, router, rate=forward.router_bias_rate)

    coefficients = balance_pass(forward, shape, mesh, frozen or {})
    return UpdateHooks("router", coefficients, change, summarize_routers)


def move_router_bias(before: Params, after: Params, router: RouterStats, *, rate: float) -> Params:
    """Return parameters after an update, with the routers' bias moved from what it was before.

    Args:
        before: the parameters before the update.
        after: those that the optimizer made of them.
        router: statistics of the mini-batch, by layer.
        rate: how far the bias is moved.
    """
    bias = before.get("layers", {}).get("router_bias")
    if bias is None:  # another router, or frozen beside an adapter
        return after
    moved = update_bias(bias, router.choices, rate=rate)
    return after | {"layers": after["layers"] | {"router_bias": moved}}


def summarize_routers(router: RouterStats) -> Fields:
    """Return the busiest expert's load, idle experts and entropy over all layers, and the loss.

    Where recorded choices were replayed, also which share of them the routers would not have made.
    """
    by_layer, replayed = router_metrics(router), {}
    if router.replayed is not None and router.replaced is not None:
        share = router.replaced.sum() / jnp.maximum(router.replayed.sum(), 1)
        replayed["router_replaced"] = share
    return replayed | {
        "router_loss": load_balance_loss(router),
        "router_max_load": by_layer["max_load"].max(),
        "router_idle": jnp.mean(by_layer["tokens_per_expert"] == 0),
        "router_entropy": by_layer["router_entropy"].mean(),
    }

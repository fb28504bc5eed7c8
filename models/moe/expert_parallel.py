"""Expert parallelism: tokens travel to the devices of their experts and back."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.moe.dispatch import dispatch, take_or_zero
from jaxrl_llm.models.moe.routing import Routing
from jaxrl_llm.sharding.layout import TOKENS, Layout

SPARE = 1.25
"""Room for tokens that a device sends to another in a round, over what it sends when balanced."""

WIDTH_AXIS = {
    "expert_gate": 2,
    "expert_up": 2,
    "expert_down": 1,
    "expert_gate_lora_b": 2,
    "expert_up_lora_b": 2,
    "expert_down_lora_a": 1,
}
"""Which axis of an array is the experts' width; other low-rank factors have none."""


def expert_parallel_mixture(
    x: Float[Array, "T D"],
    weights: Params,
    choose: Callable[[Params, Array], Any],
    experts: Callable[[Params, Array, Array], Array],
    layout: Layout,
) -> tuple[Float[Array, "T D"], Any]:
    r"""Route and dispatch tokens, with the experts split over the mesh axis `expert`.

    Every device chooses for its own tokens and sends them to the devices that hold their experts,
    in an all-to-all of fixed size, and gets the results by another. What does not fit goes in a
    next round, so no token is dropped however uneven the load is; rounds that no device needs are
    skipped. The experts' width is split over `tensor`, and their results are added up. Where the
    experts' own weights are gathered, the backward pass computes all of this again, rather than
    keep them.

    Args:
        x: Tokens, split over the batch and `context` axes.
        weights: `router`, perhaps `router_bias`; `expert_gate`, `expert_up` [E D F] and
            `expert_down` [E F D], perhaps with low-rank factors.
        choose: `(weights, tokens) -> Routing`.
        experts: `(weights, rows [M D], sizes [E]) -> [M D]`, as for `moe.dispatch.dispatch`.
        layout: The mesh.

    Returns:
        The weighted sums, in the dtype of `x`, and the routing of all tokens.

    Raises:
        ValueError: The devices of the axis can't share the experts evenly.

    >>> from jaxrl_llm.sharding.mesh import make_mesh
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> routing = Routing(jnp.array([[1, 0]]), jnp.array([[0.5, 0.25]]), jnp.ones((1, 2)) / 2)
    >>> choose, same = lambda weights, x: routing, lambda weights, rows, sizes: rows
    >>> x, weights = jnp.array([[4.0]]), {"expert_up": jnp.ones((2, 1, 1))}
    >>> expert_parallel_mixture(x, weights, choose, same, layout)[0]
    Array([[3.]], dtype=float32)
    """
    peers, tensor = layout.mesh.shape["expert"], layout.mesh.shape["tensor"]
    total, width = weights["expert_up"].shape[0], weights["expert_up"].shape[2]
    if total % peers:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise ValueError(f"expert={peers} can't share {total} experts; expected one of {divisors}")
    is_split = width % tensor == 0

    def local(x: Array, weights: Params) -> tuple[Array, Routing]:
        def run(rows: Array, sizes: Array) -> Array:
            return experts(weights, rows, sizes)

        routing = choose(weights, x)

        out = _in_rounds(x, routing, run, peers) if peers > 1 else dispatch(x, routing, run)
        return (jax.lax.psum(out, "tensor") if is_split else out), routing

    return _on_mesh(local, {name: _partition(name, is_split) for name in weights}, layout)(
        x, weights
    )


def _partition(name: str, is_split: bool) -> PartitionSpec:
    """Return how an array of the layer is split: experts over `expert`, width over `tensor`."""
    if name.startswith("router"):
        return PartitionSpec()
    width_axis = WIDTH_AXIS.get(name) if is_split else None
    return PartitionSpec("expert", *("tensor" if axis == width_axis else None for axis in (1, 2)))


def _on_mesh(
    local: Callable[[Array, Params], tuple[Array, Routing]],
    specs: dict[str, PartitionSpec],
    layout: Layout,
) -> Callable[[Array, Params], tuple[Array, Routing]]:
    """Run a function on each device's tokens, with its experts' weights gathered from others."""
    tokens = PartitionSpec(TOKENS)
    run = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(tokens, specs),
        out_specs=(tokens, tokens),
        check_vma=False,
    )

    def gathered(x: Array, weights: Params) -> tuple[Array, Routing]:
        narrow = {
            name: value if name.startswith("router") else value.astype(x.dtype)
            for name, value in weights.items()
        }
        shardings = {name: layout.sharding(*spec) for name, spec in specs.items()}
        return run(x, jax.lax.with_sharding_constraint(narrow, shardings))

    if layout.mesh.shape["fsdp"] * layout.mesh.shape["context"] > 1:
        return jax.checkpoint(gathered)  # else the gathered weights would be kept
    return gathered


def _in_rounds(
    x: Float[Array, "t D"],
    routing: Routing,
    experts: Callable[[Array, Array], Array],
    peers: int,
) -> Float[Array, "t D"]:
    tokens, top = routing.experts.shape
    own = routing.probabilities.shape[1] // peers
    choices = routing.experts.reshape(-1)
    room = min(math.ceil(SPARE * choices.size / peers / 8) * 8, choices.size)
    peer = choices // own
    place = _place_in_group(peer, peers)
    copies = jnp.repeat(x, top, axis=0)
    most = math.ceil(tokens * min(top, own) / room)
    needed = jax.lax.pmax(place.max() // room + 1, TOKENS)

    def go(number: Array, copies: Array) -> Array:
        at = place - number * room
        slot = jnp.where((at >= 0) & (at < room), peer * room + at, peers * room)
        sent = jnp.full(peers * room, choices.size)
        sent = sent.at[slot].set(jnp.arange(choices.size), mode="drop", unique_indices=True)
        rows = _swap(take_or_zero(copies, sent, slot), peers)
        # an empty slot is a row of zeros, which the last expert maps to zeros
        chosen = choices.at[sent].get(mode="fill", fill_value=own - 1) % own
        ones = jnp.ones((peers * room, 1), jnp.float32)
        local = Routing(_swap(chosen, peers)[:, None], ones, jnp.zeros((1, own)))
        back = dispatch(rows, local, experts)
        return take_or_zero(_swap(back, peers), slot, sent)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # else each round's rows are kept
    def round_(total: Array, number: Array) -> tuple[Array, None]:
        done = jax.lax.cond(
            number < needed, go, lambda _, copies: jnp.zeros_like(copies), number, copies
        )
        weighted = done.astype(jnp.float32) * routing.weights.reshape(-1, 1)
        return total + weighted.reshape(tokens, top, -1).sum(axis=1), None

    total = jnp.zeros(x.shape, jnp.float32)
    total, _ = jax.lax.scan(round_, total, jnp.arange(most))
    return total.astype(x.dtype)


def _place_in_group(group: Int[Array, " m"], groups: int) -> Int[Array, " m"]:
    """Number the members of each group, in their order."""
    member = jax.nn.one_hot(group, groups, dtype=jnp.int32)
    return jnp.take_along_axis(jnp.cumsum(member, axis=0) - 1, group[:, None], axis=1)[:, 0]


def _swap(x: Array, peers: int) -> Array:
    """Send part i of x to device i of the expert axis, and return what the devices sent."""
    parts = x.reshape(peers, -1, *x.shape[1:])
    return jax.lax.all_to_all(parts, "expert", 0, 0).reshape(x.shape)

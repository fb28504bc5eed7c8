"""The routed experts of one layer, on one device or on several.

With expert parallelism tokens travel to the devices of their experts and back.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.kernels import GroupedKernels
from jaxrl_llm.models.moe.grouped import BLOCKED, Interleaved, group_rows, grouped_matmul
from jaxrl_llm.models.moe.routing import NO_ROUTE, RouterStats, Routing, router_stats
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.sharding.layout import TOKENS, Layout, partition_spec


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
            devices and back. Its `grouped_kernels` multiply them.
        routes: Experts to take instead, as for `models.moe.routing.replay_routes`.

    Returns:
        What is added to the residual stream, the router's statistics, and each token's experts.

    >>> spec = MoeSpec(experts=2, experts_per_token=1, ff_width=1)
    >>> weights = {"router": jnp.ones((1, 2)), "expert_gate": jnp.ones((2, 1, 1)),
    ...            "expert_up": jnp.ones((2, 1, 1)), "expert_down": jnp.ones((2, 1, 1))}
    >>> real = jnp.array([[True, True, False]])
    >>> mix = jax.jit(mixture, static_argnums=1)
    >>> out, stats, experts = mix(weights, spec, jnp.ones((1, 3, 1)), real)
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


def dispatch(
    x: Float[Array, "T D"], routing: Routing, experts: Callable[[Array, Array], Array]
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


SPARE = 1.25
"""Room for tokens that a device sends to another in a round, over what it sends when balanced."""

FURTHER_ROUNDS = "further_rounds"
"""What the loop over rounds after the first is called in a program. Balanced experts need none."""

WIDTH_AXIS = {
    "expert_gate": 2,
    "expert_up": 2,
    "expert_down": 1,
    "expert_gate_lora_b": 2,
    "expert_up_lora_b": 2,
    "expert_down_lora_a": 1,
    "expert_gate_bias": 1,
    "expert_up_bias": 1,
}
"""Which axis of an array is the experts' width; other low-rank factors have none."""

EMBED_AXIS = {
    "expert_gate": 1,
    "expert_up": 1,
    "expert_down": 2,
    "expert_gate_lora_a": 1,
    "expert_up_lora_a": 1,
    "expert_down_lora_b": 2,
    "expert_down_bias": 1,
}
"""Which axis of an array is the hidden states' width; other low-rank factors have none."""

MATRICES = ("expert_gate", "expert_up", "expert_down")


def expert_parallel_mixture(
    x: Float[Array, "T D"],
    weights: Params,
    choose: Callable[[Params, Array, Array | None], Any],
    experts: Callable[[Params, Array, Array], Array],
    layout: Layout,
    routes: Int[Array, "T k"] | None = None,
) -> tuple[Float[Array, "T D"], Any]:
    r"""Route and dispatch tokens, with the experts split over the mesh axis `expert`.

    Every device chooses for its own tokens and sends them to the devices that hold their experts,
    in an all-to-all of fixed size, and gets the results by another. What does not fit goes in a
    next round, so no token is dropped however uneven the load is; there are as many rounds as the
    fullest device needs. The experts' width is split over `tensor`, and their results are added
    up. The backward pass computes all of this again, rather than keep the gathered weights and the
    exchanged rows. It sums the gradients of the experts in float32, over tokens, rounds and
    devices.

    Args:
        x: Tokens, split over the batch and `context` axes.
        weights: `router`, perhaps `router_bias`; `expert_gate`, `expert_up` [E D F] and
            `expert_down` [E F D], perhaps with biases and low-rank factors.
        choose: `(weights, tokens, routes) -> Routing`.
        experts: `(weights, rows [M D], sizes [E]) -> [M D]`, as for `dispatch`.
        layout: The mesh.
        routes: Experts that `choose` is to take, split as the tokens; None: it chooses.

    Returns:
        The weighted sums, in the dtype of `x`, and the routing of all tokens.

    Raises:
        ValueError: The devices of the axis can't share the experts evenly.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> routing = Routing(jnp.array([[1, 0]]), jnp.array([[0.5, 0.25]]), jnp.ones((1, 2)) / 2)
    >>> choose, same = lambda weights, x, routes: routing, lambda weights, rows, sizes: rows
    >>> x, weights = jnp.array([[4.0]]), {"expert_up": jnp.ones((2, 1, 1))}
    >>> jax.jit(lambda x: expert_parallel_mixture(x, weights, choose, same, layout)[0])(x).tolist()
    [[3.0]]
    """
    peers, tensor = layout.mesh.shape["expert"], layout.mesh.shape["tensor"]
    total, width = weights["expert_up"].shape[0], weights["expert_up"].shape[2]
    if total % peers:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise ValueError(f"expert={peers} can't share {total} experts; expected one of {divisors}")
    router = {name: value for name, value in weights.items() if name.startswith("router")}
    own = {name: value for name, value in weights.items() if name not in router}
    by_token = PartitionSpec(TOKENS)
    routing = jax.checkpoint(
        layout.by_tokens(choose, in_specs=(PartitionSpec(), by_token, by_token))
    )(router, x, routes)
    mix = _Mix(experts, layout, total, width % tensor == 0)
    return _mixed(x, routing.weights, own, routing.experts, mix), routing


class _Mix(NamedTuple):
    """What is known of a mixture before any array is.

    Attributes:
        experts: Of one device: `(weights, rows [M D], sizes [E]) -> [M D]`.
        layout: The mesh.
        total: Number of experts.
        is_split: Whether their width is split over `tensor`.
    """

    experts: Callable[[Params, Array, Array], Array]
    layout: Layout
    total: int
    is_split: bool

    @property
    def peers(self) -> int:
        """Return the number of devices that share the experts."""
        return self.layout.mesh.shape["expert"]

    def partition(self, name: str) -> PartitionSpec:
        """Return how an array is split in the product: experts over `expert`, width too."""
        width_axis = WIDTH_AXIS.get(name) if self.is_split else None
        axes = (1,) if name.endswith("_bias") else (1, 2)
        return PartitionSpec("expert", *("tensor" if axis == width_axis else None for axis in axes))

    def addends(self, weights: Params) -> Params:
        """Return the weights by which a device adds its part to the sum over `tensor`.

        What each adds of the experts' last bias would be added as often as there are devices.
        """
        name = "expert_down_bias"
        if not self.is_split or name not in weights:
            return weights
        is_first = jax.lax.axis_index("tensor") == 0
        return weights | {name: jnp.where(is_first, weights[name], jnp.zeros_like(weights[name]))}

    def is_interleaved(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether an array travels with the hidden states' width first, as it is split."""
        return name in MATRICES and bool(self.scatter_axes(name, shape))

    def gathered(self, weights: Params, dtype: Any) -> dict[str, Any]:
        """Return the weights whole but for what devices share, in the dtype of the computation."""

        def gather(name: str, value: Array) -> Any:
            partition, narrow = self.partition(name), value.astype(dtype)
            if not self.is_interleaved(name, value.shape):
                home = self.layout.sharding(*partition)
                return jax.lax.with_sharding_constraint(narrow, home)
            home = self.layout.sharding(*_embed_first(name, partition))
            moved = jnp.moveaxis(narrow, EMBED_AXIS[name], 0)
            whole = jax.lax.with_sharding_constraint(moved, home)
            return Interleaved(whole, transposed=name == "expert_down")

        return {name: gather(name, value) for name, value in weights.items()}

    def scatter_axes(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return the mesh axes over which devices that split tokens hold parts of an array."""
        if name not in EMBED_AXIS:
            return ()
        width = (shape[EMBED_AXIS[name]],)
        spec, _ = partition_spec(("expert_embed",), self.layout.rules, self.layout.mesh, width)
        axes = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
        return tuple(axis for axis in axes if axis in TOKENS and axis != "expert")

    def sum_terms(self, name: str, term: Any, shape: tuple[int, ...]) -> Any:
        """Sum a gradient over the devices that have terms of it, which keep the parts they hold."""
        if isinstance(term, Interleaved):
            return dataclasses.replace(term, array=self._summed(name, term.array, shape, 0))
        return self._summed(name, term, shape, EMBED_AXIS.get(name, 0))

    def _summed(self, name: str, term: Array, shape: tuple[int, ...], at: int) -> Array:
        if scatter := self.scatter_axes(name, shape):
            term = jax.lax.psum_scatter(term, scatter, scatter_dimension=at, tiled=True)
        whole = name not in WIDTH_AXIS  # by width, every device has all terms of its part
        axes = (*TOKENS, "tensor") if self.is_split and whole else TOKENS
        return jax.lax.psum(term, tuple(a for a in axes if a not in ("expert", *scatter)))

    def on_mesh(
        self, function: Callable[..., Any], weights: Params, *, backward: bool = False
    ) -> Callable[..., Any]:
        """Run a function of tokens, shares, weights and choices, and of a cotangent, on each."""
        tokens = PartitionSpec(TOKENS)
        whole, held = {}, {}
        for name, value in weights.items():
            scatter, partition = self.scatter_axes(name, value.shape), self.partition(name)
            at = EMBED_AXIS.get(name, 0)
            if self.is_interleaved(name, value.shape):
                partition, at = _embed_first(name, partition), 0
            parts = list(partition)
            if scatter:
                parts[at] = scatter
            whole[name], held[name] = partition, PartitionSpec(*parts)
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=(tokens, tokens, whole, tokens, *([tokens] if backward else [])),
            out_specs=(tokens, tokens, held) if backward else tokens,
            check_vma=False,
        )


def _embed_first(name: str, partition: PartitionSpec) -> PartitionSpec:
    """Return how an array is split after its axis of hidden states has become the first one."""
    parts = list(partition)
    return PartitionSpec(parts.pop(EMBED_AXIS[name]), *parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mixed(
    x: Float[Array, "T D"],
    shares: Float[Array, "T k"],
    weights: Params,
    chosen: Int[Array, "T k"],
    mix: _Mix,
) -> Float[Array, "T D"]:
    """Return the weighted sums of what the experts make of the tokens."""

    def run(x: Array, shares: Array, weights: Params, chosen: Array) -> Array:
        rounds = _Rounds.of(chosen, mix)
        total: Array = rounds.add_up(
            lambda number: rounds.part(number, x, shares, weights, x.dtype)
        ).astype(x.dtype)
        return jax.lax.psum(total, "tensor") if mix.is_split else total

    return mix.on_mesh(run, weights)(x, shares, mix.gathered(weights, x.dtype), chosen)


def _mixed_forward(
    x: Array, shares: Array, weights: Params, chosen: Array, mix: _Mix
) -> tuple[Array, tuple[Array, Array, Params, Array]]:
    return _mixed(x, shares, weights, chosen, mix), (x, shares, weights, chosen)


def _mixed_backward(
    mix: _Mix, saved: tuple[Array, Array, Params, Array], cotangent: Float[Array, "T D"]
) -> tuple[Array, Array, Params, None]:
    x, shares, weights, chosen = saved
    shapes = {name: value.shape for name, value in weights.items()}

    def run(
        x: Array, shares: Array, weights: Params, chosen: Array, cotangent: Array
    ) -> tuple[Array, Array, Params]:
        rounds = _Rounds.of(chosen, mix)
        wide = cotangent.astype(jnp.float32)

        def pull(number: Array) -> tuple[Array, Array, Params]:
            # gradients come in the dtype of what they belong to: in float32 by arguments that are
            # cast back where they are used, which costs nothing
            given = jax.tree.map(lambda array: array.astype(jnp.float32), (x, shares, weights))
            _, back = jax.vjp(functools.partial(rounds.part, number, dtype=x.dtype), *given)
            return back(wide)

        to_x, to_shares, to_weights = rounds.add_up(pull)
        if mix.is_split:
            to_x, to_shares = jax.lax.psum((to_x.astype(x.dtype), to_shares), "tensor")
        summed = {k: mix.sum_terms(k, v, shapes[k]) for k, v in to_weights.items()}
        return to_x.astype(x.dtype), to_shares, summed

    to_x, to_shares, to_weights = mix.on_mesh(run, weights, backward=True)(
        x, shares, mix.gathered(weights, x.dtype), chosen, cotangent
    )
    own = {name: _as_held(name, value) for name, value in to_weights.items()}
    own = {name: value.astype(weights[name].dtype) for name, value in own.items()}
    return to_x, to_shares, own, None


def _as_held(name: str, value: Any) -> Array:
    if isinstance(value, Interleaved):
        return jnp.moveaxis(value.array, 0, EMBED_AXIS[name])
    return value


_mixed.defvjp(_mixed_forward, _mixed_backward)


class _Rounds(NamedTuple):
    """The rounds in which a device exchanges its tokens.

    Attributes:
        chosen: The experts of its tokens.
        place: Of each choice, its number among those of experts of the same device.
        room: How many choices go to a device in a round.
        needed: Number of rounds; None where it can only be one.
        mix: The mixture.
    """

    chosen: Int[Array, "t k"]
    place: Int[Array, " choices"]
    room: int
    needed: Array | None
    mix: _Mix

    @staticmethod
    def of(chosen: Int[Array, "t k"], mix: _Mix) -> "_Rounds":
        """Plan the exchange of one device's tokens."""
        peers, choices = mix.peers, chosen.reshape(-1)
        if peers == 1:
            return _Rounds(chosen, choices, choices.size, None, mix)
        room = min(math.ceil(SPARE * choices.size / peers / 8) * 8, choices.size)
        place = _place_in_group(choices // (mix.total // peers), peers)
        most = math.ceil(len(chosen) * min(chosen.shape[1], mix.total // peers) / room)
        needed = jax.lax.pmax(place.max() // room + 1, TOKENS) if most > 1 else None
        return _Rounds(chosen, place, room, needed, mix)

    def add_up(self, function: Callable[[Array], Any]) -> Any:
        """Add up what a function returns for the number of each round.

        The first one is not in the loop: no sum has to begin with zeros, and its exchange overlaps
        with what is beside it.
        """
        first = function(jnp.int32(0))
        rounds = self.needed
        if rounds is None:
            return first

        def more(state: tuple[Array, Any]) -> tuple[Array, Any]:
            number, total = state
            return number + 1, jax.tree.map(jnp.add, total, function(number))

        with jax.named_scope(FURTHER_ROUNDS):
            state = jnp.int32(1), first
            return jax.lax.while_loop(lambda state: state[0] < rounds, more, state)[1]

    def part(
        self, number: Array, x: Array, shares: Array, weights: Params, dtype: Any
    ) -> Float32[Array, "t D"]:
        """Return what one round adds to the weighted sums, computed in `dtype`."""

        weights = self.mix.addends(weights)

        def run(rows: Array, sizes: Array) -> Array:
            return self.mix.experts(weights, rows, sizes)

        if self.mix.peers == 1:  # which has all experts
            routing = Routing(self.chosen, shares, jnp.zeros((1, self.mix.total)))
            return dispatch(x.astype(dtype), routing, run).astype(jnp.float32)
        peers, room, choices = self.mix.peers, self.room, self.chosen.reshape(-1)
        own = self.mix.total // peers
        copies = jnp.repeat(x, self.chosen.shape[1], axis=0).astype(dtype)
        at = self.place - number * room
        slot = jnp.where((at >= 0) & (at < room), choices // own * room + at, peers * room)
        sent = jnp.full(peers * room, choices.size)
        sent = sent.at[slot].set(jnp.arange(choices.size), mode="drop", unique_indices=True)
        rows = _swap(take_or_zero(copies, sent, slot), peers)
        # an empty slot is a row of zeros, which goes to no expert
        experts = (choices % own).at[sent].get(mode="fill", fill_value=own)
        ones = jnp.ones((peers * room, 1), jnp.float32)
        local = Routing(_swap(experts, peers)[:, None], ones, jnp.zeros((1, own)))
        back = take_or_zero(_swap(dispatch(rows, local, run), peers), slot, sent)
        weighted = back.astype(jnp.float32) * shares.reshape(-1, 1)
        return weighted.reshape(*self.chosen.shape, -1).sum(axis=1)


def _place_in_group(group: Int[Array, " m"], groups: int) -> Int[Array, " m"]:
    """Number the members of each group, in their order."""
    member = jax.nn.one_hot(group, groups, dtype=jnp.int32)
    return jnp.take_along_axis(jnp.cumsum(member, axis=0) - 1, group[:, None], axis=1)[:, 0]


def _swap(x: Array, peers: int) -> Array:
    """Send part i of x to device i of the expert axis, and return what the devices sent."""
    parts = x.reshape(peers, -1, *x.shape[1:])
    return jax.lax.all_to_all(parts, "expert", 0, 0).reshape(x.shape)

"""Parts of a layer as free functions: norms, rotations, attention's inputs, feed-forward, remat.

Parameters may be float32 master weights: matrices are cast to the compute dtype where they are
used. RMS norms and rotations are computed in float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.attention import Attending
from jaxrl_llm.models.linear import linear
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.rope import Rotation, rotation, turning_axes
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

Router = dict[str, Any]  # what the experts of a layer report; empty for a plain feed-forward
ACTIVATION_FUNCTIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}

_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
"""Stores a function's arguments for the backward pass, and nothing of what it computes."""


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], *, eps: float, unit_offset: bool = False
) -> Float[Array, "*B D"]:
    r"""Normalize by the root mean square, $x\,g / \sqrt{\mathrm{mean}(x^2)+\epsilon}$.

    Zhang & Sennrich 2019, eq. 4 (https://arxiv.org/abs/1910.07467), with ε inside the root. All of
    it is in float32, the product with g included, and only the result is rounded to the dtype of x.
    Gemma's code does the same; that of Llama and Qwen rounds before the product, which in bfloat16
    costs up to one more bit.

    Args:
        x: Input.
        scale: The scale g.
        eps: Added to the mean square.
        unit_offset: Whether g is 1 + `scale` (Gemma).

    Returns:
        The normed input, in its dtype.

    >>> rms_norm(jnp.array([3.0, -3.0]), jnp.array([1.0, 2.0]), eps=0.0).round(5).tolist()
    [1.0, -2.0]
    """

    @_recomputed
    def normed(x: Array, scale: Array) -> Array:
        wide, gain = x.astype(jnp.float32), scale.astype(jnp.float32) + float(unit_offset)
        scaled = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
        return (scaled * gain).astype(x.dtype)

    return normed(x, scale)


class Layer(NamedTuple):
    """What tells the layers of a stack apart, besides their weights.

    Attributes:
        windowed: Whether it has the window; None where all layers of the model are alike.
        rotary: Whether its queries and keys are rotated; None where those of all layers are.
        routed: Its number among those with experts, where choices of experts are replayed.
        number: Its number among all layers, where features are added after the first (DeepStack).
    """

    windowed: Bool[Array, "*layers"] | bool | None
    rotary: Bool[Array, "*layers"] | bool | None = None
    routed: Int[Array, "*layers"] | None = None
    number: Int[Array, "*layers"] | None = None


class Rotations(NamedTuple):
    """Rotations of the rows' positions: of most layers, and of those with the window."""

    main: Rotation
    windowed: Rotation

    def of(self, layer: Layer) -> Rotation:
        """Return the rotation of one layer; by no angle, where it has none."""
        rope = self._of_window(layer.windowed)
        if layer.rotary is None:
            return rope
        return Rotation(
            *(jnp.where(layer.rotary, x, y) for x, y in zip(rope, (1.0, 0.0), strict=True))
        )

    def _of_window(self, windowed: Array | bool | None) -> Rotation:
        if self.main is self.windowed or windowed is None:
            return self.main
        if isinstance(windowed, bool):
            return self.windowed if windowed else self.main
        return jax.tree.map(lambda a, b: jnp.where(windowed, b, a), self.main, self.windowed)


def rotations(spec: ModelSpec, positions: Int[Array, "R L"] | Int[Array, "R L 3"]) -> Rotations:
    """Compute the rotations that the layers of a model choose from.

    Args:
        spec: The model.
        positions: Of tokens within their own sequences; or time, height and width of each, for a
            model with `mrope_sections`.

    >>> spec = tiny_spec()
    >>> rotations(spec, jnp.array([[0, 1]])).main.cos.shape
    (1, 2, 1)
    """
    width, theta = spec.rotary_width, spec.rope_theta
    axes = None
    if spec.mrope_sections is not None:
        axes = turning_axes(spec.mrope_sections, interleaved=spec.mrope_interleaved)
    main = rotation(positions, head_dim=width, theta=theta, scaling=spec.rope_scaling, axes=axes)
    if spec.local_rope_theta is None:
        return Rotations(main, main)
    return Rotations(main, rotation(positions, head_dim=width, theta=spec.local_rope_theta))


def stacked_layers(
    params: Params, spec: ModelSpec, *, replays: bool = False, deepens: bool = False
) -> dict[str, tuple[Params, Layer]]:
    """Return the weights of each stack of layers, and what else tells its layers apart.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        replays: Whether choices of experts are replayed.
        deepens: Whether features are added after some layers.

    >>> spec = tiny_spec(layers=2, window=4, windowed_layers=(True, False))
    >>> stacked_layers({"layers": {}}, spec)["layers"][1].windowed.tolist()
    [True, False]
    """

    def of(flags: tuple[bool, ...], layers: tuple[int, ...]) -> Array | None:
        return jnp.array([flags[number] for number in layers]) if flags else None

    def routed(layers: tuple[int, ...]) -> Array | None:
        dense = spec.moe.dense_layers if spec.moe and replays else spec.layers
        return jnp.array(layers) - dense if layers[0] >= dense else None

    return {
        name: (
            params[name],
            Layer(
                of(spec.windowed_layers, layers),
                of(spec.rotary_layers, layers),
                routed(layers),
                jnp.array(layers) if deepens else None,
            ),
        )
        for name, layers in spec.stacks.items()
    }


def attention_options(spec: ModelSpec, layer: Layer, weights: Params) -> Attending:
    """Return how one layer attends: the scale of its scores, its window, soft-cap and sinks.

    >>> spec = tiny_spec(head_dim=4)
    >>> attention_options(spec, Layer(None), {}).scale
    0.5
    """
    window = spec.window
    if layer.windowed is False:
        window = None
    elif window is not None and layer.windowed is not None and layer.windowed is not True:
        window = jnp.where(layer.windowed, window, jnp.iinfo(jnp.int32).max)
    return Attending(spec.score_scale, window, spec.score_softcap, weights.get("sinks"))


def feed_forward(
    weights: Params,
    spec: ModelSpec,
    h: Float[Array, "R L D"],
    real: Bool[Array, "R L"] | None = None,
    layout: Layout | None = None,
    routes: Int[Array, "R L top"] | None = None,
) -> tuple[Float[Array, "R L D"], Router]:
    """Apply a layer's feed-forward, down(activation(gate(h)) * up(h)) (GLU variants).

    Shazeer 2020 (https://arxiv.org/abs/2002.05202). In a layer with a router it is the routed
    experts of `models.moe.mixture`, and the shared ones beside them.

    Args:
        weights: One layer's arrays.
        spec: The model.
        h: Normed residual stream.
        real: Which positions are not padding; None means all. Only what is reported depends on it.
        layout: How activations are split over a mesh.
        routes: Experts to take instead, as for `models.moe.routing.replay_routes`.

    Returns:
        What is added to the residual stream, and what the experts report: the fields of
        `models.moe.routing.RouterStats`, and as `experts` [R L top] where each token went.

    >>> spec = tiny_spec(hidden_size=1, ff_width=1)
    >>> weights = {name: jnp.ones((1, 1)) for name in ("gate", "up", "down")}
    >>> feed_forward(weights, spec, jnp.full((1, 1, 1), 100.0))
    (Array([[[10000.]]], dtype=float32), {})
    """
    activation = ACTIVATION_FUNCTIONS[spec.activation]

    @_recomputed
    def gated(gate: Array, up: Array) -> Array:
        return activation(gate) * up

    def plain(prefix: str) -> Array:
        gate, up = (linear(weights, spec, f"{prefix}{name}", h) for name in ("gate", "up"))
        return linear(weights, spec, f"{prefix}down", gated(gate, up))

    if spec.moe is None or "router" not in weights:
        return plain(""), {}
    real = jnp.ones(h.shape[:2], jnp.bool_) if real is None else real
    out, stats, experts = mixture(
        weights,
        spec.moe,
        h,
        real,
        activation=activation,
        lora_scale=spec.lora.scale if spec.lora else 0.0,
        layout=layout,
        routes=routes,
    )
    if spec.moe.shared_ff_width:
        shared = plain("shared_")
        if spec.moe.shared_gate:
            shared = _gated(shared, linear(weights, spec, "shared_expert_gate", h))
        out = out + shared
    return out, stats._asdict() | {"experts": experts}


@_recomputed
def _gated(x: Float[Array, "R L D"], gate: Float[Array, "R L 1"]) -> Float[Array, "R L D"]:
    """Multiply by a sigmoid, in float32: the gate's gradient is a sum over all of D."""
    return (x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


def project_heads(
    weights: Params, spec: ModelSpec, h: Float[Array, "R L D"]
) -> tuple[Float[Array, "R L N H"], Float[Array, "R L K H"], Float[Array, "R L K H"]]:
    """Compute a layer's queries, keys and values; the first two are normed with `spec.qk_norm`.

    >>> spec = tiny_spec(hidden_size=1, ff_width=1, qk_norm=False)
    >>> weights = {name: jnp.ones((1, n, 2)) for name, n in dict(query=2, key=1, value=1).items()}
    >>> project_heads(weights, spec, jnp.ones((1, 1, 1)))[0].tolist()
    [[[[1.0, 1.0], [1.0, 1.0]]]]
    """

    def norm(x: Array, scale: Array) -> Array:
        if not spec.whole_qk_norm:
            return norm_of(spec, x, scale)
        return norm_of(spec, x.reshape(*x.shape[:2], -1), scale).reshape(x.shape)

    q, k, v = (linear(weights, spec, name, h) for name in ("query", "key", "value"))
    if spec.qk_norm:
        q, k = norm(q, weights["query_norm"]), norm(k, weights["key_norm"])
    return q, k, v


def norm_of(
    spec: ModelSpec, x: Float[Array, "*B D"], scale: Float[Array, " D"]
) -> Float[Array, "*B D"]:
    """Norm with a model's ε and kind of scale.

    >>> spec = tiny_spec(hidden_size=2)
    >>> norm_of(spec, jnp.array([3.0, -3.0]), jnp.ones(2)).round(5).tolist()
    [1.0, -1.0]
    """
    return rms_norm(x, scale, eps=spec.norm_eps, unit_offset=spec.unit_offset_norms)


POLICIES = {"none": None, "dots": "dots_with_no_batch_dims_saveable", "full": "nothing_saveable"}
"""The names in `jax.checkpoint_policies`."""


# Rematerialisation by name: which values of a layer the backward pass finds stored.
#
# It computes the others again. Per token of a dense layer, with the letters of the axis legend,
# it stores these numbers, all but the N in the compute dtype:
#
# | policy | what is stored | numbers | what is computed again |
# | --- | --- | --- | --- |
# | `none` | arguments of products, norms, attention | 4D + 4NH + 3KH + 3F + N | norms, scores |
# | `dots` | the layer's input, products with weights | 2 D + N H + 2 K H + 2 F | attention, norms |
# | `full` | the layer's input | D | the whole layer |
#
# No policy stores scores, of which there are N L per token: `models.attention` computes them
# again, and norms and activations keep their arguments only. `full` computes a second forward
# pass, a quarter of its step; `dots` computes little but attention. The products of experts are
# not counted among those with weights, so `dots` computes them again, and on a mesh every policy
# does.
#
# Layers are a loop that is never unrolled: next to each other, the compiler would find the second
# forward pass to be the first one, and store it.
#
# Chen et al. 2016 (https://arxiv.org/abs/1604.06174).


def rematerialize(
    layer: Callable[..., Any], policy: str, *, looks_up: bool = False
) -> Callable[..., Any]:
    """Make the backward pass of a scan's body store what a policy names, and recompute the rest.

    Args:
        layer: Body of a scan over layers.
        policy: A key of `POLICIES`.
        looks_up: Whether the body takes its weights out of a stack that it closes over. Then no
            policy stores them, as they would be copies of the stack.

    Returns:
        A function with the same values and gradients.

    Raises:
        ValueError: There is no such policy.

    >>> rematerialize(abs, "some")
    Traceback (most recent call last):
    ValueError: remat policy 'some'; expected one of none, dots, full
    """
    if policy not in POLICIES:
        raise ValueError(f"remat policy {policy!r}; expected one of {', '.join(POLICIES)}")
    if policy == "none" and not looks_up:
        return layer
    import jax  # here, so that a config can be checked without it

    saved = getattr(jax.checkpoint_policies, POLICIES[policy]) if POLICIES[policy] else _no_slice
    # a scan body needs no barrier against common-subexpression elimination
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)


def _no_slice(primitive: Any, *_: Any, **__: Any) -> bool:
    """Store everything but layers of a stack."""
    return primitive.name not in ("dynamic_slice", "squeeze")

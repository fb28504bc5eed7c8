"""Gated DeltaNet: a layer that keeps a matrix per head in place of keys and values.

Yang et al. 2024 (https://arxiv.org/abs/2412.06464), as Qwen3-Next and Qwen3.5 have it. Key heads
are the axis that devices share; the value heads that belong to a key head are next to each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.delta_rule import causal_conv, gated_delta_rule
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import BATCH

L2_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by the length."""


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """Describe the gated DeltaNet of a model's layers.

    Args:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple; each has a memory of its own.
        key_width: Width of a query and of a key.
        value_width: Width of a value.
        conv_width: Tokens, itself included, that the convolution of a token sees.
        joined_by_head: Whether a checkpoint joins the projections head by head (Qwen3-Next), and
            not queries, keys and values after each other.

    Raises:
        ValueError: A size is not positive, or `key_heads` does not divide `value_heads`.

    >>> DeltaSpec(key_heads=2, value_heads=4, key_width=8, value_width=8).values_per_key
    2
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    conv_width: int = 4
    joined_by_head: bool = False

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in vars(self).items() if type(v) is int}
        if min(sizes.values()) <= 0 or self.value_heads % self.key_heads:
            raise ValueError(
                f"sizes of a DeltaNet must be positive and key_heads must divide value_heads, got "
                f"{sizes}"
            )

    @property
    def values_per_key(self) -> int:
        """Return how many value heads belong to a key head."""
        return self.value_heads // self.key_heads

    @property
    def joined_value_width(self) -> int:
        """Return the width of the values that belong to a key head, together."""
        return self.values_per_key * self.value_width


class DeltaState(NamedTuple):
    """What a layer keeps of the sequence so far, for each row.

    Attributes:
        tail: the last inputs of the convolution: queries, keys and values of each key head.
        memory: the matrix of each value head.
    """

    tail: Float[Array, "*B N C taps"]
    memory: Float32[Array, "*B M K V"]


def empty_state(spec: DeltaSpec, batch: int, dtype: jax.typing.DTypeLike) -> DeltaState:
    """Return the state before the first token.

    >>> spec = DeltaSpec(key_heads=1, value_heads=2, key_width=4, value_width=3)
    >>> state = empty_state(spec, 5, "float32")
    >>> state.tail.shape, state.memory.shape
    ((5, 1, 14, 3), (5, 2, 4, 3))
    """
    channels = 2 * spec.key_width + spec.joined_value_width
    return DeltaState(
        jnp.zeros((batch, spec.key_heads, channels, spec.conv_width - 1), dtype),
        jnp.zeros((batch, spec.value_heads, spec.key_width, spec.value_width), jnp.float32),
    )


class LayerFunctions(NamedTuple):
    """What a layer takes from its model.

    Attributes:
        apply: `(name, input) -> output` of a projection.
        norm: `(x, scale) -> x` normed over the last axis.
        activation: Of what the convolution gives; the model's, SiLU in the published ones.
    """

    apply: Callable[[str, Array], Array]
    norm: Callable[[Array, Array], Array]
    activation: Callable[[Array], Array]


def delta_mix(
    spec: DeltaSpec,
    weights: Params,
    functions: LayerFunctions,
    h: Float[Array, "R L D"],
    segment_ids: Int[Array, "R L"],
    state: DeltaState | None = None,
    layout: Layout | None = None,
) -> tuple[Float[Array, "R L N W"], DeltaState]:
    r"""Mix the tokens of each sequence by the gated delta rule.

    With $x$ the activation of a causal convolution of the projections, $q, k$ of length 1,
    $\beta = \sigma(h W_\beta)$ and
    $\alpha = \exp(-e^A\,\mathrm{softplus}(h W_\alpha + b))$, the memory is
    $S_t = \alpha_t S_{t-1} + k_t\,(\beta_t (v_t - \alpha_t S_{t-1}^\top k_t))^\top$ and the
    output $\mathrm{norm}(S_t^\top q_t / \sqrt{K}) \odot \mathrm{silu}(h W_z)$ (section 3.1 and
    figure 1 of the paper).

    Args:
        spec: Of the DeltaNet.
        weights: One layer's arrays.
        functions: Of the model.
        h: Normed residual stream.
        segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
        state: Of the sequence that the first token of each row continues; None: it begins there.
        layout: How rows are split over a mesh.

    Returns:
        For each key head what its value heads give, in the dtype of h; and the state after the last
        token that is not padding.

    Raises:
        ValueError: Devices share rows, and can't share the key heads.
    """
    apply, names = functions.apply, ("delta_query", "delta_key", "delta_value")
    joined = jnp.concatenate([apply(name, h) for name in names], axis=-1)
    taps = jnp.concatenate([weights[f"{name}_taps"] for name in names], axis=1)
    rate = jax.nn.softplus(apply("delta_decay", h).astype(jnp.float32) + weights["delta_step_bias"])
    log_decay = -jnp.exp(weights["delta_decay_log"].astype(jnp.float32)) * rate
    beta = jax.nn.sigmoid(apply("delta_beta", h).astype(jnp.float32))
    inputs = _Inputs(joined, log_decay, beta)
    taps = taps[:, :, 0].astype(h.dtype)
    if layout is not None and layout.pieces > 1:
        inputs, segment_ids = _whole_rows(spec, inputs, segment_ids, layout)
    mixed, state = _along_rows(spec, functions.activation, inputs, taps, segment_ids, state)
    if layout is not None and layout.pieces > 1:
        own = layout.sharding(BATCH, "context", "tensor", None)
        mixed = layout.split_context(jax.lax.with_sharding_constraint(mixed, own))
    normed = functions.norm(mixed, weights["delta_norm"])
    normed = normed.reshape(*h.shape[:2], spec.key_heads, -1)
    gate = apply("delta_gate", h).astype(jnp.float32)
    out = normed * jax.nn.silu(gate)
    return out.astype(h.dtype), state


class _Inputs(NamedTuple):
    """What tokens bring: queries, keys and values of each key head, and of its value heads g, β."""

    joined: Float[Array, "R L N C"]
    log_decay: Float32[Array, "R L N values"]
    beta: Float32[Array, "R L N values"]


def _along_rows(
    spec: DeltaSpec,
    activation: Callable[[Array], Array],
    inputs: _Inputs,
    taps: Float[Array, "N C W"],
    segment_ids: Int[Array, "R L"],
    state: DeltaState | None,
) -> tuple[Float32[Array, "R L M V"], DeltaState]:
    """Do what needs whole rows: the convolution and the rule."""
    tail, memory = (None, None) if state is None else state
    x, tail = causal_conv(inputs.joined, taps, segment_ids, tail)
    q, k, v = jnp.split(activation(x), (spec.key_width, 2 * spec.key_width), axis=-1)
    by_value_head = (*segment_ids.shape, spec.value_heads)
    mixed, memory = gated_delta_rule(
        _unit(q) * spec.key_width**-0.5,
        _unit(k),
        v.reshape(*by_value_head, spec.value_width),
        inputs.log_decay.reshape(by_value_head),
        inputs.beta.reshape(by_value_head),
        segment_ids,
        memory,
    )
    return mixed, DeltaState(tail, memory)


def _whole_rows(
    spec: DeltaSpec, inputs: _Inputs, segment_ids: Int[Array, "P l"], layout: Layout
) -> tuple[_Inputs, Int[Array, "R L"]]:
    """Give every device whole rows for some of the key heads, whose pieces devices hold.

    It is the all-to-all of `models.context` for attention by heads, whatever attention does here:
    a head's memory goes through the whole row.
    """
    tensor = layout.mesh.shape["tensor"]
    if spec.key_heads % (tensor * layout.pieces):
        raise ValueError(
            f"{spec.key_heads} key heads of a DeltaNet can't be split over tensor={tensor} times "
            f"context={layout.pieces} devices; expected a divisor of {spec.key_heads} as their "
            "product"
        )
    heads = layout.sharding(BATCH, None, ("tensor", "context"), None)
    inputs = _Inputs(
        *(jax.lax.with_sharding_constraint(layout.merge_context(x), heads) for x in inputs)
    )
    rows = layout.sharding(BATCH, None)
    return inputs, jax.lax.with_sharding_constraint(layout.merge_context(segment_ids), rows)


def _unit(x: Float[Array, "R L N K"]) -> Float[Array, "R L N K"]:
    """Divide vectors by their length, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + L2_EPS)).astype(x.dtype)

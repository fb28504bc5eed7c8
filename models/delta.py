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


def delta_mix(
    spec: DeltaSpec,
    weights: Params,
    apply: Callable[[str, Array], Array],
    norm: Callable[[Array, Array], Array],
    h: Float[Array, "R L D"],
    segment_ids: Int[Array, "R L"],
    state: DeltaState | None = None,
) -> tuple[Float[Array, "R L N W"], DeltaState]:
    r"""Mix the tokens of each sequence by the gated delta rule.

    With $x$ the SiLU of a causal convolution of the projections, $q, k$ of length 1,
    $\beta = \sigma(h W_\beta)$ and
    $\alpha = \exp(-e^A\,\mathrm{softplus}(h W_\alpha + b))$, the memory is
    $S_t = \alpha_t S_{t-1} + k_t\,(\beta_t (v_t - \alpha_t S_{t-1}^\top k_t))^\top$ and the
    output $\mathrm{norm}(S_t^\top q_t / \sqrt{K}) \odot \mathrm{silu}(h W_z)$ (section 3.1 and
    figure 1 of the paper).

    Args:
        spec: Of the DeltaNet.
        weights: One layer's arrays.
        apply: `(name, input) -> output` of a projection.
        norm: `(x, scale) -> x` normed over the last axis.
        h: Normed residual stream.
        segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
        state: Of the sequence that the first token of each row continues; None: it begins there.

    Returns:
        For each key head what its value heads give, in the dtype of h; and the state after the last
        token that is not padding.
    """
    names = ("delta_query", "delta_key", "delta_value")
    joined = jnp.concatenate([apply(name, h) for name in names], axis=-1)
    taps = jnp.concatenate([weights[f"{name}_taps"] for name in names], axis=1)
    tail, memory = (None, None) if state is None else state
    x, tail = causal_conv(joined, taps[:, :, 0].astype(h.dtype), segment_ids, tail)
    widths = spec.key_width, 2 * spec.key_width
    q, k, v = jnp.split(jax.nn.silu(x), widths, axis=-1)
    rows, length = h.shape[:2]
    v = v.reshape(rows, length, spec.value_heads, spec.value_width)
    rate = jax.nn.softplus(apply("delta_decay", h).astype(jnp.float32) + weights["delta_step_bias"])
    log_decay = -jnp.exp(weights["delta_decay_log"].astype(jnp.float32)) * rate
    beta = jax.nn.sigmoid(apply("delta_beta", h).astype(jnp.float32))
    by_value_head = (rows, length, spec.value_heads)
    mixed, memory = gated_delta_rule(
        _unit(q) * spec.key_width**-0.5,
        _unit(k),
        v,
        log_decay.reshape(by_value_head),
        beta.reshape(by_value_head),
        segment_ids,
        memory,
    )
    normed = norm(mixed, weights["delta_norm"])
    normed = normed.reshape(rows, length, spec.key_heads, -1)
    gate = apply("delta_gate", h).astype(jnp.float32)
    out = normed * jax.nn.silu(gate)
    return out.astype(h.dtype), DeltaState(tail, memory)


def _unit(x: Float[Array, "R L N K"]) -> Float[Array, "R L N K"]:
    """Divide vectors by their length, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + L2_EPS)).astype(x.dtype)

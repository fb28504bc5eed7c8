"""Keys and values in int8: how they are quantized, and how they are multiplied.

A scale stands for one token of one head (per-token quantization, as in KIVI's study,
https://arxiv.org/abs/2402.02750), so that none has to be calibrated and a token's numbers never
change once they are written. No array is dequantized: scales multiply scores and weights.
"""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8

LARGEST = 127
"""Of the numbers kept; -128 is not used, so that the grid is symmetric."""


class Scales(NamedTuple):
    """What the int8 keys and values of rows are multiplied by.

    Attributes:
        keys: of each key; where there are two, G = 2, the first is of the numbers that are values,
            too, and the second of the others.
        values: of each value.
    """

    keys: Float[Array, "B K G S"]
    values: Float[Array, "B K S 1"]


def make_scales(keys: Float[Array, "B K G S"], values: Float[Array, "B K S 1"] | None) -> Scales:
    """Return scales; None as those of values stands for keys that are the values."""
    return Scales(keys, keys[:, :, :1].swapaxes(2, 3) if values is None else values)


def quantize(
    x: Float[Array, "*B H"], widths: tuple[int, ...], dtype: DTypeLike
) -> tuple[Int8[Array, "*B H"], Float[Array, "*B G"]]:
    r"""Round vectors to int8: $x_8 = \mathrm{round}(x / s)$ with $s = \max_h |x_h| / 127$.

    A scale is rounded to its dtype before it divides, so that $s x_8$ is off by half a step at most
    in bfloat16, too.

    Args:
        x: Vectors.
        widths: H cut into G parts, each with a scale of its own.
        dtype: Of the scales.

    Returns:
        The rounded vectors and their scales; 0 of a vector of zeros.

    >>> numbers, scales = quantize(jnp.array([[1.0, -2.0, 30.0]]), (2, 1), jnp.float32)
    >>> numbers.tolist()
    [[64, -127, 127]]
    """
    numbers, scales = [], []
    start = 0
    for width in widths:
        part = x[..., start : start + width].astype(jnp.float32)
        start += width
        scale = (jnp.abs(part).max(axis=-1, keepdims=True) / LARGEST).astype(dtype)
        step = jnp.where(scale == 0, 1, scale).astype(jnp.float32)
        rounded = jnp.clip(jnp.round(part / step), -LARGEST, LARGEST)
        numbers.append(rounded.astype(jnp.int8))
        scales.append(scale)
    return jnp.concatenate(numbers, axis=-1), jnp.concatenate(scales, axis=-1)


def scaled_scores(
    q: Float[Array, "B K Q H"],
    k: Int8[Array, "B K H S"],
    scales: Float[Array, "B K G S"],
    first: int,
) -> Float32[Array, "B K Q S"]:
    r"""Multiply queries and int8 keys: $\sum_g (q_g \cdot k_g)\, s_g$.

    Args:
        q: Queries.
        k: Keys.
        scales: Of the keys.
        first: Width of the first part, where there are two.
    """
    cuts = [0, first, q.shape[3]] if scales.shape[2] == 2 else [0, q.shape[3]]
    total = jnp.zeros((), jnp.float32)
    for part, (start, end) in enumerate(itertools.pairwise(cuts)):
        keys = k[:, :, start:end].astype(q.dtype)
        product = jnp.matmul(q[..., start:end], keys, preferred_element_type=jnp.float32)
        total = total + product * scales[:, :, part, None].astype(jnp.float32)
    return total


def mix_scaled(
    weights: Float32[Array, "B K Q S"],
    v: Int8[Array, "B K S V"],
    scales: Float[Array, "B K S 1"],
    dtype: DTypeLike,
) -> Float32[Array, "B K Q V"]:
    r"""Mix int8 values: $\sum_j (p_j s_j)\, v_j$, multiplied in a dtype."""
    weights = weights * scales.swapaxes(2, 3).astype(jnp.float32)
    return jnp.matmul(weights.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32)

"""The decoder as free functions over an array tree: rows of packed tokens in, hidden states out.

Parameters may be float32 master weights: matrices are cast to the compute dtype where they are
used, inside the scan over layers. RMS norms and rotations are computed in float32.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.spec import ModelSpec, Params

State = TypeVar("State")


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, one per position and pair of head dimensions."""

    cos: Float32[Array, "R L half"]
    sin: Float32[Array, "R L half"]


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], *, eps: float
) -> Float[Array, "*B D"]:
    r"""Normalize in float32 by the root mean square, $x\,g / \sqrt{\mathrm{mean}(x^2)+\epsilon}$.

    Zhang & Sennrich 2019, eq. 4 (https://arxiv.org/abs/1910.07467), with ε inside the root.

    >>> rms_norm(jnp.array([3.0, -3.0]), jnp.array([1.0, 2.0]), eps=0.0).round(5).tolist()
    [1.0, -2.0]
    """
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (scaled * scale.astype(jnp.float32)).astype(x.dtype)


def rotation(positions: Int[Array, "R L"], *, head_width: int, theta: float) -> Rotation:
    r"""Compute the rotary angles $p\,\theta^{-2i/H}$ for $i < H/2$ (https://arxiv.org/abs/2104.09864).

    >>> rotation(jnp.array([[0, 5]]), head_width=4, theta=1e4).cos.shape
    (1, 2, 2)
    """
    exponents = jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width
    angles = positions[..., None].astype(jnp.float32) * (1.0 / theta**exponents)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "R L N H"], by: Rotation) -> Float[Array, "R L N H"]:
    """Rotate each pair of dimensions (i, i + H/2) of every head, in float32.

    Su et al. 2021, eq. 34 (https://arxiv.org/abs/2104.09864) pairs neighbours (2i, 2i + 1);
    published weights of this family pair the two halves.

    >>> quarter = Rotation(jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
    >>> rotate(jnp.array([[[[3.0, 5.0]]]]), quarter)[0, 0, 0].tolist()
    [-5.0, 3.0]
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def decoder_layer(
    weights: Params,
    spec: ModelSpec,
    x: Float[Array, "R L D"],
    by: Rotation,
    attention: Callable[[Array, Array, Array], tuple[Array, State]],
) -> tuple[Float[Array, "R L D"], State]:
    """Apply one layer: x += attention(norm(x)), then x += down(silu(gate(h)) * up(h)), h = norm(x).

    Args:
        weights: One layer's arrays, without the leading `layers` axis.
        spec: The model.
        x: Residual stream; its dtype is the compute dtype.
        by: Rotations for the rows' positions.
        attention: `(q [R L N H], k [R L K H], v [R L K H]) -> (mixed [R L N H], state)`. Training
            attends within the row; decoding writes into a cache and returns it as the state.

    Returns:
        The residual stream and what `attention` returned as its state.
    """
    matrix = {name: array.astype(x.dtype) for name, array in weights.items() if array.ndim > 1}
    h = rms_norm(x, weights["attention_norm"], eps=spec.norm_eps)
    q, k, v = (project(h, matrix[name]) for name in ("query", "key", "value"))
    if spec.qk_norm:
        q = rms_norm(q, weights["query_norm"], eps=spec.norm_eps)
        k = rms_norm(k, weights["key_norm"], eps=spec.norm_eps)
    mixed, state = attention(rotate(q, by), rotate(k, by), v)
    x = x + project(mixed, matrix["output"], inputs=2)
    h = rms_norm(x, weights["mlp_norm"], eps=spec.norm_eps)
    gate, up = jax.nn.silu(project(h, matrix["gate"])), project(h, matrix["up"])
    return x + project(gate * up, matrix["down"]), state


def project(x: Float[Array, "R L ..."], matrix: Array, *, inputs: int = 1) -> Array:
    """Contract the last `inputs` dimensions of x with the first ones of a matrix.

    It is one product of two flat matrices: XLA's CPU backend takes 1.6 times as long for the
    gradient of the same contraction over rows of tokens.

    >>> project(jnp.ones((2, 3, 4, 5)), jnp.ones((4, 5, 7)), inputs=2).shape
    (2, 3, 7)
    """
    width = math.prod(matrix.shape[:inputs])
    flat = x.reshape(-1, width) @ matrix.reshape(width, -1)
    return flat.reshape(*x.shape[:2], *matrix.shape[inputs:])


def forward(
    params: Params,
    spec: ModelSpec,
    tokens: Int[Array, "R L"],
    positions: Int[Array, "R L"],
    segment_ids: Int[Array, "R L"],
    *,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    activation_sharding: jax.sharding.Sharding | None = None,
) -> Float[Array, "R L D"]:
    """Run the decoder over packed rows.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        tokens: Token ids.
        positions: Index of each token within its own sequence.
        segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
        dtype: Of the computation, whatever the parameters' dtype.
        remat: Whether the backward pass recomputes each layer instead of storing its inner values.
        activation_sharding: Where the residual stream [R L D] stands, usually the rows' own layout.
            With sharded parameters it must be given: left to itself, the compiler may copy
            activations to all devices rather than gather weights. None leaves it to the compiler.

    Returns:
        Hidden states after the final norm, in `dtype`; meaningless at padding.

    >>> from jaxrl_llm.models.spec import initialize
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> params = initialize(spec, key=jax.random.key(0))
    >>> tokens, positions = jnp.array([[3, 5, 2, 7]]), jnp.array([[0, 1, 0, 1]])
    >>> forward(params, spec, tokens, positions, jnp.array([[1, 1, 2, 2]])).shape
    (1, 4, 4)
    """
    by = rotation(positions, head_width=spec.head_width, theta=spec.rope_theta)

    def place(x: Array) -> Array:
        if activation_sharding is None:
            return x
        return jax.lax.with_sharding_constraint(x, activation_sharding)

    def body(x: Array, weights: Params) -> tuple[Array, None]:
        x, _ = decoder_layer(
            weights, spec, x, by, lambda q, k, v: (attend(q, k, v, segment_ids), None)
        )
        return place(x), None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # a scan body needs no barrier against CSE
    x = place(params["embed"][tokens].astype(dtype))
    x, _ = jax.lax.scan(body, x, params["layers"])
    return rms_norm(x, params["final_norm"], eps=spec.norm_eps)


def head_matrix(params: Params, spec: ModelSpec) -> Float[Array, "D V"]:
    """Return the output projection: the transposed embedding when tied, else its own array.

    Raises:
        ValueError: The model ends in a value head.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> head_matrix({"embed": jnp.ones((8, 4))}, spec).shape
    (4, 8)
    """
    if spec.value_head:
        raise ValueError("a model with a value head has no logits; wanted a language model")
    return params["embed"].T if spec.tied_embeddings else params["head"]


def logits(params: Params, spec: ModelSpec, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
    """Project hidden states onto the vocabulary: inputs in the dtype of `hidden`, sums in float32.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        hidden: Hidden states after the final norm.

    Returns:
        Logits in float32.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> logits({"embed": jnp.ones((8, 4))}, spec, jnp.ones((2, 4), jnp.bfloat16)).dtype
    dtype('float32')
    """
    head = head_matrix(params, spec).astype(hidden.dtype)
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

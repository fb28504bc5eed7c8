"""Multi-head latent attention: queries, keys and values that come from two low-rank latents.

DeepSeek-V2, section 2.1 (https://arxiv.org/abs/2405.04434). Training expands the latents into one
key and one value per head. Decoding absorbs the expansion into queries and outputs, so that all
heads share one key, the latent itself, and a cache holds no more. Either way any attention function
serves that knows of shared keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.models.rope import Rotation, rotate

Linear: TypeAlias = Callable[[str, Array], Array]
Norm: TypeAlias = Callable[[str, Array], Array]

LATENT_NORM_EPS = 1e-6  # the published code gives these two norms no other


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Describe multi-head latent attention; a part of the model's spec.

    A head's queries and keys are `nope_width` dimensions that do not know the position and then
    `rope_width` that are rotated, in keys the same ones for all heads.

    Args:
        query_rank: Width of the queries' latent; None: queries come straight from the input.
        kv_rank: Width of the latent of keys and values.
        nope_width: Dimensions of a head's query and key that are not rotated.
        rope_width: Dimensions that are.
        value_width: Width of a head's value, at most that of its key.
        interleaved: Whether rotated pairs are neighbours (2i, 2i + 1), as published, and not the
            two halves (i, i + half).
        absorbed: Whether `latent_heads` absorbs the expansion into queries: a cache holds latents.

    Raises:
        ValueError: A size is not positive, `rope_width` is odd, or values are wider than keys.

    >>> LatentSpec(query_rank=None, kv_rank=8, nope_width=4, rope_width=2, value_width=4).key_width
    6
    """

    query_rank: int | None
    kv_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    interleaved: bool = True
    absorbed: bool = False

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in vars(self).items() if type(v) is int}
        wrong = {k: v for k, v in sizes.items() if v <= 0}
        if wrong:
            raise ValueError(f"sizes of latent attention must be positive, got {wrong}")
        if self.rope_width % 2:
            raise ValueError(f"rope_width must be even, got {self.rope_width}")
        if self.value_width > self.key_width:
            raise ValueError(
                f"values may not be wider than keys ({self.key_width}), got {self.value_width}"
            )

    @property
    def key_width(self) -> int:
        """Return the width of a head's query and key, expanded."""
        return self.nope_width + self.rope_width

    @property
    def head_dim(self) -> int:
        """Return the width H of what attention is given."""
        return self.kv_rank + self.rope_width if self.absorbed else self.key_width


def latent_heads(
    spec: LatentSpec,
    h: Float[Array, "R L D"],
    rope: Rotation,
    linear: Linear,
    norm: Norm,
    kv_b: Float[Array, "rank N key_value"] | None = None,
) -> tuple[Float[Array, "R L N H"], Float[Array, "R L K H"], Float[Array, "R L K H"]]:
    r"""Compute queries, keys and values: of all heads, or with `kv_b` in the absorbed form.

    $c = \mathrm{norm}(W^{DKV} h)$, $[k^C; v] = W^{UKV} c$ and $k = [k^C;
    \mathrm{rope}(W^{KR} h)]$; $q = W^{UQ} \mathrm{norm}(W^{DQ} h)$ with its last `rope_width`
    dimensions rotated. DeepSeek-V2, eqs. 37-47, appendix C (https://arxiv.org/abs/2405.04434).

    Absorbed (section 2.1.2), $q^C \cdot W^{UK} c = (W^{UK\top} q^C) \cdot c$, so a head's query is
    $[W^{UK\top} q^C; q^R]$, the one key that all heads share is $[c; k^R]$ and so is the value.
    Scores, softmax and mixture are the same, in another order of sums.

    Args:
        spec: The attention.
        h: Normed residual stream.
        rope: Rotations of the rows' positions, of `rope_width` dimensions.
        linear: `(name, x) -> x @ matrix` of the layer's `query`, or `query_a` and `query_b`,
            `kv_a` [D, kv_rank + rope_width] and `kv_b` [kv_rank, N, nope_width + value_width].
        norm: `(name, x) -> x` normed over its last axis, for `query_a_norm` and `kv_a_norm`.
        kv_b: The matrix that expands latents, to be absorbed; None: they are expanded.

    Returns:
        q, k and v. Values are filled up with zeros to the width H of the keys; `mixed_values`
        takes them off again. Absorbed, H is kv_rank + rope_width.

    >>> spec = LatentSpec(query_rank=None, kv_rank=8, nope_width=4, rope_width=2, value_width=4)
    >>> shapes = {"query": (3, 6), "kv_a": (10,), "kv_b": (3, 8)}
    >>> rope = Rotation(jnp.ones((1, 5, 1)), jnp.zeros((1, 5, 1)))
    >>> given = spec, jnp.ones((1, 5, 7)), rope, lambda name, x: jnp.ones((1, 5, *shapes[name]))
    >>> q, k, v = latent_heads(*given, norm=lambda name, x: x)
    >>> q.shape, k.shape, v[0, 0, 0].tolist()
    ((1, 5, 3, 6), (1, 5, 3, 6), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    >>> q, k, v = latent_heads(*given, norm=lambda name, x: x, kv_b=jnp.ones((8, 3, 8)))
    >>> q.shape, k.shape
    ((1, 5, 3, 10), (1, 5, 1, 10))
    """

    def rotated(x: Array) -> Array:
        if spec.interleaved:  # queries and keys are reordered alike, which their products don't see
            x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(x, rope)

    def queries() -> tuple[Array, Array]:
        if spec.query_rank is None:
            q = linear("query", h)
        else:
            q = linear("query_b", norm("query_a_norm", linear("query_a", h)))
        nope, rotary = jnp.split(q, [spec.nope_width], axis=-1)
        return nope, rotated(rotary)

    latent, k_rope = jnp.split(linear("kv_a", h), [spec.kv_rank], axis=-1)
    latent, k_rope = norm("kv_a_norm", latent), rotated(k_rope[:, :, None])
    if kv_b is not None:
        q_nope, q_rope = queries()
        up = kv_b[:, :, : spec.nope_width].astype(h.dtype)
        q = jnp.concatenate([jnp.einsum("rlnh,cnh->rlnc", q_nope, up), q_rope], axis=-1)
        k = jnp.concatenate([latent[:, :, None], k_rope], axis=-1)
        return q, k, k
    k, v = jnp.split(linear("kv_b", latent), [spec.nope_width], axis=-1)
    shared = jnp.broadcast_to(k_rope, (*k.shape[:3], spec.rope_width))
    q = jnp.concatenate(queries(), axis=-1)
    k = jnp.concatenate([k, shared], axis=-1)
    room = ((0, 0), (0, 0), (0, 0), (0, spec.key_width - spec.value_width))
    return q, k, jnp.pad(v, room)


def mixed_values(
    spec: LatentSpec, mixed: Float[Array, "R L N H"], kv_b: Float[Array, "rank N key_value"] | None
) -> Float[Array, "R L N value"]:
    """Turn what attention mixed into the values of the heads.

    It takes off the zeros of expanded values; mixed latents it multiplies by the values' part of
    the matrix.

    Args:
        spec: The attention.
        mixed: What attention returned.
        kv_b: The matrix that expands latents; None where they have been expanded.

    Returns:
        The mixed values.

    >>> spec = LatentSpec(query_rank=None, kv_rank=8, nope_width=4, rope_width=2, value_width=4)
    >>> mixed_values(spec, jnp.ones((1, 5, 3, 6)), None).shape
    (1, 5, 3, 4)
    """
    if kv_b is None:
        return mixed[..., : spec.value_width]
    up = kv_b[:, :, spec.nope_width :].astype(mixed.dtype)
    return jnp.einsum("rlnc,cnh->rlnh", mixed[..., : spec.kv_rank], up)

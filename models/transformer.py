"""The decoder as free functions over an array tree: rows of packed tokens in, hidden states out.

Parameters may be float32 master weights: matrices are cast to the compute dtype where they are
used, inside the scan over layers. RMS norms and rotations are computed in float32.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.attention import Attending, attend
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.models.mla import LATENT_NORM_EPS, absorb, expand, mixed_values
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.pipeline import run_stages
from jaxrl_llm.models.remat import rematerialize
from jaxrl_llm.models.rope import Rotation, rotate, rotation
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

State = TypeVar("State")
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
    """

    windowed: Bool[Array, "*layers"] | bool | None


class Rotations(NamedTuple):
    """Rotations of the rows' positions: of most layers, and of those with the window."""

    main: Rotation
    windowed: Rotation

    def of(self, layer: Layer) -> Rotation:
        """Return the rotation of one layer."""
        windowed = layer.windowed
        if self.main is self.windowed or windowed is None:
            return self.main
        if isinstance(windowed, bool):
            return self.windowed if windowed else self.main
        return jax.tree.map(lambda a, b: jnp.where(windowed, b, a), self.main, self.windowed)


def rotations(spec: ModelSpec, positions: Int[Array, "R L"]) -> Rotations:
    """Compute the rotations that the layers of a model choose from.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> rotations(spec, jnp.array([[0, 1]])).main.cos.shape
    (1, 2, 1)
    """
    width, theta = spec.rotary_width, spec.rope_theta
    main = rotation(positions, head_width=width, theta=theta, scaling=spec.rope_scaling)
    if spec.local_rope_theta is None:
        return Rotations(main, main)
    return Rotations(main, rotation(positions, head_width=width, theta=spec.local_rope_theta))


def stacked_layers(params: Params, spec: ModelSpec) -> Iterator[tuple[Params, Layer]]:
    """Yield the weights of each stack of layers, and what else tells its layers apart.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=2, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32, window=4, windowed_layers=(True, False))
    >>> [layer.windowed.tolist() for _, layer in stacked_layers({"layers": {}}, spec)]
    [[True, False]]
    """
    for name, layers in spec.stacks.items():
        windowed = spec.windowed_layers[layers.start : layers.stop]
        yield params[name], Layer(jnp.array(windowed) if windowed else None)


def attending(spec: ModelSpec, layer: Layer) -> Attending:
    """Return how one layer attends: the scale of its scores, its window and its soft-cap.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=4,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> attending(spec, Layer(None)).scale
    0.5
    """
    window = spec.window
    if layer.windowed is False:
        window = None
    elif window is not None and layer.windowed is not None:
        window = jnp.where(layer.windowed, window, jnp.iinfo(jnp.int32).max)
    return Attending(scale=spec.score_scale, window=window, softcap=spec.score_softcap)


def linear(
    weights: Params, spec: ModelSpec, name: str, x: Float[Array, "R L ..."], *, inputs: int = 1
) -> Array:
    r"""Apply the projection `name` of a layer, $x W + b + \mathrm{scale}\,(x A) B$.

    The bias `{name}_bias` and the low-rank factors `{name}_lora_a` [in…, r] and `{name}_lora_b`
    [r, out…] (https://arxiv.org/abs/2106.09685) take part where `weights` holds them. All are cast
    to the dtype of x.

    Args:
        weights: One layer's arrays.
        spec: The model; its `lora` gives the scale.
        name: Of the matrix W [in…, out…].
        x: Input; its last `inputs` dimensions are contracted.
        inputs: How many dimensions of W are inputs.

    Returns:
        The projection [R, L, out…].

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> weights = {"up": jnp.ones((4, 6)), "up_bias": jnp.ones(6)}
    >>> linear(weights, spec, "up", jnp.ones((1, 1, 4)))[0, 0].tolist()
    [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    y = project(x, weights[name], inputs=inputs)
    if f"{name}_bias" in weights:
        y = y + weights[f"{name}_bias"].astype(x.dtype)
    if spec.lora is not None and f"{name}_lora_a" in weights:
        low, high = (weights[f"{name}_lora_{factor}"] for factor in "ab")
        y = y + project(project(x, low, inputs=inputs), high) * spec.lora.scale
    return y


def adapted_matrix(weights: Params, spec: ModelSpec, name: str) -> Array:
    r"""Return the matrix that `linear` applies, $W + \mathrm{scale}\,A B$.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> adapted_matrix({"up": jnp.ones((4, 6))}, spec, "up").shape
    (4, 6)
    """
    if spec.lora is None or f"{name}_lora_a" not in weights:
        return weights[name]
    low, high = (weights[f"{name}_lora_{factor}"] for factor in "ab")
    return weights[name] + jnp.tensordot(low, high, axes=1) * spec.lora.scale


def feed_forward(
    weights: Params,
    spec: ModelSpec,
    h: Float[Array, "R L D"],
    real: Bool[Array, "R L"] | None = None,
    layout: Layout | None = None,
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

    Returns:
        What is added to the residual stream, and what the experts report: the fields of
        `models.moe.balance.RouterStats`.

    >>> spec = ModelSpec(vocab_size=8, width=1, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=1, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
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
    scale = spec.lora.scale if spec.lora else 0.0
    out, stats = mixture(
        weights, spec.moe, h, real, activation=activation, lora_scale=scale, layout=layout
    )
    out = out + plain("shared_") if spec.moe.shared_ff_width else out
    return out, stats._asdict()


def queries_keys_values(
    weights: Params, spec: ModelSpec, h: Float[Array, "R L D"], by: Rotation
) -> tuple[Float[Array, "R L N H"], Float[Array, "R L K H"], Float[Array, "R L K H"]]:
    """Compute what a layer's attention takes: queries and keys, both rotated, and values.

    Args:
        weights: One layer's arrays.
        spec: The model.
        h: Normed residual stream.
        by: Rotations for the rows' positions.

    Returns:
        q, k and v; with latent attention those of `models.mla`.

    >>> spec = ModelSpec(vocab_size=8, width=1, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=1, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32, qk_norm=False)
    >>> weights = {name: jnp.ones((1, n, 2)) for name, n in dict(query=2, key=1, value=1).items()}
    >>> by = rotations(spec, jnp.array([[0]])).main
    >>> queries_keys_values(weights, spec, jnp.ones((1, 1, 1)), by)[0].tolist()
    [[[[1.0, 1.0], [1.0, 1.0]]]]
    """

    def apply(name: str, x: Array) -> Array:
        return linear(weights, spec, name, x)

    def latent_norm(name: str, x: Array) -> Array:
        return rms_norm(x, weights[name], eps=LATENT_NORM_EPS)

    if spec.latent is not None and spec.latent.absorbed:
        kv_b = adapted_matrix(weights, spec, "kv_b")
        return absorb(spec.latent, h, by, apply, latent_norm, kv_b)
    if spec.latent is not None:
        return expand(spec.latent, h, by, apply, latent_norm)
    q, k, v = (apply(name, h) for name in ("query", "key", "value"))
    if spec.qk_norm:
        q, k = _norm(spec, q, weights["query_norm"]), _norm(spec, k, weights["key_norm"])
    return rotate(q, by), rotate(k, by), v


def decoder_layer(
    weights: Params,
    spec: ModelSpec,
    x: Float[Array, "R L D"],
    by: Rotation,
    attention: Callable[[Array, Array, Array], tuple[Array, State]],
    real: Bool[Array, "R L"] | None = None,
    layout: Layout | None = None,
) -> tuple[Float[Array, "R L D"], State, Router]:
    """Apply one layer: x += attention(norm(x)), then x += feed_forward(norm(x)).

    With `spec.post_norms` what is added is normed too.

    Args:
        weights: One layer's arrays, without the leading `layers` axis.
        spec: The model.
        x: Residual stream; its dtype is the compute dtype.
        by: Rotations for the rows' positions.
        attention: `(q [R L N H], k [R L K H], v [R L K H]) -> (mixed [R L N H], state)`. Training
            attends within the row; decoding writes into a cache and returns it as the state.
        real: Which positions are not padding; None means all.
        layout: How activations are split over a mesh.

    Returns:
        The residual stream, what `attention` returned as its state, and what the experts report.
    """

    def norm(x: Array, name: str) -> Array:
        return _norm(spec, x, weights[name])

    h = norm(x, "attention_norm")
    q, k, v = queries_keys_values(weights, spec, h, by)
    mixed, state = attention(q, k, v)
    if spec.latent is not None:
        kv_b = adapted_matrix(weights, spec, "kv_b") if spec.latent.absorbed else None
        mixed = mixed_values(spec.latent, mixed, kv_b)
    out = linear(weights, spec, "output", mixed, inputs=2)
    x = x + (norm(out, "attention_post_norm") if spec.post_norms else out)
    out, router = feed_forward(weights, spec, norm(x, "mlp_norm"), real, layout)
    return x + (norm(out, "mlp_post_norm") if spec.post_norms else out), state, router


def _norm(spec: ModelSpec, x: Array, scale: Array) -> Array:
    return rms_norm(x, scale, eps=spec.norm_eps, unit_offset=spec.unit_offset_norms)


@dataclass(frozen=True)
class Sharded:
    """A matrix of which devices hold parts, to be gathered by the product that takes it.

    Attributes:
        held: The matrix.
        home: Its layout in the product.
    """

    held: Array
    home: NamedSharding


def project(x: Float[Array, "R L ..."], matrix: Array | Sharded, *, inputs: int = 1) -> Array:
    """Contract the last `inputs` dimensions of x with the first ones of a matrix.

    The matrix is cast to the dtype of x, and then gathered where it has to be; the backward pass
    gathers it again, so it is never kept whole. Its gradient is summed over the tokens in float32,
    also over those of other devices.

    It is one product of two flat matrices, which XLA's CPU backend computes and differentiates
    faster than the same contraction over rows of tokens.

    >>> project(jnp.ones((2, 3, 4, 5)), jnp.ones((4, 5, 7)), inputs=2).shape
    (2, 3, 7)
    """
    held, home = (matrix.held, matrix.home) if isinstance(matrix, Sharded) else (matrix, None)
    product: Any = _product(x, held, _Product(home, inputs))
    return product


class _Product(NamedTuple):
    """Where a matrix is multiplied, and how many of its dimensions are inputs."""

    home: NamedSharding | None
    inputs: int

    def flat(self, x: Array, matrix: Array) -> tuple[Float[Array, "X D"], Float[Array, "D F"]]:
        """Return both factors flat, the matrix in the dtype of x and whole."""
        width = math.prod(matrix.shape[: self.inputs])
        narrow = matrix.astype(x.dtype)  # first, so that narrow numbers travel
        if self.home is not None:
            narrow = jax.lax.with_sharding_constraint(narrow, self.home)
        return x.reshape(-1, width), narrow.reshape(width, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Float[Array, "R L ..."], matrix: Array, how: _Product) -> Array:
    return _product_forward(x, matrix, how)[0]


def _product_forward(x: Array, matrix: Array, how: _Product) -> tuple[Array, tuple[Array, Array]]:
    # what is stored is x as it came: the products that share it then share one copy
    left, right = how.flat(x, matrix)
    return (left @ right).reshape(*x.shape[:2], *matrix.shape[how.inputs :]), (x, matrix)


def _product_backward(
    how: _Product, saved: tuple[Array, Array], cotangent: Float[Array, "R L ..."]
) -> tuple[Array, Array]:
    x, matrix = saved
    left, right = how.flat(x, matrix)
    flat = cotangent.reshape(len(left), -1)
    to_matrix = jnp.matmul(left.T, flat, preferred_element_type=jnp.float32)
    to_x = (flat @ right.T).reshape(x.shape)
    return to_x, to_matrix.reshape(matrix.shape).astype(matrix.dtype)


_product.defvjp(_product_forward, _product_backward)


def embed(
    params: Params, spec: ModelSpec, tokens: Int[Array, "*B"], *, dtype: DTypeLike
) -> Float[Array, "*B D"]:
    """Look tokens up; √D, by which Gemma multiplies, is rounded to the compute dtype as there.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32, scaled_embeddings=True)
    >>> embed({"embed": jnp.ones((8, 4))}, spec, jnp.array([3]), dtype="float32").tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    """
    x = params["embed"][tokens].astype(dtype)
    return x * jnp.asarray(spec.width**0.5, dtype) if spec.scaled_embeddings else x


def final_norm(params: Params, spec: ModelSpec, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Norm the residual stream after the last layer.

    >>> spec = ModelSpec(vocab_size=8, width=2, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> final_norm({"final_norm": jnp.ones(2)}, spec, jnp.array([3.0, -3.0])).round(5).tolist()
    [1.0, -1.0]
    """
    return _norm(spec, x, params["final_norm"])


class _Row(NamedTuple):
    """What layers know of a row besides its residual stream."""

    by: Rotations
    segment_ids: Array


def forward(
    params: Params,
    spec: ModelSpec,
    tokens: Int[Array, "R L"],
    positions: Int[Array, "R L"],
    segment_ids: Int[Array, "R L"],
    *,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    layout: Layout | None = None,
) -> Float[Array, "R L D"]:
    """Run the decoder over packed rows.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        tokens: Token ids.
        positions: Index of each token within its own sequence.
        segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
        dtype: Of the computation, whatever the parameters' dtype.
        remat: Policy of `models.remat`: what of a layer is stored for the backward pass.
        layout: How activations are split over a mesh. With sharded parameters it must be given:
            left to itself, the compiler may copy activations to all devices rather than gather
            weights. Where several devices share a row, the rows given are its pieces, as
            `Layout.cut` makes them. None leaves everything to the compiler.

    Returns:
        Hidden states after the final norm, in `dtype`; meaningless at padding.

    >>> from jaxrl_llm.models.parameters import initialize
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> params = initialize(spec, key=jax.random.key(0))
    >>> tokens, positions = jnp.array([[3, 5, 2, 7]]), jnp.array([[0, 1, 0, 1]])
    >>> forward(params, spec, tokens, positions, jnp.array([[1, 1, 2, 2]])).shape
    (1, 4, 4)
    """
    hidden, _ = forward_with_router(
        params,
        spec,
        tokens,
        positions,
        segment_ids,
        dtype=dtype,
        remat=remat,
        layout=layout,
    )
    return hidden


def forward_with_router(
    params: Params,
    spec: ModelSpec,
    tokens: Int[Array, "R L"],
    positions: Int[Array, "R L"],
    segment_ids: Int[Array, "R L"],
    *,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    layout: Layout | None = None,
) -> tuple[Float[Array, "R L D"], Router]:
    """Run the decoder over packed rows and return what the experts of its layers report too.

    Args:
        params: As `forward`.
        spec: As `forward`.
        tokens: As `forward`.
        positions: As `forward`.
        segment_ids: As `forward`.
        dtype: As `forward`.
        remat: As `forward`.
        layout: As `forward`.

    Returns:
        The hidden states of `forward`, and the reports of `feed_forward`, stacked over the layers
        that have experts; an empty dict for a model without.

    >>> from jaxrl_llm.models.parameters import initialize
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> row = jnp.ones((1, 4), jnp.int32)
    >>> forward_with_router(initialize(spec, key=jax.random.key(0)), spec, row, row, row)[1]
    {}
    """
    place = layout.place if layout else lambda x: x
    attention = functools.partial(attend_pieces, layout=layout) if layout else attend
    gather = layer_gatherer(spec, dtype, layout) if layout else lambda weights: weights

    def body(x: Array, rows: _Row, of_layer: tuple[Params, Layer]) -> tuple[Array, Router]:
        weights, layer = gather(of_layer[0]), of_layer[1]
        how = attending(spec, layer)
        x, _, router = decoder_layer(
            weights,
            spec,
            x,
            rows.by.of(layer),
            lambda q, k, v: (attention(q, k, v, rows.segment_ids, how), None),
            rows.segment_ids != 0,
            layout,
        )
        return place(x), router

    step = rematerialize(body, remat)
    rows = _Row(rotations(spec, positions), segment_ids)
    table = gathered(params, spec, "embed", layout)
    x = place(embed({"embed": table}, spec, tokens, dtype=dtype))
    reports: Router = {}
    for name, stack in zip(spec.stacks, stacked_layers(params, spec), strict=True):
        if layout and layout.stages > 1 and name == "layers":
            x, router = run_stages(step, x, rows, stack, layout)
        else:
            x, router = jax.lax.scan(lambda x, layer: step(x, rows, layer), x, stack)
        reports |= router
    return final_norm(params, spec, x), reports


def layer_gatherer(spec: ModelSpec, dtype: DTypeLike, layout: Layout) -> Callable[[Params], Params]:
    """Return a function from one layer's weights to the same, ready to be used on a mesh.

    Matrices are gathered by the products that take them, and those of experts by
    `models.moe.expert_parallel`. What else there is, a row per layer, is cast and gathered at once.
    """
    declared, dtypes = declare(spec), compute_dtypes(spec, dtype)
    homes = {
        name: layout.sharding(*home.spec[1:])
        for stack in spec.stacks
        for name, home in layout.working(declared[stack]).items()
    }
    kinds = {name: kind for stack in spec.stacks for name, kind in dtypes[stack].items()}

    def gather(name: str, value: Array) -> Array | Sharded:
        if name.startswith(("router", "expert_")):
            return value
        if name.endswith(("_norm", "_bias")):
            return jax.lax.with_sharding_constraint(value.astype(kinds[name]), homes[name])
        return Sharded(value, homes[name])

    return lambda weights: {name: gather(name, value) for name, value in weights.items()}


def gathered(params: Params, spec: ModelSpec, name: str, layout: Layout | None) -> Array:
    """Return an array that is no layer's, gathered from the devices that split tokens."""
    if layout is None:
        return params[name]
    home = layout.working({name: declare(spec)[name]})[name]
    return jax.lax.with_sharding_constraint(params[name], home)


def head_matrix(
    params: Params, spec: ModelSpec, layout: Layout | None = None
) -> Float[Array, "D V"]:
    """Return the output projection: the transposed embedding when tied, else its own array.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        layout: How activations are split over a mesh; the matrix is then gathered from the devices
            that split tokens, and stays split by vocabulary.

    Raises:
        ValueError: The model ends in a value head or in a reward head.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> head_matrix({"embed": jnp.ones((8, 4))}, spec).shape
    (4, 8)
    """
    if spec.value_head or spec.reward_head:
        head = "value" if spec.value_head else "reward"
        raise ValueError(f"a model with a {head} head has no logits; wanted a language model")
    matrix = gathered(params, spec, "embed" if spec.tied_embeddings else "head", layout)
    return matrix.T if spec.tied_embeddings else matrix


def logits(params: Params, spec: ModelSpec, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
    """Project hidden states onto the vocabulary: inputs in the dtype of `hidden`, sums in float32.

    With a soft-cap c the product z becomes c·tanh(z/c), in float32 (Gemma 2,
    https://arxiv.org/abs/2408.00118, section 2).

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
    z = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    cap = spec.logit_softcap
    return z if cap is None else cap * jnp.tanh(z / cap)

"""The decoder as free functions over an array tree: rows of packed tokens in, hidden states out."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.models.gather import layer_gatherer, lookup, split_matrix
from jaxrl_llm.models.inputs import PackedTokens
from jaxrl_llm.models.layers import (
    Layer,
    Mixers,
    Rotations,
    Router,
    attending,
    decoder_layer,
    norm_of,
    rotations,
    stacked_layers,
)
from jaxrl_llm.models.pipeline import run_stages
from jaxrl_llm.models.remat import rematerialize
from jaxrl_llm.models.spec import Block, ModelSpec
from jaxrl_llm.models.vision.features import deepened, rest_of_image, with_features
from jaxrl_llm.models.vision.inputs import VisualTokens
from jaxrl_llm.sharding.layout import Layout


def embed(
    params: Params,
    spec: ModelSpec,
    tokens: Int[Array, "*B"],
    *,
    dtype: DTypeLike,
    layout: Layout | None = None,
) -> Float[Array, "*B D"]:
    """Look tokens up; √D, by which Gemma multiplies, is rounded to the compute dtype as there.

    With a layout, tokens are rows [R, L] that are split over its mesh.

    >>> spec = tiny_spec(scaled_embeddings=True)
    >>> embed({"embed": jnp.ones((8, 4))}, spec, jnp.array([3]), dtype="float32").tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    """
    if layout is None:
        x = params["embed"][tokens].astype(dtype)  # ids are compared before: `data.check_ids`
    else:
        x = lookup(split_matrix(params, spec, "embed", layout), tokens, layout, dtype=dtype)
    return x * jnp.asarray(spec.hidden_size**0.5, dtype) if spec.scaled_embeddings else x


def final_norm(params: Params, spec: ModelSpec, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Norm the residual stream after the last layer.

    >>> spec = tiny_spec(hidden_size=2)
    >>> final_norm({"final_norm": jnp.ones(2)}, spec, jnp.array([3.0, -3.0])).round(5).tolist()
    [1.0, -1.0]
    """
    return norm_of(spec, x, params["final_norm"])


class _Row(NamedTuple):
    """What layers know of a row besides its residual stream."""

    by: Rotations
    segment_ids: Array
    routes: Array | None
    deep: VisualTokens | None = None
    ahead: Array | None = None

    def routes_in(self, layer: Layer) -> Array | None:
        """Return which experts tokens go to in a layer, where that is given."""
        if self.routes is None or layer.routed is None:
            return None
        return jax.lax.dynamic_index_in_dim(self.routes, layer.routed, axis=2, keepdims=False)


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
            `Layout.split_context` makes them. None leaves everything to the compiler.

    Returns:
        Hidden states after the final norm, in `dtype`; meaningless at padding.

    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec()
    >>> params = init_params(spec, key=jax.random.key(0))
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

    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec()
    >>> row = jnp.ones((1, 4), jnp.int32)
    >>> forward_with_router(init_params(spec, key=jax.random.key(0)), spec, row, row, row)[1]
    {}
    """
    rows = PackedTokens(tokens, positions, segment_ids)
    return forward_rows(params, spec, rows, dtype=dtype, remat=remat, layout=layout)


def forward_rows(
    params: Params,
    spec: ModelSpec,
    packed: PackedTokens,
    *,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    layout: Layout | None = None,
) -> tuple[Float[Array, "R L D"], Router]:
    """Run the decoder as `forward_with_router`, by recorded choices of experts where there are any.

    Args:
        params: As `forward`.
        spec: As `forward`.
        packed: The rows.
        dtype: As `forward`.
        remat: As `forward`.
        layout: As `forward`. Where several devices share a row, the features are of whole rows.

    Returns:
        As `forward_with_router`; with routes also `experts` [M R L top], where tokens went, unless
        stages hold the layers.

    >>> from jaxrl_llm.models.inputs import RowInputs
    >>> from jaxrl_llm.models.moe.spec import MoeSpec
    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec(moe=MoeSpec(experts=4, experts_per_token=1, ff_width=6))
    >>> row, routes = jnp.ones((1, 2), jnp.int32), jnp.array([[[[3]], [[0]]]])
    >>> packed = PackedTokens(row, row, row, RowInputs(routes))
    >>> forward_rows(init_params(spec, key=jax.random.key(0)), spec, packed)[1]["experts"].tolist()
    [[[[3], [0]]]]
    """
    if layout and layout.stages > 1:
        _check_stages(spec, layout.stages)
    x, rows = _embedded(params, spec, packed, dtype, layout)
    stacks = stacked_layers(
        params, spec, replays=packed.inputs.routes is not None, deepens=rows.deep is not None
    )
    reports = list[Router]()
    used = dict.fromkeys(stacks, 0)
    for block in spec.blocks:
        in_stages = layout is not None and layout.stages > 1 and block.repeats > 1
        held, steps = dict[str, _Layers](), dict[str, _Step]()
        for name in dict(block.runs):
            held[name], looked_up = _of_block(stacks[name], block, name, used, in_stages)
            steps[name] = _layer_step(spec, dtype, remat, layout, looked_up)
        repeat = functools.partial(_run_block, steps, block)
        if in_stages:
            assert layout is not None  # for pyright
            x, router = run_stages(repeat, x, rows, held, layout)
        else:
            x, router = jax.lax.scan(functools.partial(_repeat_scanned, repeat, rows), x, held)
        reports += [jax.tree.map(lambda report: jax.lax.collapse(report, 0, 2), router)]
    joined = [report for report in reports if report]
    if len(joined) > 1:
        joined = [jax.tree.map(lambda *parts: jnp.concatenate(parts), *joined)]
    return final_norm(params, spec, x), joined[0] if joined else {}


def _embedded(
    params: Params, spec: ModelSpec, packed: PackedTokens, dtype: DTypeLike, layout: Layout | None
) -> tuple[Float[Array, "P l D"], _Row]:
    """Return what enters the first layer, and what layers know besides."""
    routes, visual, rotary = packed.inputs
    x = embed(params, spec, packed.tokens, dtype=dtype, layout=layout)
    rows = _Row(
        rotations(spec, packed.positions if rotary is None else rotary), packed.segment_ids, routes
    )
    if visual is not None:
        x = with_features(x, visual, layout)
        ahead = rest_of_image(visual.feature) if spec.attends_within_images else None
        rows = rows._replace(deep=None if visual.given.deep is None else visual, ahead=ahead)
    if layout is None:
        return x, rows
    if rows.deep is not None and layout.pieces > 1 and layout.stages > 1:
        raise ValueError(
            "rows with features for several layers (DeepStack) can't be split by both "
            f"context={layout.pieces} and stage={layout.stages}; expected one of them to be 1"
        )
    return layout.constrain(x), rows


def _check_stages(spec: ModelSpec, stages: int) -> None:
    """Check that stages can share the layers where these repeat a pattern of several kinds."""
    patterns = [(block.repeats, sum(count for _, count in block.runs)) for block in spec.blocks]
    mixed = [(repeats, layers) for repeats, layers in patterns if repeats > 1 and layers > 1]
    for repeats, layers in mixed if any(r > 1 for r, _ in patterns) else patterns:
        if repeats % stages:
            divisors = [n for n in range(1, repeats + 1) if repeats % n == 0]
            raise ValueError(
                f"stage={stages} can't share layers that repeat a pattern of {layers} {repeats} "
                f"times; expected one of {divisors}"
            )


_Layers = tuple[Any, Layer]  # weights, or their numbers in a stack
_Step = Callable[[Array, Any, _Layers], tuple[Array, Router]]


def _of_block(
    stack: tuple[Params, Layer], block: Block, name: str, used: dict[str, int], in_stages: bool
) -> tuple[_Layers, Params | None]:
    """Take a block's layers from a stack: arrays [repeats, …], or [repeats, layers of one, …].

    A stack with one layer of each repeat is scanned as it is. Of one with several the scan has
    their numbers, and a layer looks its weights up in the stack, which is returned beside them:
    through another shape the loop would copy all weights, and its backward pass would make a second
    gradient instead of adding to the sum of gradients where that stands.
    """
    each, first = block.layers_of(name), used[name]
    count = block.repeats * each
    used[name] += count

    def taken(array: Array) -> Array:
        some = array if len(array) == count else array[first : first + count]
        return some if each == 1 else some.reshape(block.repeats, each, *array.shape[1:])

    if each == 1 or in_stages:
        return jax.tree.map(taken, stack), None
    numbers = first + jnp.arange(count).reshape(block.repeats, each)
    return (numbers, jax.tree.map(taken, stack[1])), stack[0]


def _repeat_scanned(repeat: Callable[..., Any], rows: _Row, x: Array, held: Any) -> Any:
    return repeat(x, rows, held)


def _run_block(
    steps: dict[str, _Step],
    block: Block,
    x: Float[Array, "P l D"],
    rows: _Row,
    held: dict[str, _Layers],
) -> tuple[Float[Array, "P l D"], Router]:
    """Run one repeat of a block; return what the experts report, stacked over its layers."""
    used, reports = dict.fromkeys(held, 0), list[Router]()
    for name, count in block.runs:
        layers, step, first = held[name], steps[name], used[name]
        used[name] += count
        if count < block.layers_of(name):
            some = first if count == 1 else slice(first, used[name])
            layers = jax.tree.map(lambda array, some=some: array[some], layers)
        if count == 1:
            x, router = step(x, rows, layers)
            reports += [jax.tree.map(lambda report: report[None], router)]
        else:
            x, router = jax.lax.scan(lambda x, layer, step=step: step(x, rows, layer), x, layers)
            reports += [router]
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports)


def _layer_step(
    spec: ModelSpec,
    dtype: DTypeLike,
    remat: str,
    layout: Layout | None,
    looked_up: Params | None = None,
) -> _Step:
    """Return the body of the scan over layers: `(x, rows, layer) -> (x, router)`.

    The weights of a layer are given, or their number in the arrays in which they are looked up.
    """
    constrain = layout.constrain if layout else lambda x: x
    attention = functools.partial(attend_pieces, layout=layout) if layout else attend
    gather = (
        layer_gatherer(spec, dtype, layout, keep=remat != "none")
        if layout
        else lambda weights: weights
    )

    def body(x: Array, rows: _Row, of_layer: _Layers) -> tuple[Array, Router]:
        weights, layer = of_layer
        if looked_up is not None:
            weights = jax.tree.map(lambda array: _layer_of(array, of_layer[0]), looked_up)
        weights = gather(weights)
        options = attending(spec, layer, weights)._replace(ahead=rows.ahead)
        x, _, router = decoder_layer(
            weights,
            spec,
            x,
            rows.by.of(layer),
            Mixers(
                lambda q, k, v: (attention(q, k, v, rows.segment_ids, options), None),
                lambda mix: (mix(rows.segment_ids)[0], None),
            ),
            rows.segment_ids != 0,
            layout,
            rows.routes_in(layer),
        )
        if rows.deep is not None and layer.number is not None:
            x = deepened(x, rows.deep, layer.number, layout)
        if rows.routes is None or (layout and layout.stages > 1):
            router.pop("experts", None)  # what stages report is added up
        return constrain(x), router

    return rematerialize(body, remat, looks_up=looked_up is not None)


def _layer_of(stack: Array, number: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)

"""The decoder of a Hugging Face directory as a `Model`.

`Decoder.layer` is one layer. `hidden_states` scans it over packed rows, for training; `extend` and
`extend_pages` run it over a cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from jaxrl_llm.models import parameters, quantization
from jaxrl_llm.models.arrays import Declarations, Params
from jaxrl_llm.models.attention import Attending, LayerCache, attend, attend_cache
from jaxrl_llm.models.cache import (
    Cache,
    PageTables,
    init_cache,
    keys_are_values,
    record_in_pages,
    record_in_rows,
    scaled_widths,
    write_kept,
)
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.models.delta import DeltaState, LayerFunctions, delta_mix
from jaxrl_llm.models.inputs import (
    NO_INPUTS,
    FrameBounds,
    PatchRows,
    RowInputs,
    Visual,
    VisualFeatures,
    VisualTokens,
)
from jaxrl_llm.models.layers import (
    ACTIVATION_FUNCTIONS,
    Layer,
    Rotations,
    Router,
    attention_options,
    feed_forward,
    norm_of,
    project_heads,
    rematerialize,
    rms_norm,
    rotations,
    stacked_layers,
)
from jaxrl_llm.models.linear import (
    SplitMatrix,
    adapted_matrix,
    layer_gatherer,
    linear,
    lookup,
    split_matrix,
)
from jaxrl_llm.models.mla import LATENT_NORM_EPS, latent_heads, mixed_values
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.paged_attention import place_of_token
from jaxrl_llm.models.parameters import PRNGKey
from jaxrl_llm.models.rope import Rotation, rotate
from jaxrl_llm.models.spec import Block, ModelSpec
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import (
    deepened,
    encode,
    rest_of_image,
    rotary_positions,
    with_features,
)
from jaxrl_llm.sharding.layout import BATCH, TOKENS, Layout, batch_shards

NEVER = -1e30
"""Logit of a token that is never drawn: finite, so that its products with 0 are."""


def with_value_head(params: Params, spec: ModelSpec) -> tuple[Params, ModelSpec]:
    """Turn a language model into a critic that predicts 0 at first, a reward model into its critic.

    A reward model keeps its weights, as Ouyang et al. 2022 begin (appendix C.4); the bias is 0.

    Args:
        params: Parameters nested as `declare(spec)`, in any layout.
        spec: A model without a value head.

    Returns:
        Parameters nested as the new spec declares, and that spec. The output projection is left
        out; the other arrays are shared with `params`. What is new is zeros on the default device,
        for the caller to lay out.

    Raises:
        ValueError: The model has a value head already.

    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec(tied_embeddings=False)
    >>> critic, critic_spec = with_value_head(init_params(spec, key=jax.random.key(0)), spec)
    >>> critic["score"].shape, "head" in critic, critic_spec.value_head
    ((4, 1), False, True)
    """
    if spec.value_head:
        raise ValueError("the model has a value head already; expected a language model")
    dtype = params["final_norm"].dtype
    body = {name: arrays for name, arrays in params.items() if name != "head"}
    head = {"score": jnp.zeros((spec.hidden_size, 1), dtype), "score_bias": jnp.zeros(1, dtype)}
    return head | body, dataclasses.replace(spec, value_head=True, reward_head=False)


def with_reward_head(
    params: Params, spec: ModelSpec, *, key: PRNGKeyArray
) -> tuple[Params, ModelSpec]:
    """Turn a language model into a reward model whose head is drawn from N(0, `init_std`²).

    Args:
        params: Parameters nested as `declare(spec)`, in any layout.
        spec: A model without a value head or reward head.
        key: Of the draw.

    Returns:
        Parameters nested as the new spec declares, and that spec. The output projection is left
        out; the other arrays are shared with `params`. What is new is on the default device, for
        the caller to lay out.

    Raises:
        ValueError: The model has a value head or a reward head already.

    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec()
    >>> key = jax.random.key(0)
    >>> scorer, scorer_spec = with_reward_head(init_params(spec, key=key), spec, key=key)
    >>> scorer["score"].shape, scorer_spec.reward_head
    ((4, 1), True)
    """
    if spec.value_head or spec.reward_head:
        raise ValueError("the model ends in another head already; expected a language model")
    dtype = params["final_norm"].dtype
    body = {name: arrays for name, arrays in params.items() if name != "head"}
    draw = spec.init_std * jax.random.normal(key, (spec.hidden_size, 1), dtype)
    return {"score": draw} | body, dataclasses.replace(spec, reward_head=True)


def _scores(params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B"]:
    wide, weights = hidden.astype(jnp.float32), params["score"].astype(jnp.float32)
    return jnp.matmul(wide, weights, precision=jax.lax.Precision.HIGHEST)[..., 0]


Step = Callable[[Array, Any, Any], tuple[Array, Any]]


def run_stages(
    step: Step, x: Float[Array, "P l D"], rows: Any, stack: Any, layout: Layout
) -> tuple[Float[Array, "P l D"], Any]:
    """Scan a stack of layers of which every stage holds a run.

    The rows are split into as many micro-batches as one data shard has rows. At each tick all
    stages work, on a micro-batch each, and hand it on (GPipe, https://arxiv.org/abs/1811.06965):
    with M micro-batches and S stages the share (S - 1) / (M + S - 1) of the work is idle. While a
    stage waits it works on padding, which reports nothing.

    Args:
        step: `(x, rows, layer) -> (x, report)`; reports are sums over tokens that are not padding.
        x: Embedded pieces of rows.
        rows: What the layers know of them, arrays whose first axis is P; zeros mean padding.
        stack: The layers' weights, each with a leading axis of layers.
        layout: How rows and layers are split.

    Returns:
        The pieces after the last layer, and the reports, stacked over the layers.

    Raises:
        ValueError: The stages can't share the layers evenly.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> step = lambda x, rows, layer: (x * layer, rows.sum())
    >>> rows = jnp.ones((2, 1))
    >>> x, report = run_stages(step, jnp.ones((2, 1, 1)), rows, jnp.array([2.0, 3.0]), layout)
    >>> x.ravel().tolist(), report.tolist()
    ([6.0, 6.0], [2.0, 2.0])
    """
    layers, stages = jax.tree.leaves(stack)[0].shape[0], layout.stages
    if layers % stages:
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(f"stage={stages} can't share {layers} layers; expected one of {divisors}")

    def run(stack: Any, x: Array, rows: Any) -> tuple[Array, Any]:
        return jax.lax.scan(lambda x, layer: step(x, rows, layer), x, stack)

    by_stage = jax.tree.map(lambda w: w.reshape(stages, -1, *w.shape[1:]), stack)
    by_stage = _on_stages(by_stage, layout)
    every_stage = jax.vmap(run, spmd_axis_name="stage")

    def tick(held: tuple[Array, Any], entering: tuple[Array, Any]) -> tuple[Any, Any]:
        shifted = jax.tree.map(
            lambda new, old: jnp.concatenate([new[None], old[:-1]]), entering, held
        )
        x, rows = _on_stages(shifted, layout, TOKENS)
        x, report = every_stage(by_stage, x, rows)
        return (x, rows), (x[-1], report)

    entering = jax.tree.map(lambda a: _micro_batches(a, layout), (x, rows))
    empty = jax.tree.map(lambda a: jnp.zeros((stages, *a.shape[1:]), a.dtype), entering)
    _, (left, reports) = jax.lax.scan(tick, empty, entering)
    left = left[stages - 1 :].reshape(-1, batch_shards(layout.mesh), layout.pieces, *x.shape[1:])
    left = left.swapaxes(0, 1).reshape(x.shape)
    summed = jax.tree.map(lambda r: r.sum(0).reshape(layers, *r.shape[3:]), reports)
    return layout.constrain(left), summed


def _on_stages(tree: Any, layout: Layout, *more: Any) -> Any:
    """Keep the first axis of arrays split over the stages, and further axes as told."""
    sharding = layout.sharding("stage", *more)
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, sharding), tree)


def _micro_batches(a: Array, layout: Layout) -> Array:
    """Cut pieces of rows into micro-batches, one a tick, and padding while the last ones leave."""
    shards, pieces = batch_shards(layout.mesh), layout.pieces
    micro = a.shape[0] // (shards * pieces)
    parts = a.reshape(shards, micro, pieces, *a.shape[1:]).swapaxes(0, 1)
    parts = parts.reshape(micro, shards * pieces, *a.shape[1:])
    return jnp.pad(parts, [(0, layout.stages - 1)] + [(0, 0)] * (parts.ndim - 1))


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
        x = params["embed"][tokens].astype(dtype)  # ids are known: `data.dataset.check_ids`
    else:
        x = lookup(split_matrix(params, spec, "embed", layout), tokens, layout, dtype=dtype)
    return x * jnp.asarray(spec.hidden_size**0.5, dtype) if spec.scaled_embeddings else x


class _Row(NamedTuple):
    """What layers know of a row besides its residual stream."""

    rope: Rotations
    segment_ids: Array
    routes: Array | None
    deep: VisualTokens | None = None
    ahead: Array | None = None

    def routes_in(self, layer: Layer) -> Array | None:
        """Return which experts tokens go to in a layer, where that is given."""
        if self.routes is None or layer.routed is None:
            return None
        return jax.lax.dynamic_index_in_dim(self.routes, layer.routed, axis=2, keepdims=False)


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


def _layer_of(stack: Array, number: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


def _layers(params: Params, spec: ModelSpec) -> Iterator[tuple[Params, Layer]]:
    """Yield each layer's weights, from stacked arrays or from those of `by_layer`."""
    places = {
        number: (name, index)
        for name, layers in spec.stacks.items()
        for index, number in enumerate(layers)
    }
    for number in range(spec.layers):
        name, index = places[number]
        weights = {key: arrays[index] for key, arrays in params[name].items()}
        kinds = (spec.windowed_layers, spec.rotary_layers)
        windowed, rotary = (flags[number] if flags else None for flags in kinds)
        yield weights, Layer(windowed, rotary)


class _Rows(NamedTuple):
    """The next tokens of each row, which of them are not padding, and states before them.

    Rotary positions may be three of each token, as in `RowInputs`, or one.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    states: tuple[DeltaState, ...]
    visual: VisualTokens | None = None
    rotary: Int[Array, "B T"] | Int[Array, "B T 3"] | None = None

    def state(self, number: int) -> DeltaState:
        """Return the state of a layer; a row that begins has none yet, whatever it held."""
        begins = self.positions[:, 0] == 0

        def kept(x: Array) -> Array:
            return jnp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0, x)

        return jax.tree.map(kept, self.states[number])


def _run(
    params: Params,
    spec: ModelSpec,
    attend: Callable[..., tuple[Array, LayerCache]],
    rows: _Rows,
    *,
    dtype: DTypeLike,
    layout: Layout | None,
) -> tuple[Float[Array, "B T D"], Cache, list[Int[Array, "B T top"]]]:
    """Run all layers over a cache.

    Those with attention attend by `(number, options, q, k, v) -> (mixed, its cache)`. The last that
    is returned is where tokens went in each layer with experts.
    """
    rope = rotations(spec, rows.positions if rows.rotary is None else rows.rotary)
    segment_ids = rows.real.astype(jnp.int32)
    constrain = layout.constrain if layout else lambda x: x
    x = embed(params, spec, rows.tokens, dtype=dtype)
    ahead = None
    if rows.visual is not None:
        x = with_features(x, rows.visual)
        ahead = rest_of_image(rows.visual.feature) if spec.attends_within_images else None
    x = constrain(x)
    kept, states = list[LayerCache](), list[DeltaState]()
    experts: list[Array] = []
    for number, (weights, layer) in enumerate(_layers(params, spec)):
        options = attention_options(spec, layer, weights)._replace(ahead=ahead)
        x, after, router = Decoder(spec).layer(
            weights,
            x,
            rope.of(layer),
            functools.partial(attend, len(kept), options),
            segment_ids,
            state=rows.state(len(states)) if "delta_output" in weights else None,
            layout=layout,
        )
        x = constrain(x if rows.visual is None else deepened(x, rows.visual, number))
        if isinstance(after, DeltaState):
            states.append(after)
        else:
            kept.append(after)
        experts += [router["experts"]] if router else []
    fields = zip(LayerCache._fields, zip(*kept, strict=True), strict=True)
    held: dict[str, Any] = {name: () if arrays[0] is None else arrays for name, arrays in fields}
    x = norm_of(spec, x, params["final_norm"])
    return x, Cache(**held, states=tuple(states)), experts


def _on_each(
    layout: Layout | None,
    function: Callable[..., tuple[Array, LayerCache]],
    heads: tuple[Array | None, Float[Array, "B N H"], Float[Array, "B K H"], Float[Array, "B K V"]],
    layer: LayerCache,
    table: Int[Array, "B n"],
    positions: Int[Array, " B"],
) -> tuple[Array, LayerCache]:
    """Call a function on the part of each device: rows by part, heads as they are split.

    The heads' arrays are sinks, which have no rows, queries, keys and values.
    """
    arrays = (*heads, layer, table, positions)
    if layout is None:
        return function(*arrays)
    rows = PartitionSpec(BATCH)
    split = "tensor" if heads[2].shape[1] % layout.mesh.shape["tensor"] == 0 else None
    queries, keys = PartitionSpec(BATCH, "tensor"), PartitionSpec(BATCH, split)
    pages = PartitionSpec(BATCH, None, split)
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=(PartitionSpec("tensor"), queries, keys, keys, pages, rows, rows),
        out_specs=(queries, pages),
        check_vma=False,  # a kernel does not say along which axes its results vary
    )(*arrays)


def _attend_part(
    spec: ModelSpec,
    kernel: Callable[..., Array],
    options: Attending,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K V"],
    *held: Any,
) -> tuple[Float[Array, "B N W"], LayerCache]:
    """Write one token of each row into the pages of one part, and attend over them."""
    layer, table, positions = held
    size, count = layer.keys.shape[4], layer.keys.shape[1]
    (page, slot), every = place_of_token(table, positions, count, size), slice(None)
    layer = write_kept(spec, layer, k, v, ((0, page, every, every, slot), (0, page, every, slot)))
    arrays: list[Any] = [None if x is None else x[0] for x in layer]
    pages = LayerCache(*arrays)
    if keys_are_values(spec) and spec.latent is not None:
        pages = pages._replace(values=None, value_scales=None)
        width = spec.latent.kv_rank
        return kernel(q, pages, table, positions, options, value_width=width), layer
    return kernel(q, pages, table, positions, options), layer


@dataclass(frozen=True)
class Decoder:
    """The decoder that a `ModelSpec` describes, as a `models.model.Model`.

    It decodes by `ModelSpec.for_decoding`, whose parameters are the same.

    >>> decoder = Decoder(tiny_spec())
    >>> decoder.vocab_size, decoder.has_router, decoder == Decoder(tiny_spec())
    (8, False, True)
    """

    spec: ModelSpec

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.spec.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for."""
        return self.spec.max_positions

    @property
    def logit_softcap(self) -> int | float | None:
        """What logits are capped at."""
        return self.spec.logit_softcap

    @property
    def has_router(self) -> bool:
        """Whether there are experts."""
        return self.spec.moe is not None

    @property
    def route_shape(self) -> RouteShape | None:
        """What is recorded of each token's experts."""
        return self.spec.moe and self.spec.moe.route_shape(self.spec.layers)

    @property
    def vision(self) -> VisionSpec | None:
        """The tower, and the ids of placeholder tokens."""
        return self.spec.vision

    @property
    def has_rotary_positions(self) -> bool:
        """Whether tokens of images are rotated by other numbers than their positions."""
        return self.spec.vision is not None and self.spec.mrope_sections is not None

    @property
    def attends_within_images(self) -> bool:
        """Whether tokens of an image attend to all others of it."""
        return self.spec.attends_within_images

    def rotary_positions(
        self, tokens: Int[np.ndarray, " T"], visuals: Sequence[Visual]
    ) -> tuple[Int[np.ndarray, "T 3"], int]:
        """See `models.vision.tower`.

        Raises:
            ValueError: As there, or the model has no tower.
        """
        if self.spec.vision is None:
            raise ValueError("rotary positions of images, for a model without a vision tower")
        return rotary_positions(self.spec.vision, tokens, visuals)

    def encode_visuals(
        self,
        params: Params,
        patches: PatchRows,
        *,
        dtype: DTypeLike,
        remat: str,
        layout: Layout | None,
        bounds: FrameBounds,
    ) -> VisualFeatures:
        """See `models.vision.tower.encode`.

        Raises:
            ValueError: The model has no tower.
        """
        if self.spec.vision is None:
            raise ValueError("patches of images, for a model without a vision tower")
        return encode(
            params["vision"],
            self.spec.vision,
            patches,
            dtype=dtype,
            layout=layout,
            remat=remat,
            bounds=bounds,
        )

    def declare(self) -> Declarations:
        """See `models.parameters.declare`."""
        return parameters.declare(self.spec)

    def init_params(self, key: PRNGKey) -> Params:
        """See `models.parameters.init_params`."""
        return parameters.init_params(self.spec, key=key)

    def compute_dtypes(self, dtype: DTypeLike) -> Any:
        """See `models.parameters.compute_dtypes`."""
        return parameters.compute_dtypes(self.spec, dtype)

    def declare_quantized(self) -> Declarations:
        """See `models.quantization.declare_quantized`."""
        return quantization.declare_quantized(self.spec)

    def head_matrix(
        self, params: Params, layout: Layout | None = None
    ) -> Float[Array, "D V"] | SplitMatrix:
        """Return the output projection: the transposed embedding when tied, else its own array.

        Args:
            params: Parameters nested as `declare()`.
            layout: How activations are split over a mesh. The devices that split tokens may then
                hold parts of the matrix.

        Raises:
            ValueError: The model ends in a value head or in a reward head.

        >>> Decoder(tiny_spec()).head_matrix({"embed": jnp.ones((8, 4))}).shape
        (4, 8)
        """
        spec = self.spec
        if spec.value_head or spec.reward_head:
            head = "value" if spec.value_head else "reward"
            raise ValueError(f"a model with a {head} head has no logits; expected a language model")
        name = "embed" if spec.tied_embeddings else "head"
        if layout is None:
            return params[name].T if spec.tied_embeddings else params[name]
        matrix = split_matrix(params, spec, name, layout)
        return matrix._replace(array=matrix.array.T) if spec.tied_embeddings else matrix

    def logits(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Project onto the vocabulary: inputs in the dtype of `hidden`, sums in float32.

        With a soft-cap c the product z becomes c·tanh(z/c), in float32 (Gemma 2,
        https://arxiv.org/abs/2408.00118, section 2). Those of tokens that stand for images alone
        are `NEVER`.

        >>> hidden = jnp.ones((2, 4), jnp.bfloat16)
        >>> Decoder(tiny_spec()).logits({"embed": jnp.ones((8, 4))}, hidden).dtype
        dtype('float32')
        """
        head: Any = self.head_matrix(params)
        z = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        cap = self.spec.logit_softcap
        z = z if cap is None else cap * jnp.tanh(z / cap)
        if self.spec.vision is None:
            return z
        # a comparison splits over a sharded vocabulary; a scatter would gather the logits
        words = jnp.arange(z.shape[-1])[:, None]
        never = jnp.array(self.spec.vision.never_sampled)
        return jnp.where((words == never).any(axis=1), NEVER, z)

    def token_values(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B"]:
        r"""Compute the value of each token's state from its hidden state, $v = h \cdot w + b$.

        The critic of PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), as a linear head
        on the decoder. It is computed in float32 whatever the dtype of `hidden`. The value at index
        t has seen tokens 0 to t.

        Raises:
            KeyError: The parameters have no `score`.

        >>> head = {"score": jnp.array([[2.0], [3.0]]), "score_bias": jnp.array([0.5])}
        >>> critic = Decoder(tiny_spec(value_head=True))
        >>> critic.token_values(head, jnp.array([[[1.0, 0.0], [1.0, 1.0]]])).tolist()
        [[2.5, 5.5]]
        """
        return _scores(params, hidden) + params["score_bias"].astype(jnp.float32)[0]

    def sequence_scores(
        self,
        params: Params,
        hidden: Float[Array, "R L D"],
        row: Int[Array, " B"],
        start: Int[Array, " B"],
        size: Int[Array, " B"],
    ) -> Float32[Array, " B"]:
        r"""Compute each sequence's score from its last token's hidden state, $r = h_T \cdot w$.

        The reward model of Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155, section 3.5), as
        `transformers` has it in its `…ForSequenceClassification`: no bias, and the last token that
        is not padding. It is computed in float32 whatever the dtype of `hidden`.

        Args:
            params: Parameters nested as `declare()`.
            hidden: Hidden states of packed rows after the final norm.
            row: The row that holds each sequence.
            start: Index of each sequence's first token in its row.
            size: Number of tokens of each sequence; one of 0 tokens scores 0.

        Raises:
            KeyError: The parameters have no `score`.

        >>> hidden, ones = jnp.array([[[1.0], [2.0], [5.0]]]), jnp.array([1, 1])
        >>> head, scorer = {"score": jnp.array([[3.0]])}, Decoder(tiny_spec(reward_head=True))
        >>> scorer.sequence_scores(head, hidden, 0 * ones, ones - 1, ones + 1).tolist()
        [6.0, 6.0]
        """
        last = hidden[row, jnp.maximum(start + size - 1, 0)]
        return jnp.where(size > 0, _scores(params, last), 0.0)

    def layer(
        self,
        weights: Params,
        x: Float[Array, "R L D"],
        rope: Rotation,
        attend: Callable[[Array, Array, Array], tuple[Array, Any]],
        segment_ids: Int[Array, "R L"],
        *,
        state: DeltaState | None = None,
        layout: Layout | None = None,
        routes: Int[Array, "R L top"] | None = None,
    ) -> tuple[Float[Array, "R L D"], Any, Router]:
        """Apply one layer: x += mixed(norm(x)), then x += feed_forward(norm(x)).

        What mixes tokens is attention, or a DeltaNet in a layer that has its arrays. With
        `spec.post_norms` what is added is normed too, or, without `spec.pre_norms`, instead.
        Training and decoding differ in `attend` and `state` alone.

        Args:
            weights: One layer's arrays, without the leading `layers` axis.
            x: Residual stream; its dtype is the compute dtype.
            rope: Rotations for the rows' positions.
            attend: `(q [R L N H], k [R L K H], v [R L K H]) -> (mixed [R L N H], state)`. Training
                attends within the row; decoding writes into a cache and returns it as the state.
            segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
            state: Of a DeltaNet before the rows; None: they begin their sequences.
            layout: How activations are split over a mesh.
            routes: As for `feed_forward`.

        Returns:
            The residual stream, the state after the rows, and what the experts report.
        """
        spec, latent, output = self.spec, self.spec.latent, "output"

        def norm(x: Array, name: str, applies: bool) -> Array:
            return norm_of(spec, x, weights[name]) if applies else x

        def project(name: str, x: Array) -> Array:
            return linear(weights, spec, name, x)

        def latent_norm(name: str, x: Array) -> Array:
            return rms_norm(x, weights[name], eps=LATENT_NORM_EPS)

        h = norm(x, "attention_norm", spec.pre_norms)
        if spec.delta is not None and "delta_output" in weights:
            rms = functools.partial(rms_norm, eps=spec.norm_eps)
            functions = LayerFunctions(project, rms, ACTIVATION_FUNCTIONS[spec.activation])
            mixed, state = delta_mix(spec.delta, weights, functions, h, segment_ids, state, layout)
            output = "delta_output"
        else:
            kv_b = None
            if latent is not None:  # multi-head latent attention rotates a part of its heads
                kv_b = adapted_matrix(weights, spec, "kv_b") if latent.absorbed else None
                with jax.named_scope("qkv"):
                    q, k, v = latent_heads(latent, h, rope, project, latent_norm, kv_b)
            else:
                with jax.named_scope("qkv"):
                    q, k, v = project_heads(weights, spec, h)
                with jax.named_scope("rope"):
                    q, k = rotate(q, rope), rotate(k, rope)
            with jax.named_scope("attention"):
                mixed, state = attend(q, k, v)
            if latent is not None:
                mixed = mixed_values(latent, mixed, kv_b)
            if spec.gated_attention:
                mixed = mixed * jax.nn.sigmoid(project("attention_gate", h))
        with jax.named_scope("out"):
            out = linear(weights, spec, output, mixed, inputs=2)
        x = x + norm(out, "attention_post_norm", spec.post_norms)
        with jax.named_scope("mlp"):
            h = norm(x, "mlp_norm", spec.pre_norms)
            out, router = feed_forward(weights, spec, h, segment_ids != 0, layout, routes)
        return x + norm(out, "mlp_post_norm", spec.post_norms), state, router

    def hidden_states(
        self,
        params: Params,
        tokens: Int[Array, "R L"],
        positions: Int[Array, "R L"],
        segment_ids: Int[Array, "R L"],
        *,
        dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        layout: Layout | None = None,
        inputs: RowInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "R L D"], Router]:
        """Run the decoder over packed rows, by recorded choices of experts where there are any.

        Args:
            params: Parameters nested as `declare()`.
            tokens: Token ids.
            positions: Index of each token within its own sequence.
            segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
            dtype: Of the computation, whatever the parameters' dtype.
            remat: Policy of `models.layers`: what of a layer is stored for the backward pass.
            layout: How activations are split over a mesh. With sharded parameters it must be given:
                left to itself, the compiler may copy activations to all devices rather than gather
                weights. Where several devices share a row, the rows given are its pieces, as
                `Layout.split_context` makes them; features are of whole rows. None leaves
                everything to the compiler.
            inputs: What else the rows have.

        Returns:
            Hidden states after the final norm, in `dtype`, meaningless at padding; and the reports
            of `feed_forward`, stacked over the layers that have experts, an empty dict for a model
            without. With routes these have `experts` [M R L top], where tokens went, unless stages
            hold the layers.

        >>> decoder = Decoder(tiny_spec())
        >>> params = jax.eval_shape(decoder.init_params, jax.random.key(0))
        >>> tokens, positions = jnp.array([[3, 5, 2, 7]]), jnp.array([[0, 1, 0, 1]])
        >>> rows = tokens, positions, jnp.array([[1, 1, 2, 2]])
        >>> jax.eval_shape(decoder.hidden_states, params, *rows)[0].shape
        (1, 4, 4)
        """
        spec, replays = self.spec, inputs.routes is not None
        if layout and layout.stages > 1:
            _check_stages(spec, layout.stages)
        x = embed(params, spec, tokens, dtype=dtype, layout=layout)
        turned_by = positions if inputs.rotary is None else inputs.rotary
        rows = _Row(rotations(spec, turned_by), segment_ids, inputs.routes)
        if (visual := inputs.visual) is not None:
            x = with_features(x, visual, layout)
            ahead = rest_of_image(visual.feature) if spec.attends_within_images else None
            rows = rows._replace(deep=None if visual.given.deep is None else visual, ahead=ahead)
        if layout is not None:
            if rows.deep is not None and layout.pieces > 1 and layout.stages > 1:
                raise ValueError(
                    "rows with features for several layers (DeepStack) can't be split by both "
                    f"context={layout.pieces} and stage={layout.stages}; expected one of them to "
                    "be 1"
                )
            x = layout.constrain(x)
        stacks = stacked_layers(params, spec, replays=replays, deepens=rows.deep is not None)
        reports = list[Router]()
        used = dict.fromkeys(stacks, 0)
        for block in spec.blocks:
            in_stages = layout is not None and layout.stages > 1 and block.repeats > 1
            held, steps = dict[str, _Layers](), dict[str, _Step]()
            for name in dict(block.runs):
                held[name], looked_up = _of_block(stacks[name], block, name, used, in_stages)
                steps[name] = self._layer_step(dtype, remat, layout, looked_up)
            repeat = functools.partial(_run_block, steps, block)
            if in_stages:
                assert layout is not None  # for pyright
                x, router = run_stages(repeat, x, rows, held, layout)
            else:
                x, router = jax.lax.scan(lambda x, held, f=repeat: f(x, rows, held), x, held)
            reports += [jax.tree.map(lambda report: jax.lax.collapse(report, 0, 2), router)]
        joined = [report for report in reports if report]
        if len(joined) > 1:
            joined = [jax.tree.map(lambda *parts: jnp.concatenate(parts), *joined)]
        return norm_of(spec, x, params["final_norm"]), joined[0] if joined else {}

    def _layer_step(
        self, dtype: DTypeLike, remat: str, layout: Layout | None, looked_up: Params | None
    ) -> _Step:
        """Return the body of the scan over layers: `(x, rows, layer) -> (x, router)`.

        The weights of a layer are given, or their number in the arrays in which they are looked up.
        """
        spec = self.spec
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
            options = attention_options(spec, layer, weights)._replace(ahead=rows.ahead)
            x, _, router = self.layer(
                weights,
                x,
                rows.rope.of(layer),
                lambda q, k, v: (attention(q, k, v, rows.segment_ids, options), None),
                rows.segment_ids,
                layout=layout,
                routes=rows.routes_in(layer),
            )
            if rows.deep is not None and layer.number is not None:
                x = deepened(x, rows.deep, layer.number, layout)
            if rows.routes is None or (layout and layout.stages > 1):
                router.pop("experts", None)  # what stages report is added up
            return constrain(x), router

        return rematerialize(body, remat, looks_up=looked_up is not None)

    def init_cache(
        self, batch: int, length: int, *, dtype: DTypeLike, kv_cache_dtype: str = "auto"
    ) -> Cache:
        """Make an empty cache for `ModelSpec.for_decoding`; see `models.cache.init_cache`."""
        spec = self.spec.for_decoding
        return init_cache(spec, batch, length, dtype=dtype, kv_cache_dtype=kv_cache_dtype)

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        dtype: DTypeLike = jnp.float32,
        layout: Layout | None = None,
        inputs: RowInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Run the next T tokens of each row, writing their slots and attending up to them.

        With T = 1 it is a step of decoding, with more it reads a piece of a prompt.

        Args:
            params: Parameters nested as `declare()`, stacked or `by_layer`.
            cache: Filled below `positions`; donate it under `jax.jit`, it is updated in place.
            tokens: The rows' next tokens.
            positions: Their positions, in order and without a gap, each below S. Of a token at S or
                more nothing is written, and its result means nothing: so rows are padded.
            dtype: Of the computation.
            layout: How rows are split over a mesh; None leaves it to the compiler.
            inputs: What else the rows have; routes are not replayed here.

        Returns:
            Hidden states after the final norm, and the cache with the tokens' keys and values.

        >>> decoder = Decoder(tiny_spec())
        >>> params = jax.eval_shape(decoder.init_params, jax.random.key(0))
        >>> cache = decoder.init_cache(1, 8, dtype="float32")
        >>> tokens, positions = jnp.array([[3, 5, 2]]), jnp.array([[0, 1, 2]])
        >>> jax.eval_shape(decoder.extend, params, cache, tokens, positions)[0].shape
        (1, 3, 4)
        """
        spec = self.spec.for_decoding
        rows, every = jnp.arange(tokens.shape[0])[:, None], slice(None)
        at = (rows, every, every, positions), (rows, every, positions)
        real = positions < cache.keys[0].shape[3]

        def attend(
            number: int, options: Attending, q: Array, k: Array, v: Array
        ) -> tuple[Array, LayerCache]:
            layer = write_kept(spec, cache.layer(number), k, v, at)
            keys, mixed_in, of_keys, of_values = layer
            if mixed_in is None or keys_are_values(spec):
                mixed_in = keys.swapaxes(2, 3)
                of_values = None if of_keys is None else of_keys[:, :, :1].swapaxes(2, 3)
            if of_keys is not None:
                mixed_in = mixed_in[..., : scaled_widths(spec)[0]]
            return attend_cache(q, keys, mixed_in, positions, options, of_keys, of_values), layer

        _, visual, rotary = inputs
        given = _Rows(tokens, positions, real, cache.states, visual, rotary)
        hidden, kept, experts = _run(params, spec, attend, given, dtype=dtype, layout=layout)
        return hidden, kept._replace(routes=record_in_rows(cache.routes, experts, positions))

    def extend_pages(
        self,
        params: Params,
        pool: Cache,
        tables: PageTables,
        tokens: Int[Array, " B"],
        positions: Int[Array, " B"],
        *,
        dtype: DTypeLike = jnp.float32,
        layout: Layout | None = None,
        rotary: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Run the next token of each row as `extend` does, but over the pages of a pool in place.

        A token's keys and values are written into its page, which nobody else may read or write.

        Args:
            params: As for `extend`.
            pool: A cache of pages [parts, pages, …] for each layer; donate it under `jax.jit`. Rows
                belong to the parts in order, as many to each. Its `states` are those of the rows.
            tables: The pages of each row, within its part, and what attends over them.
            tokens: The rows' next tokens.
            positions: Their positions; negative in an empty row, of which nothing is written.
            dtype: Of the computation.
            layout: How rows, and parts of the pool, are split over a mesh; None: there is one part.
            rotary: By which queries and keys are rotated, where that is not the position: after
                images, for a model with `mrope_sections`.

        Returns:
            Hidden states after the final norm, and the pool with the tokens' keys and values.

        Raises:
            ValueError: There is no layout for several parts.
        """
        spec = self.spec.for_decoding
        if layout is None and pool.keys[0].shape[0] != 1:
            parts = len(pool.keys[0])
            raise ValueError(f"expected a pool of one part without a layout, got {parts}")

        def attend(
            number: int, options: Attending, q: Array, k: Array, v: Array
        ) -> tuple[Array, LayerCache]:
            def on_device(sinks: Any, *arrays: Any) -> tuple[Array, LayerCache]:
                own = options._replace(sinks=sinks)
                return _attend_part(spec, tables.kernel, own, *arrays)

            heads = options.sinks, q[:, 0], k[:, 0], v[:, 0]
            where = (pool.layer(number), tables.table, positions)
            mixed, layer = _on_each(layout, on_device, heads, *where)
            return mixed[:, None], layer

        turned_by = None if rotary is None else rotary[:, None]
        at = positions[:, None]
        rows = _Rows(tokens[:, None], at, at >= 0, pool.states, rotary=turned_by)
        hidden, kept, experts = _run(params, spec, attend, rows, dtype=dtype, layout=layout)
        routes = record_in_pages(pool.routes, experts, tables.table, positions)
        return hidden[:, 0], kept._replace(routes=routes)

"""The programs that the engine runs on devices for a few shapes, and what they are given."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from jaxrl_llm.compilation import (
    BACKGROUND,
    PendingProgram,
    Task,
    compile_all,
    compiler_options,
    compiles_ahead,
)
from jaxrl_llm.models.arrays import ArrayDecl, by_layer
from jaxrl_llm.models.cache import Cache, PageTables, empty_record
from jaxrl_llm.models.inputs import (
    FrameBounds,
    PatchRows,
    RowInputs,
    VisualFeatures,
    VisualTokens,
    patch_rows,
)
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.quantization import is_quantized, quantize_stack, quantized_dtypes
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, SamplingParams, ScoredTokens
from jaxrl_llm.rollout.native.images import encode_into
from jaxrl_llm.rollout.native.page_pool import (
    FEWEST_ROWS,
    PAGE,
    PATCHES_AT_ONCE,
    Sizes,
    StatePagePool,
    StateSlots,
    gather_states,
    scatter_states,
    touched,
)
from jaxrl_llm.rollout.native.sampler import (
    BatchSamplingParams,
    Extras,
    choose_tokens,
    limits_in_use,
)
from jaxrl_llm.rollout.native.scheduler import SequenceState
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.checksum import checksum
from jaxrl_llm.sharding.layout import BATCH, Layout, over_batch
from jaxrl_llm.sharding.reshard import moved_bytes, reshard

# What the engine runs on devices: pages gathered into rows, prompts read, tokens drawn.
#
# Keys and values live in a pool of pages, [parts, pages, …] per layer and within a page as in
# `models.cache.Cache`; `parts` is the number of parts of a batch, each of which has pages of its
# own. States of layers that have no keys lie in slots of their own (`native.page_pool`).
# A step of decoding works on rows, gathered from the pages of B sequences, and what it adds goes
# back to pages. Where there is a kernel for it (`models.paged_triton`) it works on the pages.

POSITIONS = {"keys": 3, "values": 2, "key_scales": 3, "value_scales": 2, "routes": 2}
"""Along which axis of a row's arrays positions lie, by their field of `models.cache.Cache`."""

MOST_TOP_LOGPROBS = 20
"""The most of the likeliest tokens that are reported."""


class DecodeState(NamedTuple):
    """Sequences that are decoded, one per row.

    Attributes:
        tokens: the newest token of each, not yet in the cache.
        positions: its position.
        generated: tokens generated so far.
        left: how many tokens may follow; 0 in an empty row.
        stop_ids: tokens that end the answer, padded with -1.
        sampling: how tokens are drawn.
        rotary_delta: what is added to positions to rotate by, for a model with
            `has_rotary_positions`; None: it is another.
    """

    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    generated: Int[Array, " B"]
    left: Int[Array, " B"]
    stop_ids: Int[Array, "B stops"]
    sampling: BatchSamplingParams
    rotary_delta: Int[Array, " B"] | None = None


class DecodeOutput(NamedTuple):
    """What a chunk of steps drew.

    Attributes:
        counts: tokens of each row.
        tokens: the tokens.
        logprobs: their log-probs.
        top_ids: the likeliest tokens of each step, where `Extras` were given.
        top_logprobs: their log-probs.
    """

    counts: Int[Array, " B"]
    tokens: Int[Array, "B steps"]
    logprobs: Float32[Array, "B steps"]
    top_ids: Int[Array, "B steps top"] | None
    top_logprobs: Float32[Array, "B steps top"] | None


def make_pool(
    model: Model,
    parts: int,
    pages: int,
    size: int,
    *,
    slots: int = 0,
    dtype: DTypeLike = jnp.float32,
    kv_cache_dtype: str = "auto",
    routes: RouteShape | None = None,
) -> Cache:
    """Make an empty pool: pages of `size` tokens, and slots if the model has states.

    With `routes` there is room for choices of experts, too.
    """
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    flat = model.init_cache(parts * pages, size, **options)
    states = flat.states and model.init_cache(parts * slots, 1, **options).states
    flat = flat._replace(states=())
    if routes is not None:
        flat = flat._replace(routes=empty_record(routes, parts * pages, size))
    pool = jax.tree.map(lambda x: x.reshape(parts, pages, *x.shape[1:]), flat)
    states = jax.tree.map(lambda x: x.reshape(parts, slots, *x.shape[1:]), states)
    return pool._replace(states=states)


def page_size(pool: Cache) -> int:
    """Return how many tokens a page, or a row, holds."""
    return pool.keys[0].shape[-1]


def gather_pages(
    pool: Cache, table: Int[Array, "B n"], slots: Int[Array, " B"] | None = None
) -> Cache:
    """Lay the pages of each sequence side by side: rows of n·size tokens.

    Args:
        pool: as `make_pool`.
        table: page numbers within the row's part; a number past the pages gives zeros.
        slots: of the rows' states, as `gather_states`; None: the rows have none.

    >>> from jaxrl_llm.models.decoder import Decoder
    >>> model = Decoder(tiny_spec())
    >>> gather_pages(make_pool(model, 1, 5, 16), jnp.array([[3, 1], [2, 5]])).keys[0].shape
    (2, 1, 2, 32)
    """
    held = {
        name: tuple(_side_by_side(pages, table, axis) for pages in getattr(pool, name))
        for name, axis in POSITIONS.items()
    }
    return Cache(**held, states=gather_states(pool.states, slots))


def gather_routes(
    routes: tuple[Int[Array, "parts pages 1 S choices"], ...], table: Int[Array, "B n"]
) -> Int[Array, "B n*S choices"]:
    """Lay what `Cache.routes` holds of each sequence side by side; see `gather_pages`."""
    return _side_by_side(routes[0], table, POSITIONS["routes"])[:, 0]


def _side_by_side(
    pages: Shaped[Array, "parts pages ..."], table: Int[Array, "B n"], axis: int
) -> Shaped[Array, "B ..."]:
    """Join the pages of each row along an axis of theirs."""

    def of_part(pages: Array, table: Array) -> Array:
        # a table ends in numbers past all pages
        rows = pages.at[table].get(mode="fill", fill_value=0)
        return jax.lax.collapse(jnp.moveaxis(rows, 1, axis), axis, axis + 2)

    by_part = table.reshape(pages.shape[0], -1, table.shape[1])
    return jax.lax.collapse(jax.vmap(of_part)(pages, by_part), 0, 2)


def scatter_pages(
    pool: Cache,
    rows: Cache,
    first: Int[Array, " B"],
    targets: Int[Array, "B m"],
    slots: Int[Array, " B"] | None = None,
) -> Cache:
    """Write m pages of each row to the pool, the first of them being the row's page `first`.

    Args:
        pool: as `make_pool`.
        rows: as `gather_pages` gives them.
        first: number of the first page within the row.
        targets: where its pages go, within the row's part; a number past the pages is dropped.
        slots: where its state goes, as `scatter_states`.
    """
    parts, size = pool.keys[0].shape[0], page_size(pool)
    places = first[:, None] * size + jnp.arange(targets.shape[1] * size)
    by_part = targets.reshape(parts, -1)

    def of_all(pages: Array, rows: Array, axis: int) -> Array:
        outer = [other for other in range(1, 4) if other != axis]
        place = jnp.expand_dims(jnp.minimum(places, rows.shape[axis] - 1), outer)
        new = jnp.take_along_axis(rows, place, axis=axis)
        here = (targets.shape[1], size)
        new = new.reshape(
            parts, len(places) // parts, *new.shape[1:axis], *here, *new.shape[axis + 1 :]
        )
        new = jax.lax.collapse(jnp.moveaxis(new, axis + 1, 2), 1, 3)
        return jax.vmap(lambda pages, at, x: pages.at[at].set(x, mode="drop"))(pages, by_part, new)

    held: dict[str, Any] = {}
    for name, axis in POSITIONS.items():
        both = zip(getattr(pool, name), getattr(rows, name), strict=True)
        held[name] = tuple(of_all(*arrays, axis) for arrays in both)
    return Cache(**held, states=scatter_states(pool.states, rows.states, slots))


def decode(
    params: Any,
    model: Model,
    cache: Cache,
    state: DecodeState,
    extras: Extras | None = None,
    *,
    steps: int,
    layout: Layout | None = None,
    tables: PageTables | None = None,
) -> tuple[Cache, DecodeOutput]:
    """Decode up to `steps` tokens in every row; stop early when all have ended.

    Args:
        params: in the compute dtype.
        model: the model.
        cache: of the rows; the pool, with the rows' states, where there are tables.
        state: where each sequence stands.
        extras: what else requests ask for.
        steps: the most tokens.
        layout: how rows are split over a mesh.
        tables: the pages of each row, with room for the tokens; the model has `extend_pages`.
    """
    size = state.tokens.shape[0]
    output = DecodeOutput(
        jnp.zeros(size, jnp.int32),
        jnp.zeros((size, steps), jnp.int32),
        jnp.zeros((size, steps), jnp.float32),
        *_no_top(model, size, steps, extras),
    )
    seen = None if extras is None else _mark_seen(model, extras.tokens)
    limits = limits_in_use(state.sampling)

    def some_left(carry: tuple[Any, ...]) -> Bool[Array, ""]:
        step, _, state, _, _ = carry
        return (step < steps) & jnp.any(state.left > 0)

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, cache, state, seen, output = carry
        going = state.left > 0
        hidden, cache = _extend_by_one(params, model, cache, state, tables, layout)
        changes = None if extras is None else (seen, extras)
        logits = model.logits(params, hidden)
        tokens, logprobs = choose_tokens(logits, state.generated, state.sampling, changes, limits)
        if extras is not None:
            seen = seen.at[jnp.arange(size), tokens].set(True)
        output = _record(output, step, going, tokens, logprobs)
        return step + 1, cache, advance(state, tokens), seen, output

    start = (jnp.zeros((), jnp.int32), cache, state, seen, output)
    _, cache, _, _, output = jax.lax.while_loop(some_left, body, start)
    return cache, output


def _extend_by_one(
    params: Any,
    model: Model,
    cache: Cache,
    state: DecodeState,
    tables: PageTables | None,
    layout: Layout | None,
) -> tuple[Float[Array, "B D"], Cache]:
    """Run the newest token of each row that goes on."""
    going = state.left > 0
    options: dict[str, Any] = {"dtype": cache.compute_dtype, "layout": layout}
    rotary = None if state.rotary_delta is None else state.positions + state.rotary_delta
    if tables is not None and model.extend_pages is not None:
        if rotary is not None:
            options["rotary"] = rotary
        at = jnp.where(going, state.positions, -1)
        return model.extend_pages(params, cache, tables, state.tokens, at, **options)
    if rotary is not None:
        all_three = jnp.broadcast_to(rotary[:, None, None], (len(rotary), 1, 3))
        options["inputs"] = RowInputs(rotary=all_three)
    at = jnp.where(going, state.positions, page_size(cache))[:, None]
    tokens = state.tokens[:, None]
    hidden, cache = model.extend(params, cache, tokens, at, **options)
    return hidden[:, 0], cache


def copy_pages(pool: Cache, source: Int[Array, " B"], target: Int[Array, " B"]) -> Cache:
    """Copy a page of each row; the rows are those of the parts in order.

    Args:
        pool: as `make_pool`.
        source: page numbers within the row's part.
        target: where they go; a number past the pages is dropped.
    """
    parts = pool.keys[0].shape[0]

    def copied(pages: Array) -> Array:
        def of_part(pages: Array, source: Array, target: Array) -> Array:
            # what is read for a target that is dropped does not matter
            return pages.at[target].set(pages.at[source].get(mode="clip"), mode="drop")

        return jax.vmap(of_part)(pages, source.reshape(parts, -1), target.reshape(parts, -1))

    return jax.tree.map(copied, pool._replace(states=()))._replace(states=pool.states)


def advance(state: DecodeState, tokens: Int[Array, " B"]) -> DecodeState:
    """Append one token to every sequence that goes on; those that it ends have nothing left."""
    going = state.left > 0
    stopped = jnp.any(tokens[:, None] == state.stop_ids, axis=1)
    return state._replace(
        tokens=jnp.where(going, tokens, state.tokens),
        positions=state.positions + going,
        generated=state.generated + going,
        left=jnp.where(going & ~stopped, state.left - 1, 0),
    )


def _record(
    output: DecodeOutput,
    step: Int[Array, ""],
    going: Bool[Array, " B"],
    tokens: Int[Array, " B"],
    logprobs: Float32[Array, "B V"],
) -> DecodeOutput:
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    top_ids, top_logprobs = output.top_ids, output.top_logprobs
    if top_ids is not None and top_logprobs is not None:
        values, ids = jax.lax.top_k(logprobs, top_ids.shape[2])
        top_ids = top_ids.at[:, step].set(ids)
        top_logprobs = top_logprobs.at[:, step].set(values)
    return DecodeOutput(
        output.counts + going,
        output.tokens.at[:, step].set(tokens),
        output.logprobs.at[:, step].set(chosen),
        top_ids,
        top_logprobs,
    )


def _no_top(
    model: Model, size: int, steps: int, extras: Extras | None
) -> tuple[Array | None, Array | None]:
    if extras is None:
        return None, None
    shape = (size, steps, min(MOST_TOP_LOGPROBS, model.vocab_size))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _mark_seen(model: Model, tokens: Int[Array, "B S"]) -> Bool[Array, "B V"]:
    """Mark the tokens of each row."""
    # rows are padded with the vocabulary's size; a request's own ids are below (`check_request`)
    none = jnp.zeros((len(tokens), model.vocab_size), bool)
    return none.at[jnp.arange(len(tokens))[:, None], tokens].set(True, mode="drop")


# The weights of the engine: their layout and dtypes, and how they get there.

_quantize_stack = jax.jit(quantize_stack, static_argnums=(1, 2))


class EngineWeights:
    """Where an engine's weights lie, each layer's arrays apart.

    Args:
        model: whose weights they are.
        layout: how they are split.
        dtype: of the computation.
        quantized: hold the layers' matrices in float8.

    Attributes:
        given_layout: of weights that need no move on their way in.
        checksum: of the weights as `load` returns them, jitted.
    """

    def __init__(self, model: Model, layout: Layout, dtype: Any, *, quantized: bool) -> None:
        """Copy nothing yet."""
        self._layout = layout
        self._declared = model.declare_quantized() if quantized else model.declare()
        self._given_dtypes = model.compute_dtypes(dtype)
        self._dtypes = quantized_dtypes(self._declared, self._given_dtypes)
        self.given_layout = layout.of(model.declare())
        self._stacked_layout = layout.of(self._declared)
        self._layers_layout = jax.tree.map(
            self._home_by_layer, self._declared, self._stacked_layout
        )
        homes = jax.tree.structure(self._declared).flatten_up_to(self._layers_layout)
        self._unstack = [
            jax.jit(tuple, out_shardings=home) if isinstance(home, tuple) else None
            for home in homes
        ]
        self.checksum: Any = jax.jit(checksum)
        self._ahead: PendingProgram | None = None

    def compile_ahead(self) -> None:
        """Begin to compile what copies weights into each layer's arrays, and their checksum."""

        def compile_copies() -> None:
            stacks = zip(*map(jax.tree.leaves, (self._declared, self._dtypes)), strict=True)
            homes = jax.tree.leaves(self._stacked_layout)
            for split, (declared, dtype), home in zip(self._unstack, stacks, homes, strict=True):
                if split is not None:
                    like = jax.ShapeDtypeStruct(declared.shape, dtype, sharding=home)
                    split.lower(like).compile()
            self.checksum.lower(self.shapes()).compile()

        self._ahead = PendingProgram("weights", compile_copies)
        BACKGROUND.add([self._ahead])

    def close(self) -> None:
        """Compile no more."""
        if self._ahead is not None:
            BACKGROUND.drop([self._ahead])

    def load(self, params: Any, *, donate: bool = False) -> tuple[Any, int]:
        """Copy weights into the engine's layout and dtype.

        Returns:
            The weights, and the bytes that travelled to devices that did not hold them.
        """
        if self._ahead is not None:
            self._ahead.result()
        narrow = self._quantize(params, donate=donate)
        moved = moved_bytes(narrow, self._stacked_layout, dtype=self._dtypes)
        whole = reshard(narrow, self._stacked_layout, dtype=self._dtypes, donate=donate)
        del narrow
        arrays, tree = jax.tree.flatten(whole)
        del whole
        for i, split in enumerate(self._unstack):
            if split is not None:
                arrays[i] = split(arrays[i])
        return jax.tree.unflatten(tree, arrays), moved

    def shapes(self) -> Any:
        """Return the weights as shapes in their layout; nothing is allocated."""
        stacked = jax.tree.map(
            lambda d, dtype: jax.ShapeDtypeStruct(d.shape, dtype), self._declared, self._dtypes
        )
        weights = jax.eval_shape(lambda arrays: by_layer(arrays, self._declared), stacked)
        return as_shapes(weights, self._layers_layout)

    def _quantize(self, params: Any, *, donate: bool) -> Any:
        """Quantize what the engine holds so, a stack of matrices after the other, where it is."""
        tree = jax.tree.structure(self._given_dtypes)
        parts = self._declared, params, self._given_dtypes
        stacks = []
        for declared, stack, dtype in zip(*map(tree.flatten_up_to, parts), strict=True):
            if not is_quantized(declared):
                stacks.append(stack)
                continue
            stacks.append(_quantize_stack(stack, declared.inputs, dtype))
            if donate:
                jax.block_until_ready(stacks[-1])
                stack.delete()
        return jax.tree.unflatten(tree, stacks)

    def _home_by_layer(self, declared: ArrayDecl, home: Any) -> Any:
        """Return the layout of an array, or of each layer's where it is a stack of layers."""
        if not declared.is_stack:
            return home
        return (self._layout.sharding(*home.spec[1:]),) * declared.shape[0]


def as_shapes(tree: Any, layout: Any) -> Any:
    """Return arrays as shapes in a layout."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout
    )


# The programs that the engine runs for a few shapes, and what they are given.


class PrefillChunk(NamedTuple):
    """Parts of prompts that are read at once, one per row.

    Attributes:
        table: pages of what was read before, and room for the new ones, as `gather_pages` takes it.
        tokens: of each prompt, padded on the right.
        start: position of the first token of each.
        lengths: tokens of each; 0 for none.
        targets: where the pages go that they touch, as in `scatter_pages`.
        slots: of their states, where the model has some.
        features: where those of each token are, in the slots of its part, negative for text; None:
            the model reads text alone.
        rotary: time, height and width of each token, for a model with `has_rotary_positions`.
    """

    table: Int[Array, "B n"]
    tokens: Int[Array, "B T"]
    start: Int[Array, " B"]
    lengths: Int[Array, " B"]
    targets: Int[Array, "B m"]
    slots: StateSlots | None = None
    features: Int[Array, "B T"] | None = None
    rotary: Int[Array, "B T 3"] | None = None


def prefill(
    params: Any,
    model: Model,
    pool: Cache,
    chunk: PrefillChunk,
    held: VisualFeatures | None = None,
    *,
    layout: Layout | None = None,
) -> Cache:
    """Read a part of each prompt and keep its keys and values, and its state.

    Args:
        params: in the compute dtype.
        model: the model.
        pool: as `make_pool`.
        chunk: what to read.
        held: features of images and videos, if the model reads some.
        layout: how prompts are split over a mesh.
    """
    source, target = chunk.slots or (None, None)
    rows = gather_pages(pool, chunk.table, source)
    index, outside = jnp.arange(chunk.tokens.shape[1]), page_size(rows)
    positions = chunk.start[:, None] + index
    positions = jnp.where(index < chunk.lengths[:, None], positions, outside)
    options: dict[str, Any] = {"dtype": rows.compute_dtype, "layout": layout}
    if held is not None and chunk.features is not None:
        visual = gather_features(held, chunk.features)
        options["inputs"] = RowInputs(visual=visual, rotary=chunk.rotary)
    _, rows = model.extend(params, rows, chunk.tokens, positions, **options)
    return scatter_pages(pool, rows, chunk.start // page_size(pool), chunk.targets, target)


def gather_features(held: VisualFeatures, slots: Int[Array, "B T"]) -> VisualTokens:
    """Return the features of tokens of rows, which belong to the parts in order.

    Args:
        held: as `Programs.encode` keeps them.
        slots: within the row's part; negative for text.

    >>> held = VisualFeatures(jnp.array([[[1.0], [2.0]]]))
    >>> visual = gather_features(held, jnp.array([[-1, 1], [0, -1]]))
    >>> visual.given.features[..., 0].tolist(), visual.feature.tolist()
    ([[1.0, 2.0], [1.0, 1.0]], [[-1, 1], [0, -1]])
    """
    by_part = slots.reshape(len(held.features), -1, slots.shape[1])

    def of_part(held: Array, at: Array) -> Array:
        # slots come from `FeatureSlots`, within the part's; text reads slot 0, and is masked
        return jax.vmap(lambda at: held.at[..., at, :].get(mode="clip"))(at)

    def of_rows(held: Array) -> Array:
        return jax.lax.collapse(jax.vmap(of_part)(held, jnp.maximum(by_part, 0)), 0, 2)

    own = jnp.arange(slots.shape[1])
    return VisualTokens(jnp.where(slots >= 0, own, -1), jax.tree.map(of_rows, held))


READ_AT_ONCE = 256
"""Tokens of each row whose logits exist at once."""


def score_rows(
    params: Any,
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    dtype: Any,
    layout: Layout | None = None,
) -> ScoredTokens:
    """Read rows of tokens a part after the other, and score each token.

    Args:
        params: in the compute dtype, each layer's arrays apart.
        model: the model.
        tokens: padded on the right to a multiple of `READ_AT_ONCE`, if longer than that.
        lengths: tokens of each row; what is beyond them is meaningless.
        dtype: of the computation.
        layout: how rows are split over a mesh.

    Returns:
        Arrays with the rows first: entry t is of token t given those before it. The log-prob of one
        that is never drawn is `LEAST_LOGPROB`.
    """
    rows, width = tokens.shape
    size = min(width, READ_AT_ONCE)
    targets = jnp.roll(tokens, -1, axis=1)  # what a state tells is of the next token
    most = min(MOST_TOP_LOGPROBS, model.vocab_size)

    def read(cache: Any, first: Int[Array, ""]) -> tuple[Any, tuple[Array, Array, Array]]:
        index = first + jnp.arange(size)
        positions = jnp.where(index < lengths[:, None], index, width)
        part, target = (
            jax.lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (tokens, targets)
        )
        hidden, cache = model.extend(params, cache, part, positions, dtype=dtype, layout=layout)
        logprobs = jax.nn.log_softmax(model.logits(params, hidden), axis=-1)
        own = jnp.take_along_axis(logprobs, target[..., None], axis=-1)[..., 0]
        own = jnp.maximum(own, LEAST_LOGPROB)  # a mark of an image is never drawn
        values, ids = jax.lax.top_k(logprobs, most)
        return cache, (own, ids, values)

    cache = model.init_cache(rows, width, dtype=dtype, kv_cache_dtype="auto")
    _, parts = jax.lax.scan(read, cache, jnp.arange(0, width, size))

    def joined(x: Array) -> Array:
        whole = jnp.moveaxis(x, 0, 1).reshape(rows, width, *x.shape[3:])
        return jnp.roll(whole, 1, axis=1).at[:, 0].set(0)

    scores: Any = map(joined, parts)
    return ScoredTokens(*scores)


STOP_IDS = 8
"""The most stop tokens of a request."""

BIASES = 300
"""The most biased tokens of a request."""

Placed = Sequence[SequenceState | None]
"""Whom each row of a program belongs to."""

SlotsOf = Callable[[SequenceState, int], Int[np.ndarray, " tokens"]]
"""(sequence, number of one of its visuals) -> where the features of that visual's tokens are."""


def compiled_once(trace: Callable[..., Any]) -> Any:
    """Make of a method that traces a program for a size one that returns it compiled.

    `Programs.trace` still traces it.
    """

    @functools.wraps(trace)
    def compiled(self: "Programs", *size: Any) -> Any:
        return self.pending(trace.__name__, *size).result()

    return compiled


class Programs:
    """What runs on devices, for one model in one layout, and what it is given of sequences.

    A program is a method: (its size) -> what takes its inputs, compiled once.

    Args:
        model: what they run.
        layout: how rows and weights are split.
        shapes: of all programs.
        dtype: of weights, cache and computation.
        kv_cache_dtype: of the cache, where it is not auto.
        records_routes: keep the experts that tokens go to beside their keys and values; the model
            has a `route_shape`.
        kernel: what attends over pages in place; None where pages are gathered into rows.
        quantized: hold the layers' matrices in float8.

    Attributes:
        weights: where they lie.
        route_shape: of what is kept of each token's experts; None: nothing.
        vision: the model's tower; None: it reads text alone.
        has_rotary: whether the model is told what to rotate by.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        shapes: Sizes,
        dtype: Any,
        kernel: Callable[..., jax.Array] | None = None,
        *,
        quantized: bool = False,
        kv_cache_dtype: str = "auto",
        records_routes: bool = False,
    ) -> None:
        """Compile nothing yet."""
        self.kv_cache_dtype = kv_cache_dtype
        self.route_shape = model.route_shape if records_routes else None
        self.kernel, shapes = kernel, shapes._replace(has_rows=kernel is None)
        self.model, self.layout, self.sizes, self.dtype = model, layout, shapes, jnp.dtype(dtype)
        self.vision = model.vision
        self.has_rotary = self.vision is not None and model.has_rotary_positions
        self.weights = EngineWeights(model, layout, self.dtype, quantized=quantized)
        self.by_row = over_batch(layout.mesh)
        pool = jax.eval_shape(self._empty_pool)
        heads = [self._split_heads(pages.shape[2]) for pages in jax.tree.leaves(pool)]
        place = functools.partial(jax.tree.unflatten, jax.tree.structure(pool))
        self._pool_layout = place([layout.sharding(BATCH, None, split) for split in heads])
        self._rows_layout = place([layout.sharding(BATCH, split) for split in heads])
        self._programs: dict[tuple[Any, ...], PendingProgram] = {}

    def warm_up(self, sequences: int | None = None) -> None:
        """Compile everything but what few requests ask for.

        On CPUs this returns at once. What is needed before it is compiled is compiled then.

        Args:
            sequences: how many are to be sampled first; None: as many as may run. What they need
                comes first.
        """
        keys = list(self._keys(sequences or self.sizes.rows[-1]))
        programs = [self.pending(*key) for key in keys]
        if compiles_ahead(self.layout.mesh.devices.flat):
            first = 1 + [name for name, *_ in keys].index("prefill")
            BACKGROUND.add(programs[:first])
            BACKGROUND.add(programs[first:], later=True)
        else:
            compile_all(programs)

    def close(self) -> None:
        """Compile no more; wait for what is being compiled."""
        BACKGROUND.drop(self._programs.values())
        self.weights.close()

    def _keys(self, sequences: int) -> Iterable[tuple[Any, ...]]:
        """Yield name and size of each program, in the order in which they are likely needed.

        As sequences end, fewer rows are decoded; more than at first come with others.
        """
        first = next((n for n in self.sizes.rows if n >= sequences), self.sizes.rows[-1])
        fewer = [n for n in reversed(self.sizes.rows) if n <= first]
        more = [n for n in self.sizes.rows if n > first]
        prefill = sorted(
            self.sizes.prefill_shapes,
            key=lambda shape: (shape[1], shape[0] if sequences <= FEWEST_ROWS else -shape[0]),
        )
        decoded = [
            (rows, width)
            for rows, width in itertools.product([*fewer, *more], self.sizes.widths)
            if self.sizes.fits(rows, width)
        ]
        yield ("pool",)
        if self.sizes.patch_shapes:
            yield ("features",)
        encoded = [("encode", length, longest) for length, longest in self.sizes.patch_shapes]
        yield from (key for key in encoded if key[1] <= PATCHES_AT_ONCE)
        for rows, width in decoded:
            yield "decode", rows, width, False
            if self.route_shape is not None:
                yield "routes", rows, width // PAGE
            if self.sizes.has_rows:
                yield "gather", rows, width // PAGE
            elif width == self.sizes.widths[0]:
                yield "copy", rows
            if (rows, width) == decoded[0]:
                for prompts, length in prefill:
                    for pages in sorted({self.sizes.width(length), self.sizes.widths[-1]}):
                        yield "prefill", prompts, length, pages // PAGE
        yield from (key for key in encoded if key[1] > PATCHES_AT_ONCE)

    def trace(self, name: str, *size: Any) -> Any:
        """Trace one program for shapes alone."""
        return getattr(type(self), name).__wrapped__(self, *size)

    def pending(self, *key: Any) -> PendingProgram:
        """Return a program that is compiled now or later, by its name and size."""
        if key not in self._programs or self._programs[key].has_failed:
            label = f"{key[0]} {' x '.join(str(n) for n in key[1:3])}".strip()
            self._programs[key] = PendingProgram(label, lambda: self.trace(*key).lower().compile())
        return self._programs[key]

    @compiled_once
    def pool(self) -> Any:
        """Make an empty pool."""
        return jax.jit(self._empty_pool, out_shardings=self._pool_layout).trace()

    @compiled_once
    def gather(self, rows: int, pages: int) -> Any:
        """Lay the pages of each row side by side: (pool, table, slots) -> rows."""
        run = jax.jit(gather_pages, out_shardings=self._rows_layout)
        return run.trace(self.shapes()[1], *self._gathered(rows, pages))

    @compiled_once
    def routes(self, rows: int, pages: int) -> Any:
        """Gather the experts that tokens in the pages of each row went to: (routes, table)."""
        run = jax.jit(gather_routes, out_shardings=self.by_row)
        table = self._shapes(self.page_table([None] * rows, pages))
        return run.trace(self.shapes()[1].routes, table)

    @compiled_once
    def copy(self, rows: int) -> Any:
        """Copy a page of each row: (pool, sources, targets) -> pool, which is donated."""
        run = jax.jit(copy_pages, donate_argnums=0, out_shardings=self._pool_layout)
        pages = self._shapes(np.zeros(rows, np.int32))
        return run.trace(self.shapes()[1], pages, pages)

    @compiled_once
    def prefill(self, rows: int, length: int, pages: int) -> Any:
        """Prefill parts of prompts: (weights, pool, chunk, features) -> pool, which is donated."""

        def prefill_chunk(params: Any, pool: Cache, chunk: PrefillChunk, held: Any) -> Cache:
            return prefill(params, self.model, pool, chunk, held, layout=self.layout)

        run = self._jit(prefill_chunk, donate_argnums=1, out_shardings=self._pool_layout)
        chunk = self._shapes(self.prefill_chunk([None] * rows, [0] * rows, length, pages))
        return run.trace(*self.shapes(), chunk, self.feature_shapes())

    @compiled_once
    def decode(self, rows: int, width: int, has_extras: bool) -> Any:
        """Decode a chunk; the pool, and rows if there are some, are donated.

        (weights, pool, rows, state, extras, targets, slots) -> pool, rows, `DecodeOutput`; with a
        kernel (weights, pool, state, extras, table, slots) -> pool, `DecodeOutput`.
        """
        empty, kernel, model = [None] * rows, self.kernel, self.model
        run = functools.partial(decode, steps=self.sizes.steps, layout=self.layout)

        def in_rows(
            params: Any, pool: Cache, rows: Cache, state: DecodeState, *rest: Any
        ) -> tuple[Cache, Cache, DecodeOutput]:
            extras, targets, slots = rest
            rows, output = run(params, model, rows, state, extras)
            _, to = slots or (None, None)
            pool = scatter_pages(pool, rows, state.positions // PAGE, targets, to)
            return pool, rows, output

        def in_place(
            params: Any, pool: Cache, state: DecodeState, *rest: Any
        ) -> tuple[Cache, DecodeOutput]:
            assert kernel is not None
            extras, table, slots = rest
            source, target = slots or (None, None)
            cache = pool._replace(states=gather_states(pool.states, source))
            tables = PageTables(table, kernel)
            cache, output = run(params, model, cache, state, extras, tables=tables)
            states = scatter_states(pool.states, cache.states, target)
            return cache._replace(states=states), output

        def decode_chunk(*arrays: Any) -> tuple[Any, ...]:  # names the program
            return (in_rows if kernel is None else in_place)(*arrays)

        params, *caches = self.shapes()
        homes, pages = [self._pool_layout], width // PAGE
        if kernel is None:
            caches.append(self.row_shapes(rows, width))
            homes.append(self._rows_layout)
            pages = touched(self.sizes.steps)
        extras = self.extras(empty, width) if has_extras else None
        inputs = self.decode_state(empty), extras, self.page_table(empty, pages)
        jitted = self._jit(
            decode_chunk,
            donate_argnums=tuple(range(1, 1 + len(caches))),
            out_shardings=(*homes, self.by_row),
        )
        return jitted.trace(params, *caches, *self._shapes((*inputs, self.state_slots(empty))))

    @compiled_once
    def features(self) -> Any:
        """Make room for the features of images and videos."""
        return jax.jit(self._empty_features, out_shardings=self.by_row).trace()

    @compiled_once
    def encode(self, length: int, longest: int) -> Any:
        """Read so many patches of each part, and keep their features, which are donated.

        (weights, features, patches, slots) -> features. The longest frame has `longest` patches.
        """
        model, parts = self.model, self.sizes.parts
        assert self.vision is not None  # for pyright: asked of models with a tower

        def encode_visuals(
            params: Any, held: VisualFeatures, patches: PatchRows, slots: Any
        ) -> VisualFeatures:
            options = {"bounds": FrameBounds(longest), "layout": self.layout}
            return encode_into(params, model, held, patches, slots, **options)

        patches = patch_rows(self.vision, [()] * parts, length)
        slots = np.zeros((parts, length // self.vision.group), np.int32)
        run = self._jit(encode_visuals, donate_argnums=1, out_shardings=self.by_row)
        inputs = self.feature_shapes(), *self._shapes((patches, slots))
        return run.trace(self.shapes()[0], *inputs)

    @compiled_once
    def score(self, rows: int, width: int) -> Any:
        """Score rows of tokens: (weights, tokens, lengths) -> `ScoredTokens`."""

        def score_chunks(params: Any, tokens: Any, lengths: Any) -> ScoredTokens:
            given = (params, self.model, tokens, lengths)
            return score_rows(*given, dtype=self.dtype, layout=self.layout)

        run = self._jit(score_chunks, out_shardings=self.by_row)
        tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        return run.trace(self.shapes()[0], *self._shapes((tokens, lengths)))

    def score_tokens(self, params: Any, tokens: Sequence[int]) -> ScoredTokens:
        """Return the log-probs of tokens; see `score_rows`. A row of each part is read."""
        width = self.sizes.width(len(tokens))
        width += -width % READ_AT_ONCE if width > READ_AT_ONCE else 0
        rows = np.zeros((self.sizes.parts, width), np.int32)
        rows[0, : len(tokens)] = tokens
        lengths = np.zeros(self.sizes.parts, np.int32)
        lengths[0] = len(tokens)
        inputs = distributed.put((rows, lengths), self.by_row)
        scores = self.score(*rows.shape)(params, *inputs)
        return ScoredTokens(*(x[0, : len(tokens)] for x in distributed.fetch(scores)))

    def page_table(
        self,
        placed: Placed,
        width: int,
        pages_of: Callable[[SequenceState], Sequence[int]] = lambda _: (),
    ) -> Int[np.ndarray, "B n"]:
        """Return pages of each row, and then numbers past all pages."""
        table = np.full((len(placed), width), self.sizes.pages, np.int32)
        for row, s in enumerate(placed):
            if s is not None:
                pages = pages_of(s)
                table[row, : len(pages)] = pages
        return table

    def state_slots(self, placed: Placed, ends: Sequence[int] | None = None) -> StateSlots | None:
        """Return where the state of each row is read and, if it has an end, written.

        Args:
            placed: whom each row belongs to.
            ends: how many tokens of each are cached then; None: nothing is written.
        """
        if not self.sizes.slots:
            return None
        source, target = np.full((2, len(placed)), self.sizes.slots, np.int32)
        for i, s in enumerate(placed):
            if s is not None:
                assert isinstance(s.pages, StatePagePool)  # for pyright: the sizes have slots
                source[i] = s.pages.slot_to_read(s.table)
                if ends is not None:
                    target[i] = s.pages.slot_to_write(s.table, ends[i])
        return source, target

    def prefill_chunk(
        self,
        placed: Placed,
        ends: Sequence[int],
        length: int,
        pages: int,
        slots_of: SlotsOf = lambda *_: np.zeros(0, np.int32),
    ) -> PrefillChunk:
        """Return what the next parts of prompts are read from.

        Args:
            placed: whose prompt each row reads, from `cached` on.
            ends: where that part ends.
            length: of the longest part.
            pages: of the longest sequence.
            slots_of: (sequence, number of its visual) -> slots of the visual's features.
        """
        tokens = np.zeros((len(placed), length), np.int32)
        start, lengths = np.zeros((2, len(placed)), np.int32)
        for i, (s, end) in enumerate(zip(placed, ends, strict=True)):
            if s is not None:
                tokens[i, : end - s.cached] = s.tokens[s.cached : end]
                start[i], lengths[i] = s.cached, end - s.cached
        upto = dict(zip(placed, ends, strict=True))
        table = self.page_table(placed, pages, lambda s: s.pages.pages_to_read(s.table, s.cached))
        targets = self.page_table(
            placed, touched(length), lambda s: s.pages.pages_to_write(s.table, s.cached, upto[s])
        )
        slots = self.state_slots(placed, ends)
        features = rotary = None
        if self.vision is not None:
            features = feature_table(placed, ends, length, slots_of)
        if self.has_rotary:
            rotary = rotary_of_rows(placed, ends, length)
        columns: Any = (table, tokens, start, lengths, targets, slots, features, rotary)
        return PrefillChunk(*columns)

    def decode_state(self, placed: Placed) -> DecodeState:
        """Return where each row stands; empty ones have nothing left."""

        def column(dtype: Any, value: Callable[[SequenceState], Any], empty: Any = 0) -> Any:
            return np.array([empty if s is None else value(s) for s in placed], dtype)

        def number(value: Callable[[SequenceState], int]) -> Any:
            return column(np.int32, value)

        def share(value: Callable[[SamplingParams], float], empty: float) -> Any:
            return column(np.float32, lambda s: value(s.request.sampling), empty)

        none = [-1] * STOP_IDS
        return DecodeState(
            tokens=number(lambda s: s.tokens[-1]),
            positions=number(lambda s: s.cached),
            generated=number(lambda s: s.generated),
            left=number(lambda s: s.left),
            stop_ids=column(
                np.int32, lambda s: [*s.request.sampling.stop_ids, *none][:STOP_IDS], none
            ),
            sampling=BatchSamplingParams(
                seeds=column(np.uint32, lambda s: s.request.seed),
                temperature=share(lambda sampling: sampling.temperature, 1.0),
                top_p=share(lambda sampling: sampling.top_p, 1.0),
                top_k=number(lambda s: s.request.sampling.top_k),
                min_p=share(lambda sampling: sampling.min_p, 0.0),
            ),
            rotary_delta=number(rotary_delta) if self.has_rotary else None,
        )

    def extras(self, placed: Placed, width: int) -> Extras:
        """Return what else the rows ask for, which few do."""
        biases, nothing = (len(placed), BIASES), self.model.vocab_size
        tokens, penalty = np.full((len(placed), width), nothing, np.int32), np.ones(len(placed))
        bias_ids, bias = np.full(biases, nothing, np.int32), np.zeros(biases, np.float32)
        for i, s in enumerate(placed):
            if s is not None:
                sampling = s.request.sampling
                tokens[i, : len(s.tokens)] = s.tokens
                penalty[i] = sampling.repetition_penalty
                for j, (token, shift) in enumerate(sampling.logit_bias):
                    bias_ids[i, j], bias[i, j] = token, shift
        columns: Any = (tokens, penalty.astype(np.float32), bias_ids, bias)
        return Extras(*columns)

    def shapes(self) -> tuple[Any, Cache]:
        """Return weights and pool as shapes in their layouts; nothing is allocated."""
        pool = jax.eval_shape(self._empty_pool)
        return self.weights.shapes(), as_shapes(pool, self._pool_layout)

    def row_shapes(self, rows: int, width: int) -> Cache:
        """Return rows as shapes in their layout."""
        given = self.shapes()[1], *self._gathered(rows, width // PAGE)
        return as_shapes(jax.eval_shape(gather_pages, *given), self._rows_layout)

    def feature_shapes(self) -> VisualFeatures | None:
        """Return room for features of images as shapes; None: the model reads text alone."""
        return None if self.vision is None else self._shapes(jax.eval_shape(self._empty_features))

    def feature_bytes(self) -> int:
        """Return how many bytes of a device the features of a token take."""
        assert self.vision is not None  # for pyright
        return self.vision.out_size * (1 + len(self.vision.deep_layers)) * self.dtype.itemsize

    def page_bytes(self) -> int:
        """Return how many bytes of a device a page of one part takes."""
        return self._bytes_of(jax.eval_shape(lambda: self._empty_pages(1, 1, 0)))

    def slot_bytes(self) -> int:
        """Return how many bytes of a device a slot of one part takes; 0 without states."""
        return self._bytes_of(jax.eval_shape(lambda: self._empty_pages(1, 1, 1)).states)

    def _bytes_of(self, arrays: Any) -> int:
        size = 0
        for x in jax.tree.leaves(arrays):
            shared = self.layout.mesh.shape["tensor"] if self._split_heads(x.shape[2]) else 1
            size += math.prod(x.shape) * x.dtype.itemsize // shared
        return size

    def _gathered(self, rows: int, pages: int) -> tuple[Any, Any]:
        """Return which pages and states are gathered into rows, as shapes."""
        slots = self.state_slots([None] * rows)
        return self._shapes((self.page_table([None] * rows, pages), slots and slots[0]))

    def _shapes(self, tree: Any) -> Any:
        """Return arrays of the host, which have the rows first, as shapes in their layout."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.by_row), tree
        )

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Jit a function with the flags of decoding."""
        flags = compiler_options(Task.DECODE, self.layout.mesh.devices.flat)
        return jax.jit(function, compiler_options=flags, **options)

    def _empty_features(self) -> VisualFeatures:
        assert self.vision is not None  # for pyright
        slots, deep = self.sizes.visual_tokens, len(self.vision.deep_layers)
        shape = (self.sizes.parts, slots, self.vision.out_size)
        further = jnp.zeros((shape[0], deep, *shape[1:]), self.dtype) if deep else None
        return VisualFeatures(jnp.zeros(shape, self.dtype), further)

    def _empty_pool(self) -> Cache:
        shapes = self.sizes
        return self._empty_pages(shapes.parts, shapes.pages, shapes.slots)

    def _empty_pages(self, parts: int, pages: int, slots: int) -> Cache:
        kinds = {
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "routes": self.route_shape,
        }
        return make_pool(self.model, parts, pages, PAGE, slots=slots, **kinds)

    def _split_heads(self, heads: int) -> str | None:
        """Return the axis of the mesh that splits the heads of a cache, if they can be shared."""
        return "tensor" if heads % self.layout.mesh.shape["tensor"] == 0 else None


def rotary_delta(sequence: SequenceState) -> int:
    """Return what is added to positions of what follows a prompt, to rotate by."""
    return 0 if sequence.visuals is None else sequence.visuals.delta


def rotary_of_rows(placed: Placed, ends: Sequence[int], length: int) -> Int[np.ndarray, "B T 3"]:
    """Return by what each row's next tokens are rotated: those from `cached` on.

    Args:
        placed: whom each row belongs to.
        ends: where its tokens end.
        length: of all rows.
    """
    rotary = np.zeros((len(placed), length, 3), np.int32)
    for row, (s, end) in enumerate(zip(placed, ends, strict=True)):
        if s is None:
            continue
        piece = rotary[row, : end - s.cached]
        piece[:] = np.arange(s.cached, end)[:, None] + rotary_delta(s)
        if s.visuals is not None and s.visuals.rotary is not None:
            given = s.visuals.rotary[s.cached : end]
            piece[: len(given)] = given
    return rotary


def feature_table(
    placed: Placed, ends: Sequence[int], length: int, slots_of: SlotsOf
) -> Int[np.ndarray, "B T"]:
    """Return where the features of each row's next tokens are; -1 for text."""
    table = np.full((len(placed), length), -1, np.int32)
    for row, (s, end) in enumerate(zip(placed, ends, strict=True)):
        if s is None or s.visuals is None:
            continue
        piece = slice(s.cached, end)
        number, index = s.visuals.number[piece], s.visuals.index[piece]
        for visual in s.visuals.within(s.cached, end):
            own = np.flatnonzero(number == visual)
            table[row, own] = slots_of(s, visual)[index[own]]
    return table

"""The programs that the engine runs on devices, for a few shapes, all compiled before they run."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from jaxrl_llm.compilation import BACKGROUND, PendingProgram, compile_all, compiles_ahead
from jaxrl_llm.compiler_options import Task, compiler_options
from jaxrl_llm.models.cache import Cache, PageTables
from jaxrl_llm.models.inputs import PatchRows, RowInputs, VisualFeatures, VisualTokens
from jaxrl_llm.models.model import Model
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, ScoredTokens
from jaxrl_llm.rollout.native.decode import (
    MOST_TOP_LOGPROBS,
    DecodeOutput,
    DecodeState,
    Extras,
    copy_pages,
    decode,
    gather_pages,
    gather_routes,
    make_pool,
    page_size,
    scatter_pages,
)
from jaxrl_llm.rollout.native.images import Tower
from jaxrl_llm.rollout.native.page_pool import StateSlots, gather_states, scatter_states
from jaxrl_llm.rollout.native.sampler import BatchSamplingParams
from jaxrl_llm.rollout.native.sizes import PAGE, Sizes, program_keys, touched
from jaxrl_llm.rollout.native.weights import EngineWeights, as_shapes
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import BATCH, Layout, over_batch


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
        held: as `tower.Tower` keeps them.
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


class TokenScores(NamedTuple):
    """Log-probs of rows of tokens: entry t is of token t given those before it; the first is 0.

    Attributes:
        logprobs: of the tokens, in nats, before any temperature; `LEAST_LOGPROB` of one that is
            never drawn.
        top_ids: the likeliest tokens, likeliest first.
        top_logprobs: their log-probs.
    """

    logprobs: Float32[Array, "B T"]
    top_ids: Int[Array, "B T top"]
    top_logprobs: Float32[Array, "B T top"]


def score_rows(
    params: Any,
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    dtype: Any,
    layout: Layout | None = None,
) -> TokenScores:
    """Read rows of tokens a part after the other, and score each token.

    Args:
        params: in the compute dtype, each layer's arrays apart.
        model: the model.
        tokens: padded on the right to a multiple of `READ_AT_ONCE`, if longer than that.
        lengths: tokens of each row; what is beyond them is meaningless.
        dtype: of the computation.
        layout: how rows are split over a mesh.
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

    return TokenScores(*map(joined, parts))


STOP_IDS = 8
"""The most stop tokens of a request."""

BIASES = 300
"""The most biased tokens of a request."""


class Programs:
    """What runs on devices, for one model in one layout. Compiled once each.

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
        routes: what is kept of each token's experts; None: nothing.
        tower: what the model's vision tower runs; None: it reads text alone.
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
        self.routes = model.route_shape if records_routes else None
        self.kernel, shapes = kernel, shapes._replace(has_rows=kernel is None)
        self.model, self.layout, self.sizes, self.dtype = model, layout, shapes, jnp.dtype(dtype)
        self.tower, self.has_rotary = None, False
        if model.vision is not None:
            self.tower = Tower(model, model.vision, shapes, dtype, layout)
            self.has_rotary = model.has_rotary_positions
        self.weights = EngineWeights(model, layout, self.dtype, quantized=quantized)
        self.by_row = over_batch(layout.mesh)
        pool = jax.eval_shape(self._empty_pool)
        heads = [self._split_heads(pages.shape[2]) for pages in jax.tree.leaves(pool)]
        place = functools.partial(jax.tree.unflatten, jax.tree.structure(pool))
        self._pool_layout = place([layout.sharding(BATCH, None, split) for split in heads])
        self._rows_layout = place([layout.sharding(BATCH, split) for split in heads])
        self._programs: dict[tuple[Any, ...], PendingProgram] = {}

    def make_pool(self) -> Cache:
        """Make an empty pool."""
        return self._compiled("pool")()

    def gather_pages(self, pool: Cache, table: Any, slots: Any = None) -> Cache:
        """Lay the pages of each row side by side; see `decode.gather_pages`."""
        return self._compiled("gather", *table.shape)(pool, table, slots)

    def gather_routes(self, pool: Cache, table: Any) -> Any:
        """Return the experts that the tokens in the pages of each row went to, flat."""
        return self._compiled("routes", *table.shape)(pool.routes, table)

    def make_features(self) -> VisualFeatures:
        """Make room for the features of images and videos."""
        return self._compiled("features")()

    def encode(
        self, params: Any, held: VisualFeatures, patches: PatchRows, slots: Any, longest: int
    ) -> VisualFeatures:
        """Read images and videos; see `tower.encode_into`. What is held is donated."""
        key = (patches.frames.shape[1], longest)
        return self._compiled("encode", *key)(params, held, patches, slots)

    def prefill(
        self, params: Any, pool: Cache, chunk: PrefillChunk, held: VisualFeatures | None = None
    ) -> Cache:
        """Read a chunk of prompts; see `prefill.prefill`. The pool is donated."""
        key = (*chunk.tokens.shape, chunk.table.shape[1])
        return self._compiled("prefill", *key)(params, pool, chunk, held)

    def decode(
        self,
        params: Any,
        pool: Cache,
        rows: Cache,
        state: DecodeState,
        extras: Extras | None,
        targets: Any,
        slots: StateSlots | None,
    ) -> tuple[Cache, Cache, DecodeOutput]:
        """Decode a chunk and write what it adds to the pool. Pool and rows are donated."""
        shape = (*state.tokens.shape, page_size(rows), extras is not None)
        return self._compiled("decode", *shape)(params, pool, rows, state, extras, targets, slots)

    def score(self, params: Any, tokens: Sequence[int]) -> ScoredTokens:
        """Return the log-probs of tokens; see `score.score_rows`. A row of each part is read."""
        width = self.sizes.width(len(tokens))
        width += -width % READ_AT_ONCE if width > READ_AT_ONCE else 0
        rows = np.zeros((self.sizes.parts, width), np.int32)
        rows[0, : len(tokens)] = tokens
        lengths = np.zeros(self.sizes.parts, np.int32)
        lengths[0] = len(tokens)
        inputs = distributed.put((rows, lengths), self.by_row)
        scores = self._compiled("score", *rows.shape)(params, *inputs)
        return ScoredTokens(*(x[0, : len(tokens)] for x in distributed.fetch(scores)))

    def copy_pages(self, pool: Cache, source: Any, target: Any) -> Cache:
        """Copy a page of each row; see `decode.copy_pages`. The pool is donated."""
        return self._compiled("copy", *source.shape)(pool, source, target)

    def decode_pages(
        self,
        params: Any,
        pool: Cache,
        state: DecodeState,
        extras: Extras | None,
        table: Any,
        slots: StateSlots | None,
    ) -> tuple[Cache, DecodeOutput]:
        """Decode a chunk over the pages of each row in place. The pool is donated."""
        shape = (*state.tokens.shape, table.shape[1] * PAGE, extras is not None)
        return self._compiled("decode", *shape)(params, pool, state, extras, table, slots)

    def warm_up(self, sequences: int | None = None) -> None:
        """Compile everything but what few requests ask for.

        On CPUs this returns at once. What is needed before it is compiled is compiled then.

        Args:
            sequences: how many are to be sampled first; None: as many as may run. What they need
                comes first.
        """
        keys = list(self._keys(sequences or self.sizes.rows[-1]))
        programs = [self._program(*key) for key in keys]
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
        """Yield what each program is called by, in the order in which they are likely needed."""
        return program_keys(self.sizes, sequences, records_routes=self.routes is not None)

    def shapes(self) -> tuple[Any, Cache]:
        """Return weights and pool as shapes in their layouts; nothing is allocated."""
        pool = jax.eval_shape(self._empty_pool)
        return self.weights.shapes(), as_shapes(pool, self._pool_layout)

    def row_shapes(self, rows: int, width: int) -> Cache:
        """Return rows as shapes in their layout."""
        given = (self.shapes()[1], self._input((rows, width // PAGE)), self._source(rows))
        return as_shapes(jax.eval_shape(gather_pages, *given), self._rows_layout)

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

    def trace(self, name: str, *shape: Any) -> Any:
        """Trace one program for shapes alone.

        Args:
            name: `pool`, `gather`, `routes`, `copy`, `prefill`, `score` or `decode`.
            shape: rows and pages of `gather` and `routes`; rows of `copy`; rows, tokens and pages
                of `prefill`; rows and width of `score`; rows, width and whether there are `Extras`
                of `decode`.
        """
        build: Callable[..., Any] = getattr(self, f"_trace_{name}")
        return build(*shape)

    def _program(self, *key: Any) -> PendingProgram:
        if key not in self._programs or self._programs[key].has_failed:
            label = f"{key[0]} {' x '.join(str(n) for n in key[1:3])}".strip()
            self._programs[key] = PendingProgram(label, lambda: self.trace(*key).lower().compile())
        return self._programs[key]

    def _compiled(self, *key: Any) -> Any:
        return self._program(*key).result()

    def _trace_pool(self) -> Any:
        return jax.jit(self._empty_pool, out_shardings=self._pool_layout).trace()

    def _trace_gather(self, rows: int, pages: int) -> Any:
        run = jax.jit(gather_pages, out_shardings=self._rows_layout)
        return run.trace(self.shapes()[1], self._input((rows, pages)), self._source(rows))

    def _trace_routes(self, rows: int, pages: int) -> Any:
        run = jax.jit(gather_routes, out_shardings=self.by_row)
        return run.trace(self.shapes()[1].routes, self._input((rows, pages)))

    def _trace_copy(self, rows: int) -> Any:
        run = jax.jit(copy_pages, donate_argnums=0, out_shardings=self._pool_layout)
        return run.trace(self.shapes()[1], self._input((rows,)), self._input((rows,)))

    def _trace_prefill(self, rows: int, length: int, pages: int) -> Any:
        def prefill_chunk(params: Any, pool: Cache, chunk: PrefillChunk, held: Any) -> Cache:
            return prefill(params, self.model, pool, chunk, held, layout=self.layout)

        run = self._jit(prefill_chunk, donate_argnums=1, out_shardings=self._pool_layout)
        shapes = ((rows, pages), (rows, length), (rows,), (rows,), (rows, touched(length)))
        chunk = PrefillChunk(*map(self._input, shapes), slots=self._slots(rows))
        held = None
        if self.tower is not None:
            chunk = chunk._replace(features=self._input((rows, length)))
            held = self.tower.shapes()
        if self.has_rotary:
            chunk = chunk._replace(rotary=self._input((rows, length, 3)))
        return run.trace(*self.shapes(), chunk, held)

    def _trace_features(self) -> Any:
        assert self.tower is not None  # for pyright
        return self.tower.trace_features()

    def _trace_encode(self, length: int, longest: int) -> Any:
        assert self.tower is not None  # for pyright
        return self.tower.trace_encode(length, longest, self.shapes()[0], self._jit)

    def _trace_score(self, rows: int, width: int) -> Any:
        def score_chunks(params: Any, tokens: Any, lengths: Any) -> TokenScores:
            given = (params, self.model, tokens, lengths)
            return score_rows(*given, dtype=self.dtype, layout=self.layout)

        run = self._jit(score_chunks, out_shardings=self.by_row)
        return run.trace(self.shapes()[0], self._input((rows, width)), self._input((rows,)))

    def _trace_decode(self, rows: int, width: int, has_extras: bool) -> Any:
        state, extras = self._decode_inputs(rows, width)
        params, pool = self.shapes()
        given = (params, pool, state, extras if has_extras else None)
        homes: tuple[Any, ...] = (self._pool_layout, self.by_row)
        if self.kernel is not None:
            arrays = (*given, self._input((rows, width // PAGE)), self._slots(rows))
            decode_some, donated = self._decode_in_place, (1,)
        else:
            targets = self._input((rows, touched(self.sizes.steps)))
            cache = self.row_shapes(rows, width)
            arrays = (params, pool, cache, *given[2:], targets, self._slots(rows))
            homes = (self._pool_layout, self._rows_layout, self.by_row)
            decode_some, donated = self._decode_rows, (1, 2)

        def decode_chunk(*arrays: Any) -> tuple[Any, ...]:  # names the program
            return decode_some(*arrays)

        return self._jit(decode_chunk, donate_argnums=donated, out_shardings=homes).trace(*arrays)

    def _decode_rows(
        self,
        params: Any,
        pool: Cache,
        cache: Cache,
        state: DecodeState,
        extras: Extras | None,
        targets: Any,
        slots: StateSlots | None,
    ) -> tuple[Cache, Cache, DecodeOutput]:
        run = functools.partial(decode, steps=self.sizes.steps, layout=self.layout)
        cache, output = run(params, self.model, cache, state, extras)
        to = None if slots is None else slots.target
        return scatter_pages(pool, cache, state.positions // PAGE, targets, to), cache, output

    def _decode_in_place(
        self,
        params: Any,
        pool: Cache,
        state: DecodeState,
        extras: Extras | None,
        table: Any,
        slots: StateSlots | None,
    ) -> tuple[Cache, DecodeOutput]:
        assert self.kernel is not None
        run = functools.partial(decode, steps=self.sizes.steps, layout=self.layout)
        tables = PageTables(table, self.kernel)
        source, target = slots or (None, None)
        cache = pool._replace(states=gather_states(pool.states, source))
        cache, output = run(params, self.model, cache, state, extras, tables=tables)
        states = scatter_states(pool.states, cache.states, target)
        return cache._replace(states=states), output

    def _decode_inputs(self, rows: int, width: int) -> tuple[DecodeState, Extras]:
        number, share = self._input((rows,)), self._input((rows,), jnp.float32)
        sampling = BatchSamplingParams(
            self._input((rows,), jnp.uint32), share, share, number, share
        )
        delta = number if self.has_rotary else None
        stops = self._input((rows, STOP_IDS))
        state = DecodeState(number, number, number, number, stops, sampling, delta)
        biases = (rows, BIASES)
        extras = Extras(
            self._input((rows, width)), share, self._input(biases), self._input(biases, jnp.float32)
        )
        return state, extras

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Jit a function with the flags of decoding."""
        flags = compiler_options(Task.DECODE, self.layout.mesh.devices.flat)
        return jax.jit(function, compiler_options=flags, **options)

    def _input(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.by_row)

    def _slots(self, rows: int) -> StateSlots | None:
        number = self._input((rows,))
        return StateSlots(number, number) if self.sizes.slots else None

    def _source(self, rows: int) -> Any:
        return self._input((rows,)) if self.sizes.slots else None

    def _empty_pool(self) -> Cache:
        shapes = self.sizes
        return self._empty_pages(shapes.parts, shapes.pages, shapes.slots)

    def _empty_pages(self, parts: int, pages: int, slots: int) -> Cache:
        kinds = {"dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype, "routes": self.routes}
        return make_pool(self.model, parts, pages, PAGE, slots=slots, **kinds)

    def _split_heads(self, heads: int) -> str | None:
        """Return the axis of the mesh that splits the heads of a cache, if they can be shared."""
        return "tensor" if heads % self.layout.mesh.shape["tensor"] == 0 else None

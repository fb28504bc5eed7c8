"""What the engine runs on devices: pages gathered into rows, prompts read, tokens drawn.

Keys and values live in a pool of pages, [parts, pages, …] per layer and within a page as in
`models.cache.Cache`; `parts` is the number of parts of a batch, each of which has pages of its own.
States of layers that have no keys lie in slots of their own (`native.page_pool`).
A step of decoding works on rows, gathered from the pages of B sequences, and what it adds goes back
to pages. Where there is a kernel for it (`models.paged_triton`) it works on the pages.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from jaxrl_llm.models.cache import Cache, PageTables, empty_record
from jaxrl_llm.models.inputs import RowInputs
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.rollout.native.page_pool import gather_states, scatter_states
from jaxrl_llm.rollout.native.sampler import (
    BatchSamplingParams,
    Extras,
    choose_tokens,
    limits_in_use,
)
from jaxrl_llm.sharding.layout import Layout

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

    >>> from jaxrl_llm.models.model import model_of
    >>> model = model_of(tiny_spec())
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

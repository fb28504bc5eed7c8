"""A user's own model from pure functions: one that draws parameters, one that computes logits."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, Params
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.inputs import NO_INPUTS, RowInputs
from jaxrl_llm.models.layers import rematerialize
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.parameters import PRNGKey
from jaxrl_llm.sharding.layout import UNSPLIT, Layout

Axes: TypeAlias = dict[str, Any]  # nested as the parameters, a logical name or None per dimension


class CachedDecoding(NamedTuple):
    """How a model goes on from what it has read, without reading it again.

    Attributes:
        init_cache: (rows, slots, dtype) -> an empty `models.cache.Cache`; a slot holds all that is
            kept of a position.
        extend: (params, cache, tokens [B T], positions [B T]) -> (what `FunctionalModel.apply`
            gives for these tokens, the cache with them). Of a token at a position past the slots
            nothing is written, and its result means nothing.
    """

    init_cache: Callable[[int, int, DTypeLike], Cache]
    extend: Callable[[Params, Cache, Array, Array], tuple[Array, Cache]]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FunctionalModel(Model):
    """A language model as a pair of pure functions, and what else it may bring.

    Without `cached` the engine computes the whole sequence again for
    each token that it draws. Parameters are trained in float32, and given to the functions in the
    dtype of the computation, gathered from the devices that split tokens.

    Args:
        init: key -> float32 parameters, a nested dict.
        apply: (params, tokens, positions, segment_ids), each of these [R L], -> logits [R L V]. A
            row holds several sequences side by side: `segment_ids` are 1, 2, … for them and 0 for
            padding, `positions` count within each. A token's logits depend on the tokens up to it
            in its own sequence, and on no other (`models.attention.segment_mask`).
        head: params -> matrix [D V]. With it `apply` returns hidden states [R L D], and logits are
            their product with it, which training computes in chunks.
        cached: decodes with a cache.
        axes: nested as the parameters, a logical name or None for each dimension of an array; None:
            no array is split.
        max_positions: the longest sequence, in tokens; None: any.

    >>> model = FunctionalModel(
    ...     init=lambda key: {"table": jax.random.normal(key, (8, 8))},
    ...     apply=lambda params, tokens, positions, segment_ids: params["table"][tokens],
    ...     axes={"table": ("vocab", None)})
    >>> model.vocab_size, model.declare()["table"].axes
    (8, ('vocab', '_1'))
    """

    init: Callable[[PRNGKey], Params]
    apply: Callable[[Params, Array, Array, Array], Array]
    head: Callable[[Params], Array] | None = None
    cached: CachedDecoding | None = None
    axes: Axes | None = None
    max_positions: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def vocab_size(self) -> int:
        """Number of logits per token.

        Raises:
            ValueError: The functions give something else than logits of each token.
        """
        return self._vocab_size

    @functools.cached_property
    def _vocab_size(self) -> int:
        params = jax.eval_shape(self.init_params, jax.random.key(0))
        row = jax.ShapeDtypeStruct((1, 2), jnp.int32)
        given = jax.eval_shape(self.apply, params, row, row, row)
        wanted = "logits [R L V]" if self.head is None else "hidden states [R L D]"
        is_array = isinstance(given, jax.ShapeDtypeStruct) and given.ndim == 3
        if not is_array or given.shape[:2] != row.shape:
            raise ValueError(f"expected {wanted} for tokens [R L] of shape (1, 2), got {given}")
        if self.head is None:
            return given.shape[2]
        head = jax.eval_shape(self.head, params)
        if head.ndim != 2 or head.shape[0] != given.shape[2]:
            raise ValueError(
                f"expected a head [D V] with D = {given.shape[2]} as of hidden states, got {head}"
            )
        return head.shape[1]

    @property
    def logit_softcap(self) -> None:
        """Logits are not capped."""

    @property
    def has_router(self) -> bool:
        """There are no experts that the trainer knows of."""
        return False

    def declare(self) -> Declarations:
        """Declare each array by the shape that `init` gives it, and the names of `axes`.

        In a checkpoint it has its own shape, and its path with dots as its name.

        Raises:
            ValueError: `init` gives no float32 array, or `axes` do not fit one.
        """
        return self._declared

    @functools.cached_property
    def _declared(self) -> Declarations:
        params = jax.eval_shape(self.init_params, jax.random.key(0))
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        return tree.unflatten([_declare(path, array, self.axes) for path, array in paths])

    def init_params(self, key: PRNGKey) -> Params:
        """Draw parameters by `init`."""
        return self.init(key)

    def compute_dtypes(self, dtype: DTypeLike) -> Any:
        """Return the dtype of the computation for every array."""
        return jax.tree.map(lambda _: jnp.dtype(dtype), self.declare())

    def hidden_states(
        self,
        params: Params,
        tokens: Int[Array, "R L"],
        positions: Int[Array, "R L"],
        segment_ids: Int[Array, "R L"],
        *,
        dtype: DTypeLike,
        remat: str,
        layout: Layout | None,
        inputs: RowInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "R L D"], dict[str, Any]]:
        """Run `apply` over packed rows.

        Raises:
            ValueError: The policy is `full`, or the mesh has stages: both would have to know the
                model's layers.
        """
        if remat == "full":
            raise ValueError(
                "model.remat: expected none or dots, got full: only the model knows its layers, so "
                "let it compute them again itself, by nnx.remat or jax.checkpoint"
            )
        if layout is not None and layout.stages > 1:
            raise ValueError(f"mesh: expected stage=1, got {layout.stages}: layers are not known")

        def run(params: Params, tokens: Array, positions: Array, segment_ids: Array) -> Array:
            return self.apply(self._ready(params, dtype, layout), tokens, positions, segment_ids)

        if layout is None:
            return rematerialize(run, remat)(params, tokens, positions, segment_ids), {}
        rows = map(layout.merge_context, (tokens, positions, segment_ids))
        hidden = rematerialize(run, remat)(params, *rows)
        return layout.constrain(layout.split_context(hidden)), {}

    def head_matrix(
        self, params: Params, layout: Layout | None = None
    ) -> Float[Array, "D V"] | None:
        """Return the matrix of `head`; None where `apply` gives logits."""
        del layout
        return None if self.head is None else self.head(params)

    def logits(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Return the logits of what `apply` gives."""
        if self.head is None:
            return hidden.astype(jnp.float32)
        head = self.head(self._stacked(params)).astype(hidden.dtype)
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

    def token_values(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B"]:
        """Refuse: there is no value head."""
        raise KeyError("a model of functions has no value head")

    def sequence_scores(
        self,
        params: Params,
        hidden: Float[Array, "R L D"],
        row: Int[Array, " B"],
        start: Int[Array, " B"],
        size: Int[Array, " B"],
    ) -> Float32[Array, " B"]:
        """Refuse: there is no reward head."""
        raise KeyError("a model of functions has no reward head")

    def init_cache(
        self, batch: int, length: int, *, dtype: DTypeLike, kv_cache_dtype: str
    ) -> Cache:
        """Make an empty cache: of `cached`, or else one that holds the tokens themselves.

        Raises:
            ValueError: It is to be int8.
        """
        if kv_cache_dtype != "auto":
            raise ValueError(f"kv_cache_dtype: expected auto, got {kv_cache_dtype!r}")
        if self.cached is not None:
            return self.cached.init_cache(batch, length, dtype)
        return _token_cache(batch, length, dtype)

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        dtype: DTypeLike,
        layout: Layout | None,
        inputs: RowInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Run the next tokens of each row: by `cached`, or by `apply` over all that it holds."""
        ready = self._ready(self._stacked(params), dtype, layout)
        if self.cached is not None:
            return self.cached.extend(ready, cache, tokens, positions)
        rows, cache = _write_tokens(cache, tokens, positions)
        every = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        last = jnp.where(positions < rows.shape[1], positions, -1).max(1, keepdims=True)
        hidden = self.apply(ready, rows, every, (every <= last).astype(jnp.int32))
        at = jnp.minimum(positions, rows.shape[1] - 1)[:, :, None]
        return jnp.take_along_axis(hidden, at, axis=1), cache

    def _stacked(self, params: Params) -> Params:
        """Join stacks of layers, which the engine takes apart."""

        def stacked(declared: ArrayDecl, array: Any) -> Array:
            return jnp.stack(array) if declared.is_stack and isinstance(array, tuple) else array

        return jax.tree.map(stacked, self.declare(), params)

    def _ready(self, params: Params, dtype: DTypeLike, layout: Layout | None) -> Params:
        """Cast parameters, and gather what devices that split tokens hold parts of."""
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        if layout is None:
            return params
        homes = layout.gathered(self.declare())
        return jax.tree.map(jax.lax.with_sharding_constraint, params, homes)


def _declare(path: tuple[Any, ...], array: Any, axes: Axes | None) -> ArrayDecl:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if not isinstance(array, jax.ShapeDtypeStruct) or array.dtype != jnp.float32:
        raise ValueError(f"{name}: expected a float32 array, got {array}")
    names: Any = axes
    for key in path:
        names = names and names.get(key.key)
    if names is None:
        names = (None,) * array.ndim
    own = tuple(f"{UNSPLIT}{i}" if axis is None else axis for i, axis in enumerate(names))
    return ArrayDecl(
        shape=array.shape,
        axes=own,
        initializer=_drawn_with_the_others,
        hf_name=name.replace("{", "{{").replace("}", "}}"),
        hf_axes=tuple((axis,) for axis in own),
    )


def _drawn_with_the_others(key: Any, shape: Any, dtype: Any) -> Array:
    raise ValueError("the model's init draws all arrays at once; no array has one of its own")


def _token_cache(batch: int, length: int, dtype: DTypeLike) -> Cache:
    """Return a cache whose keys are token ids; arrays of no width say what the dtype is."""

    def empty(*shape: int, of: DTypeLike) -> tuple[Array]:
        return (jnp.zeros((batch, 1, *shape), of),)

    keys, values = empty(1, length, of=jnp.int32), empty(length, 0, of=jnp.int32)
    return Cache(keys, values, empty(0, length, of=dtype), empty(length, 0, of=dtype))


def _write_tokens(
    cache: Cache, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> tuple[Int[Array, "B S"], Cache]:
    """Write tokens into a cache of tokens; return all of each row, and the cache."""
    (held,) = cache.keys
    at = jnp.arange(len(tokens))[:, None], 0, 0, positions
    held = held.at[at].set(tokens, mode="drop")  # padding stands past the row's end
    return held[:, 0, 0], cache._replace(keys=(held,))

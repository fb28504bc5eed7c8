"""A `flax.nnx` module as a `Model`. It needs the package's extra `flax`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jaxtyping import Array

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.functional import CachedDecoding, FunctionalModel
from jaxrl_llm.models.parameters import PRNGKey

Path = tuple[Any, ...]


def from_module(make: Callable[..., Any], *, seed: int = 0) -> FunctionalModel:
    """Return the model that an `nnx.Module` is, by `nnx.split` and `nnx.merge`.

    Its `nnx.Param`s are the parameters, in float32. All its other variables keep the values with
    which it is made. It is run as `module.eval()` leaves it, so that dropout does nothing.

    The module is called with (tokens, positions, segment_ids), each [R L], and returns logits
    [R L V]. It may have

    * `head_matrix()`, [D V]: then the call returns hidden states [R L D];
    * `init_cache(rows, slots, dtype)` and `extend(cache, tokens, positions)`: as in
      `models.functional.CachedDecoding`, with what the call returns first;
    * `max_positions`: the longest sequence, in tokens.

    The logical axes of a parameter are its `out_sharding`, as `nnx.with_partitioning` writes it.

    Args:
        make: (rngs=nnx.Rngs) -> module.
        seed: For the variables that are no parameters.

    Raises:
        TypeError: `make` returns something else.
        ValueError: The module has a jax array as a plain attribute, or half of a cache.
    """
    from flax import nnx  # an extra

    module: Any = nnx.eval_shape(lambda: _build(make, seed))
    _check(module)
    graph, state, others = nnx.split(module, nnx.Param, ...)
    if jax.tree.leaves(others):
        others = jax.jit(lambda: nnx.split(_build(make, seed), nnx.Param, ...)[2])()
    variables = dict(nnx.to_flat_state(state))

    def merge(params: Params) -> Any:
        # variables are made anew: flax wants those of the trace in which they are used
        flat = [(path, var.replace(_at(params, path))) for path, var in variables.items()]
        same = jax.tree.map(lambda x: x, others)
        return nnx.merge(graph, nnx.from_flat_state(flat), same)

    def init(key: PRNGKey) -> Params:
        flat = nnx.to_flat_state(nnx.state(_build(make, key), nnx.Param))
        return _nested({path: variable[...] for path, variable in flat})

    def apply(params: Params, tokens: Array, positions: Array, segment_ids: Array) -> Array:
        return merge(params)(tokens, positions, segment_ids)

    def head(params: Params) -> Array:
        return merge(params).head_matrix()

    def extend(params: Params, cache: Cache, *next_tokens: Array) -> tuple[Array, Cache]:
        return merge(params).extend(cache, *next_tokens)

    return FunctionalModel(
        init=init,
        apply=apply,
        head=head if hasattr(module, "head_matrix") else None,
        cached=CachedDecoding(module.init_cache, extend) if hasattr(module, "extend") else None,
        axes=_nested({path: _axes(variable) for path, variable in variables.items()}),
        max_positions=module.max_positions if hasattr(module, "max_positions") else None,
    )


def set_params(module: Any, params: Params) -> None:
    """Give an `nnx.Module` the parameters of the model that it was, in place.

    Args:
        module: Of the same kind, as flax alone makes it.
        params: Of the model, such as those of a trained policy.
    """
    from flax import nnx

    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable[...] = _at(params, path)
    # `nnx.state` shares the module's variables


def _build(make: Callable[..., Any], key: Any) -> Any:
    from flax import nnx

    with nnx.use_eager_sharding(False):  # the trainer's rules split arrays
        module = make(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(f"expected an nnx.Module, got {type(module).__name__}")
    module.eval()
    return module


def _check(module: Any) -> None:
    from flax import nnx

    if hasattr(module, "extend") != hasattr(module, "init_cache"):
        raise ValueError(
            f"{type(module).__name__} has one of init_cache and extend, expected both or neither"
        )
    for path, value in nnx.iter_graph(module):
        if isinstance(value, Tracer):
            name = ".".join(map(str, path))
            raise ValueError(
                f"{type(module).__name__}.{name} is a jax array, and no variable of nnx: keep it "
                "as nnx.Variable(…) or as an array of numpy"
            )


def _nested(values: dict[Path, Any]) -> dict[str, Any]:
    """Return values by path as a nested dict, whose keys are texts."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *outer, last = map(str, path)
        inner = functools.reduce(lambda part, key: part.setdefault(key, {}), outer, tree)
        inner[last] = value
    return tree


def _at(params: Params, path: Path) -> Array:
    array: Any = functools.reduce(lambda tree, key: tree[str(key)], path, params)
    return array


def _axes(variable: Any) -> tuple[str | None, ...] | None:
    """Return the logical axes of a parameter, if it says any."""
    return variable.get_metadata().get("out_sharding")

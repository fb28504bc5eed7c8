"""The optimizer that a config names, and the arrays that it is shown.

Our models stack the arrays of their layers; an optimizer is written for arrays as a model has
them, one per layer. Where that makes no difference, as for AdamW, it is given the stacks. Else it
is given trees with `LayerArrays` instead of stacks, and its updates and state are stacked again.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import described_failure, find_function, load_function, signature_of
from jaxrl_llm.config.sections import OptimConfig
from jaxrl_llm.models.arrays import ArrayDecl, Declarations, Params, declarer

OptimizerOf: TypeAlias = Callable[[Declarations, Params], optax.GradientTransformation]
"""From a model's declarations, and the parameters that are trained, to their optimizer."""

MOST_RATES = 100_000
"""Updates for which a schedule is evaluated at most, evenly spaced."""

MUON_NUMBERS = "muon_weight_dimension_numbers"
"""The parameter by which an optimizer asks for `muon_numbers`."""

ENDS = frozenset({"vocab", "label", "_places"})
"""Axes of embeddings and of heads, whose matrices are not Muon's."""

OTHER_WEIGHTS = (optax.contrib.ScheduleFreeState, optax.contrib.SAMState)
"""States of optimizers that train other weights than those to validate, sample from and save."""

ELEMENTWISE = re.compile(
    "abs|add|add_any|and|clamp|convert_element_type|copy|copy_p|div|eq|exp|expm1|ge|gt|integer_pow|"
    "is_finite|le|log|log1p|lt|max|min|mul|ne|neg|not|or|pow|rsqrt|select_n|sign|sqrt|square|"
    "stop_gradient|sub|tanh|xor|broadcast_in_dim"
)
LAYOUT = re.compile("broadcast_in_dim|copy|expand_dims|reshape|squeeze|transpose")
"""Jax's primitives that compute each element by itself, and those that only move elements."""

_array = declarer({"rows": 2, "columns": 2})
TRIED = {
    "matrix": _array("m", "rows columns", "rows columns"),
    "vector": _array("v", "rows", "rows"),
}
"""Arrays on which an optimizer is tried before a model is read."""


def make_optimizer(
    config: OptimConfig, key: str = "optim"
) -> tuple[OptimizerOf, Callable[[Any], Any]]:
    """Return what makes a model's optimizer, with clipping and learning rate in it; its schedule.

    Raises:
        ConfigError: one of the functions is no such thing, or does not work with its keywords; so
            does what is returned.
    """
    name, at = config.schedule.fn, f"{key}.schedule"
    with _function_errors(make := load_schedule(config, at), f"{at}: {name!r} does not work"):
        schedule = make()
        jax.eval_shape(lambda count: _rate(schedule, count, f"{at}: {name!r}"), 0)
    make = _load_optimizer(config, f"{key}.optimizer")

    def optimizer_of(declared: Declarations, params: Params) -> optax.GradientTransformation:
        optimizer = make(_trained(declared, params), schedule)
        if config.grad_clip is not None:
            optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip), optimizer)
        return optimizer

    optimizer_of(TRIED, TRIED)  # optax checks keywords when they are used
    return optimizer_of, schedule


def _load_optimizer(
    config: OptimConfig, at: str
) -> Callable[[Declarations, Any], optax.GradientTransformation]:
    """Return the function from declarations and a learning rate to the optimizer named."""
    spec, given = config.optimizer, {"learning_rate"}
    with contextlib.suppress(ValueError):  # a builtin without a signature
        asks = signature_of(find_function(spec, functions.OPTIMIZERS, key=at)).parameters
        given |= {MUON_NUMBERS} & asks.keys() - spec.kwargs.keys()
    make = load_function(spec, functions.OPTIMIZERS, passed=given, key=at)

    def made(declared: Declarations, learning_rate: Any) -> optax.GradientTransformation:
        known = {"learning_rate": learning_rate, MUON_NUMBERS: muon_numbers(declared)}
        optimizer = make(**{name: known[name] for name in given})
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ConfigError(
                f"{at}: {spec.fn!r} is not an optax optimizer: it returned a "
                f"{type(optimizer).__name__}; did you mean adamw?"
            )
        return optimizer

    def load(declared: Declarations, schedule: Any) -> optax.GradientTransformation:
        with _function_errors(make, f"{at}: {spec.fn!r} does not work"):
            optimizer = made(declared, schedule)
            # a schedule may begin at 0, where no two optimizers differ
            constant = made(declared, optax.constant_schedule(1.0))
            has_numbers = MUON_NUMBERS in given
            if not _may_see_stacks(constant, declared, has_numbers=has_numbers):
                optimizer = _per_layer(optimizer, declared)
            like = _like(declared)
            state = jax.eval_shape(optimizer.init, like)
            jax.eval_shape(optimizer.update, like, state, like)
        nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, OTHER_WEIGHTS))
        if others := [type(node) for node in nodes if isinstance(node, OTHER_WEIGHTS)]:
            raise ConfigError(
                f"{at}: {spec.fn!r} trains other weights than those to evaluate and save "
                f"(its state is a {others[0].__name__}), which is not supported; take another one"
            )
        return optimizer

    return load


def load_schedule(config: OptimConfig, key: str) -> Callable[[], Any]:
    """Return the function that makes the schedule."""
    try:
        return load_function(config.schedule, functions.SCHEDULES, key=key)
    except ConfigError as error:
        if config.schedule.given is None:
            raise
        raise ConfigError(
            f"{error} (the function given makes a schedule: give one itself as `lambda: schedule`)"
        ) from error


def _rate(schedule: Any, count: Any, named: str) -> Any:
    """Return the learning rate of an update, checked to be a number."""
    rate = schedule(count) if callable(schedule) else None
    if not isinstance(rate, int | float | np.generic | jax.Array) or np.ndim(rate) != 0:
        raise ConfigError(
            f"{named} is not an optax schedule: got {rate!r} as the learning rate of an update, "
            "expected a number; did you mean constant_schedule?"
        )
    return jnp.asarray(rate, jnp.float32)


def check_learning_rates(
    schedule: Callable[[Any], Any], config: OptimConfig, updates: int, key: str = "optim"
) -> None:
    """Refuse a schedule that gives an update a negative or non-finite learning rate.

    Args:
        schedule: from the number of an update, from 0 on, to its learning rate.
        config: that names it.
        updates: in all.
        key: the config key of `config`.
    """
    named = f"{key}.schedule: {config.schedule.fn!r}"
    counts = np.unique(np.linspace(0, updates - 1, min(updates, MOST_RATES)).astype(np.int32))
    rates = np.asarray(jax.jit(jax.vmap(lambda count: _rate(schedule, count, named)))(counts))
    wrong = np.flatnonzero(~(np.isfinite(rates) & (rates >= 0)))
    if wrong.size:
        raise ConfigError(
            f"{named} gives the learning rate {rates[wrong[0]]:g} for update {counts[wrong[0]]} of "
            f"{updates}, counted from 0; expected a finite number, 0 or more"
        )


@contextlib.contextmanager
def _function_errors(function: Callable[..., Any], key: str) -> Iterator[None]:
    """Turn what a function raises into a ConfigError that begins with `key`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {described_failure(error, function)}") from error


# ---------------------------------------------------------------- arrays as optimizers know them


class LayerArrays(tuple[Any, ...]):
    """The arrays of a stack, one per layer, or what an optimizer has of them."""

    declared: ArrayDecl

    @classmethod
    def of(cls, declared: ArrayDecl, arrays: Iterable[Any]) -> "LayerArrays":
        """Return arrays, or what an optimizer has of them, as those of a declared one."""
        layers = cls(arrays)
        layers.declared = declared
        return layers


jax.tree_util.register_pytree_with_keys(
    LayerArrays,
    lambda layers: (
        [(jax.tree_util.SequenceKey(i), layer) for i, layer in enumerate(layers)],
        layers.declared,
    ),
    LayerArrays.of,
)


def _per_layer(
    optimizer: optax.GradientTransformation, declared: Declarations
) -> optax.GradientTransformation:
    """Return an optimizer of stacks that shows another one the array of each layer.

    The shapes that it shows are those of `ArrayDecl.layer_axes`. Its state has stacks in the places
    of `LayerArrays`, so that it lies on a mesh and in a checkpoint as the parameters do.
    """

    def init(params: Any) -> Any:
        return _stack(optimizer.init(_show(declared, params)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        shown = None if params is None else _show(declared, params)
        like = jax.eval_shape(optimizer.init, jax.eval_shape(lambda: _show(declared, updates)))
        updates, state = optimizer.update(
            _show(declared, updates), jax.tree.map(_unstack, like, state, is_leaf=_is_layers), shown
        )
        return _stack(updates), _stack(state)

    return optax.GradientTransformation(init, update)


def _show(declared: Declarations, params: Params) -> Any:
    def layers(decl: ArrayDecl, array: Any) -> Any:
        if not decl.counts_layers and decl.layer_shape == decl.shape:
            return array
        each = array if decl.counts_layers else (array,)
        return LayerArrays.of(decl, (layer.reshape(decl.layer_shape) for layer in each))

    return jax.tree.map(layers, declared, params)


def _is_layers(node: Any) -> bool:
    return isinstance(node, LayerArrays)


def _is_uniform(layers: LayerArrays) -> bool:
    """Say whether an optimizer has the same of each layer; else its state has them in a list."""
    shapes = [jax.tree.map(lambda array: (array.shape, array.dtype), layer) for layer in layers]
    return all(shape == shapes[0] for shape in shapes)


def _stack(tree: Any) -> Any:
    """Join the layers of a tree's nodes, each in the shape that it has in the stack."""

    def join(*layers: Any, declared: ArrayDecl) -> Any:
        own = declared.shape[declared.counts_layers :]
        if layers[0].shape == declared.layer_shape:
            layers = tuple(layer.reshape(own) for layer in layers)
        return jnp.stack(layers) if declared.counts_layers else layers[0]

    def joined(node: Any) -> Any:
        if not _is_layers(node):
            return node
        if not _is_uniform(node):
            return list(node)
        return jax.tree.map(functools.partial(join, declared=node.declared), *node)

    return jax.tree.map(joined, tree, is_leaf=_is_layers)


def _unstack(like: Any, stacked: Any) -> Any:
    """Return the inverse of `_stack` for one node."""
    if not _is_layers(like):
        return stacked
    if not _is_uniform(like):
        return LayerArrays.of(like.declared, stacked)
    if not like.declared.counts_layers:
        stacked = jax.tree.map(lambda array: array[None], stacked)
    layers = (
        jax.tree.map(lambda shape, array, i=i: array[i].reshape(shape.shape), layer, stacked)
        for i, layer in enumerate(like)
    )
    return LayerArrays.of(like.declared, layers)


def muon_numbers(declared: Declarations) -> Callable[[Any], Any]:
    """Return what gives Muon the dimension numbers of a model's parameters; None is Adam's.

    Muon's are the matrices inside of a model, those of experts one by one, of adapters and of
    routers included. Embeddings, heads, norms and biases are Adam's (Jordan 2024,
    https://kellerjordan.github.io/posts/muon; Liu et al. 2025, https://arxiv.org/abs/2502.16982).
    """

    def numbers(decl: ArrayDecl, shown: Any) -> optax.contrib.MuonDimensionNumbers | None:
        matrix = [group for group in decl.layer_axes if group != ("experts",)]
        if len(matrix) != 2 or ENDS & set(decl.axes):
            return None
        axes: Any = decl.axes
        if _is_layers(shown):
            axes, matrix = decl.layer_axes, [(group,) for group in matrix]
        at = (tuple(axes.index(axis) - len(axes) for axis in group) for group in matrix)
        return optax.contrib.MuonDimensionNumbers(*at)

    return lambda params: jax.tree.map(numbers, declared, params)


def _may_see_stacks(
    optimizer: optax.GradientTransformation, declared: Declarations, *, has_numbers: bool
) -> bool:
    """Say whether an optimizer of stacks does what it does when it sees the array of each layer.

    It does where it takes the same decisions about both, i.e. computes by the same primitives with
    the same constants, and either computes each element by itself or has `muon_numbers`, by which
    it knows what of an array is a matrix. Where that is not certain, it does not.
    """
    if all(not d.counts_layers and d.layer_shape == d.shape for d in jax.tree.leaves(declared)):
        return True
    stacked = _operations(optimizer, declared)
    one_layer = jax.tree.map(
        lambda decl: (
            dataclasses.replace(decl, shape=(1, *decl.shape[1:])) if decl.counts_layers else decl
        ),
        declared,
    )
    alone = _operations(optimizer, one_layer, show=True)
    return stacked[:2] == alone[:2] and (stacked[2] or has_numbers)


def _trained(declared: Declarations, params: Params) -> Declarations:
    """Return the declarations of parameters that are a part of a model's."""
    return {
        name: _trained(declared[name], value) if isinstance(value, dict) else declared[name]
        for name, value in params.items()
    }


def _like(declared: Declarations) -> Any:
    return jax.tree.map(lambda decl: jax.ShapeDtypeStruct(decl.shape, jnp.float32), declared)


def _operations(
    optimizer: optax.GradientTransformation, declared: Declarations, *, show: bool = False
) -> tuple[list[str], list[Any], bool]:
    """Return the primitives of an update, its constants, and whether each is of single elements."""

    def run(params: Params) -> Any:
        return optimizer.update(params, optimizer.init(params), params)

    params = _like(declared)
    shown = jax.eval_shape(functools.partial(_show, declared), params) if show else params
    jaxpr = jax.make_jaxpr(run)(shown)
    equations = [e for e in _equations(jaxpr.jaxpr) if not LAYOUT.fullmatch(e.primitive.name)]
    inputs = [x for equation in equations for x in equation.invars if isinstance(x, Literal)]
    constants = list(map(str, (*jaxpr.consts, *(literal.val for literal in inputs))))
    names = [equation.primitive.name for equation in equations]
    return names, constants, all(map(_is_elementwise, _equations(jaxpr.jaxpr)))


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        values = jax.tree.leaves(list(equation.params.values()))
        inner = [x for x in values if isinstance(x, ClosedJaxpr | Jaxpr)]
        for part in inner:
            yield from _equations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
        if not inner or equation.primitive.name in ("scan", "while"):
            yield equation


def _is_elementwise(equation: Any) -> bool:
    shapes = {variable.aval.shape for variable in (*equation.invars, *equation.outvars)} - {()}
    name = equation.primitive.name
    return not shapes or (len(shapes) == 1 and ELEMENTWISE.fullmatch(name) is not None)

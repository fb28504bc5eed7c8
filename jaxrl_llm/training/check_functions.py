"""Every function that a config names, tried on the shapes of a batch before a model is loaded.

`jax.eval_shape` runs a function without numbers, so that what it raises and the shape of what it
returns are known in milliseconds. A NaN can't be seen so.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.fields import FIELDS, call, name_of
from jaxrl_llm.config.functions import described_failure
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.training.distillation import Distillation
from jaxrl_llm.training.experience import (
    ScoreError,
    check_per_answer,
    compute_advantages,
    correction_weights,
)
from jaxrl_llm.training.load_functions import PAIR_FIELDS, AlgorithmFunctions, Function
from jaxrl_llm.training.objective import PolicyObjective, as_token_loss, per_token
from jaxrl_llm.training.optimizer import check_learning_rates
from jaxrl_llm.training.preference_objective import LENGTHS, PreferenceObjective, as_pair_loss
from jaxrl_llm.training.selection import check_pairs
from jaxrl_llm.training.stages.algorithm import checked_controller

Fields = dict[str, Any]
Trial = tuple[str, Function, Callable[[Fields], Any]]
"""A function's config key, the function, and how a run calls it and checks what it returns."""


def check_functions(config: TrainConfig, functions: AlgorithmFunctions) -> None:
    """Call every function as a run does, with the shapes of its batches.

    Raises:
        ConfigError: one of them raises, or returns something else than is expected.
    """
    fields = abstract_fields(
        config.batch.prompts_per_step * config.rollout.samples_per_prompt,
        config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        len(config.reward.components),
        config.teacher.top_k or 1,
    )
    for key, function, run in trials(config, functions):
        check_function(key, function, functools.partial(jax.eval_shape, run, fields))
    actor = functions.updates["actor"].objective
    if isinstance(actor, PolicyObjective) and actor.distillation:
        check_divergence("algorithm.distillation", actor.distillation.divergence)
    if functions.kl:
        controller, coef = functions.controller, config.algorithm.kl_coef
        control = functools.partial(
            checked_controller(controller), coef, 0.01, fields["mask"].shape[0]
        )
        check_function("algorithm.kl_controller", controller, control)  # it gets numbers
    if config.steps is not None:
        check_schedules(config, functions, config.steps)


def check_schedules(config: TrainConfig, functions: AlgorithmFunctions, steps: int) -> None:
    """Refuse schedules that give one of the updates of all steps a negative learning rate."""
    batch = config.batch
    per_step = batch.prompts_per_step // (batch.prompts_per_minibatch or batch.prompts_per_step)
    updates = steps * per_step * batch.epochs_per_step
    for name, update in functions.updates.items():
        section: Any = config if name == "actor" else getattr(config, name)
        key = "optim" if name == "actor" else f"{name}.optim"
        check_learning_rates(update.schedule, section.optim, updates, key)


def trials(config: TrainConfig, functions: AlgorithmFunctions) -> Iterator[Trial]:
    """Yield the functions of a config that get arrays."""
    algorithm, needs_returns = config.algorithm, "critic" in functions.updates
    if advantage := functions.advantage:
        compute = functools.partial(compute_advantages, advantage, with_returns=needs_returns)
        yield "algorithm.advantage", advantage, compute
    if kl := functions.kl:
        in_loss = algorithm.kl_loss is not None
        key = "algorithm.kl_loss" if in_loss else "algorithm.kl_reward"
        yield key, kl, functools.partial(_kl, kl, compiled=in_loss)
    for key, function, kind in (
        ("algorithm.group_filter", functions.group_filter, np.bool_),
        ("algorithm.penalty", functions.penalty, np.floating),
        ("algorithm.answer_filter", functions.answer_filter, np.bool_),
    ):
        if function:
            yield key, function, functools.partial(_per_answer, function, key, kind)
    for number, function in enumerate(functions.corrections):
        key = f"algorithm.correction[{number}]"
        yield key, function, functools.partial(correction_weights, function)
    if select := functions.select_covariant:
        yield "algorithm.high_covariance", select, functools.partial(_marks, select)
    if pairs := functions.pairs:
        yield "algorithm.pairs", pairs, functools.partial(_pairs, pairs)
    yield from trials_of_updates(functions)


def trials_of_updates(functions: AlgorithmFunctions) -> Iterator[Trial]:
    """Yield the losses and reductions of a config."""
    for name, update in functions.updates.items():
        section = "algorithm" if name == "actor" else name
        learned = "values" if name == "critic" else "logprobs"
        if isinstance(update.objective, PreferenceObjective):
            of_pairs = update.objective.loss
            yield "algorithm.pair_loss", of_pairs, functools.partial(_gradient_of_pairs, of_pairs)
            continue
        loss, reduce = update.objective.loss, update.reduce
        if loss is not None:
            yield f"{section}.loss", loss, functools.partial(_gradient, loss, learned)
        yield f"{section}.reduce", reduce, functools.partial(_weights, reduce)


def _kl(function: Function, fields: Fields, *, compiled: bool) -> Any:
    try:
        result = call(function, fields)
    except jax.errors.JAXTypeError:
        if compiled:
            raise
        return None  # in the reward it may compute with numpy
    return per_token(result, function, "kl", fields["mask"].shape)


def _per_answer(function: Function, key: str, kind: type[np.generic], fields: Fields) -> Any:
    result = jax.jit(lambda fields: call(function, fields))(fields)
    return check_per_answer(result, function, key, kind, len(fields["mask"]))


def _marks(select: Function, fields: Fields) -> Any:
    result = jax.jit(lambda fields: call(with_key(select, jax.random.key(0)), fields))(fields)
    return check_marks(result, select, fields["mask"].shape)


def _pairs(function: Function, fields: Fields) -> Any:
    return check_pairs(jax.jit(lambda fields: call(function, fields))(fields), function)


def _gradient_of_pairs(loss: Function, fields: Fields) -> Any:
    """Differentiate a loss of pairs by the log-probs of the chosen answers."""
    of_pairs = abstract_pairs(fields["mask"].shape[0])
    fields = {name: jnp.zeros(like.shape, like.dtype) for name, like in of_pairs.items()}

    def total(array: Any) -> Any:
        result = call(loss, fields | {"chosen_logps": array})
        return jnp.sum(as_pair_loss(result, loss, array.shape).loss)

    return jax.grad(total)(fields["chosen_logps"])


def _gradient(loss: Function, learned: str, fields: Fields) -> Any:
    """Differentiate a loss by what its model says of each token."""

    def total(array: Any) -> Any:
        result = call(loss, fields | {learned: array})
        return jnp.sum(as_token_loss(result, loss, fields["mask"].shape).loss)

    return jax.grad(total)(fields[learned])


def _weights(reduce: Function, fields: Fields) -> Any:
    return per_token(reduce(fields["mask"]), reduce, "reduce", fields["mask"].shape)


def abstract_fields(size: int, length: int, components: int, top: int) -> Fields:
    """Return shape and dtype of every field of a batch [B T], with C components and K tokens."""
    sizes = {"B": size, "T": length, "C": components, "K": top}
    shapes = {name: tuple(sizes[axis] for axis in f.axes.split()) for name, f in FIELDS.items()}
    return {
        name: jax.ShapeDtypeStruct(shapes[name], jnp.dtype(field.dtype))
        for name, field in FIELDS.items()
    }


def abstract_pairs(size: int) -> Fields:
    """Return shape and dtype of every field that a loss of a step's pairs may ask for [P]."""
    return {
        name: jax.ShapeDtypeStruct((size,), jnp.int32 if name in LENGTHS else jnp.float32)
        for name in PAIR_FIELDS
    }


def check_function(key: str, function: Function, run: Callable[[], Any]) -> None:
    """Run a function.

    Raises:
        ConfigError: it raises, or `run` refuses what it returned.
    """
    try:
        run()
    except RunError as error:  # of what it returned
        text = str(error).removeprefix(f"{key.partition('[')[0]}: ")
        raise ConfigError(f"{key}: {text}") from error
    except Exception as error:
        text = f"{key}: {name_of(function)}: {described_failure(error, function)}"
        if isinstance(error, jax.errors.JAXTypeError):
            text += " (jax compiles this function: take jax.numpy for numpy, and jnp.where for if)"
        raise ConfigError(text) from error


def check_divergence(key: str, divergence: Function) -> None:
    """Call a divergence as an update does, and differentiate it.

    Raises:
        ConfigError: it raises, or returns something else than a number per token.
    """
    both = (jax.ShapeDtypeStruct((2, 8), jnp.float32),) * 2
    distillation = Distillation(divergence=divergence)

    def total(student: Any, teacher: Any) -> Any:
        return jnp.sum(distillation.checked(student, teacher))

    check_function(key, divergence, lambda: jax.eval_shape(jax.grad(total), *both))


def check_marks(result: Any, select: Function, shape: tuple[int, ...]) -> jax.Array:
    """Return what a producer of `high_covariance` returned if it is true or false for each token.

    Raises:
        ScoreError: it is something else.
    """
    got = type(result).__name__
    if isinstance(result, jax.Array):
        got = f"{result.dtype}{list(result.shape)}"
        if result.shape == shape and result.dtype == bool:
            return result
    raise ScoreError(
        f"algorithm.high_covariance: {name_of(select)!r} returned {got}; expected true or false "
        f"for each token [B T], here {list(shape)}"
    )


def with_key(select: Function, key: Any) -> Function:
    """Return a selector with its random key bound, if it takes one."""
    takes_key = "key" in inspect.signature(select).parameters
    return functools.partial(select, key=key) if takes_key else select

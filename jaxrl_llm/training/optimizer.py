"""The optimizer that a config names."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import described_failure, load_function
from jaxrl_llm.config.sections.optim import OptimConfig

MOST_RATES = 100_000
"""Updates for which a schedule is evaluated at most, evenly spaced."""


def make_optimizer(
    config: OptimConfig, key: str = "optim"
) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """Return the optimizer, with clipping and learning rate in it, and its schedule.

    Raises:
        ConfigError: one of the functions is no such thing, or does not work with its keywords.
    """
    name, at = config.schedule.fn, f"{key}.schedule"
    with _function_errors(make := load_schedule(config, at), f"{at}: {name!r} does not work"):
        schedule = make()
        jax.eval_shape(lambda count: _rate(schedule, count, f"{at}: {name!r}"), 0)
    name, at = config.optimizer.fn, f"{key}.optimizer"
    make = load_function(config.optimizer, kinds.OPTIMIZERS, passed=("learning_rate",), key=at)
    with _function_errors(make, f"{at}: {name!r} does not work"):
        optimizer = make(learning_rate=schedule)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ConfigError(
                f"{at}: {name!r} is not an optax optimizer: it returned a "
                f"{type(optimizer).__name__}; did you mean adamw?"
            )
        tried = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}  # optax checks when it is used
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), tried)
    if config.grad_clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip), optimizer)
    return optimizer, schedule


def load_schedule(config: OptimConfig, key: str) -> Callable[[], Any]:
    """Return the function that makes the schedule."""
    try:
        return load_function(config.schedule, kinds.SCHEDULES, key=key)
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

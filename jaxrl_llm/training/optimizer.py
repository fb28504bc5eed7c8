"""The optimizer that a config names."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import load_function
from jaxrl_llm.config.sections.optim import OptimConfig


def make_optimizer(
    config: OptimConfig, key: str = "optim"
) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """Return the optimizer, with clipping and learning rate in it, and its schedule.

    Raises:
        ConfigError: one of the functions is no such thing, or does not work with its keywords.
    """
    with config_errors_at(f"{key}.schedule: {config.schedule.fn!r} does not work"):
        schedule = load_function(config.schedule, kinds.SCHEDULES, key=f"{key}.schedule")()
        rate = schedule(jnp.zeros((), jnp.int32)) if callable(schedule) else None
        if not isinstance(rate, int | float | np.generic | jax.Array) or np.ndim(rate) != 0:
            raise ConfigError(
                f"{key}.schedule: {config.schedule.fn!r} is not an optax schedule: got {rate!r} as "
                "the learning rate of update 0, expected a number; did you mean constant_schedule?"
            )
    with config_errors_at(f"{key}.optimizer: {config.optimizer.fn!r} does not work"):
        optimizer = load_function(
            config.optimizer, kinds.OPTIMIZERS, passed=("learning_rate",), key=f"{key}.optimizer"
        )(learning_rate=schedule)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ConfigError(
                f"{key}.optimizer: {config.optimizer.fn!r} is not an optax optimizer; "
                "did you mean adamw?"
            )
        tried = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}  # optax checks when it is used
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), tried)
    if config.grad_clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip), optimizer)
    return optimizer, schedule

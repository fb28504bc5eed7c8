"""The moving average of a policy's weights, which follows it from step to step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import replicated
from jaxrl_llm.sharding.offload import on_device, to_device
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.update import TrainState


class MovingAverage:
    """The exponential moving average of a policy's trained weights, in float32.

    Args:
        rate: the share of the policy's weights that it takes over in each step.
        shardings: of its arrays.
        layout: where they stand.
    """

    def __init__(self, rate: float, shardings: Any, layout: Layout) -> None:
        """Begin without any weights."""
        everywhere: Any = replicated(layout.mesh)
        self.state_shardings = TrainState(shardings, (), everywhere, everywhere)

        @functools.partial(jax.jit, out_shardings=self.state_shardings)
        def init(params: Params) -> TrainState:
            zero = jnp.zeros((), jnp.int32)
            return TrainState(jax.tree.map(jnp.copy, params), (), zero, zero)

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
        def move(average: Params, params: Params) -> Params:
            return jax.tree.map(lambda a, p: a + rate * (p - a), average, params)

        self.init, self._move = init, move

    def follow(self, state: TrainState, policy: TrainState) -> TrainState:
        """Return the state after a step of the policy. Donates the old one."""
        target = self.state_shardings.params
        with on_device(policy.params) as params:
            same = jax.tree.map(lambda p, there: p.sharding == there, params, target)
            here = params if jax.tree.all(same) else reshard(params, target)
            average = self._move(to_device(state.params), here)
        return state._replace(params=average, updates=state.updates + 1)

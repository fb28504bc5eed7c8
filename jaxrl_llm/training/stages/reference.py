"""The reference policy of a run: the policy as it began, or as it was at the last refresh."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ReferenceConfig
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import replicated
from jaxrl_llm.sharding.offload import on_device, to_host
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import Layouts, microbatch_shape
from jaxrl_llm.training.load_model import LoadedModel, forward_config
from jaxrl_llm.training.roles import Role
from jaxrl_llm.training.update import TrainState
from jaxrl_llm.types import Batch

REFERENCE = "reference"
"""The name of a reference that is refreshed among the states of a run."""


@dataclass(frozen=True, kw_only=True)
class ReferencePolicy:
    """A reference policy.

    Attributes:
        infer: (params, batch) -> its log-probs of each token [B T], by name.
        copy: parameters of the policy -> those of a reference like it.
        mix: (old reference, new one) -> what a refresh makes of them.
        settings: when it is refreshed, and how.
        on_host: whether it waits in the host's memory until it is used.
    """

    infer: Callable[[Any, Batch], dict[str, np.ndarray]]
    copy: Callable[[Params], Params]
    mix: Callable[[Params, Params], Params]
    settings: ReferenceConfig
    on_host: bool = False

    def is_due(self, step: int) -> bool:
        """Tell whether the reference is refreshed after a step."""
        every = self.settings.refresh_every
        return every is not None and step % every == 0

    def refreshed(self, state: TrainState, policy: TrainState) -> TrainState:
        """Return the state after a refresh by the policy's."""
        params = self.copy(policy.params)
        if self.settings.mix != 1:
            with on_device(state.params) as before:
                params = self.mix(before, params)
        params = to_host(params) if self.on_host else params
        return state._replace(params=params, updates=state.updates + 1)


def initial_weights(
    config: TrainConfig, model: LoadedModel, layout: Layout, on_host: bool
) -> Params:
    """Copy the weights that a run begins with, in the compute dtype; of an adapter as they are.

    Args:
        config: of the run.
        model: the policy's.
        layout: where the copy stands.
        on_host: whether it waits there.
    """
    if model.frozen is not None:
        return jax.tree.map(jnp.copy, model.params)
    dtypes = model.model.compute_dtypes(config.model.dtype)
    params = reshard(model.params, layout.of(model.model.declare()), dtype=dtypes)
    return to_host(params) if on_host else params


def make_reference(
    config: TrainConfig,
    model: LoadedModel,
    layouts: Layouts,
    actor: Role,
    initial: Callable[[Layout, bool], Params],
) -> tuple[ReferencePolicy, Params]:
    """Copy the weights that a run begins with, in the compute dtype; return what is done with them.

    With an adapter the reference is the base, and so an adapter of zeros. Where a refresh mixes,
    its weights are in float32, or small shares of the policy would be lost in rounding.

    Args:
        config: of the run.
        model: the policy's.
        layouts: where each model stands.
        actor: the policy.
        initial: (layout, whether they wait on the host) -> weights that the run begins with, which
            others may read, too.

    Raises:
        ConfigError: it has a mesh of its own or is offloaded, but there is an adapter.
    """
    layout, settings = layouts.reference, config.reference
    infer: Callable[[Any, Batch], dict[str, np.ndarray]] = actor.infer
    if model.frozen is not None:
        if layout is not layouts.train or config.offload.reference:
            key = "offload.reference" if config.offload.reference else "mesh.reference"
            raise ConfigError(
                f"{key} is set, but beside an adapter the reference is the frozen model "
                "itself, where it is trained: remove it"
            )
        split, dtypes = jax.tree.map(lambda like: like.sharding, model.like), None
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        params = jax.jit(zeros, out_shardings=split)(model.like)
    else:
        split = layout.of(model.model.declare())
        dtypes = model.model.compute_dtypes(reference_dtype(config))
        if layout is not layouts.train:
            forward = forward_config(
                *(config.model, model.model, layout, config.rollout.temperature),
                *(model.tower, config.data.max_pixels),
            )
            shape = microbatch_shape(config, forward, layout)
            infer = logprob_pass(forward.over(shape), shape, layout.mesh, ("logprobs",))
        if settings.refresh_every is None:
            params = initial(layout, config.offload.reference)
        else:
            params = reshard(model.params, split, dtype=dtypes)

    @functools.partial(jax.jit, donate_argnums=1, out_shardings=split)
    def mix(before: Params, after: Params) -> Params:
        share = settings.mix
        return jax.tree.map(lambda old, new: share * new + (1 - share) * old, before, after)

    copy = functools.partial(reshard, target=split, dtype=dtypes)
    on_host = config.offload.reference
    policy = ReferencePolicy(infer=infer, copy=copy, mix=mix, settings=settings, on_host=on_host)
    return policy, params


def start_of(params: Params, layouts: Layouts) -> TrainState:
    """Return the state that a refreshed reference starts from; `updates` counts refreshes."""
    zero = distributed.put(np.zeros((), np.int32), replicated(layouts.reference.mesh))
    return TrainState(params, (), zero, zero)


def reference_dtype(config: TrainConfig) -> str:
    """Return the dtype of a reference's weights."""
    return config.model.dtype if config.reference.mix == 1 else "float32"


def fixed_reference(
    reference: ReferencePolicy, params: Params
) -> Callable[[dict[str, TrainState], Batch], dict[str, np.ndarray]]:
    """Return the pass of a reference that stays as it is: (states, batch) -> its log-probs."""
    infer = reference.infer

    def run(states: dict[str, TrainState], batch: Batch) -> dict[str, np.ndarray]:
        del states
        with on_device(params) as held:
            return infer(held, batch)

    return run


def changing_reference(
    reference: ReferencePolicy,
) -> Callable[[dict[str, TrainState], Batch], dict[str, np.ndarray]]:
    """Return the pass of a reference that is refreshed: (states, batch) -> its log-probs."""
    infer = reference.infer

    def run(states: dict[str, TrainState], batch: Batch) -> dict[str, np.ndarray]:
        with on_device(states[REFERENCE].params) as held:
            return infer(held, batch)

    return run

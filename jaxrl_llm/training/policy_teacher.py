"""A policy as its own teacher: with the weights that it began with, has now, or had on average."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.runs.resume import TrainableModel
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import Layouts, longest_teacher_sequence, microbatch_shape
from jaxrl_llm.training.load_model import LoadedModel, forward_config, laid_out
from jaxrl_llm.training.moving_average import MovingAverage
from jaxrl_llm.training.roles import Role
from jaxrl_llm.training.update import TrainState
from jaxrl_llm.types import ROUTES, Batch

AVERAGE = "teacher"
"""The name of the moving average among the states of a run."""

Infer = Callable[[Params, Batch], dict[str, np.ndarray]]


Run = Callable[[dict[str, TrainState], Batch, Rollouts, int], tuple[Batch, dict[str, float]]]


class PolicyTeacher(NamedTuple):
    """A policy as its own teacher.

    Attributes:
        run: (states, batch, its answers, step) -> the batch with what the teacher says of it, and
            how far the policy is from it.
        average: the moving average that it is; None where it is none.
        trainable: what the average begins with, which must not outlive the start of the run; None
            without one.
    """

    run: Run
    average: MovingAverage | None = None
    trainable: TrainableModel | None = None


def run_by(infer: Callable[[dict[str, TrainState], Batch], np.ndarray]) -> Run:
    """Return the pass of a teacher.

    Args:
        infer: (states, batch) -> its log-probs [B T].
    """

    def run(
        states: dict[str, TrainState], batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del rollouts, step
        logprobs = infer(states, batch)
        apart = (batch["rollout_logprobs"] - logprobs)[batch["mask"]]
        mean = float(apart.mean()) if apart.size else 0.0
        metrics = {"teacher/reverse_kl": mean, "teacher/left_out": 0.0}
        return batch.add(teacher_logprobs=logprobs, teacher_mask=batch["mask"]), metrics

    return run


def open_policy_teacher(
    config: TrainConfig,
    model: LoadedModel,
    layouts: Layouts,
    actor: Role,
    initial: Callable[[Layout, bool], Params],
) -> PolicyTeacher:
    """Make a policy its own teacher, with the weights that teacher.weights names.

    Args:
        config: of the run.
        model: the policy's.
        layouts: where each model stands.
        actor: the policy.
        initial: (layout, whether they wait on the host) -> weights that the run begins with.

    Raises:
        ConfigError: what it reads is longer than the model's positions.
    """
    layout = layouts.teacher
    infer = pass_of(config, model, layout, layouts, actor)
    if config.teacher.weights == "live":
        return PolicyTeacher(
            run_by(lambda states, batch: run_on(infer, states["actor"].params, batch))
        )
    if config.teacher.weights == "initial":
        params = initial(layout, config.offload.teacher)
        return PolicyTeacher(run_by(lambda _, batch: run_on(infer, params, batch)))
    placed = model
    if layout is not layouts.train:
        declared = layout.of(model.model.declare())
        placed = laid_out(model.model, reshard(model.params, declared), layout)
    shardings = jax.tree.map(lambda like: like.sharding, placed.like)
    average = MovingAverage(config.teacher.ema, shardings, layout)
    return PolicyTeacher(
        run_by(lambda states, batch: run_on(infer, states[AVERAGE].params, batch)),
        average,
        TrainableModel(placed, average),
    )


def run_on(infer: Infer, params: Params, batch: Batch) -> np.ndarray:
    """Return the log-probs of a batch under weights that may wait on the host."""
    with on_device(params) as held:
        return infer(held, batch.without(ROUTES))["logprobs"]  # its routers choose


def pass_of(
    config: TrainConfig, model: LoadedModel, layout: Layout, layouts: Layouts, actor: Role
) -> Infer:
    """Return the teacher's pass: the policy's, where it reads nothing longer, nor elsewhere."""
    longest = longest_teacher_sequence(config)
    if model.model.max_positions is not None and longest > model.model.max_positions:
        raise ConfigError(
            f"the teacher's longest prompt + rollout.max_new_tokens = {longest}, but the model has "
            f"{model.model.max_positions} positions: lower teacher.max_prompt_tokens"
        )
    plain = dataclasses.replace(config.model, router_loss_coef=0.0)
    forward = forward_config(plain, model.model, layout, 1.0, model.tower, config.data.max_pixels)
    shape = microbatch_shape(config, forward, layout, longest)
    if layout is layouts.train and shape == microbatch_shape(config, forward, layout):
        return actor.infer
    frozen = model.frozen
    return logprob_pass(forward.over(shape), shape, layout.mesh, ("logprobs",), frozen=frozen)

"""The models stage: what is trained, the reference, and their passes over a step's batch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.precision import agreement_tolerance
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.runs.resume import TrainableModel
from jaxrl_llm.sharding.offload import on_device, to_host
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.batch_metrics import check_agreement, check_difference
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import Layouts, microbatch_shape
from jaxrl_llm.training.load_functions import AlgorithmFunctions
from jaxrl_llm.training.load_model import LoadedModel, forward_config
from jaxrl_llm.training.roles import Role, make_roles, old_logprob_step
from jaxrl_llm.training.teacher_model import TeacherModel
from jaxrl_llm.training.update import TrainState
from jaxrl_llm.types import Batch

States = dict[str, TrainState]


class ModelPass(NamedTuple):
    """A pass of a model over a step's batch, before the advantages.

    Attributes:
        timer: name of its time in the metrics.
        run: (states, batch, its answers, step) -> the batch with more fields, and metrics.
    """

    timer: str
    run: Callable[[States, Batch, Rollouts, int], tuple[Batch, dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class ModelsStage:
    """The models of a run.

    Attributes:
        roles: that are trained, in the order of their updates: the actor is the last one.
        passes: over a step's batch, in this order.
        warmup_steps: in which only the critic is updated.
        check_canaries: (states, batch of fresh answers, step) -> metrics; raises where engine and
            trainer do not agree.
    """

    roles: tuple[Role, ...]
    passes: tuple[ModelPass, ...]
    warmup_steps: int
    check_canaries: Callable[[States, Batch, int], dict[str, float]]

    def to_update(self, step: int) -> Sequence[Role]:
        """Return the roles that a step updates; the actor only when the critic has warmed up."""
        return self.roles if step > self.warmup_steps else self.roles[:-1]


@activity("building the models")
def build_models(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    model: LoadedModel,
    layouts: Layouts,
    teacher: TeacherModel | None = None,
) -> tuple[ModelsStage, dict[str, TrainableModel]]:
    """Build every model that is trained and the reference; return also what training starts from.

    Args:
        config: of the run.
        functions: that it names.
        model: the policy's.
        layouts: where each model stands.
        teacher: that the policy's update runs; None: it runs none.
    """
    shape_on = functools.partial(microbatch_shape, config)
    roles, trainable = make_roles(config, functions, model, layouts, shape_on, teacher)
    passes = []
    if not functions.on_policy:
        passes.append(old_logprob_pass(config, roles["actor"]))
    if functions.needs_reference:
        reference = make_reference(config, model, layouts, roles["actor"])
        passes.append(reference_pass(reference))
    if reward := roles.get("implicit_reward_model"):
        fields = {"reward_logprobs": "logprobs"}
        passes.append(role_pass("implicit_reward_model", reward, fields))
    if critic := roles.get("critic"):
        passes.append(role_pass("values", critic, {"values": "values", "old_values": "values"}))
    order = ("implicit_reward_model", "critic", "actor")
    stage = ModelsStage(
        roles=tuple(roles[name] for name in order if name in roles),
        passes=tuple(passes),
        warmup_steps=config.critic.warmup_steps if "critic" in roles else 0,
        check_canaries=canary_check(config, roles["actor"]),
    )
    return stage, trainable


def old_logprob_pass(config: TrainConfig, actor: Role) -> ModelPass:
    """Return the pass that adds `old_logprobs`, and compares the engine's with the trainer's."""
    rollout = config.rollout
    add = old_logprob_step(
        actor.infer,
        use_rollout_logprobs=config.algorithm.use_rollout_logprobs,
        probe_tokens=config.batch.max_tokens_per_device,
    )

    def run(
        states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del rollouts
        with on_device(states[actor.name].params) as params:
            batch, probe = add(params, batch)
        tolerance, keeps_cache = agreement_tolerance(rollout), rollout.at_push == "keep"
        return batch, check_agreement(probe, step, tolerance, keeps_cache=keeps_cache)

    return ModelPass("old_log_prob", run)


def canary_check(
    config: TrainConfig, actor: Role
) -> Callable[[States, Batch, int], dict[str, float]]:
    """Return what compares the engine's log-probs of fresh answers with the trainer's."""
    tolerance = agreement_tolerance(config.rollout)

    def check(states: States, batch: Batch, step: int) -> dict[str, float]:
        with on_device(states[actor.name].params) as params:
            logprobs = actor.infer(params, batch)["logprobs"]
        difference = np.abs(logprobs - batch["rollout_logprobs"])[batch["mask"]].mean()
        return {"async/canary_diff_mean": check_difference(float(difference), step, tolerance)}

    return check


def reference_pass(reference: Callable[[Batch], dict[str, np.ndarray]]) -> ModelPass:
    """Return the pass that adds the reference's log-probs."""

    def run(
        states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del states, rollouts, step
        return batch.add(ref_logprobs=reference(batch)["logprobs"]), {}

    return ModelPass("ref", run)


def role_pass(timer: str, role: Role, fields: dict[str, str]) -> ModelPass:
    """Return the pass that adds fields of a batch, by the names of a role's results."""

    def run(
        states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del rollouts, step
        with on_device(states[role.name].params) as params:
            results = role.infer(params, batch)
        return batch.add(**{field: results[name] for field, name in fields.items()}), {}

    return ModelPass(timer, run)


def make_reference(
    config: TrainConfig, model: LoadedModel, layouts: Layouts, actor: Role
) -> Callable[[Batch], dict[str, np.ndarray]]:
    """Copy the weights that a run begins with, in the compute dtype; return their pass.

    With an adapter nothing is copied: the reference is the base, and so an adapter of zeros.

    Raises:
        ConfigError: it has a mesh of its own or is offloaded, but there is an adapter.
    """
    layout = layouts.reference
    if model.frozen is not None:
        if layout is not layouts.train or config.offload.reference:
            key = "offload.reference" if config.offload.reference else "mesh.reference"
            raise ConfigError(
                f"{key} is set, but beside an adapter the reference is the frozen model "
                "itself, where it is trained: remove it"
            )
        split = jax.tree.map(lambda like: like.sharding, model.like)
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return functools.partial(actor.infer, jax.jit(zeros, out_shardings=split)(model.like))
    split = layout.of(model.model.declare())
    dtypes = model.model.compute_dtypes(config.model.dtype)
    infer: Callable[[Any, Batch], dict[str, np.ndarray]] = actor.infer
    if layout is not layouts.train:
        forward = forward_config(config.model, model.model, layout, config.rollout.temperature)
        shape = microbatch_shape(config, forward, layout)
        infer = logprob_pass(forward.over(shape), shape, layout.mesh, ("logprobs",))
    params = reshard(model.params, split, dtype=dtypes)
    if config.offload.reference:
        params = to_host(params)

    def infer_reference(batch: Batch) -> dict[str, np.ndarray]:
        with on_device(params) as reference:
            return infer(reference, batch)

    return infer_reference

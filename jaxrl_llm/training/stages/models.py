"""The models stage: what is trained, the reference, and their passes over a step's batch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.precision import agreement_tolerance
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.runs.resume import TrainableModel
from jaxrl_llm.sharding.offload import on_device
from jaxrl_llm.training.batch_metrics import check_agreement, check_difference
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.layouts import Layouts, microbatch_shape
from jaxrl_llm.training.load_model import LoadedModel
from jaxrl_llm.training.roles import Role, make_roles, old_logprob_step
from jaxrl_llm.training.stages.reference import (
    REFERENCE,
    ReferencePolicy,
    changing_reference,
    fixed_reference,
    initial_weights,
    make_reference,
    start_of,
)
from jaxrl_llm.training.teachers import AVERAGE, TeacherModel, open_policy_teacher
from jaxrl_llm.training.update import MovingAverage, TrainState
from jaxrl_llm.training.visuals import FrozenTower
from jaxrl_llm.types import ROUTES, Batch

States = dict[str, TrainState]

TEACHER_TIMER = "teacher"
"""Timer of the passes that add what a teacher says."""

VISION_TIMER = "vision"
"""Timer of the pass that computes the features of images, where the tower is frozen."""


class ModelPass(NamedTuple):
    """A pass of a model over a step's batch, before the advantages.

    Attributes:
        timer: name of its time in the metrics.
        run: (states, batch, its answers, step) -> the batch with more fields, and metrics.
        begin: (batch, its answers) is called before the first pass of a step, for what goes on
            elsewhere while other passes run; None where there is nothing.
    """

    timer: str
    run: Callable[[States, Batch, Rollouts, int], tuple[Batch, dict[str, float]]]
    begin: Callable[[Batch, Rollouts], None] | None = None


class ScoredPass(NamedTuple):
    """A pass that waits for the scores of the step's answers.

    Attributes:
        timer: name of its time in the metrics.
        run: (states, batch, its answers, their scores, step) -> the batch with more fields, and
            metrics.
    """

    timer: str
    run: Callable[[States, Batch, Rollouts, Sequence[Score], int], tuple[Batch, dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class ModelsStage:
    """The models of a run.

    Attributes:
        roles: that are trained, in the order of their updates: the actor is the last one.
        passes: over a step's batch, in this order.
        warmup_steps: in which only the critic is updated.
        check_canaries: (states, batch of fresh answers, step) -> metrics; raises where engine and
            trainer do not agree.
        reference: that is refreshed; None without one, and for one that stays.
        scored_passes: over a step's batch with its scores, after all others.
        average: the policy's moving average, if a run has one.
    """

    roles: tuple[Role, ...]
    passes: tuple[ModelPass, ...]
    warmup_steps: int
    check_canaries: Callable[[States, Batch, int], dict[str, float]]
    scored_passes: tuple[ScoredPass, ...] = ()
    average: MovingAverage | None = None
    reference: ReferencePolicy | None = None

    def refresh_reference(self, states: States, step: int) -> States:
        """Return the states after a step, with a new reference where one is due."""
        if self.reference is None or not self.reference.is_due(step):
            return states
        return states | {REFERENCE: self.reference.refreshed(states[REFERENCE], states["actor"])}

    def to_update(self, step: int) -> Sequence[Role]:
        """Return the roles that a step updates; the actor only when the critic has warmed up."""
        return self.roles if step > self.warmup_steps else self.roles[:-1]

    def follow(self, states: States) -> States:
        """Return the states after a step's updates, with the moving average moved on."""
        if self.average is None:
            return states
        moved = self.average.follow(states[AVERAGE], states["actor"])
        return states | {AVERAGE: moved}


@activity("building the models")
def build_models(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    model: LoadedModel,
    layouts: Layouts,
    teacher: TeacherModel | None = None,
) -> tuple[ModelsStage, dict[str, TrainableModel], States]:
    """Build every model that is trained and the reference.

    Args:
        config: of the run.
        functions: that it names.
        model: the policy's.
        layouts: where each model stands.
        teacher: that the policy's update runs; None: it runs none.

    Returns:
        The stage, what training starts from, and the state of a reference that is refreshed.
    """
    shape_on = functools.partial(microbatch_shape, config)
    roles, trainable = make_roles(config, functions, model, layouts, shape_on, teacher)
    initial = functools.cache(functools.partial(initial_weights, config, model))
    passes = [] if model.tower is None else [tower_pass(model.tower)]
    average, refreshed, beside = None, None, {}
    if not functions.on_policy:
        passes.append(old_logprob_pass(config, functions, roles["actor"]))
    if functions.needs_reference:
        reference, params = make_reference(config, model, layouts, roles["actor"], initial)
        if config.reference.refresh_every is None:
            passes.append(reference_pass(fixed_reference(reference, params)))
        else:
            passes.append(reference_pass(changing_reference(reference)))
            refreshed, beside = reference, {REFERENCE: start_of(params, layouts)}
    if reward := roles.get("implicit_reward_model"):
        fields = {"reward_logprobs": "logprobs"}
        passes.append(role_pass("implicit_reward_model", reward, fields))
    if critic := roles.get("critic"):
        passes.append(role_pass("values", critic, {"values": "values", "old_values": "values"}))
    if functions.needs_teacher and config.teacher.weights != "given":
        own = open_policy_teacher(config, model, layouts, roles["actor"], initial)
        passes.append(ModelPass(TEACHER_TIMER, own.run))
        average = own.average
        trainable |= {AVERAGE: own.trainable} if own.trainable else {}
    order = ("implicit_reward_model", "critic", "actor")
    stage = ModelsStage(
        roles=tuple(roles[name] for name in order if name in roles),
        passes=tuple(passes),
        warmup_steps=config.critic.warmup_steps if "critic" in roles else 0,
        check_canaries=canary_check(config, roles["actor"]),
        reference=refreshed,
        average=average,
    )
    return stage, trainable, beside


def tower_pass(tower: FrozenTower) -> ModelPass:
    """Return the pass that computes the features of a step's images, which all others read."""

    def run(
        states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del states, rollouts, step
        tower.keep(batch)
        return batch, {}

    return ModelPass(VISION_TIMER, run)


def old_logprob_pass(config: TrainConfig, functions: AlgorithmFunctions, actor: Role) -> ModelPass:
    """Return the pass that adds `old_logprobs`, and compares the engine's with the trainer's."""
    rollout = config.rollout
    add = old_logprob_step(
        actor.infer,
        use_rollout_logprobs=config.algorithm.use_rollout_logprobs or functions.probes_only,
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


def reference_pass(
    reference: Callable[[States, Batch], dict[str, np.ndarray]],
) -> ModelPass:
    """Return the pass that adds the reference's log-probs."""

    def run(
        states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del rollouts, step
        own = batch.without(ROUTES)  # its routers choose
        return batch.add(ref_logprobs=reference(states, own)["logprobs"]), {}

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

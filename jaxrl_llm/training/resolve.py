"""The functions that a config names, and what follows from their signatures.

What a function asks for by parameter name decides which models a run has: a critic where one asks
for `values`, a reference where one asks for `ref_logprobs`, and so on.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.fields import FIELDS, Stage, asks_for, call, fields_of_model, name_of
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections.algorithm import AlgorithmConfig
from jaxrl_llm.config.sections.critic import CriticConfig
from jaxrl_llm.config.sections.implicit_reward_model import ImplicitRewardModelConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.rollout.precision import is_low_precision
from jaxrl_llm.training.load_functions import (
    Function,
    UpdateSpec,
    find,
    find_controller,
    find_covariance_selector,
    find_kl,
    update_spec,
)
from jaxrl_llm.training.objective import PolicyObjective, ValueObjective

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchFunctions:
    """The functions of a step that see the whole batch, as the config names them.

    Attributes:
        advantage, kl, controller, group_filter, penalty, corrections: of the keys of these names.
        select_covariant: produces `high_covariance`.
    """

    advantage: Function
    kl: Function | None
    controller: Function
    group_filter: Function | None
    penalty: Function | None
    corrections: tuple[Function, ...]
    select_covariant: Function | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmFunctions(BatchFunctions):
    """The functions that a config names, checked against the dataflow: see `resolve_functions`.

    Attributes:
        updates: of the actor, and of the critic and the reward model where something asks for
            them, by name.
        needs: every field that one of the functions asks for.
    """

    updates: Mapping[str, UpdateSpec]
    needs: frozenset[str]

    @property
    def needs_reference(self) -> bool:
        """Return whether a function asks for the reference's log-probs."""
        return bool(self.needs & fields_of_model("reference"))

    @property
    def on_policy(self) -> bool:
        """Return whether the update itself computes the old log-probs; see `is_on_policy`."""
        objective = self.updates["actor"].objective
        return isinstance(objective, PolicyObjective) and objective.on_policy

    @property
    def learns_labels(self) -> bool:
        """Return whether the reward model learns from scores as labels."""
        update = self.updates.get("implicit_reward_model")
        return update is not None and "raw_scores" in asks_for(update.objective.loss)


def resolve_functions(config: TrainConfig) -> AlgorithmFunctions:
    """Return the functions that a config names, checked against the dataflow.

    Raises:
        ConfigError: there is no such function, it asks for what does not exist when it is called,
            or its keywords are out of range.
    """
    batch_functions = load_batch_functions(config)
    policy = load_policy_objective(config.algorithm, batch_functions)
    updates, needs = load_updates(config, batch_functions, policy)
    check_sections(config, updates)
    if is_on_policy(config, batch_functions, updates):
        objective = dataclasses.replace(policy, on_policy=True)
        updates["actor"] = updates["actor"]._replace(objective=objective)
    check_producers(config, needs)
    check_scores_are_used(config.algorithm, needs)
    check_skipped_pass(config.algorithm, needs)
    functions = AlgorithmFunctions(
        **vars(batch_functions), updates=MappingProxyType(updates), needs=needs
    )
    trace_functions(config, functions)
    return functions


def load_batch_functions(config: TrainConfig) -> BatchFunctions:
    """Load the functions that see the whole batch."""
    algorithm = config.algorithm
    return BatchFunctions(
        advantage=find(
            algorithm.advantage, kinds.ADVANTAGES, "algorithm.advantage", Stage.INFERRED
        ),
        kl=find_kl(algorithm),
        controller=find_controller(algorithm.kl_controller),
        group_filter=algorithm.group_filter
        and find(algorithm.group_filter, kinds.SHAPING, "algorithm.group_filter", Stage.SCORED),
        penalty=algorithm.penalty
        and find(algorithm.penalty, kinds.SHAPING, "algorithm.penalty", Stage.SCORED),
        corrections=tuple(
            find(spec, kinds.CORRECTIONS, "algorithm.correction", Stage.ESTIMATED)
            for spec in corrections(config)
        ),
        select_covariant=algorithm.high_covariance
        and find_covariance_selector(algorithm.high_covariance),
    )


def load_policy_objective(algorithm: AlgorithmConfig, functions: BatchFunctions) -> PolicyObjective:
    """Load the policy's loss."""
    return PolicyObjective(
        loss=find(algorithm.loss, kinds.LOSSES, "algorithm.loss", Stage.SELECTED),
        kl=functions.kl if algorithm.kl_loss else None,
        entropy=algorithm.entropy_coef != 0,
        corrected=bool(functions.corrections),
    )


def load_updates(
    config: TrainConfig, functions: BatchFunctions, policy: PolicyObjective
) -> tuple[dict[str, UpdateSpec], frozenset[str]]:
    """Return the update of every model that is trained, and the fields that functions ask for."""
    updates = {"actor": update_spec(policy, config.algorithm.reduce, "algorithm", config.optim)}
    needs = policy.asks_for() | (fields_of_batch_functions(functions) - {"logprobs"})
    for _ in range(2):  # each may ask for the other
        if "critic" not in updates and needs & fields_of_model("critic"):
            updates["critic"] = load_critic_update(config.critic)
            needs |= updates["critic"].objective.asks_for()
        name = "implicit_reward_model"
        if name not in updates and needs & fields_of_model(name):
            updates[name] = load_reward_update(config.implicit_reward_model, functions.advantage)
            needs |= updates[name].objective.asks_for()
    return updates, frozenset(needs)


def fields_of_batch_functions(functions: BatchFunctions) -> set[str]:
    """Return the fields that functions of the whole batch ask for; the controller gets none."""
    asking = [
        functions.advantage,
        functions.kl,
        functions.group_filter,
        functions.penalty,
        functions.select_covariant,
        *functions.corrections,
    ]
    return {name for function in asking if function for name in asks_for(function)}


def load_critic_update(config: CriticConfig) -> UpdateSpec:
    """Load the critic's loss."""
    loss = find(config.loss, kinds.VALUES, "critic.loss", Stage.ESTIMATED)
    objective = ValueObjective(loss=loss)
    return update_spec(objective, config.reduce, "critic", config.optim, "critic.optim")


def load_reward_update(config: ImplicitRewardModelConfig, advantage: Function) -> UpdateSpec:
    """Load the implicit reward model's loss; the advantage takes its rewards."""
    name = "implicit_reward_model"
    loss = find(config.loss, kinds.VALUES, f"{name}.loss", Stage.UPDATING)
    check_betas(advantage, loss)
    objective = PolicyObjective(loss=loss)
    return update_spec(objective, config.reduce, name, config.optim, f"{name}.optim")


def is_on_policy(
    config: TrainConfig, functions: BatchFunctions, updates: Mapping[str, UpdateSpec]
) -> bool:
    """Tell whether a pass for the old log-probs would only repeat what the update computes.

    That is so where a step is one update, and nothing but the policy's loss asks for them.
    """
    batch, algorithm = config.batch, config.algorithm
    once = batch.epochs_per_step == 1 and batch.prompts_per_minibatch in (
        None,
        batch.prompts_per_step,
    )
    before = [functions.advantage, functions.select_covariant, *functions.corrections]
    asked = {name for function in before if function for name in asks_for(function)}
    for name, update in updates.items():
        asked |= update.objective.asks_for() - ({"old_logprobs"} if name == "actor" else set())
    return (
        once
        and not algorithm.use_rollout_logprobs
        and algorithm.kl_reward is None
        and config.critic.warmup_steps == 0
        and not asked & {"old_logprobs", "entropy", "sum_pi_squared"}
    )


def check_sections(config: TrainConfig, updates: Mapping[str, UpdateSpec]) -> None:
    """Refuse the section of a model that no function asks for."""
    defaults = {"critic": CriticConfig(), "implicit_reward_model": ImplicitRewardModelConfig()}
    for name, default in defaults.items():
        if name not in updates and getattr(config, name) != default:
            fields = sorted(fields_of_model(name))
            raise ConfigError(
                f"{name} is set, but no function asks for {' or '.join(fields)}: "
                "remove it, or name an advantage or a loss that does"
            )


def check_betas(advantage: Function, loss: Function) -> None:
    """Refuse an advantage whose rewards are not those that the reward model learns."""
    betas = {beta_of(advantage), beta_of(loss)} - {None}
    if len(betas) > 1:
        raise ConfigError(
            f"algorithm.advantage has beta={beta_of(advantage)}, "
            "implicit_reward_model.loss has "
            f"beta={beta_of(loss)}: the rewards are not those that the model learns; "
            "give both the same"
        )


def check_producers(config: TrainConfig, needs: frozenset[str]) -> None:
    """Refuse fields that no key produces, and keys that produce what nothing asks for."""
    producers = {
        "high_covariance": ("algorithm.high_covariance", config.algorithm.high_covariance),
        "score_components": ("reward.components", config.reward.components),
    }
    for field, (key, value) in producers.items():
        if field in needs and not value:
            raise ConfigError(f"{key} is not set, but a function asks for {field!r}")
        if value and field not in needs:
            raise ConfigError(f"{key} is set, but no function asks for {field!r}: remove it")


def check_scores_are_used(algorithm: AlgorithmConfig, needs: frozenset[str]) -> None:
    """Refuse keys that change scores and rewards where no function asks for them."""
    for name in ("penalty", "kl_reward"):
        if getattr(algorithm, name) and not needs & {"scores", "rewards"}:
            raise ConfigError(
                f"algorithm.{name} changes the scores and rewards, but no function asks for "
                "them: remove it, or name an advantage that does"
            )


def check_skipped_pass(algorithm: AlgorithmConfig, needs: frozenset[str]) -> None:
    """Refuse to skip the pass for the old log-probs where a function needs what it computes."""
    missing = sorted(needs & {"entropy", "sum_pi_squared"})
    if algorithm.use_rollout_logprobs and missing:
        raise ConfigError(
            f"algorithm.use_rollout_logprobs skips the pass that computes {missing[0]!r}, "
            "which a function asks for: set it to false"
        )


def trace_functions(config: TrainConfig, functions: AlgorithmFunctions) -> None:
    """Trace every function once, so that keywords out of range are refused before sampling."""
    size = config.batch.prompts_per_step * config.rollout.samples_per_prompt
    fields = abstract_fields(
        size,
        config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        len(config.reward.components),
    )
    for key, function in functions_by_key(config.algorithm, functions).items():
        if function:
            try_out(key, function, lambda f, function=function: call(function, f), fields)
    for name, update in functions.updates.items():
        key = "algorithm.reduce" if name == "actor" else f"{name}.reduce"
        reduce = update.reduce
        try_out(key, reduce, lambda f, reduce=reduce: reduce(f["mask"]), fields)


def functions_by_key(
    algorithm: AlgorithmConfig, functions: AlgorithmFunctions
) -> dict[str, Function | None]:
    """Return the functions that ask for fields of a batch, by config key."""
    losses = {name: update.objective.loss for name, update in functions.updates.items()}
    return {
        "algorithm.advantage": functions.advantage,
        "algorithm.loss": losses.pop("actor"),
        f"algorithm.{'kl_loss' if algorithm.kl_loss else 'kl_reward'}": functions.kl,
        "algorithm.group_filter": functions.group_filter,
        "algorithm.penalty": functions.penalty,
        "algorithm.high_covariance": functions.select_covariant
        and with_key(functions.select_covariant, jax.random.key(0)),
        **{f"algorithm.correction[{i}]": f for i, f in enumerate(functions.corrections)},
        **{f"{name}.loss": loss for name, loss in losses.items()},
    }


def abstract_fields(size: int, length: int, components: int) -> dict[str, Any]:
    """Return shape and dtype of every field of a batch [B T]."""
    sizes = {"B": size, "T": length, "C": components}
    shapes = {name: tuple(sizes[axis] for axis in f.axes.split()) for name, f in FIELDS.items()}
    return {
        name: jax.ShapeDtypeStruct(shapes[name], jnp.dtype(field.dtype))
        for name, field in FIELDS.items()
    }


def try_out(key: str, function: Function, run: Function, fields: dict[str, Any]) -> None:
    """Raise ConfigError where a function raises ValueError, as for keywords out of range."""
    try:
        jax.eval_shape(run, fields)
    except ValueError as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{key}: {name_of(function)}: {text[0]}") from error


def with_key(select: Function, key: Any) -> Function:
    """Return a selector with its random key bound, if it takes one."""
    takes_key = "key" in inspect.signature(select).parameters
    return functools.partial(select, key=key) if takes_key else select


def corrections(config: TrainConfig) -> tuple[FunctionSpec, ...]:
    """Return the off-policy corrections of a run.

    vLLM, and an engine in low precision, compute otherwise than the trainer.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.correction is not None:
        return algorithm.correction
    differs = rollout.engine == "vllm" or is_low_precision(rollout)
    if not differs or algorithm.use_rollout_logprobs:
        return ()
    if is_low_precision(rollout):
        log.info("algorithm.correction is truncated_token: the engine is in low precision")
    return (FunctionSpec("truncated_token"),)


def beta_of(function: Function) -> float | None:
    """Return a function's keyword `beta`, if it has one."""
    parameter = inspect.signature(function).parameters.get("beta")
    return parameter and parameter.default

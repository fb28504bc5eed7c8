"""The functions that a config names, and what follows from their signatures.

What a function asks for by parameter name decides which models a run has: a critic where one asks
for `values`, a reference where one asks for `ref_logprobs`, and so on.
"""

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.fields import Stage, asks_for, fields_of_model
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections.algorithm import AlgorithmConfig
from jaxrl_llm.config.sections.critic import CriticConfig
from jaxrl_llm.config.sections.implicit_reward_model import ImplicitRewardModelConfig
from jaxrl_llm.config.sections.teacher import TeacherConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.rollout.precision import is_low_precision
from jaxrl_llm.training.advantage_sum import terms_of
from jaxrl_llm.training.check_functions import check_functions
from jaxrl_llm.training.distillation import OF_TOP, Distillation
from jaxrl_llm.training.load_functions import (
    AlgorithmFunctions,
    BatchFunctions,
    Function,
    UpdateSpec,
    find,
    find_advantage,
    find_controller,
    find_covariance_selector,
    find_divergence,
    find_kl,
    update_spec,
)
from jaxrl_llm.training.objective import PolicyObjective, ValueObjective

log = logging.getLogger(__name__)


def resolve_functions(config: TrainConfig) -> AlgorithmFunctions:
    """Return the functions that a config names, checked against the dataflow.

    Raises:
        ConfigError: there is no such function, it asks for what does not exist when it is called,
            its keywords are out of range, or it does not return what is expected of it.
    """
    batch_functions = load_batch_functions(config)
    policy = load_policy_objective(config, batch_functions)
    updates, needs = load_updates(config, batch_functions, policy)
    check_sections(config, updates)
    if is_on_policy(config, batch_functions, updates):
        objective = dataclasses.replace(policy, on_policy=True)
        updates["actor"] = updates["actor"]._replace(objective=objective)
    check_producers(config, needs)
    check_scores_are_used(config.algorithm, needs)
    check_skipped_pass(config.algorithm, needs)
    check_staleness(config, needs, policy)
    check_teacher(config, needs)
    check_distillation(config)
    functions = AlgorithmFunctions(
        **vars(batch_functions), updates=MappingProxyType(updates), needs=needs
    )
    check_functions(config, functions)
    return functions


def load_batch_functions(config: TrainConfig) -> BatchFunctions:
    """Load the functions that see the whole batch."""
    algorithm = config.algorithm
    return BatchFunctions(
        advantage=find_advantage(algorithm.advantage),
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


def load_policy_objective(config: TrainConfig, functions: BatchFunctions) -> PolicyObjective:
    """Load the policy's loss, and the divergence from its teacher."""
    algorithm, distillation = config.algorithm, None
    if algorithm.distillation:
        divergence = find_divergence(algorithm.distillation, "algorithm.distillation")
        of_top = config.teacher.top_k is not None
        distillation = Distillation(divergence=divergence, of_top=of_top)
    return PolicyObjective(
        loss=algorithm.loss
        and find(algorithm.loss, kinds.LOSSES, "algorithm.loss", Stage.SELECTED),
        distillation=distillation,
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
    own = {beta_of(term) for term in terms_of(advantage)} - {None}
    if len(own | {beta_of(loss)} - {None}) > 1:
        raise ConfigError(
            f"algorithm.advantage has beta={', '.join(map(str, own))}, "
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


def check_staleness(config: TrainConfig, needs: frozenset[str], policy: PolicyObjective) -> None:
    """Refuse what compares answers of several policies, and warn of a trust region around one.

    A loss that asks for ages and the engine's log-probs weighs tokens of older policies by itself.
    """
    staleness = config.rollout.staleness
    weighs = policy.asks_for() >= {"ages", "rollout_logprobs"}
    if weighs and policy.corrected:
        raise ConfigError(
            "algorithm.loss asks for 'ages' and 'rollout_logprobs', so that algorithm.correction "
            "would weigh tokens a second time: set algorithm.use_rollout_logprobs to true, which "
            "also skips the pass for the old log-probs"
        )
    if staleness and "greedy_scores" in needs:
        raise ConfigError(
            f"rollout.staleness={staleness}, but a function asks for 'greedy_scores': greedy "
            "answers of the newest policy are no baseline for answers of older ones"
        )
    if staleness and config.algorithm.use_rollout_logprobs and not weighs:
        log.warning(
            "algorithm.use_rollout_logprobs with rollout.staleness=%d: the loss clips around "
            "policies that are up to %d updates old (docs/async.md)",
            *(staleness, staleness),
        )


def check_teacher(config: TrainConfig, needs: frozenset[str]) -> None:
    """Refuse a teacher that no function asks for, none where one does, and tempered samples."""
    asked = sorted(needs & fields_of_model("teacher"))
    if config.algorithm.distillation:
        asked.append("algorithm.distillation")
    of_top = sorted(needs & set(OF_TOP))
    if bool(of_top) != (config.teacher.top_k is not None):
        raise ConfigError(
            f"teacher.top_k is not set, but a function asks for {of_top[0]!r}"
            if of_top
            else f"teacher.top_k is set, but no function asks for {' or '.join(OF_TOP)}, and there "
            "is no algorithm.distillation: remove it"
        )
    if asked and config.teacher.path is None:
        by = f"a function asks for {asked[0]!r}"
        by = "algorithm.distillation needs a teacher" if config.algorithm.distillation else by
        raise ConfigError(f"teacher.path is not set, but {by}")
    if not asked and config.teacher != TeacherConfig():
        raise ConfigError(
            "teacher is set, but no function asks for teacher_logprobs, and there is no "
            "algorithm.distillation: remove it, or name an advantage that does, as reverse_kl, or "
            "a divergence"
        )
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    sampled = {key: getattr(config.rollout, key) for key in plain}
    changed = [f"rollout.{key}={value}" for key, value in sampled.items() if value != plain[key]]
    if "teacher_logprobs" in needs and changed:
        raise ConfigError(
            f"{' and '.join(changed)}, but a teacher's log-probs are compared with those of plain "
            "samples: expected rollout.temperature=1, top_p=1 and top_k=0"
        )


def check_distillation(config: TrainConfig) -> None:
    """Refuse contradictions between the teacher's keys and what is distilled from it."""
    algorithm, teacher = config.algorithm, config.teacher
    spec, of_top = algorithm.distillation, teacher.top_k is not None
    if spec is None:
        if algorithm.loss is None:
            raise ConfigError("algorithm.loss is null, and so is algorithm.distillation: set one")
        if algorithm.distillation_coef != AlgorithmConfig().distillation_coef:
            raise ConfigError(
                "algorithm.distillation_coef is set, but algorithm.distillation is null: remove it"
            )
        return
    default = AlgorithmConfig().advantage
    if algorithm.loss is None and (algorithm.advantage != default or algorithm.correction):
        key = "advantage" if algorithm.advantage != default else "correction"
        raise ConfigError(
            f"algorithm.loss is null, so that nothing is learned by algorithm.{key}: remove it"
        )
    if of_top and spec.kwargs.get("temperature", 1) != 1:
        raise ConfigError(
            f"algorithm.distillation.temperature={spec.kwargs['temperature']}, but of the tokens "
            "beyond teacher.top_k only the sum is known, and not at another temperature: "
            "set it to 1, or teacher.top_k to null"
        )
    if not of_top and (isinstance(teacher.path, dict) or config.mesh.teacher is not None):
        key = (
            "teacher.path has several" if isinstance(teacher.path, dict) else "mesh.teacher is set"
        )
        raise ConfigError(
            f"{key}, but over the whole vocabulary algorithm.distillation runs one teacher where "
            "the policy is trained: set teacher.top_k, or name one teacher without a mesh"
        )


def corrections(config: TrainConfig) -> tuple[FunctionSpec, ...]:
    """Return the off-policy corrections of a run.

    vLLM, and an engine in low precision, compute otherwise than the trainer; and stale answers are
    of older policies.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.correction is not None:
        return algorithm.correction
    if algorithm.loss is None:
        return ()
    differs = rollout.engine == "vllm" or is_low_precision(rollout) or rollout.staleness > 0
    if not differs or algorithm.use_rollout_logprobs:
        return ()
    if is_low_precision(rollout):
        log.info("algorithm.correction is truncated_token: the engine is in low precision")
    return (FunctionSpec("truncated_token"),)


def beta_of(function: Function) -> float | None:
    """Return a function's keyword `beta`, if it has one."""
    parameter = inspect.signature(function).parameters.get("beta")
    return parameter and parameter.default

"""The functions that a config names, and what follows from their signatures.

What a function asks for by parameter name decides which models a run has: a critic where one asks
for `values`, a reference where one asks for `ref_logprobs`, and so on.
"""

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.fields import Stage, asks_for, fields_of_model
from jaxrl_llm.config.functions import CORRECTIONS, LOSSES, PAIRS, SHAPING, VALUES, FunctionSpec
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import CriticConfig, ImplicitRewardModelConfig
from jaxrl_llm.rollout.precision import is_low_precision
from jaxrl_llm.training.advantage_sum import terms_of
from jaxrl_llm.training.check_functions import check_functions
from jaxrl_llm.training.check_needs import (
    check_distillation,
    check_producers,
    check_refresh,
    check_router_replay,
    check_scores_are_used,
    check_skipped_pass,
    check_staleness,
    check_teacher,
)
from jaxrl_llm.training.distillation import Distillation
from jaxrl_llm.training.load_functions import (
    AlgorithmFunctions,
    BatchFunctions,
    Function,
    UpdateSpec,
    fields_of_update,
    find,
    find_advantage,
    find_controller,
    find_covariance_selector,
    find_divergence,
    find_kl,
    find_pair_loss,
    find_teacher_prompt,
    update_spec,
)
from jaxrl_llm.training.objective import PolicyObjective, ValueObjective
from jaxrl_llm.training.preference_objective import PreferenceObjective

log = logging.getLogger(__name__)

OF_PAIRS = FunctionSpec("sequence_mean_token_mean")
"""How pairs are weighed: alike."""


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
    is_of_tokens = isinstance(policy, PolicyObjective)
    if is_of_tokens and is_on_policy(config, batch_functions, updates):
        objective = dataclasses.replace(policy, on_policy=True)
        updates["actor"] = updates["actor"]._replace(objective=objective)
    check_producers(config, needs)
    check_skipped_pass(config.algorithm, needs)
    check_refresh(config, needs)
    if is_of_tokens:
        check_staleness(config, needs, policy)
    check_teacher(config, needs)
    check_distillation(config)
    functions = AlgorithmFunctions(
        **vars(batch_functions), updates=MappingProxyType(updates), needs=needs
    )
    check_scores_are_used(config.algorithm, functions)
    check_router_replay(config, functions)
    check_functions(config, functions)
    return functions


def load_batch_functions(config: TrainConfig) -> BatchFunctions:
    """Load the functions that see the whole batch."""
    algorithm = config.algorithm
    return BatchFunctions(
        advantage=None if algorithm.pairs else find_advantage(algorithm.advantage),
        kl=find_kl(algorithm),
        controller=find_controller(algorithm.kl_controller),
        group_filter=algorithm.group_filter
        and find(algorithm.group_filter, SHAPING, "algorithm.group_filter", Stage.SCORED),
        penalty=algorithm.penalty
        and find(algorithm.penalty, SHAPING, "algorithm.penalty", Stage.SCORED),
        corrections=tuple(
            find(spec, CORRECTIONS, "algorithm.correction", Stage.ESTIMATED)
            for spec in corrections(config)
        ),
        select_covariant=algorithm.high_covariance
        and find_covariance_selector(algorithm.high_covariance),
        answer_filter=algorithm.answer_filter
        and find(algorithm.answer_filter, SHAPING, "algorithm.answer_filter", Stage.ESTIMATED),
        pairs=algorithm.pairs and find(algorithm.pairs, PAIRS, "algorithm.pairs", Stage.SCORED),
        teacher_prompt=config.teacher.prompt and find_teacher_prompt(config.teacher.prompt),
    )


def load_policy_objective(
    config: TrainConfig, functions: BatchFunctions
) -> PolicyObjective | PreferenceObjective:
    """Load the policy's loss, of tokens or of pairs, and the divergence from its teacher."""
    algorithm, distillation = config.algorithm, None
    if algorithm.pair_loss is not None:
        return PreferenceObjective(loss=find_pair_loss(algorithm.pair_loss))
    if algorithm.distillation:
        divergence = find_divergence(algorithm.distillation, "algorithm.distillation")
        of_top = config.teacher.top_k is not None
        distillation = Distillation(divergence=divergence, of_top=of_top)
    return PolicyObjective(
        loss=algorithm.loss and find(algorithm.loss, LOSSES, "algorithm.loss", Stage.SELECTED),
        distillation=distillation,
        kl=functions.kl if algorithm.kl_loss else None,
        entropy=algorithm.entropy_coef != 0,
        corrected=bool(functions.corrections),
    )


def load_updates(
    config: TrainConfig,
    functions: BatchFunctions,
    policy: PolicyObjective | PreferenceObjective,
) -> tuple[dict[str, UpdateSpec], frozenset[str]]:
    """Return the update of every model that is trained, and the fields that functions ask for."""
    reduce = OF_PAIRS if functions.pairs else config.algorithm.reduce
    updates = {"actor": update_spec(policy, reduce, "algorithm", config.optim)}
    needs = fields_of_update(policy) | (fields_of_batch_functions(functions) - {"logprobs"})
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
        functions.answer_filter,
        functions.pairs,
        *functions.corrections,
    ]
    return {name for function in asking if function for name in asks_for(function)}


def load_critic_update(config: CriticConfig) -> UpdateSpec:
    """Load the critic's loss."""
    loss = find(config.loss, VALUES, "critic.loss", Stage.ESTIMATED)
    objective = ValueObjective(loss=loss)
    return update_spec(objective, config.reduce, "critic", config.optim, "critic.optim")


def load_reward_update(config: ImplicitRewardModelConfig, advantage: Function | None) -> UpdateSpec:
    """Load the implicit reward model's loss; the advantage takes its rewards."""
    name = "implicit_reward_model"
    loss = find(config.loss, VALUES, f"{name}.loss", Stage.UPDATING)
    check_betas(advantage, loss)
    objective = PolicyObjective(loss=loss)
    return update_spec(objective, config.reduce, name, config.optim, f"{name}.optim")


def is_on_policy(
    config: TrainConfig, functions: BatchFunctions, updates: Mapping[str, UpdateSpec]
) -> bool:
    """Tell whether a pass for the old log-probs would only repeat what the update computes.

    That is so where a step is one update on all answers, and nothing but the policy's loss asks for
    them.
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
        and functions.answer_filter is None
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


def check_betas(advantage: Function | None, loss: Function) -> None:
    """Refuse an advantage whose rewards are not those that the reward model learns."""
    terms = () if advantage is None else terms_of(advantage)
    own = {beta_of(term) for term in terms} - {None}
    if len(own | {beta_of(loss)} - {None}) > 1:
        raise ConfigError(
            f"algorithm.advantage has beta={', '.join(map(str, own))}, "
            "implicit_reward_model.loss has "
            f"beta={beta_of(loss)}: the rewards are not those that the model learns; "
            "give both the same"
        )


def corrections(config: TrainConfig) -> tuple[FunctionSpec, ...]:
    """Return the off-policy corrections of a run.

    vLLM, and an engine in low precision, compute otherwise than the trainer; and stale answers are
    of older policies. A loss of pairs takes answers of any policy as they are.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.pairs is not None:
        return ()
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

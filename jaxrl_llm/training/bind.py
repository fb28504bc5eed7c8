"""The functions that a config names, bound to a run: found, checked, and what follows from them.

What a function asks for by parameter name decides which models a run has: a critic where one asks
for `values`, a reference where one asks for `ref_logprobs`, and so on. Every function is tried on
the shapes of a batch before a model is loaded.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import (
    ADVANTAGES,
    CORRECTIONS,
    DATASETS,
    DIVERGENCES,
    FIELDS,
    KLS,
    LOSSES,
    PAIRS,
    PREFERENCES,
    PREPARATIONS,
    REDUCTIONS,
    SHAPING,
    TEACHER_PROMPTS,
    VALUES,
    FunctionSpec,
    Stage,
    asks_for,
    call,
    check_fields,
    described_failure,
    fields_at,
    fields_of_model,
    find_function,
    load_function,
    name_of,
    signature_of,
)
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import (
    AlgorithmConfig,
    CriticConfig,
    ImplicitRewardModelConfig,
    OptimConfig,
    TeacherConfig,
)
from jaxrl_llm.data.teacher_prompts import TOLD
from jaxrl_llm.monitoring.trackers import check_trackers
from jaxrl_llm.rewards.scoring import check_scoring
from jaxrl_llm.rollout.agents.sampler import check_episode_functions
from jaxrl_llm.rollout.build import is_low_precision
from jaxrl_llm.rollout.vllm.setup import find_python
from jaxrl_llm.training import experience
from jaxrl_llm.training.optimizer import check_learning_rates, make_optimizer
from jaxrl_llm.training.update import (
    ANSWER_FIELDS,
    LENGTHS,
    OF_LABELLED,
    OF_REFERENCE,
    OF_TOP,
    SCORES,
    Distillation,
    PolicyObjective,
    PreferenceObjective,
    UpdateSpec,
    ValueObjective,
    as_pair_loss,
    as_token_loss,
    per_token,
)

log = logging.getLogger(__name__)

Function = Callable[..., Any]


class AdvantageSum:
    """The advantage function Σ w_i · A_i, which asks for all that its terms ask for.

    A term that gives advantages and returns gives the sum its returns; one may.

    Args:
        terms: functions, each with its weight.

    Attributes:
        terms: the same.
    """

    def __init__(self, terms: Sequence[tuple[Function, float]]) -> None:
        """Take the fields of all terms as parameters."""
        self.terms = tuple(terms)
        names = dict.fromkeys(name for function, _ in terms for name in asks_for(function))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        self.__name__ = " + ".join(
            name_of(function) if weight == 1 else f"{weight:g} {name_of(function)}"
            for function, weight in terms
        )

    def __call__(self, *values: Any) -> Any:
        """Return the advantages [B] or [B T], or a pair of these and the returns.

        Raises:
            ValueError: two terms have returns.
        """
        fields = dict(zip(inspect.signature(self).parameters, values, strict=True))
        parts, returns = [], []
        for function, weight in self.terms:
            result = call(function, fields)
            advantages, *rest = result if isinstance(result, tuple) else (result,)
            parts.append(weight * advantages)
            returns += rest
        if len(returns) > 1:
            raise ValueError(
                f"{self.__name__}: {len(returns)} of the terms have returns for a critic, "
                "expected one at most"
            )
        per_token = any(part.ndim == 2 for part in parts)
        spread = [part[:, None] if per_token and part.ndim == 1 else part for part in parts]
        total = functools.reduce(lambda a, b: a + b, spread)
        return (total, *returns) if returns else total


# Loading the functions that a config names, each checked against what its key gives it.


PAIR_FIELDS = ANSWER_FIELDS - OF_LABELLED - SCORES
"""What a loss of the pairs of a step may ask for, [P] each."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmFunctions:
    """The functions that a config names, checked against the dataflow by `resolve_functions`.

    Attributes:
        advantage, kl, controller, group_filter, penalty, corrections, answer_filter, pairs: of the
            keys of these names; there is no advantage where there are pairs.
        select_covariant: produces `high_covariance`.
        teacher_prompt: writes the prompt that a teacher reads.
        updates: of the actor, and of the critic and the reward model where something asks for
            them, by name.
        needs: every field that one of the functions asks for.
    """

    advantage: Function | None
    kl: Function | None
    controller: Function
    group_filter: Function | None
    penalty: Function | None
    corrections: tuple[Function, ...]
    select_covariant: Function | None
    answer_filter: Function | None
    pairs: Function | None
    teacher_prompt: Function | None
    updates: Mapping[str, UpdateSpec] = dataclasses.field(default_factory=dict)
    needs: frozenset[str] = frozenset()

    @property
    def needs_reference(self) -> bool:
        """Return whether a function asks for the reference's log-probs."""
        return bool(self.needs & fields_of_model("reference"))

    @property
    def needs_teacher(self) -> bool:
        """Return whether a function asks for what a teacher says of the answers."""
        return bool(self.needs & fields_of_model("teacher"))

    @property
    def distillation(self) -> Distillation | None:
        """Return the divergence from a teacher that the actor's update minimises, if it does."""
        objective = self.updates["actor"].objective
        return objective.distillation if isinstance(objective, PolicyObjective) else None

    @property
    def runs_teacher_in_update(self) -> bool:
        """Return whether the actor's update runs the teacher, over the whole vocabulary."""
        return self.distillation is not None and not self.distillation.of_top

    @property
    def on_policy(self) -> bool:
        """Return whether the update itself computes the old log-probs; see `is_on_policy`."""
        objective = self.updates["actor"].objective
        return isinstance(objective, PolicyObjective) and objective.on_policy

    @property
    def probes_only(self) -> bool:
        """Return whether the actor's pass before its update only compares it with the engine.

        It does where the update sees some of the answers, and nothing asks for what it computes.
        """
        selects = self.pairs is not None or self.answer_filter is not None
        asked = self.needs & fields_of_model("actor")
        return selects and not asked and self.kl is None

    @property
    def learns_labels(self) -> bool:
        """Return whether the reward model learns from scores as labels."""
        update = self.updates.get("implicit_reward_model")
        return update is not None and "raw_scores" in update.objective.asks_for()


def find(
    spec: FunctionSpec,
    home: str,
    key: str,
    available: Collection[str],
    *,
    passed: Iterable[str] | None = None,
) -> Function:
    """Return a function that asks for fields.

    Args:
        spec: as a config names it.
        home: the module of bare names.
        key: its config key, for messages.
        available: the fields that it may ask for.
        passed: parameters that no keyword of a config may set; None: those without a default.
    """
    function = load_function(spec, home, passed=passed, key=key)
    check_fields(function, key, available=available)
    return function


def find_positional(spec: FunctionSpec, home: str, key: str, expected: tuple[str, ...]) -> Function:
    """Return a function that takes so many positional arguments, whatever it calls them."""
    function = load_function(spec, home, passed=None, key=key)
    names = asks_for(function)
    if len(names) != len(expected):
        raise ConfigError(
            f"{key}: {name_of(function)} takes ({', '.join(names)}), "
            f"expected ({', '.join(expected)})"
        )
    return function


def find_divergence(spec: FunctionSpec, key: str) -> Function:
    """Return a divergence of a student from its teacher."""
    return find_positional(spec, DIVERGENCES, key, ("student_logprobs", "teacher_logprobs"))


def check_divergence(key: str, divergence: Function) -> None:
    """Call a divergence as an update does, and differentiate it.

    Raises:
        ConfigError: it raises, or returns something else than a number per token.
    """
    both = (jax.ShapeDtypeStruct((2, 8), jnp.float32),) * 2
    distillation = Distillation(divergence=divergence)

    def total(student: Any, teacher: Any) -> Any:
        return jnp.sum(distillation.checked(student, teacher))

    check_function(key, divergence, lambda: jax.eval_shape(jax.grad(total), *both))


def find_advantage(spec: FunctionSpec | Sequence[FunctionSpec]) -> Function:
    """Return the advantage function, or the weighted sum of several.

    `weight` of a term is what it is multiplied by, unless the function has a keyword of this name.

    Raises:
        ConfigError: one can't be loaded, or a weight is no finite number.
    """
    key, available = "algorithm.advantage", fields_at(Stage.INFERRED)
    if isinstance(spec, FunctionSpec) and "weight" not in spec.kwargs:
        return find(spec, ADVANTAGES, key, available)
    terms = []
    for term in (spec,) if isinstance(spec, FunctionSpec) else spec:
        weight, kwargs = 1.0, dict(term.kwargs)
        function = find_function(term, ADVANTAGES, key=key)
        if "weight" not in signature_of(function).parameters:
            weight = kwargs.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise ConfigError(f"{key}.weight: got {weight!r}, expected a finite number")
        bare = dataclasses.replace(term, kwargs=kwargs)
        terms.append((find(bare, ADVANTAGES, key, available), float(weight)))
    return AdvantageSum(terms)


def update_spec(
    objective: PolicyObjective | ValueObjective | PreferenceObjective,
    reduce: FunctionSpec,
    section: str,
    optim: OptimConfig,
) -> UpdateSpec:
    """Find the reduction and the optimizer of a model that is trained.

    Args:
        objective: what it minimises.
        reduce: from a mask to weights.
        section: of the config that names the reduction.
        optim: its optimizer.
    """
    weigh = find_positional(reduce, REDUCTIONS, f"{section}.reduce", ("mask",))
    key = "optim" if section == "algorithm" else f"{section}.optim"
    optimizer, schedule = make_optimizer(optim, key)
    return UpdateSpec(objective, weigh, optimizer, schedule, optim.max_skipped)


# The functions that a config names, and what follows from their signatures.


OF_PAIRS = FunctionSpec("sequence_mean_token_mean")
"""How pairs are weighed: alike."""


def resolve_functions(config: TrainConfig) -> AlgorithmFunctions:
    """Return the functions that a config names, checked against the dataflow.

    Raises:
        ConfigError: there is no such function, it asks for what does not exist when it is called,
            its keywords are out of range, or it does not return what is expected of it.
    """
    functions = load_batch_functions(config)
    policy = load_policy_objective(config, functions)
    updates, needs = load_updates(config, functions, policy)
    is_of_tokens = isinstance(policy, PolicyObjective)
    if is_of_tokens and is_on_policy(config, functions, updates):
        objective = dataclasses.replace(policy, on_policy=True)
        updates["actor"] = updates["actor"]._replace(objective=objective)
    check_needs(config, updates, needs)
    if is_of_tokens:
        check_staleness(config, needs, policy)
    check_teacher(config, needs)
    check_distillation(config)
    functions = dataclasses.replace(functions, updates=MappingProxyType(updates), needs=needs)
    check_scores_are_used(config.algorithm, functions)
    check_router_replay(config, functions)
    check_functions(config, functions)
    return functions


def load_batch_functions(config: TrainConfig) -> AlgorithmFunctions:
    """Load the functions that see the whole batch."""
    algorithm, teacher_prompt = config.algorithm, config.teacher.prompt

    def optional(spec: FunctionSpec | None, name: str, home: str, stage: Stage) -> Any:
        return spec and find(spec, home, f"algorithm.{name}", fields_at(stage))

    kl = "kl_loss" if algorithm.kl_loss else "kl_reward"
    kl_spec, select = getattr(algorithm, kl), algorithm.high_covariance
    # KL is called before advantages are known, with the old log-probs for the current ones
    of_kl = [*fields_at(Stage.INFERRED), "logprobs"]
    return AlgorithmFunctions(
        advantage=None if algorithm.pairs else find_advantage(algorithm.advantage),
        kl=kl_spec and find(kl_spec, KLS, f"algorithm.{kl}", of_kl),
        controller=find_positional(
            algorithm.kl_controller,
            KLS,
            "algorithm.kl_controller",
            expected=("coef", "observed_kl", "batch_size"),
        ),
        group_filter=optional(algorithm.group_filter, "group_filter", SHAPING, Stage.SCORED),
        penalty=optional(algorithm.penalty, "penalty", SHAPING, Stage.SCORED),
        corrections=tuple(
            find(spec, CORRECTIONS, "algorithm.correction", fields_at(Stage.ESTIMATED))
            for spec in corrections(config)
        ),
        select_covariant=select
        and find(
            select,
            LOSSES,
            "algorithm.high_covariance",
            fields_at(Stage.UPDATING),
            passed=[*FIELDS, "key"],  # which it may take as a keyword
        ),
        answer_filter=optional(algorithm.answer_filter, "answer_filter", SHAPING, Stage.ESTIMATED),
        pairs=optional(algorithm.pairs, "pairs", PAIRS, Stage.SCORED),
        teacher_prompt=teacher_prompt
        and find(teacher_prompt, TEACHER_PROMPTS, "teacher.prompt", TOLD),
    )


def load_policy_objective(
    config: TrainConfig, functions: AlgorithmFunctions
) -> PolicyObjective | PreferenceObjective:
    """Load the policy's loss, of tokens or of pairs, and the divergence from its teacher."""
    algorithm, distillation = config.algorithm, None
    if algorithm.pair_loss is not None:
        loss = find(algorithm.pair_loss, PREFERENCES, "algorithm.pair_loss", PAIR_FIELDS)
        return PreferenceObjective(loss=loss)
    if algorithm.distillation:
        divergence = find_divergence(algorithm.distillation, "algorithm.distillation")
        of_top = config.teacher.top_k is not None
        distillation = Distillation(divergence=divergence, of_top=of_top)
    return PolicyObjective(
        loss=algorithm.loss
        and find(algorithm.loss, LOSSES, "algorithm.loss", fields_at(Stage.SELECTED)),
        distillation=distillation,
        kl=functions.kl if algorithm.kl_loss else None,
        entropy=algorithm.entropy_coef != 0,
        corrected=bool(functions.corrections),
    )


def load_updates(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    policy: PolicyObjective | PreferenceObjective,
) -> tuple[dict[str, UpdateSpec], frozenset[str]]:
    """Return the update of every model that is trained, and the fields that functions ask for."""
    reduce = OF_PAIRS if functions.pairs else config.algorithm.reduce
    updates = {"actor": update_spec(policy, reduce, "algorithm", config.optim)}
    needs = policy.asks_for()
    if isinstance(policy, PreferenceObjective):  # its other fields are made with the pairs
        needs = {"ref_logprobs"} if needs & OF_REFERENCE else set()
    of_batch = (
        functions.advantage,
        functions.kl,
        functions.group_filter,
        functions.penalty,
        functions.select_covariant,
        functions.answer_filter,
        functions.pairs,
        *functions.corrections,
    )
    needs |= fields_asked(*of_batch) - {"logprobs"}  # the controller gets none
    critic, reward, name = config.critic, config.implicit_reward_model, "implicit_reward_model"
    for _ in range(2):  # each may ask for the other
        if "critic" not in updates and needs & fields_of_model("critic"):
            loss = find(critic.loss, VALUES, "critic.loss", fields_at(Stage.ESTIMATED))
            objective = ValueObjective(loss=loss)
            updates["critic"] = update_spec(objective, critic.reduce, "critic", critic.optim)
            needs |= objective.asks_for()
        if name not in updates and needs & fields_of_model(name):
            loss = find(reward.loss, VALUES, f"{name}.loss", fields_at(Stage.UPDATING))
            check_betas(functions.advantage, loss)
            objective = PolicyObjective(loss=loss)
            updates[name] = update_spec(objective, reward.reduce, name, reward.optim)
            needs |= objective.asks_for()
    return updates, frozenset(needs)


def fields_asked(*functions: Function | None) -> set[str]:
    """Return the fields that functions ask for."""
    return {name for function in functions if function for name in asks_for(function)}


def is_on_policy(
    config: TrainConfig, functions: AlgorithmFunctions, updates: Mapping[str, UpdateSpec]
) -> bool:
    """Tell whether a pass for the old log-probs would only repeat what the update computes.

    That is so where a step is one update on all answers, and nothing but the policy's loss asks for
    them.
    """
    batch, algorithm = config.batch, config.algorithm
    prompts = batch.prompts_per_minibatch or batch.prompts_per_step
    once = batch.epochs_per_step == 1 and prompts == batch.prompts_per_step
    asked = fields_asked(functions.advantage, functions.select_covariant, *functions.corrections)
    for name, update in updates.items():
        asked |= update.objective.asks_for() - ({"old_logprobs"} if name == "actor" else set())
    return (
        once
        and functions.answer_filter is None
        and not algorithm.use_rollout_logprobs
        and algorithm.kl_reward is None
        and config.critic.warmup_steps == 0
        and not asked & fields_of_model("actor")
    )


def check_betas(advantage: Function | None, loss: Function) -> None:
    """Refuse an advantage whose rewards are not those that the reward model learns."""
    terms = [(advantage, 1.0)] if advantage is not None else []
    terms = advantage.terms if isinstance(advantage, AdvantageSum) else terms
    own = {beta_of(term) for term, _ in terms} - {None}
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


# What functions ask for, held against the keys of a config that produce or read it.


def check_needs(
    config: TrainConfig, updates: Mapping[str, UpdateSpec], needs: frozenset[str]
) -> None:
    """Refuse fields that no key produces, and keys that produce what nothing asks for.

    So to skip the pass for the old log-probs where a function needs what it computes, and to
    refresh a reference that there is not.
    """
    defaults = {"critic": CriticConfig(), "implicit_reward_model": ImplicitRewardModelConfig()}
    for name, default in defaults.items():
        if name not in updates and getattr(config, name) != default:
            raise ConfigError(
                f"{name} is set, but no function asks for "
                f"{' or '.join(sorted(fields_of_model(name)))}: "
                "remove it, or name an advantage or a loss that does"
            )
    producers = {
        "high_covariance": ("algorithm.high_covariance", config.algorithm.high_covariance),
        "score_components": ("reward.components", config.reward.components),
    }
    for field, (key, value) in producers.items():
        if field in needs and not value:
            raise ConfigError(f"{key} is not set, but a function asks for {field!r}")
        if value and field not in needs:
            raise ConfigError(f"{key} is set, but no function asks for {field!r}: remove it")
    missing = sorted(needs & fields_of_model("actor") - {"old_logprobs"})
    if config.algorithm.use_rollout_logprobs and missing:
        raise ConfigError(
            f"algorithm.use_rollout_logprobs skips the pass that computes {missing[0]!r}, "
            "which a function asks for: set it to false"
        )
    every = config.reference.refresh_every
    if every is not None and not needs & fields_of_model("reference"):
        raise ConfigError(
            f"reference.refresh_every={every}, but no function asks for the reference's log-probs: "
            "remove it, or name a KL, as in algorithm.kl_loss=k3, or a loss of pairs with a "
            "reference"
        )


def check_scores_are_used(algorithm: AlgorithmConfig, functions: AlgorithmFunctions) -> None:
    """Refuse keys that change scores and rewards where no function asks for them afterwards.

    The group filter and the penalty are called before, and see the scores as they were.
    """
    later = functions.advantage, functions.answer_filter, functions.pairs, *functions.corrections
    objectives = [update.objective for update in functions.updates.values()]
    asked = fields_asked(*later).union(*(objective.asks_for() for objective in objectives))
    for name in ("penalty", "kl_reward"):
        if getattr(algorithm, name) and not asked & {"scores", "rewards"}:
            raise ConfigError(
                f"algorithm.{name} changes the scores and rewards, but no function asks for "
                "them afterwards: remove it, or name an advantage that does"
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
            staleness,
            staleness,
        )


def check_router_replay(config: TrainConfig, functions: AlgorithmFunctions) -> None:
    """Refuse to replay choices of experts that nothing has recorded, or that an update can't."""
    replay, key = config.model.router_replay, f"model.router_replay={config.model.router_replay}"
    if replay == "none":
        return
    if config.algorithm.pairs is not None:
        raise ConfigError(f"{key}, but algorithm.pairs takes answers of any policy: remove it")
    if replay == "rollout" and config.rollout.engine == "vllm":
        raise ConfigError(
            f"{key}, but rollout.engine=vllm: only the native engine says which experts it has "
            "chosen; set rollout.engine to native, or replay old_policy"
        )
    if replay == "rollout":
        return
    if functions.on_policy:
        raise ConfigError(
            f"{key}, but a step is one update on all of its answers, whose own pass is that of the "
            "old policy: remove it, or lower batch.prompts_per_minibatch"
        )
    if config.algorithm.use_rollout_logprobs or functions.probes_only:
        raise ConfigError(
            f"{key}, but there is no pass for the old log-probs of all answers: set "
            "algorithm.use_rollout_logprobs to false, or replay rollout"
        )
    if config.mesh.train.stage > 1:
        raise ConfigError(
            f"{key}, but mesh.train.stage={config.mesh.train.stage}: stages do not report which "
            "experts their layers chose; expected stage=1, or replay rollout"
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
    places = config.teacher.path, config.teacher.url
    if asked and places == (None, None) and config.teacher.weights == "given":
        by = f"a function asks for {asked[0]!r}"
        by = "algorithm.distillation needs a teacher" if config.algorithm.distillation else by
        raise ConfigError(
            f"teacher.path is not set, but {by}: name a teacher there, or in teacher.url, or take "
            "the policy's own weights by teacher.weights"
        )
    if not asked and config.teacher != TeacherConfig():
        raise ConfigError(
            "teacher is set, but no function asks for teacher_logprobs, and there is no "
            "algorithm.distillation: remove it, or name an advantage that does, as reverse_kl, or "
            "a divergence"
        )
    check_teacher_keys(config)
    check_teacher_prompt(config)
    check_own_teacher(config)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    sampled = {key: getattr(config.rollout, key) for key in plain}
    changed = [f"rollout.{key}={value}" for key, value in sampled.items() if value != plain[key]]
    if "teacher_logprobs" in needs and changed:
        raise ConfigError(
            f"{' and '.join(changed)}, but a teacher's log-probs are compared with those of plain "
            "samples: expected rollout.temperature=1, top_p=1 and top_k=0"
        )


def check_teacher_keys(config: TrainConfig) -> None:
    """Refuse keys of a teacher that contradict each other, or that nothing would read."""
    teacher, default = config.teacher, TeacherConfig()
    if teacher.path is not None and teacher.url is not None:
        raise ConfigError(
            "teacher.path and teacher.url are both set: a teacher stands in one place"
        )
    readers = {
        "url": ("model", "api_key", "concurrency", "timeout_s", "retries"),
        "tokenizer": ("chat_template_kwargs", "max_tokens"),
    }
    for reader, keys in readers.items():
        changed = [key for key in keys if getattr(teacher, key) != getattr(default, key)]
        if getattr(teacher, reader) is None and changed:
            raise ConfigError(
                f"teacher.{changed[0]} is set, but teacher.{reader} is not: nothing reads it"
            )
    if teacher.tokenizer is not None and teacher.top_k is not None:
        raise ConfigError(
            "teacher.tokenizer and teacher.top_k are both set: the likeliest tokens of another "
            "tokenizer are none of the policy's"
        )
    if teacher.tokenizer is not None and config.rollout.has_episodes:
        raise ConfigError(
            "teacher.tokenizer is set, but rollout has tools, an environment or an agent: only "
            "plain answers can be written in another tokenizer's tokens"
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
        key = "correction" if algorithm.advantage == default else "advantage"
        raise ConfigError(
            f"algorithm.loss is null, so that nothing is learned by algorithm.{key}: remove it, or "
            f"set it to {'null' if key == 'correction' else getattr(default, 'fn', default)}"
        )
    if of_top and spec.kwargs.get("temperature", 1) != 1:
        raise ConfigError(
            f"algorithm.distillation.temperature={spec.kwargs['temperature']}, but of the tokens "
            "beyond teacher.top_k only the sum is known, and not at another temperature: "
            "set it to 1, or teacher.top_k to null"
        )
    if not of_top and (teacher.url is not None or teacher.tokenizer is not None):
        key = "url" if teacher.url is not None else "tokenizer"
        raise ConfigError(
            f"teacher.{key} is set, but over the whole vocabulary algorithm.distillation runs a "
            "teacher with the policy's tokens in this process: "
            + ("set teacher.top_k, too" if key == "url" else "remove it")
        )
    if not of_top and (isinstance(teacher.path, dict) or config.mesh.teacher is not None):
        several = isinstance(teacher.path, dict)
        key = "teacher.path has several" if several else "mesh.teacher is set"
        raise ConfigError(
            f"{key}, but over the whole vocabulary algorithm.distillation runs one teacher where "
            "the policy is trained: set teacher.top_k, or name one teacher without a mesh"
        )


# What the keys of a teacher with a prompt or with the policy's weights must not say.


def check_teacher_prompt(config: TrainConfig) -> None:
    """Refuse prompts of a teacher that could not be followed by the answers."""
    teacher, room = config.teacher, config.batch.max_tokens_per_device
    if teacher.prompt is None:
        if teacher.max_prompt_tokens is not None:
            raise ConfigError("teacher.max_prompt_tokens is set, but teacher.prompt is null")
        return
    if config.rollout.has_episodes:
        raise ConfigError(
            "teacher.prompt is set, but rollout has tools, an environment or an agent: only plain "
            "answers can be read behind another prompt"
        )
    if teacher.url is not None or teacher.tokenizer is not None:
        key = "url" if teacher.url is not None else "tokenizer"
        raise ConfigError(
            f"teacher.prompt is set, and so is teacher.{key}: only a teacher in this process with "
            "the policy's tokens reads another prompt"
        )
    refuse_distributions(config, "prompt")
    longest = config.longest_teacher_sequence
    if config.mesh.train.context == 1 and room < longest:
        raise ConfigError(
            f"batch.max_tokens_per_device={room} can't hold the longest sequence that the teacher "
            f"reads: its longest prompt + rollout.max_new_tokens = {longest}"
        )


def check_own_teacher(config: TrainConfig) -> None:
    """Refuse keys that contradict the teacher's weights, and a teacher that is the policy."""
    teacher, weights = config.teacher, config.teacher.weights
    if weights != "ema" and teacher.ema != TeacherConfig.ema:
        raise ConfigError(f"teacher.ema={teacher.ema}, but teacher.weights={weights}: remove it")
    if weights == "given":
        return
    refuse_distributions(config, f"weights={weights}")
    for key in ("path", "url", "tokenizer"):
        if getattr(teacher, key) is not None:
            raise ConfigError(
                f"teacher.{key} is set, but teacher.weights={weights} are the policy's own: remove "
                "one"
            )
    if weights == "live" and teacher.prompt is None:
        raise ConfigError(
            "teacher.weights=live without teacher.prompt is the policy itself, from which nothing "
            "is learned: set teacher.prompt, or take other weights"
        )
    is_adapter = config.model.lora is not None or config.model.adapter is not None
    elsewhere = {"mesh.teacher": config.mesh.teacher, "offload.teacher": config.offload.teacher}
    for key, is_set in elsewhere.items():
        if is_set and (weights == "live" or is_adapter):
            reason = "weights=live are those" if weights == "live" else "base is that"
            raise ConfigError(
                f"{key} is set, but the teacher's {reason} of the policy, where it is trained: "
                "remove it"
            )


def refuse_distributions(config: TrainConfig, key: str) -> None:
    """Refuse a key beside what compares more than the log-probs of the drawn tokens."""
    if config.algorithm.distillation is not None or config.teacher.top_k is not None:
        other = "teacher.top_k" if config.teacher.top_k else "algorithm.distillation"
        raise ConfigError(
            f"teacher.{key} gives log-probs of the drawn tokens alone, but {other} is set: remove "
            "one of them"
        )


# Every function that a config names, tried on the shapes of a batch before a model is loaded.


Fields = dict[str, Any]
Trial = tuple[str, Function, Callable[[Function, Fields], Any]]
"""A function's config key, the function, and how a run calls it and checks what it returns."""


def check_functions(config: TrainConfig, functions: AlgorithmFunctions) -> None:
    """Call every function as a run does, with the shapes of its batches.

    Raises:
        ConfigError: one of them raises, or returns something else than is expected.
    """
    size = config.batch.prompts_per_step * config.rollout.samples_per_prompt
    components, top = len(config.reward.components), config.teacher.top_k or 1
    fields = abstract_fields(size, config.longest_sequence, components, top) | abstract_pairs(size)
    for key, function, run in trials(config, functions):
        trial = functools.partial(run, function)
        check_function(key, function, functools.partial(jax.eval_shape, trial, fields))
    actor = functions.updates["actor"].objective
    if isinstance(actor, PolicyObjective) and actor.distillation:
        check_divergence("algorithm.distillation", actor.distillation.divergence)
    if functions.kl:
        controller, coef = functions.controller, config.algorithm.kl_coef
        control = functools.partial(experience.checked_controller(controller), coef, 0.01, size)
        check_function("algorithm.kl_controller", controller, control)  # it gets numbers
    if config.steps is not None:
        check_schedules(config, functions, config.steps)


def check_schedules(config: TrainConfig, functions: AlgorithmFunctions, steps: int) -> None:
    """Refuse schedules that give one of the updates of all steps a negative learning rate."""
    batch = config.batch
    per_step = batch.prompts_per_step // (batch.prompts_per_minibatch or batch.prompts_per_step)
    updates = steps * per_step * batch.epochs_per_step
    for name, update in functions.updates.items():
        section: Any = config if name == "actor" else getattr(config, name)
        key = "optim" if name == "actor" else f"{name}.optim"
        check_learning_rates(update.schedule, section.optim, updates, key)


def trials(config: TrainConfig, functions: AlgorithmFunctions) -> Iterator[Trial]:
    """Yield the functions of a config that get arrays."""
    algorithm, needs_returns = config.algorithm, "critic" in functions.updates
    if functions.advantage:
        compute = functools.partial(experience.compute_advantages, with_returns=needs_returns)
        yield "algorithm.advantage", functions.advantage, compute
    if functions.kl:
        key = "kl_reward" if algorithm.kl_loss is None else "kl_loss"
        compute = functools.partial(_kl, compiled=algorithm.kl_loss is not None)
        yield f"algorithm.{key}", functions.kl, compute
    kinds = {"group_filter": np.bool_, "penalty": np.floating, "answer_filter": np.bool_}
    for name, kind in kinds.items():
        if function := getattr(functions, name):
            key = f"algorithm.{name}"
            yield key, function, functools.partial(_per_answer, key=key, kind=kind)
    for number, function in enumerate(functions.corrections):
        yield f"algorithm.correction[{number}]", function, experience.correction_weights
    if functions.select_covariant:
        yield "algorithm.high_covariance", functions.select_covariant, _marks
    if functions.pairs:
        yield "algorithm.pairs", functions.pairs, _pairs
    for name, update in functions.updates.items():
        section = "algorithm" if name == "actor" else name
        if isinstance(update.objective, PreferenceObjective):
            learned, checked = "chosen_logps", as_pair_loss
            compute = functools.partial(_gradient, learned=learned, checked=checked)
            yield "algorithm.pair_loss", update.objective.loss, compute
            continue
        if update.objective.loss is not None:
            learned = "values" if name == "critic" else "logprobs"
            compute = functools.partial(_gradient, learned=learned, checked=as_token_loss)
            yield f"{section}.loss", update.objective.loss, compute
        yield f"{section}.reduce", update.reduce, _weights


def _kl(function: Function, fields: Fields, *, compiled: bool) -> Any:
    try:
        result = call(function, fields)
    except jax.errors.JAXTypeError:
        if compiled:
            raise
        return None  # in the reward it may compute with numpy
    return per_token(result, function, "kl", fields["mask"].shape)


def _jitted(function: Function, fields: Fields) -> Any:
    return jax.jit(lambda fields: call(function, fields))(fields)


def _per_answer(function: Function, fields: Fields, *, key: str, kind: type[np.generic]) -> Any:
    result = _jitted(function, fields)
    return experience.check_per_answer(result, function, key, kind, len(fields["mask"]))


def _marks(function: Function, fields: Fields) -> Any:
    result = _jitted(experience.with_key(function, jax.random.key(0)), fields)
    return experience.check_marks(result, function, fields["mask"].shape)


def _pairs(function: Function, fields: Fields) -> Any:
    return experience.check_pairs(_jitted(function, fields), function)


def _gradient(loss: Function, fields: Fields, *, learned: str, checked: Function) -> Any:
    """Differentiate a loss by what its model says of each token, or of each chosen answer."""

    def total(array: Any) -> Any:
        return jnp.sum(checked(call(loss, fields | {learned: array}), loss, array.shape).loss)

    return jax.grad(total)(fields[learned])


def _weights(reduce: Function, fields: Fields) -> Any:
    return per_token(reduce(fields["mask"]), reduce, "reduce", fields["mask"].shape)


def abstract_fields(size: int, length: int, components: int, top: int) -> Fields:
    """Return shape and dtype of every field of a batch [B T], with C components and K tokens."""
    sizes = {"B": size, "T": length, "C": components, "K": top}
    return {
        name: jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in field.axes.split()), field.dtype)
        for name, field in FIELDS.items()
    }


def abstract_pairs(size: int) -> Fields:
    """Return shape and dtype of every field that a loss of a step's pairs may ask for [P]."""
    return {
        name: jax.ShapeDtypeStruct((size,), jnp.int32 if name in LENGTHS else jnp.float32)
        for name in PAIR_FIELDS
    }


def check_function(key: str, function: Function, run: Callable[[], Any]) -> None:
    """Run a function.

    Raises:
        ConfigError: it raises, or `run` refuses what it returned.
    """
    try:
        run()
    except RunError as error:  # of what it returned
        text = str(error).removeprefix(f"{key.partition('[')[0]}: ")
        raise ConfigError(f"{key}: {text}") from error
    except Exception as error:
        text = f"{key}: {name_of(function)}: {described_failure(error, function)}"
        if isinstance(error, jax.errors.JAXTypeError):
            text += " (jax compiles this function: take jax.numpy for numpy, and jnp.where for if)"
        raise ConfigError(text) from error


def check_inputs(config: TrainConfig, functions: AlgorithmFunctions) -> None:
    """Import the functions that get no arrays, look for vLLM, and warn of what can't learn.

    Raises:
        ConfigError: a function can't be imported, or a tracker's package or vLLM's environment is
            not there.
    """
    data, rollout = config.data, config.rollout
    if config.reward.function:
        check_scoring(config.reward, config.reward.function)
    load_function(data.dataset, DATASETS, passed=("paths",), key="data.dataset")
    if data.prepare:
        load_function(data.prepare, PREPARATIONS, key="data.prepare")
    check_trackers(config)
    if rollout.has_episodes:
        check_episode_functions(rollout)
    if rollout.engine == "vllm" and not (rollout.nodes or rollout.vllm.launch):
        find_python(rollout.vllm.python)  # elsewhere this machine need not have it
    advantage = functions.advantage
    if rollout.samples_per_prompt == 1 and advantage and "group_ids" in asks_for(advantage):
        log.warning(
            "rollout.samples_per_prompt=1, but %s (algorithm.advantage) compares the answers to a "
            "prompt with each other, and there is one: set 2 or more, or take an advantage without "
            "groups, as reinforce_plus_plus",
            name_of(advantage),
        )

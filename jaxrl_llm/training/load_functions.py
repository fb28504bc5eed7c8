"""Loading the functions that a config names, each checked against what its key gives it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.fields import (
    FIELDS,
    Stage,
    asks_for,
    check_fields,
    fields_at,
    fields_of_model,
    name_of,
)
from jaxrl_llm.config.functions import (
    FunctionSpec,
    find_function,
    load_function,
    signature_of,
)
from jaxrl_llm.config.sections import AlgorithmConfig, OptimConfig
from jaxrl_llm.data.teacher_prompts import TOLD
from jaxrl_llm.training.advantage_sum import AdvantageSum
from jaxrl_llm.training.objective import PolicyObjective, ValueObjective
from jaxrl_llm.training.optimizer import OptimizerOf, make_optimizer
from jaxrl_llm.training.preference_objective import (
    ANSWER_FIELDS,
    OF_LABELLED,
    OF_REFERENCE,
    SCORES,
    PreferenceObjective,
)

Function = Callable[..., Any]

PAIR_FIELDS = ANSWER_FIELDS - OF_LABELLED - SCORES
"""What a loss of the pairs of a step may ask for, [P] each."""


class UpdateSpec(NamedTuple):
    """How a model learns: what it minimises, how tokens are weighed, and the optimizer."""

    objective: PolicyObjective | ValueObjective | PreferenceObjective
    reduce: Function
    optimizer: OptimizerOf
    schedule: Callable[[int], Any]
    max_skipped: int


@dataclass(frozen=True, kw_only=True)
class BatchFunctions:
    """The functions of a step that see the whole batch, as the config names them.

    Attributes:
        advantage, kl, controller, group_filter, penalty, corrections, answer_filter, pairs: of the
            keys of these names; there is no advantage where there are pairs.
        select_covariant: produces `high_covariance`.
        teacher_prompt: writes the prompt that a teacher reads.
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


@dataclass(frozen=True, kw_only=True)
class AlgorithmFunctions(BatchFunctions):
    """The functions that a config names, checked against the dataflow by `resolve_functions`.

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
    def needs_teacher(self) -> bool:
        """Return whether a function asks for what a teacher says of the answers."""
        return bool(self.needs & fields_of_model("teacher"))

    @property
    def runs_teacher_in_update(self) -> bool:
        """Return whether the actor's update runs the teacher, over the whole vocabulary."""
        objective = self.updates["actor"].objective
        is_policy = isinstance(objective, PolicyObjective)
        distillation = objective.distillation if is_policy else None
        return distillation is not None and not distillation.of_top

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
        asked = self.needs & {"old_logprobs", "entropy", "sum_pi_squared"}
        return selects and not asked and self.kl is None

    @property
    def learns_labels(self) -> bool:
        """Return whether the reward model learns from scores as labels."""
        update = self.updates.get("implicit_reward_model")
        return update is not None and "raw_scores" in update.objective.asks_for()


def find(
    spec: FunctionSpec, home: str, key: str, stage: Stage, besides: Iterable[str] = ()
) -> Function:
    """Return a function that asks for fields.

    Args:
        spec: as a config names it.
        home: the module of bare names.
        key: its config key, for messages.
        stage: at which it is called.
        besides: fields that it is given besides those that exist then.
    """
    function = load_function(spec, home, passed=None, key=key)
    check_fields(function, key, available=fields_at(stage).union(besides))
    return function


def find_pair_loss(spec: FunctionSpec) -> Function:
    """Return the loss of the pairs that a step makes; a policy has no scores, and no labels."""
    key = "algorithm.pair_loss"
    function = load_function(spec, functions.PREFERENCES, passed=None, key=key)
    check_fields(function, key, available=PAIR_FIELDS)
    return function


def fields_of_update(
    objective: PolicyObjective | ValueObjective | PreferenceObjective,
) -> set[str]:
    """Return the fields of a step's batch that an update is made from."""
    if isinstance(objective, PreferenceObjective):
        return {"ref_logprobs"} if objective.asks_for() & OF_REFERENCE else set()
    return objective.asks_for()


def find_advantage(spec: FunctionSpec | Sequence[FunctionSpec]) -> Function:
    """Return the advantage function, or the weighted sum of several.

    `weight` of a term is what it is multiplied by, unless the function has a keyword of this name.

    Raises:
        ConfigError: one can't be loaded, or a weight is no finite number.
    """
    key = "algorithm.advantage"
    if isinstance(spec, FunctionSpec) and "weight" not in spec.kwargs:
        return find(spec, functions.ADVANTAGES, key, Stage.INFERRED)
    terms = []
    for term in (spec,) if isinstance(spec, FunctionSpec) else spec:
        weight, kwargs = 1.0, dict(term.kwargs)
        function = find_function(term, functions.ADVANTAGES, key=key)
        if "weight" not in signature_of(function).parameters:
            weight = kwargs.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise ConfigError(f"{key}.weight: got {weight!r}, expected a finite number")
        bare = dataclasses.replace(term, kwargs=kwargs)
        terms.append((find(bare, functions.ADVANTAGES, key, Stage.INFERRED), float(weight)))
    return AdvantageSum(terms)


def update_spec(
    objective: PolicyObjective | ValueObjective | PreferenceObjective,
    reduce: FunctionSpec,
    section: str,
    optim: OptimConfig,
    optim_key: str = "optim",
) -> UpdateSpec:
    """Find the reduction and the optimizer of a model that is trained.

    Args:
        objective: what it minimises.
        reduce: from a mask to weights.
        section: of the config that names the reduction.
        optim: its optimizer.
        optim_key: the config key of `optim`.
    """
    key = f"{section}.reduce"
    weigh = load_function(reduce, functions.REDUCTIONS, passed=None, key=key)
    takes(weigh, ("mask",), key)
    optimizer, schedule = make_optimizer(optim, optim_key)
    return UpdateSpec(objective, weigh, optimizer, schedule, optim.max_skipped)


def find_controller(spec: FunctionSpec) -> Function:
    """Return the function that sets the KL coefficient after each step."""
    key = "algorithm.kl_controller"
    function = load_function(spec, functions.KLS, passed=None, key=key)
    takes(function, ("coef", "observed_kl", "batch_size"), key)
    return function


def find_kl(config: AlgorithmConfig) -> Function | None:
    """Return the KL estimator of the loss or of the reward, if there is one.

    It is called before the advantages are known, with the old log-probs for the current ones.
    """
    name = "kl_loss" if config.kl_loss else "kl_reward"
    spec = config.kl_loss or config.kl_reward
    return spec and find(spec, functions.KLS, f"algorithm.{name}", Stage.INFERRED, ["logprobs"])


def find_covariance_selector(spec: FunctionSpec) -> Function:
    """Return the producer of `high_covariance`; it may take a random `key` as a keyword."""
    name = "algorithm.high_covariance"
    function = load_function(spec, functions.LOSSES, passed=[*FIELDS, "key"], key=name)
    check_fields(function, name, available=fields_at(Stage.UPDATING))
    return function


def find_teacher_prompt(spec: FunctionSpec) -> Function:
    """Return the function that writes the prompt that a teacher reads."""
    key = "teacher.prompt"
    function = load_function(spec, functions.TEACHER_PROMPTS, passed=None, key=key)
    check_fields(function, key, available=TOLD)
    return function


def find_divergence(spec: FunctionSpec, key: str) -> Function:
    """Return a divergence of a student from its teacher."""
    function = load_function(spec, functions.DIVERGENCES, passed=None, key=key)
    takes(function, ("student_logprobs", "teacher_logprobs"), key)
    return function


def takes(function: Function, expected: tuple[str, ...], key: str) -> None:
    """Raise ConfigError unless a function has as many positional parameters as it is given."""
    names = asks_for(function)
    if len(names) != len(expected):
        raise ConfigError(
            f"{key}: {name_of(function)} takes ({', '.join(names)}), "
            f"expected ({', '.join(expected)})"
        )

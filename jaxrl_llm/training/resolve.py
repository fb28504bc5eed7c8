"""The functions that a config names, and what follows from their signatures.

What a function asks for by parameter name decides which models a run has: a critic where one asks
for `values`, a reference where one asks for `ref_logprobs`, and so on.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.fields import asks_for, call, check_fields, name_of
from jaxrl_llm.config.functions import FunctionSpec, load_function
from jaxrl_llm.config.sections.algorithm import AlgorithmConfig
from jaxrl_llm.config.sections.critic import CriticConfig
from jaxrl_llm.config.sections.implicit_reward_model import ImplicitRewardModelConfig
from jaxrl_llm.config.sections.optim import OptimConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.training.objective import PolicyObjective, ValueObjective
from jaxrl_llm.training.optimizer import make_optimizer
from jaxrl_llm.types import FIELDS

Function = Callable[..., Any]

SCORED = frozenset(
    {
        "scores",
        "raw_scores",
        "rewards",
        "group_ids",
        "mask",
        "response_lengths",
        "rollout_logprobs",
        "score_components",
    }
)
"""Fields that are there when answers have been sampled and scored."""

UPDATING = frozenset({"logprobs", "high_covariance"})
"""Fields that are there only while the policy is updated."""

OF_CRITIC = frozenset({"values", "old_values", "returns"})


class UpdateSpec(NamedTuple):
    """How a model learns: what it minimises, how tokens are weighed, and the optimizer."""

    objective: PolicyObjective | ValueObjective
    reduce: Function
    optimizer: Any
    schedule: Callable[[int], Any]
    max_skipped: int


class AlgorithmFunctions:
    """The functions that a config names, found and checked against the dataflow.

    Attributes:
        advantage, kl, controller, group_filter, penalty, corrections: as the config names them.
        select_covariant: produces `high_covariance`.
        learns_labels: whether the reward model learns from scores as labels.
        updates: of the actor, and of the critic and the reward model where something asks for
            them, by name.
        needs: every field that one of them asks for.
        on_policy: whether the update itself can find the old log-probs: a step is one update, and
            nothing else asks for them.
        needs_reference: whether that includes the reference's log-probs.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Find them all; raise ConfigError where one is wrong."""
        wanted = config.algorithm
        estimating = UPDATING | {"advantages", "returns"}
        self.advantage = find(wanted.advantage, kinds.ADVANTAGES, "algorithm.advantage", estimating)
        self.kl = find_kl(wanted)
        self.controller = load_function(
            wanted.kl_controller, kinds.KLS, passed=None, key="algorithm.kl_controller"
        )
        takes(self.controller, ("coef", "observed_kl", "batch_size"), "algorithm.kl_controller")
        later = frozenset(FIELDS) - SCORED
        self.group_filter = wanted.group_filter and find(
            wanted.group_filter, kinds.SHAPING, "algorithm.group_filter", later
        )
        self.penalty = wanted.penalty and find(
            wanted.penalty, kinds.SHAPING, "algorithm.penalty", later
        )
        self.corrections = [
            find(spec, kinds.CORRECTIONS, "algorithm.correction", UPDATING)
            for spec in corrections(config)
        ]
        self.select_covariant = wanted.high_covariance and find_covariance_selector(
            wanted.high_covariance
        )
        policy = PolicyObjective(
            loss=find(wanted.loss, kinds.LOSSES, "algorithm.loss"),
            kl=self.kl if wanted.kl_loss else None,
            entropy=wanted.entropy_coef != 0,
            corrected=bool(self.corrections),
        )
        self.learns_labels = False
        self.updates = {"actor": update_spec(policy, wanted.reduce, "algorithm", config.optim)}
        asking = [
            self.advantage,
            self.kl,
            self.group_filter,
            self.penalty,
            self.select_covariant,
            *self.corrections,
        ]
        asked = {name for f in asking if f for name in asks_for(f)}
        self.needs = policy.asks_for() | (asked - {"logprobs"})
        for _ in range(2):  # each may ask for the other
            self._add_critic(config.critic)
            self._add_reward_model(config.implicit_reward_model)
        self._check_sections(config)
        self.needs_reference = "ref_logprobs" in self.needs
        self.on_policy = self._is_on_policy(config)
        if self.on_policy:
            actor = self.updates["actor"]
            policy = dataclasses.replace(policy, on_policy=True)
            self.updates["actor"] = actor._replace(objective=policy)
        self._check_producers(config)
        self._try_out(config)

    def _check_sections(self, config: TrainConfig) -> None:
        """Refuse the section of a model that no function asks for."""
        for name, default, fields in (
            ("critic", CriticConfig(), OF_CRITIC),
            ("implicit_reward_model", ImplicitRewardModelConfig(), {"reward_logprobs"}),
        ):
            if name not in self.updates and getattr(config, name) != default:
                raise ConfigError(
                    f"{name} is set, but no function asks for {' or '.join(sorted(fields))}: "
                    "remove it, or name an advantage or a loss that does"
                )

    def _add_reward_model(self, config: ImplicitRewardModelConfig) -> None:
        if "implicit_reward_model" in self.updates or "reward_logprobs" not in self.needs:
            return
        loss = find(config.loss, kinds.VALUES, "implicit_reward_model.loss", {"high_covariance"})
        self.learns_labels = "raw_scores" in asks_for(loss)
        betas = {beta_of(self.advantage), beta_of(loss)} - {None}
        if len(betas) > 1:
            raise ConfigError(
                f"algorithm.advantage has beta={beta_of(self.advantage)}, "
                "implicit_reward_model.loss has "
                f"beta={beta_of(loss)}: the rewards are not those that the model learns; "
                "give both the same"
            )
        self._add("implicit_reward_model", PolicyObjective(loss=loss), config.reduce, config.optim)

    def _add_critic(self, config: CriticConfig) -> None:
        if "critic" in self.updates or not self.needs & OF_CRITIC:
            return
        loss = find(config.loss, kinds.VALUES, "critic.loss", UPDATING)
        self._add("critic", ValueObjective(loss=loss), config.reduce, config.optim)

    def _add(
        self,
        name: str,
        objective: PolicyObjective | ValueObjective,
        reduce: FunctionSpec,
        optim: OptimConfig,
    ) -> None:
        self.updates[name] = update_spec(objective, reduce, name, optim, f"{name}.optim")
        self.needs |= objective.asks_for()

    def _is_on_policy(self, config: TrainConfig) -> bool:
        """Tell whether a pass for the old log-probs would only repeat what the update computes."""
        batch, algorithm = config.batch, config.algorithm
        once = batch.epochs_per_step == 1 and batch.prompts_per_minibatch in (
            None,
            batch.prompts_per_step,
        )
        before = [self.advantage, self.select_covariant, *self.corrections]
        asked = {name for f in before if f for name in asks_for(f)}
        for name, how in self.updates.items():
            asked |= how.objective.asks_for() - ({"old_logprobs"} if name == "actor" else set())
        return (
            once
            and not algorithm.use_rollout_logprobs
            and algorithm.kl_reward is None
            and config.critic.warmup_steps == 0
            and not asked & {"old_logprobs", "entropy", "sum_pi_squared"}
        )

    def _check_producers(self, config: TrainConfig) -> None:
        """Refuse fields that no key produces, and keys that produce what nothing asks for."""
        producers = {
            "high_covariance": ("algorithm.high_covariance", config.algorithm.high_covariance),
            "score_components": ("reward.components", config.reward.components),
        }
        for field, (key, value) in producers.items():
            if field in self.needs and not value:
                raise ConfigError(f"{key} is not set, but a function asks for {field!r}")
            if value and field not in self.needs:
                raise ConfigError(f"{key} is set, but no function asks for {field!r}: remove it")
        for name in ("penalty", "kl_reward"):
            if getattr(config.algorithm, name) and not self.needs & {"scores", "rewards"}:
                raise ConfigError(
                    f"algorithm.{name} changes the scores and rewards, but no function asks for "
                    "them: remove it, or name an advantage that does"
                )
        passed_over = sorted(self.needs & {"entropy", "sum_pi_squared"})
        if config.algorithm.use_rollout_logprobs and passed_over:
            raise ConfigError(
                f"algorithm.use_rollout_logprobs skips the pass that computes {passed_over[0]!r}, "
                "which a function asks for: set it to false"
            )

    def _try_out(self, config: TrainConfig) -> None:
        """Trace every function once, so that keywords out of range are found before sampling."""
        size = config.batch.prompts_per_step * config.rollout.samples_per_prompt
        fields = abstract_fields(
            size,
            config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            len(config.reward.components),
        )
        policy = self.updates["actor"].objective
        functions = {
            "algorithm.advantage": self.advantage,
            "algorithm.loss": policy.loss,
            f"algorithm.{'kl_loss' if config.algorithm.kl_loss else 'kl_reward'}": self.kl,
            "algorithm.group_filter": self.group_filter,
            "algorithm.penalty": self.penalty,
            "algorithm.high_covariance": self.select_covariant
            and with_key(self.select_covariant, jax.random.key(0)),
            **{f"algorithm.correction[{i}]": f for i, f in enumerate(self.corrections)},
            **{f"{n}.loss": how.objective.loss for n, how in self.updates.items() if n != "actor"},
        }
        for key, function in functions.items():
            if function:
                try_out(key, function, lambda f, function=function: call(function, f), fields)
        for name, how in self.updates.items():
            key = "algorithm.reduce" if name == "actor" else f"{name}.reduce"
            try_out(key, how.reduce, lambda f, how=how: how.reduce(f["mask"]), fields)


def abstract_fields(size: int, length: int, components: int) -> dict[str, Any]:
    """Return shape and dtype of every field of a batch [B T]."""
    sizes = {"[B]": (size,), "[B T]": (size, length), "[B C]": (size, components)}
    dtypes: dict[str, Any] = dict.fromkeys(("mask", "high_covariance"), jnp.bool_)
    dtypes |= dict.fromkeys(("group_ids", "response_lengths"), jnp.int32)
    return {
        name: jax.ShapeDtypeStruct(
            sizes[meaning[: meaning.index("]") + 1]], dtypes.get(name, jnp.float32)
        )
        for name, meaning in FIELDS.items()
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
    """Return the off-policy corrections of a run; vLLM computes otherwise than the trainer."""
    algorithm = config.algorithm
    if algorithm.correction is not None:
        return algorithm.correction
    other = config.rollout.engine == "vllm" and not algorithm.use_rollout_logprobs
    return (FunctionSpec("truncated_token"),) if other else ()


def beta_of(function: Function) -> float | None:
    """Return a function's keyword `beta`, if it has one."""
    parameter = inspect.signature(function).parameters.get("beta")
    return parameter and parameter.default


def find(spec: FunctionSpec, home: str, key: str, after: Iterable[str] = ()) -> Function:
    """Return a function that asks for fields.

    Args:
        spec: as a config names it.
        home: the module of bare names.
        key: its config key, for messages.
        after: fields that exist only later in the step.
    """
    function = load_function(spec, home, passed=None, key=key)
    check_fields(function, key, after=frozenset(after))
    return function


def update_spec(
    objective: PolicyObjective | ValueObjective,
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
    weigh = load_function(reduce, kinds.REDUCTIONS, passed=None, key=key)
    takes(weigh, ("mask",), key)
    optimizer, schedule = make_optimizer(optim, optim_key)
    return UpdateSpec(objective, weigh, optimizer, schedule, optim.max_skipped)


def find_kl(config: AlgorithmConfig) -> Function | None:
    """Return the KL estimator of the loss or of the reward, if there is one.

    It is called before the advantages are known, with the old log-probs for the current ones.
    """
    later = {"advantages", "returns", "high_covariance"}
    if config.kl_loss:
        return find(config.kl_loss, kinds.KLS, "algorithm.kl_loss", later)
    return config.kl_reward and find(config.kl_reward, kinds.KLS, "algorithm.kl_reward", later)


def find_covariance_selector(spec: FunctionSpec) -> Function:
    """Return the producer of `high_covariance`; it may take a random `key` as a keyword."""
    name = "algorithm.high_covariance"
    function = load_function(spec, kinds.LOSSES, passed=[*FIELDS, "key"], key=name)
    check_fields(function, name, after=frozenset({"high_covariance"}))
    return function


def takes(function: Function, wanted: tuple[str, ...], key: str) -> None:
    """Raise ConfigError unless a function has as many positional parameters as it is given."""
    names = asks_for(function)
    if len(names) != len(wanted):
        raise ConfigError(
            f"{key}: {name_of(function)} takes ({', '.join(names)}), wanted ({', '.join(wanted)})"
        )

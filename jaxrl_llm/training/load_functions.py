"""Loading the functions that a config names, each checked against what its key gives it."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.fields import FIELDS, Stage, asks_for, check_fields, fields_at, name_of
from jaxrl_llm.config.functions import FunctionSpec, load_function
from jaxrl_llm.config.sections.algorithm import AlgorithmConfig
from jaxrl_llm.config.sections.optim import OptimConfig
from jaxrl_llm.training.objective import PolicyObjective, ValueObjective
from jaxrl_llm.training.optimizer import make_optimizer

Function = Callable[..., Any]


class UpdateSpec(NamedTuple):
    """How a model learns: what it minimises, how tokens are weighed, and the optimizer."""

    objective: PolicyObjective | ValueObjective
    reduce: Function
    optimizer: Any
    schedule: Callable[[int], Any]
    max_skipped: int


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


def find_controller(spec: FunctionSpec) -> Function:
    """Return the function that sets the KL coefficient after each step."""
    key = "algorithm.kl_controller"
    function = load_function(spec, kinds.KLS, passed=None, key=key)
    takes(function, ("coef", "observed_kl", "batch_size"), key)
    return function


def find_kl(config: AlgorithmConfig) -> Function | None:
    """Return the KL estimator of the loss or of the reward, if there is one.

    It is called before the advantages are known, with the old log-probs for the current ones.
    """
    name = "kl_loss" if config.kl_loss else "kl_reward"
    spec = config.kl_loss or config.kl_reward
    return spec and find(spec, kinds.KLS, f"algorithm.{name}", Stage.INFERRED, ["logprobs"])


def find_covariance_selector(spec: FunctionSpec) -> Function:
    """Return the producer of `high_covariance`; it may take a random `key` as a keyword."""
    name = "algorithm.high_covariance"
    function = load_function(spec, kinds.LOSSES, passed=[*FIELDS, "key"], key=name)
    check_fields(function, name, available=fields_at(Stage.UPDATING))
    return function


def takes(function: Function, expected: tuple[str, ...], key: str) -> None:
    """Raise ConfigError unless a function has as many positional parameters as it is given."""
    names = asks_for(function)
    if len(names) != len(expected):
        raise ConfigError(
            f"{key}: {name_of(function)} takes ({', '.join(names)}), "
            f"expected ({', '.join(expected)})"
        )

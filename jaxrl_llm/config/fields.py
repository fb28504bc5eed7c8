"""The fields of a batch, and the dataflow graph, which is read off the functions' signatures.

A function's positional parameters without a default name the fields that it asks for; what none of
them asks for is never computed.
"""

import enum
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.config.keys import texts_below_keys


class Stage(enum.IntEnum):
    """The stages of a step, in order; a field exists from one of them on."""

    SCORED = 1
    """Responses have been sampled and scored."""
    INFERRED = 2
    """Models have been run for log-probs and values."""
    ESTIMATED = 3
    """The advantage function has returned."""
    UPDATING = 4
    """The model that learns has been run on a mini-batch."""
    SELECTED = 5
    """Tokens of the mini-batch have been selected by their covariance."""


class BatchField(NamedTuple):
    """An array of a batch, which a function may ask for by parameter name.

    Attributes:
        axes: B sequences, T tokens, C components of the score, K likeliest tokens.
        dtype: of its elements.
        stage: from which it exists.
        model: whose pass before the update gives the field, if a function asks for it.
        name: of the parameter.
        meaning: what it holds.
    """

    axes: Literal["B", "B T", "B C", "B T K"]
    dtype: Literal["float32", "int32", "bool"]
    stage: Stage
    model: Literal["actor", "critic", "reference", "implicit_reward_model", "teacher"] | None = None
    name: str = ""
    meaning: str = ""


class BatchFields:
    """What a function may ask for, by name; the text below a field says what it holds."""

    scores = BatchField("B", "float32", Stage.SCORED)
    """score of each answer, plus the rewards of its turns and algorithm.penalty, less the KL
    penalty"""
    raw_scores = BatchField("B", "float32", Stage.SCORED)
    """score of each answer as its reward function, or reward.classifier, gave it"""
    rewards = BatchField("B T", "float32", Stage.SCORED)
    """each turn's reward on the turn's last drawn token, the score (or each step's, with
    reward.step_rewards) and algorithm.penalty on the last drawn token of all, less the KL penalty
    of each"""
    group_ids = BatchField("B", "int32", Stage.SCORED)
    """which answers share a prompt; one that is not usable is alone"""
    mask = BatchField("B T", "bool", Stage.SCORED)
    """true on tokens that the policy generated; false on prompt and padding"""
    response_lengths = BatchField("B", "int32", Stage.SCORED)
    """tokens that the policy generated"""
    turn_ids = BatchField("B T", "int32", Stage.SCORED)
    """number of the turn that drew the token, from 0; -1 on all others"""
    chain_ids = BatchField("B T", "int32", Stage.SCORED)
    """number of the chain, a context in which the policy draws, that the token belongs to, from 0;
    -1 on padding"""
    turns = BatchField("B", "int32", Stage.SCORED)
    """turns that the policy drew"""
    usable = BatchField("B", "bool", Stage.SCORED)
    """false where the infrastructure of an episode failed, or an answer has no score"""
    versions = BatchField("B T", "int32", Stage.SCORED)
    """of the weights that drew the token; -1 on all others"""
    ages = BatchField("B T", "int32", Stage.INFERRED)
    """updates since the weights that drew the token; 0 with rollout.staleness: 0"""
    logprobs = BatchField("B T", "float32", Stage.UPDATING)
    """log-probs under the policy that is being updated"""
    old_logprobs = BatchField("B T", "float32", Stage.INFERRED, "actor")
    """log-probs under the policy at the start of the step; the engine's own with
    algorithm.use_rollout_logprobs"""
    rollout_logprobs = BatchField("B T", "float32", Stage.SCORED)
    """log-probs that the engine reported"""
    ref_logprobs = BatchField("B T", "float32", Stage.INFERRED, "reference")
    """log-probs under the reference: the policy at the start of the run, or at its last refresh"""
    teacher_logprobs = BatchField("B T", "float32", Stage.INFERRED, "teacher")
    """log-probs under the teacher of the answer's prompt; the policy's own where teacher_mask is
    false"""
    teacher_mask = BatchField("B T", "bool", Stage.INFERRED, "teacher")
    """true on generated tokens that the teacher tells something of: all of them, if it has the
    policy's tokens and a prompt"""
    teacher_ids = BatchField("B T K", "int32", Stage.INFERRED, "teacher")
    """the teacher.top_k tokens that the teacher finds likeliest in each token's place"""
    teacher_top_logprobs = BatchField("B T K", "float32", Stage.INFERRED, "teacher")
    """their log-probs under the teacher; −∞ for one that is missing"""
    reward_logprobs = BatchField("B T", "float32", Stage.INFERRED, "implicit_reward_model")
    """log-probs under the implicit reward model at the start of the step"""
    advantages = BatchField("B T", "float32", Stage.ESTIMATED)
    """what the advantage function returned"""
    returns = BatchField("B T", "float32", Stage.ESTIMATED, "critic")
    """the second of a pair that it returned: the critic's targets"""
    values = BatchField("B T", "float32", Stage.INFERRED, "critic")
    """value of the state before each token; in critic.loss, as it is updated"""
    old_values = BatchField("B T", "float32", Stage.INFERRED, "critic")
    """the same at the start of the step"""
    entropy = BatchField("B T", "float32", Stage.INFERRED, "actor")
    """entropy of the policy at the start of the step; in its loss, as it is updated"""
    sum_pi_squared = BatchField("B T", "float32", Stage.INFERRED, "actor")
    """Σ_v π_v², the sum of the squared probabilities of all tokens, at the start of the step"""
    high_covariance = BatchField("B T", "bool", Stage.SELECTED)
    """the tokens that algorithm.high_covariance marks in a mini-batch"""
    greedy_scores = BatchField("B", "float32", Stage.INFERRED)
    """score of the greedy answer to the same prompt, plus algorithm.penalty"""
    score_components = BatchField("B C", "float32", Stage.SCORED)
    """the numbers of reward.components; reward.on_error for each where a reward function failed, 0
    where the answer is unscored"""


_TEXTS = texts_below_keys(__name__).get("BatchFields", {})
FIELDS: Mapping[str, BatchField] = {
    name: field._replace(name=name, meaning=_TEXTS.get(name, ""))
    for name, field in vars(BatchFields).items()
    if isinstance(field, BatchField)
}


def fields_at(stage: Stage) -> frozenset[str]:
    """Return the names of the fields that exist at a stage.

    >>> sorted(fields_at(Stage.ESTIMATED) - fields_at(Stage.INFERRED))
    ['advantages', 'returns']
    """
    return frozenset(name for name, field in FIELDS.items() if field.stage <= stage)


def fields_of_model(model: str) -> frozenset[str]:
    """Return the names of the fields that a model's pass before the update gives.

    >>> fields_of_model("reference")
    frozenset({'ref_logprobs'})
    """
    return frozenset(name for name, field in FIELDS.items() if field.model == model)


def asks_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the fields that a function asks for.

    >>> def advantage(scores, group_ids, *, eps=1e-6): ...
    >>> asks_for(advantage)
    ('scores', 'group_ids')
    """
    return tuple(
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    )


def check_fields(function: Callable[..., Any], key: str, *, available: Collection[str]) -> None:
    """Raise ConfigError where a function asks for a field that nothing produces before it.

    Args:
        function: as a config names it.
        key: its config key, for the message.
        available: fields that exist when it is called.
    """
    for name in asks_for(function):
        if name not in available:
            raise ConfigError(
                f"{key}: {name_of(function)} asks for {name!r}, which nothing produces there; "
                + closest(name, available)
            )


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages.

    >>> name_of(functools.partial(max, 1))
    'max'
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", repr(function))


def call(function: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Call a function with the fields that it asks for.

    >>> call(lambda scores: scores * 2, {"scores": 3, "mask": None})
    6
    """
    return function(*(fields[name] for name in asks_for(function)))

"""Functions named by a config: `{fn: NAME, keyword: value, …}`.

A bare NAME is looked up in the module that owns the kind, `pkg.mod:name` (or `pkg.mod.name`) is
imported, and `my_file.py:name` is loaded from the user's file. The other keys are the function's
keyword arguments. From Python a function may stand for its name. A function's positional parameters
without a default name the fields of a batch that it asks for; what none of them asks for is never
computed. This module imports no array library, so that worker processes start fast.
"""

import difflib
import enum
import functools
import hashlib
import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from jaxrl_llm.config.errors import ConfigError, described_error

# The kinds of functions that a config names: the module in which a bare name is looked up.


ADVANTAGES = "jaxrl_llm.algorithms.advantages"
LOSSES = "jaxrl_llm.algorithms.losses"
REDUCTIONS = "jaxrl_llm.algorithms.reduce"
DIVERGENCES = "jaxrl_llm.algorithms.divergences"
KLS = "jaxrl_llm.algorithms.kl"
CORRECTIONS = "jaxrl_llm.algorithms.correction"
SHAPING = "jaxrl_llm.algorithms.shaping"
PAIRS = "jaxrl_llm.algorithms.pairs"
VALUES = "jaxrl_llm.algorithms.values"
PREFERENCES = "jaxrl_llm.algorithms.preferences"
MODELS = "jaxrl_llm.models.functional"
REWARD_FUNCTIONS = "jaxrl_llm.rewards.functions"
TOOLS = "jaxrl_llm.rollout.tools.builtin"
ENVIRONMENTS = "jaxrl_llm.rollout.agents.environments"
AGENTS = "jaxrl_llm.rollout.agents.agents"
DATASETS = "jaxrl_llm.data.rows"
TEACHER_PROMPTS = "jaxrl_llm.data.teacher_prompts"
PREPARATIONS = "jaxrl_llm.data.prepare"
TRACKERS = "jaxrl_llm.monitoring.trackers"
OPTIMIZERS = SCHEDULES = "optax"


NOT_IMPORTABLE = "__main__"
"""The module of a function that only the process has which defined it, as that of a notebook."""


@dataclass(frozen=True)
class FunctionSpec:
    """A function by name, with the keyword arguments that a config gives it.

    Attributes:
        fn: its name.
        kwargs: keyword arguments.
        given: the function itself, where no other process could import it. It is pickled by value.
    """

    fn: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    given: Any = None  # a callable, or None: not said, as pydantic would describe it for editors

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "FunctionSpec":
        """Return the spec of a function; a partial's keywords become the config's.

        >>> FunctionSpec.of(functools.partial(difflib.get_close_matches, n=1))
        FunctionSpec(fn='difflib:get_close_matches', kwargs={'n': 1}, given=None)
        """
        if isinstance(function, functools.partial) and not function.args:
            inner = cls.of(function.func)
            return cls(inner.fn, {**inner.kwargs, **function.keywords}, inner.given)
        kind: Any = function if hasattr(function, "__qualname__") else type(function)
        name, module = kind.__qualname__, kind.__module__
        found = getattr(sys.modules.get(module), name, None)
        if found is function and module != NOT_IMPORTABLE and not module.startswith(FROM_FILES):
            return cls(f"{module}:{name}")
        return cls(f"{NOT_IMPORTABLE}:{name.rpartition('.')[2]}", {}, function)

    def __reduce__(self) -> Any:
        """Pickle a function that can't be imported by value."""
        given = None
        if self.given is not None:
            import cloudpickle  # workers that need no such function import no package

            given = cloudpickle.dumps(self.given)
        return _unpickled, (self.fn, dict(self.kwargs), given)

    def as_config(self) -> dict[str, Any]:
        """Return the mapping that a YAML file would hold; what it can't hold is described."""
        return {"fn": self.fn, **{name: _plain(value) for name, value in self.kwargs.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return FunctionSpec.of(value).fn if callable(value) else repr(value)


def _unpickled(fn: str, kwargs: dict[str, Any], given: bytes | None) -> FunctionSpec:
    # what cloudpickle wrote is a pickle
    return FunctionSpec(fn, kwargs, None if given is None else pickle.loads(given))


FROM_FILES = "jaxrl_llm_user_"
"""How the names of modules from users' files begin."""

MOST_LISTED = 40
"""Known names are listed besides the nearest one if they are no more than this."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, and all of them if they are few.

    >>> closest("clip_hihg", ["clip_low", "clip_high"])
    "did you mean 'clip_high'? (known: clip_high, clip_low)"
    """
    known = sorted(known)
    by_lower_case = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    listing = f"known: {', '.join(known) or 'none'}"
    if not near:
        return listing
    hint = f"did you mean {by_lower_case[near[0]]!r}?"
    return f"{hint} ({listing})" if len(known) <= MOST_LISTED else hint


def load_function(
    spec: FunctionSpec, home: str, *, passed: Iterable[str] | None = (), key: str = "fn"
) -> Callable[..., Any]:
    """Return the function that `spec` names with its keyword arguments bound.

    Args:
        spec: the name and the keyword arguments.
        home: the module in which a bare name is looked up.
        passed: parameters that the caller passes itself, so that a config may not; None where
            they are the positional ones without a default (fields of a batch).
        key: the config key, for messages.

    Returns:
        The function, or a `functools.partial` of it where there are keyword arguments.

    Raises:
        ConfigError: no such module, file or name; an unknown, missing or mistyped keyword.

    >>> spec = FunctionSpec("math:isclose", {"rel_tol": 0.5})
    >>> load_function(spec, home="math", passed=None)(1.0, 1.4)
    True
    """
    function = find_function(spec, home, key=key)
    keywords = checked_keywords(function, spec, passed=passed, key=key)
    return functools.partial(function, **keywords) if keywords else function


def find_function(spec: FunctionSpec, home: str, *, key: str = "fn") -> Callable[..., Any]:
    """Return the function that `spec` names, without its keyword arguments.

    Raises:
        ConfigError: no such module, file or name.
    """
    if spec.given is not None:
        return spec.given
    where, attribute = split_name(spec.fn)
    if where == NOT_IMPORTABLE:
        raise ConfigError(
            f"{key}: {attribute!r} was given as a Python function by a notebook or a program; "
            "name the module or file that has it, as in --function-from my_functions.py"
        )
    if where.endswith(".py"):
        module = _module_from_file(Path(where), key)
    else:
        module = _import(where if {":", "."} & set(spec.fn) else home, key)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(
            f"{key}: no function {attribute!r} in {where or home}; "
            + closest(attribute, public_functions(module))
        )
    return function


def split_name(name: str) -> tuple[str, str]:
    """Return file or module and the name in it; the first is empty for a bare name.

    >>> split_name("a/mine.py:f"), split_name("pkg.mod.f"), split_name("grpo")
    (('a/mine.py', 'f'), ('pkg.mod', 'f'), ('', 'grpo'))
    """
    where, _, attribute = name.rpartition(":" if ":" in name else ".")
    return where, attribute


def renamed_functions(tree: Any, module: str) -> Any:
    """Return a config's tree in which a module or file has the functions that Python had given.

    >>> renamed_functions({"loss": {"fn": "__main__:capped", "cap": 2}}, "mine.py")
    {'loss': {'fn': 'mine.py:capped', 'cap': 2}}
    """
    if isinstance(tree, Mapping):
        return {key: renamed_functions(value, module) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renamed_functions(value, module) for value in tree]
    if isinstance(tree, str) and tree.startswith(f"{NOT_IMPORTABLE}:"):
        return module + tree.removeprefix(NOT_IMPORTABLE)
    return tree


def _import(name: str, key: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{key}: {name!r} is not a module's name; expected pkg.mod or my_file.py")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        parent = (error.name or "").rpartition(".")[0]
        folders = vars(sys.modules[parent]).get("__path__", []) if parent in sys.modules else []
        siblings = [m.name for m in pkgutil.iter_modules(folders, f"{parent}.")]
        hint = f"; {closest(name, siblings)}" if siblings else ""
        raise ConfigError(f"{key}: can't import {name!r}: {error}{hint}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: can't import {name!r}: {described_error(error)}") from error


def _module_from_file(path: Path, key: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        hint = closest(path.name, [p.name for p in path.parent.glob("*.py")])
        raise ConfigError(f"{key}: no file {str(path)!r}; {hint}")
    text = path.read_bytes()  # an edited file is another module
    digest = hashlib.sha256(str(path).encode() + b"\0" + text).hexdigest()
    name = f"{FROM_FILES}{path.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{key}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{key}: {described_error(error, str(path))}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def public_functions(module: ModuleType) -> list[str]:
    """Return the names of a module's functions, those it takes from its package included.

    One of this library may choose by `__all__`.
    """

    def own(value: Any) -> bool:
        if isinstance(value, functools.partial):
            value = value.func
        home = getattr(value, "__module__", None) or ""
        return inspect.isroutine(value) and home.split(".")[0] == module.__name__.split(".")[0]

    is_ours = module.__name__.startswith("jaxrl_llm.")
    names = getattr(module, "__all__", vars(module)) if is_ours else vars(module)
    return [n for n in names if not n.startswith("_") and own(getattr(module, n))]


def checked_keywords(
    function: Callable[..., Any], spec: FunctionSpec, *, passed: Iterable[str] | None, key: str
) -> dict[str, Any]:
    """Return `spec.kwargs`, in the types of the function's annotations.

    Raises:
        ConfigError: they do not fit the function's signature.
    """
    try:
        parameters = signature_of(function).parameters
    except ValueError:  # a builtin without a signature: the call itself will check
        return dict(spec.kwargs)
    named = {
        n: p for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    if passed is None:
        passed = [
            n for n, p in named.items() if p.kind is not p.KEYWORD_ONLY and p.default is p.empty
        ]
    passed = set(passed)
    settable = {n: p for n, p in named.items() if n not in passed}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in spec.kwargs:
        if name in passed:
            raise ConfigError(f"{key}: {spec.fn!r} is given {name!r} by the trainer; remove it")
        if name not in settable and not open_ended:
            raise ConfigError(f"{key}: {spec.fn!r} takes no {name!r}; {closest(name, settable)}")
    missing = [n for n, p in settable.items() if p.default is p.empty and n not in spec.kwargs]
    if missing:
        raise ConfigError(f"{key}: {spec.fn!r} needs a value for {', '.join(missing)}")
    return {
        name: _as_annotated(f"{key}.{name}", value, settable[name].annotation)
        if name in settable
        else value
        for name, value in spec.kwargs.items()
    }


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return what a function takes, or a class whose metaclass hides it, such as flax's modules.

    Raises:
        ValueError: a builtin has no signature.
    """
    if isinstance(function, type) and type(function).__call__ is not type.__call__:
        own = inspect.signature(function.__init__)
        return own.replace(parameters=list(own.parameters.values())[1:])
    return inspect.signature(function)


def _as_annotated(key: str, value: Any, annotation: Any) -> Any:
    """Return the value in the type of a plain annotation, T or `T | None`; others are not read."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if union else (annotation,)
    if value is None and type(None) in options:
        return None
    plain = [option for option in options if option is not type(None)]
    if len(plain) != 1 or plain[0] not in (bool, int, float, str):
        return value
    kind = plain[0]
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(
            f"{key}: got {value!r} ({type(value).__name__}), expected a {kind.__name__}"
        )
    return value


LIBRARIES = ("jaxrl_llm", "optax")
"""Packages whose ValueErrors are about keywords, and say what is wrong by themselves."""


def described_failure(error: Exception, function: Callable[..., Any]) -> str:
    """Return on one line what a function raised, with the place where it is a user's.

    >>> described_failure(KeyError("x"), lambda scores: {}["x"])
    "KeyError: 'x'"
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    own = (getattr(function, "__module__", None) or "").partition(".")[0]
    if isinstance(error, TypeError | ValueError) and own in LIBRARIES:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return described_error(error, code and code.co_filename)


# The fields of a batch, and the dataflow graph, which is read off the functions' signatures.


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
    """

    axes: Literal["B", "B T", "B C", "B T K"]
    dtype: Literal["float32", "int32", "bool"]
    stage: Stage
    model: Literal["actor", "critic", "reference", "implicit_reward_model", "teacher"] | None = None


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


FIELDS: Mapping[str, BatchField] = {
    name: field for name, field in vars(BatchFields).items() if isinstance(field, BatchField)
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

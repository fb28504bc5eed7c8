"""Teachers: models whose log-probs of the answers the policy learns from, untrained."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at
from jaxrl_llm.config.functions import closest
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.model import Model
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.rollout.types import ScoredTokens
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device, to_host
from jaxrl_llm.training.distillation import top_pass
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import longest_teacher_sequence, microbatch_shape
from jaxrl_llm.training.load_functions import AlgorithmFunctions
from jaxrl_llm.training.sequence_teacher import SequenceTeacher
from jaxrl_llm.training.stages.models import TEACHER_TIMER, ModelPass, States
from jaxrl_llm.training.stages.rollout import PolicyTokens
from jaxrl_llm.training.teacher_model import TeacherModel, open_teacher_model
from jaxrl_llm.training.teacher_server import (
    longest_for_teacher,
    open_retokenizer,
    open_server_teacher,
)
from jaxrl_llm.types import Batch

log = logging.getLogger(__name__)

EVERYTHING = "*"
"""The data source of the only teacher."""


class TeacherError(RunError):
    """An answer that a teacher can't read."""


class UnalignedError(RunError):
    """Answers of a step of which no token can be compared with the teachers'."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher in this process.

    Attributes:
        path: Hugging Face directory that it was loaded from.
        params: in the compute dtype; on the host, where it waits there.
        infer: (params, batch) -> `logprobs` [B T] at temperature 1, and what else the batch gets.
        vocab_size: tokens that it knows.
        model: what the policy's update runs; None where it runs none.
        is_asked: whether a function asks for what it says of the answers.
    """

    path: str
    params: Params
    infer: Callable[[Params, Batch], dict[str, np.ndarray]]
    vocab_size: int
    model: TeacherModel | None = None
    is_asked: bool = True

    def __call__(self, batch: Batch, rollouts: Rollouts) -> dict[str, np.ndarray]:
        """Return fields of a batch of answers: `teacher_logprobs`, `teacher_mask`, top tokens.

        Raises:
            TeacherError: a token is beyond the teacher's vocabulary, or it gives NaN.
        """
        del rollouts
        results = self._infer(batch)
        logprobs = results.pop("logprobs")
        self._refuse_nan(logprobs[batch["mask"]])
        return {"teacher_logprobs": logprobs, "teacher_mask": batch["mask"], **results}

    def score(self, sequences: Sequence[Sequence[int]], longest: int) -> list[ScoredTokens]:
        """Return the log-probs of the tokens of sequences, none longer than so many tokens.

        Raises:
            TeacherError: as for answers.
        """
        if not sequences:
            return []
        tokens = np.zeros((len(sequences), longest), np.int32)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        sizes = np.array([len(sequence) for sequence in sequences], np.int32)
        logprobs = self._infer(Batch(tokens, sizes, {}))["logprobs"]
        self._refuse_nan(logprobs[np.arange(longest) < sizes[:, None]])
        return [
            ScoredTokens(row[:size], np.zeros((size, 0), np.int32), np.zeros((size, 0), np.float32))
            for row, size in zip(logprobs, sizes.tolist(), strict=True)
        ]

    def _refuse_nan(self, logprobs: np.ndarray) -> None:
        unknown = np.isnan(logprobs).sum()
        if unknown:
            raise TeacherError(
                f"teacher.path: {self.path} gave NaN as the log-probs of {unknown} of "
                f"{logprobs.size} tokens"
            )

    def _infer(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return what it says of a batch's tokens.

        Raises:
            TeacherError: a token is beyond the teacher's vocabulary.
        """
        largest = int(batch.tokens.max(initial=0))
        if largest >= self.vocab_size:
            raise TeacherError(
                f"teacher.path: an answer has token {largest}, but {self.path} knows "
                f"{self.vocab_size} tokens"
            )
        with on_device(self.params) as params:
            return self.infer(params, batch)


AnyTeacher: TypeAlias = Teacher | SequenceTeacher
"""What is called with a batch and its answers, and returns fields."""


def open_teachers(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    tokens: PolicyTokens,
    actor: Model,
    layout: Layout,
    stack: contextlib.ExitStack,
) -> dict[str, AnyTeacher]:
    """Load the teachers of a run by data source; one for all sources has the name `*`.

    Args:
        config: of the run.
        functions: that it names.
        tokens: of the policy.
        actor: the policy.
        layout: where the teachers stand.
        stack: closes the connections to servers at the run's end.

    Raises:
        ConfigError: there is no such model, or it does not know the policy's tokens.
        ScoringError: a server can't be reached, or does not know these tokens.
    """
    asked = config.teacher
    named = asked.url if asked.path is None else asked.path
    if not (functions.needs_teacher or functions.runs_teacher_in_update) or named is None:
        return {}
    opened: dict[Any, AnyTeacher] = {}
    teachers = {}
    for source, where in ({EVERYTHING: named} if isinstance(named, str) else named).items():
        own, model = of_source(asked.tokenizer, source), of_source(asked.model, source)
        key = where, own, model
        if key not in opened and asked.path is None:
            opened[key] = open_server_teacher(config, *key, tokens, stack)
        elif key not in opened and own is not None:
            opened[key] = open_retokenized(config, where, own, tokens, actor, layout)
        elif key not in opened:
            teacher = open_teacher(config, where, tokens.tokenizer, actor, layout)
            inside = teacher.model if functions.runs_teacher_in_update else None
            opened[key] = dataclasses.replace(
                teacher, model=inside, is_asked=functions.needs_teacher
            )
        teachers[source] = opened[key]
    return teachers


def of_source(value: str | Mapping[str, str] | None, source: str) -> str | None:
    """Return what a key that may be a mapping says of a data source.

    >>> of_source({"math": "a"}, "math"), of_source({"math": "a"}, "code"), of_source("b", "code")
    ('a', None, 'b')
    """
    return value.get(source) if isinstance(value, Mapping) else value


def open_teacher(
    config: TrainConfig, path: str, tokenizer: Any, actor: Model, layout: Layout
) -> Teacher:
    """Load a teacher that has the policy's tokens; see `open_teachers`."""
    longest = longest_teacher_sequence(config)
    with config_errors_at("teacher.path"):
        model = open_teacher_model(path, config.model, tokenizer, actor, layout, longest=longest)
    return as_teacher(config, path, model, layout, longest)


def open_retokenized(
    config: TrainConfig, path: str, own: str, tokens: PolicyTokens, actor: Model, layout: Layout
) -> SequenceTeacher:
    """Load a teacher that has the tokenizer of the directory `own`; see `open_teachers`."""
    retokenize = open_retokenizer(config, own, tokens)
    with config_errors_at("teacher.path"):
        model = open_teacher_model(path, config.model, None, actor, layout, longest=0)
    room = model.forward.model.max_positions
    if config.mesh.train.context == 1:
        in_row = config.batch.max_tokens_per_device
        room = in_row if room is None else min(room, in_row)
    longest = longest_for_teacher(config, room)
    teacher = as_teacher(config, path, model, layout, longest)

    def submit(sequences: Sequence[Sequence[int]]) -> Callable[[], list[ScoredTokens]]:
        return lambda: teacher.score(sequences, longest)

    return SequenceTeacher(
        name=path, submit=submit, retokenize=retokenize, longest=longest, model=teacher
    )


def as_teacher(
    config: TrainConfig, path: str, model: TeacherModel, layout: Layout, longest: int
) -> Teacher:
    """Return a loaded teacher with its pass over sequences of so many tokens.

    Raises:
        ConfigError: it has fewer tokens than teacher.top_k.
    """
    known = model.vocab or model.forward.model.vocab_size
    if (config.teacher.top_k or 0) > known:
        raise ConfigError(
            f"teacher.top_k={config.teacher.top_k}, but {path} and the policy have {known} tokens: "
            "lower it"
        )
    if config.offload.teacher:
        model = model._replace(params=to_host(model.params))
    shape = microbatch_shape(config, model.forward, layout, longest)
    forward, count = model.forward.over(shape), config.teacher.top_k
    infer = (
        logprob_pass(forward, shape, layout.mesh, ("logprobs",))
        if count is None
        else top_pass(forward, shape, layout.mesh, count=count, vocab=model.vocab)
    )
    size = model.forward.model.vocab_size
    return Teacher(path=path, params=model.params, infer=infer, vocab_size=size, model=model)


def run_in_update(teachers: Mapping[str, AnyTeacher]) -> TeacherModel | None:
    """Return the teacher that the policy's update runs, if it runs one."""
    here = (teacher for teacher in teachers.values() if isinstance(teacher, Teacher))
    return next((teacher.model for teacher in here if teacher.model), None)


class TeacherPass:
    """Adds what teachers say of a batch's answers, each of those of its data source.

    Args:
        teachers: by data source.
    """

    def __init__(self, teachers: Mapping[str, AnyTeacher]) -> None:
        """Nothing is asked for yet."""
        self._teachers = teachers
        self._asked: dict[str, Callable[[], dict[str, np.ndarray]]] = {}

    def begin(self, batch: Batch, rollouts: Rollouts) -> None:
        """Ask the servers, which answer while other passes run."""
        self._asked = {
            source: teacher.begin(batch.take(rows), rollouts.take(rows.tolist()))
            for source, teacher, rows in self._shares(rollouts)
            if isinstance(teacher, SequenceTeacher)
        }

    def run(
        self, states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        """Return the batch with the teachers' fields, and how far the policy is from them.

        Raises:
            UnalignedError: the teachers tell nothing of any token. One of several may, in a step.
        """
        del states, step
        fields: dict[str, np.ndarray] = {}
        metrics = {}
        for source, teacher, rows in self._shares(rollouts):
            part = batch.take(rows)
            asked = self._asked.pop(source, None)
            results = asked() if asked else teacher(part, rollouts.take(rows.tolist()))
            for name, values in results.items():
                empty = np.zeros((len(batch.tokens), *values.shape[1:]), values.dtype)
                fields.setdefault(name, empty)[rows] = values
            if source != EVERYTHING and results["teacher_mask"].any():
                metrics[f"teacher/reverse_kl/{source}"] = mean_apart(part.add(**results))
        batch = batch.add(**fields)
        metrics["teacher/reverse_kl"] = mean_apart(batch)
        told = batch["teacher_mask"][batch["mask"]]
        if told.size and not told.any():
            names = {t.name for t in self._teachers.values() if isinstance(t, SequenceTeacher)}
            raise UnalignedError(
                f"{', '.join(sorted(names))}: not one of {told.size} tokens of the answers can be "
                "compared with the teacher's tokens (teacher.tokenizer)"
            )
        metrics["teacher/left_out"] = float(1 - told.mean()) if told.size else 0.0
        return batch, metrics

    def _shares(self, rollouts: Rollouts) -> Iterator[tuple[str, AnyTeacher, np.ndarray]]:
        sources = np.array([prompt.data_source for prompt in rollouts.prompts], object)
        for source, teacher in self._teachers.items():
            rows = np.flatnonzero((sources == source) | (source == EVERYTHING))
            if rows.size:
                yield source, teacher, rows


def teacher_passes(teachers: Mapping[str, AnyTeacher]) -> list[ModelPass]:
    """Return the pass of the teachers by data source, if there are any."""
    made = TeacherPass(teachers)
    asked = [t for t in teachers.values() if isinstance(t, SequenceTeacher) or t.is_asked]
    return [ModelPass(TEACHER_TIMER, made.run, made.begin)] if asked else []


def mean_apart(batch: Batch) -> float:
    """Return the mean of log π − log π_T over the tokens that the teachers tell of."""
    apart = batch["rollout_logprobs"] - batch["teacher_logprobs"]
    told = apart[batch["teacher_mask"]]
    return float(told.mean()) if told.size else 0.0


def held_params(teachers: Mapping[str, AnyTeacher]) -> dict[str, Params]:
    """Return the weights of the teachers in this process, by their keys."""
    models = [t.model if isinstance(t, SequenceTeacher) else t for t in teachers.values()]
    return {f"teacher.path: {model.path}": model.params for model in models if model is not None}


def check_teacher_sources(config: TrainConfig, sources: Iterable[str]) -> None:
    """Refuse data sources that have no teacher, and what is said of none, before any is loaded."""
    key = "url" if config.teacher.path is None else "path"
    paths = getattr(config.teacher, key)
    of_it = {"tokenizer": config.teacher.tokenizer, "model": config.teacher.model}
    for name, value in of_it.items():
        for source in value if isinstance(value, dict) else ():
            if not isinstance(paths, dict):
                raise ConfigError(
                    f"teacher.{name} names data_source {source!r}, but teacher.{key} is one "
                    f"teacher for all: give both one value, or both a mapping, got {paths!r}"
                )
            if source not in paths:
                raise ConfigError(
                    f"teacher.{name}: teacher.{key} has no data_source {source!r}; "
                    + closest(source, paths)
                )
    if not isinstance(paths, dict):
        return
    for source in sorted(set(sources)):
        if source not in paths:
            raise ConfigError(
                f"teacher.{key} has no teacher for data_source {source!r} of data.train; "
                + closest(source, paths)
            )

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
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.data.chat import VOCABULARIES
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.rollout.types import ScoredTokens
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device, to_host
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import microbatch_shape
from jaxrl_llm.training.load_functions import AlgorithmFunctions
from jaxrl_llm.training.load_model import forward_config, read_model
from jaxrl_llm.training.reward_model import check_same_tokens
from jaxrl_llm.training.sequence_teacher import SequenceTeacher
from jaxrl_llm.training.stages.models import ModelPass, States
from jaxrl_llm.training.stages.rollout import PolicyTokens
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


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher in this process.

    Attributes:
        path: Hugging Face directory that it was loaded from.
        params: in the compute dtype; on the host, where it waits there.
        infer: (params, batch) -> `logprobs` [B T] at temperature 1.
        vocab_size: tokens that it knows.
    """

    path: str
    params: Params
    infer: Callable[[Params, Batch], dict[str, np.ndarray]]
    vocab_size: int

    def __call__(self, batch: Batch, rollouts: Rollouts) -> dict[str, np.ndarray]:
        """Return fields of a batch of answers: `teacher_logprobs` and `teacher_mask`, [B T].

        Raises:
            TeacherError: a token is beyond the teacher's vocabulary.
        """
        del rollouts
        return {"teacher_logprobs": self.logprobs(batch), "teacher_mask": batch["mask"]}

    def score(self, sequences: Sequence[Sequence[int]], longest: int) -> list[ScoredTokens]:
        """Return the log-probs of the tokens of sequences, none longer than so many tokens."""
        if not sequences:
            return []
        tokens = np.zeros((len(sequences), longest), np.int32)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        sizes = np.array([len(sequence) for sequence in sequences], np.int32)
        logprobs = self.logprobs(Batch(tokens, sizes, {}))
        return [
            ScoredTokens(row[:size], np.zeros((size, 0), np.int32), np.zeros((size, 0), np.float32))
            for row, size in zip(logprobs, sizes.tolist(), strict=True)
        ]

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return the log-probs of a batch's tokens [B T].

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
            return self.infer(params, batch)["logprobs"]


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
    if not functions.needs_teacher or named is None:
        return {}
    opened: dict[Any, AnyTeacher] = {}
    teachers = {}
    for source, where in ({EVERYTHING: named} if isinstance(named, str) else named).items():
        own, model = of_source(asked.tokenizer, source), of_source(asked.model, source)
        key = where, own, model
        if key not in opened and asked.path is None:
            opened[key] = open_server_teacher(config, *key, tokens, stack)
        elif key not in opened and own is not None:
            opened[key] = open_retokenized(config, where, own, tokens, layout)
        elif key not in opened:
            opened[key] = open_teacher(config, where, tokens.tokenizer, actor, layout)
        teachers[source] = opened[key]
    return teachers


def of_source(value: str | Mapping[str, str] | None, source: str) -> str | None:
    """Return what a key that may be a mapping says of a data source.

    >>> of_source({"math": "a"}, "math"), of_source({"math": "a"}, "code"), of_source("b", "code")
    ('a', None, 'b')
    """
    return value.get(source) if isinstance(value, Mapping) else value


@activity("loading a teacher")
def open_teacher(
    config: TrainConfig, path: str, tokenizer: Any, actor: Model, layout: Layout
) -> Teacher:
    """Load a teacher that has the policy's tokens; see `open_teachers`."""
    with config_errors_at("teacher.path"):
        spec = read_teacher(path)
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        if spec.max_positions is not None and spec.max_positions < longest:
            raise ValueError(
                f"{path} has {spec.max_positions} positions, but the longest sequence is "
                f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}"
            )
        if any((resolve(path) / name).is_file() for name in VOCABULARIES):
            try:
                check_same_tokens(path, tokenizer)  # the number of padded ones may differ
            except ValueError as error:
                raise ValueError(f"{error}; or set teacher.tokenizer to {path}") from error
        elif spec.vocab_size != actor.vocab_size:
            raise ValueError(
                f"{path} has no tokenizer and vocab_size={spec.vocab_size}, expected the policy's "
                f"{actor.vocab_size}"
            )
    return place_teacher(config, path, spec, layout, longest)


@activity("loading a teacher")
def open_retokenized(
    config: TrainConfig, path: str, own: str, tokens: PolicyTokens, layout: Layout
) -> SequenceTeacher:
    """Load a teacher that has the tokenizer of the directory `own`; see `open_teachers`."""
    retokenize = open_retokenizer(config, own, tokens)
    with config_errors_at("teacher.path"):
        spec = read_teacher(path)
    longest = longest_for_teacher(config, spec.max_positions)
    if config.mesh.train.context == 1:
        longest = min(longest, config.batch.max_tokens_per_device)
    teacher = place_teacher(config, path, spec, layout, longest)

    def submit(sequences: Sequence[Sequence[int]]) -> Callable[[], list[ScoredTokens]]:
        return lambda: teacher.score(sequences, longest)

    return SequenceTeacher(
        name=path, submit=submit, retokenize=retokenize, longest=longest, model=teacher
    )


def read_teacher(path: str) -> ModelSpec:
    """Read what a teacher is.

    Raises:
        ValueError: it is no language model.
    """
    spec = read_spec(path)
    if spec.value_head or spec.reward_head:
        raise ValueError(f"{path} ends in a value head, expected a language model")
    return spec


def place_teacher(
    config: TrainConfig, path: str, spec: ModelSpec, layout: Layout, longest: int
) -> Teacher:
    """Load a teacher in the compute dtype, for sequences of so many tokens."""
    with config_errors_at("teacher.path"):
        model = read_model(path, spec, layout)
    params = model.params
    if config.model.dtype != "float32":
        dtypes = compute_dtypes(spec, config.model.dtype)
        params = reshard(params, layout.of(declare(spec)), dtype=dtypes)
    if config.offload.teacher:
        params = to_host(params)
    plain = dataclasses.replace(config.model, router_loss_coef=0.0)
    forward = forward_config(plain, model.model, layout)
    shape = microbatch_shape(config, forward, layout, longest)
    infer = logprob_pass(forward.over(shape), shape, layout.mesh, ("logprobs",))
    return Teacher(path=path, params=params, infer=infer, vocab_size=spec.vocab_size)


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
        """Return the batch with the teachers' fields, and how far the policy is from them."""
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
    return [ModelPass("teacher", made.run, made.begin)] if teachers else []


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
    """Refuse data sources that have no teacher, before anything is loaded."""
    key = "url" if config.teacher.path is None else "path"
    paths = getattr(config.teacher, key)
    if not isinstance(paths, dict):
        return
    for source in sorted(set(sources)):
        if source not in paths:
            raise ConfigError(
                f"teacher.{key} has no teacher for data_source {source!r} of data.train; "
                + closest(source, paths)
            )

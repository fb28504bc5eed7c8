"""Teachers: models whose log-probs of the answers the policy learns from, untrained."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at
from jaxrl_llm.config.functions import closest
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.model import Model
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device, to_host
from jaxrl_llm.training.distillation import top_pass
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import microbatch_shape
from jaxrl_llm.training.load_functions import AlgorithmFunctions
from jaxrl_llm.training.stages.models import ModelPass, States
from jaxrl_llm.training.teacher_model import TeacherModel, open_teacher_model
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
        """Return fields of a batch of answers: `teacher_logprobs` [B T], and of top tokens.

        Raises:
            TeacherError: a token is beyond the teacher's vocabulary.
        """
        del rollouts
        largest = int(batch.tokens.max(initial=0))
        if largest >= self.vocab_size:
            raise TeacherError(
                f"teacher.path: an answer has token {largest}, but {self.path} knows "
                f"{self.vocab_size} tokens"
            )
        with on_device(self.params) as params:
            results = self.infer(params, batch)
        return {"teacher_logprobs": results.pop("logprobs"), **results}


def open_teachers(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    tokenizer: Any,
    actor: Model,
    layout: Layout,
) -> dict[str, Teacher]:
    """Load the teachers of a run by data source; one for all sources has the name `*`.

    Args:
        config: of the run.
        functions: that it names.
        tokenizer: of the policy.
        actor: the policy.
        layout: where the teachers stand.

    Raises:
        ConfigError: there is no such model, or it does not know the policy's tokens.
    """
    is_asked = functions.needs_teacher or functions.runs_teacher_in_update
    if not is_asked or config.teacher.path is None:
        return {}
    paths = config.teacher.path
    by_source = {EVERYTHING: paths} if isinstance(paths, str) else paths
    opened = {}
    for path in dict.fromkeys(by_source.values()):
        teacher = open_teacher(config, path, tokenizer, actor, layout)
        model = teacher.model if functions.runs_teacher_in_update else None
        opened[path] = dataclasses.replace(teacher, model=model, is_asked=functions.needs_teacher)
    return {source: opened[path] for source, path in by_source.items()}


def open_teacher(
    config: TrainConfig, path: str, tokenizer: Any, actor: Model, layout: Layout
) -> Teacher:
    """Load a teacher in the compute dtype; see `open_teachers`."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    with config_errors_at("teacher.path"):
        model = open_teacher_model(path, config.model, tokenizer, actor, layout, longest=longest)
    if config.offload.teacher:
        model = model._replace(params=to_host(model.params))
    shape = microbatch_shape(config, model.forward, layout)
    forward, count = model.forward.over(shape), config.teacher.top_k
    infer = (
        logprob_pass(forward, shape, layout.mesh, ("logprobs",))
        if count is None
        else top_pass(forward, shape, layout.mesh, count=count, vocab=model.vocab)
    )
    size = model.forward.model.vocab_size
    return Teacher(path=path, params=model.params, infer=infer, vocab_size=size, model=model)


def run_in_update(teachers: Mapping[str, Teacher]) -> TeacherModel | None:
    """Return the teacher that the policy's update runs, if it runs one."""
    return next((teacher.model for teacher in teachers.values() if teacher.model), None)


def teacher_passes(teachers: Mapping[str, Teacher]) -> list[ModelPass]:
    """Return the pass that adds what the teachers say of a batch's answers, if there are any.

    Each answer has the teacher of its prompt's data source.
    """

    def run(
        states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del states, step
        sources = np.array([prompt.data_source for prompt in rollouts.prompts], object)
        fields: dict[str, np.ndarray] = {}
        metrics = {}
        for source, teacher in teachers.items():
            rows = np.flatnonzero((sources == source) | (source == EVERYTHING))
            if not rows.size:
                continue
            part = batch.take(rows)
            results = teacher(part, rollouts.take(rows.tolist()))
            for name, values in results.items():
                shape = *batch.tokens.shape, *values.shape[2:]
                fields.setdefault(name, np.zeros(shape, values.dtype))[rows] = values
            apart = part["rollout_logprobs"] - results["teacher_logprobs"]
            if part["mask"].any() and source != EVERYTHING:
                metrics[f"teacher/reverse_kl/{source}"] = float(apart[part["mask"]].mean())
        batch = batch.add(**fields)
        apart = (batch["rollout_logprobs"] - batch["teacher_logprobs"])[batch["mask"]]
        metrics["teacher/reverse_kl"] = float(apart.mean()) if apart.size else 0.0
        return batch, metrics

    is_asked = any(teacher.is_asked for teacher in teachers.values())
    return [ModelPass("teacher", run)] if is_asked else []


def check_teacher_sources(config: TrainConfig, sources: Iterable[str]) -> None:
    """Refuse data sources that have no teacher, before anything is loaded."""
    paths = config.teacher.path
    if not isinstance(paths, dict):
        return
    for source in sorted(set(sources)):
        if source not in paths:
            raise ConfigError(
                f"teacher.path has no teacher for data_source {source!r} of data.train; "
                + closest(source, paths)
            )

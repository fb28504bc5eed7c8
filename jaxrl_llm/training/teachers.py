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
from jaxrl_llm.data.chat import VOCABULARIES
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device, to_host
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import microbatch_shape
from jaxrl_llm.training.load_functions import AlgorithmFunctions
from jaxrl_llm.training.load_model import forward_config, read_model
from jaxrl_llm.training.reward_model import check_same_tokens
from jaxrl_llm.training.stages.models import ModelPass, States
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
        """Return fields of a batch of answers: `teacher_logprobs` [B T].

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
            return {"teacher_logprobs": self.infer(params, batch)["logprobs"]}


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
    if not functions.needs_teacher or config.teacher.path is None:
        return {}
    paths = config.teacher.path
    by_source = {EVERYTHING: paths} if isinstance(paths, str) else paths
    opened = {
        path: open_teacher(config, path, tokenizer, actor, layout)
        for path in dict.fromkeys(by_source.values())
    }
    return {source: opened[path] for source, path in by_source.items()}


@activity("loading a teacher")
def open_teacher(
    config: TrainConfig, path: str, tokenizer: Any, actor: Model, layout: Layout
) -> Teacher:
    """Load a teacher in the compute dtype; see `open_teachers`."""
    with config_errors_at("teacher.path"):
        spec = read_spec(path)
        if spec.value_head or spec.reward_head:
            raise ValueError(f"{path} ends in a value head, expected a language model")
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        if spec.max_positions is not None and spec.max_positions < longest:
            raise ValueError(
                f"{path} has {spec.max_positions} positions, but the longest sequence is "
                f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}"
            )
        if any((resolve(path) / name).is_file() for name in VOCABULARIES):
            check_same_tokens(path, tokenizer)  # the number of padded ones may differ
        elif spec.vocab_size != actor.vocab_size:
            raise ValueError(
                f"{path} has no tokenizer and vocab_size={spec.vocab_size}, expected the policy's "
                f"{actor.vocab_size}"
            )
        model = read_model(path, spec, layout)
    params = model.params
    if config.model.dtype != "float32":
        dtypes = compute_dtypes(spec, config.model.dtype)
        params = reshard(params, layout.of(declare(spec)), dtype=dtypes)
    if config.offload.teacher:
        params = to_host(params)
    plain = dataclasses.replace(config.model, router_loss_coef=0.0)
    forward = forward_config(plain, model.model, layout)
    shape = microbatch_shape(config, forward, layout)
    infer = logprob_pass(forward.over(shape), shape, layout.mesh, ("logprobs",))
    return Teacher(path=path, params=params, infer=infer, vocab_size=spec.vocab_size)


def teacher_passes(teachers: Mapping[str, Teacher]) -> list[ModelPass]:
    """Return the pass that adds what the teachers say of a batch's answers, if there are any.

    Each answer has the teacher of its prompt's data source.
    """

    def run(
        states: States, batch: Batch, rollouts: Rollouts, step: int
    ) -> tuple[Batch, dict[str, float]]:
        del states, step
        sources = np.array([prompt.data_source for prompt in rollouts.prompts], object)
        fields = {"teacher_logprobs": np.zeros(batch.tokens.shape, np.float32)}
        metrics = {}
        for source, teacher in teachers.items():
            rows = np.flatnonzero((sources == source) | (source == EVERYTHING))
            if not rows.size:
                continue
            part = batch.take(rows)
            results = teacher(part, rollouts.take(rows.tolist()))
            for name, values in results.items():
                fields[name][rows] = values
            apart = part["rollout_logprobs"] - results["teacher_logprobs"]
            if part["mask"].any() and source != EVERYTHING:
                metrics[f"teacher/reverse_kl/{source}"] = float(apart[part["mask"]].mean())
        batch = batch.add(**fields)
        apart = (batch["rollout_logprobs"] - batch["teacher_logprobs"])[batch["mask"]]
        metrics["teacher/reverse_kl"] = float(apart.mean()) if apart.size else 0.0
        return batch, metrics

    return [ModelPass("teacher", run)] if teachers else []


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

"""A whole run of `jaxrl_llm.sft`: its keys, and the rules between them."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, function_key
from jaxrl_llm.config.rules import check
from jaxrl_llm.config.sections.batch import SftBatchConfig
from jaxrl_llm.config.sections.checkpoint import CheckpointConfig
from jaxrl_llm.config.sections.data import SftDataConfig
from jaxrl_llm.config.sections.log import LogConfig
from jaxrl_llm.config.sections.mesh import SftMeshConfig
from jaxrl_llm.config.sections.model import ModelConfig
from jaxrl_llm.config.sections.optim import OptimConfig
from jaxrl_llm.config.shared import (
    COMPILATION_CACHE,
    STALL_TIMEOUT,
    adapter_has_a_kept_base,
    adapter_is_new_or_given,
    own_model_is_plain,
    profiled_steps_are_steps,
)
from jaxrl_llm.config.vision import images_are_seen


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftTeacherConfig(Section):
    """A teacher whose distributions are learned on the examples' answers."""

    path: str | None = Field(
        default=None,
        description="Hugging Face directory of a teacher with the model's tokens; null: none",
    )
    divergence: Function = function_key(
        kinds.DIVERGENCES,
        "forward_kl_divergence",
        "divergence of the model from the teacher, over the whole vocabulary: "
        "algorithms.divergences",
    )
    share: Number = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share a of the divergence in the loss (1 - a) * -log π + a * divergence",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftConfig(Section):
    """A whole run of `jaxrl_llm.sft`."""

    run_dir: str = Field(min_length=1, description="directory for everything that the run writes")
    export_to: str = Field(description="Hugging Face directory to write at the end")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="seed of the data order and of random weights"
    )
    steps: int | None = Field(default=None, ge=1, description="updates in all; null takes epochs")
    epochs: int = Field(
        default=1, ge=1, description="passes over the examples, where steps is null"
    )
    model: ModelConfig
    teacher: SftTeacherConfig = Field(default_factory=SftTeacherConfig)
    data: SftDataConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    batch: SftBatchConfig = Field(default_factory=SftBatchConfig)
    mesh: SftMeshConfig = Field(default_factory=SftMeshConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    compilation_cache: bool = Field(default=True, description=COMPILATION_CACHE)
    log: LogConfig = Field(default_factory=LogConfig)
    stall_timeout_s: Number | None = Field(default=3600.0, gt=0, description=STALL_TIMEOUT)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(
            self,
            longest_example_fits,
            folders_are_two,
            divergence_has_a_teacher,
            profiled_steps_are_steps,
            adapter_is_new_or_given,
            adapter_has_a_kept_base,
            own_model_is_plain,
            images_are_seen,
        )


def longest_example_fits(config: SftConfig) -> Iterator[str]:
    """Require room for the longest example, unless devices share a row."""
    room = config.batch.max_tokens_per_device
    if config.mesh.train.context == 1 and room < config.data.max_tokens:
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest example: "
            f"data.max_tokens={config.data.max_tokens}"
        )


def folders_are_two(config: SftConfig) -> Iterator[str]:
    """Refuse to export into the folder of the run."""
    if Path(config.export_to).resolve() == Path(config.run_dir).resolve():
        yield f"export_to and run_dir are both {config.run_dir!r}: name two folders"


def divergence_has_a_teacher(config: SftConfig) -> Iterator[str]:
    """Refuse keys of a teacher where there is none."""
    if config.teacher.path is None and config.teacher != SftTeacherConfig():
        yield "teacher is set, but there is no teacher.path: name one, or remove the section"

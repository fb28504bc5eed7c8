"""A whole run of `jaxrl_llm.prefer`: its keys, and the rules between them."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, Several, Table, function_key
from jaxrl_llm.config.rules import check
from jaxrl_llm.config.sections.checkpoint import CheckpointConfig
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferDataConfig(Section):
    """Pairs, answers with a label, or answers with labelled steps."""

    train: Several[str] = Field(
        min_length=1,
        description="parquet or jsonl files with columns prompt, chosen and rejected, or prompt, "
        "completion and label, or prompt, completions and labels",
    )
    validation: Several[str] = Field(default=(), description="held-out files of the same kind")
    prepare: Function | None = function_key(
        kinds.PREPARATIONS,
        None,
        "preparation that writes the files when they are missing (jaxrl_llm.data.prepare)",
        passed=(),
    )
    dataset: Function = function_key(
        kinds.DATASETS, "preference_rows", "function from files to rows"
    )
    max_tokens: int = Field(
        default=1024, ge=1, description="the longest prompt and answer; a pair is two of them"
    )
    filter_overlong: bool = Field(
        default=False, description="drop longer rows; false makes them an error"
    )
    shuffle: bool = Field(default=True, description="shuffle in every epoch, by the seed")
    chat_template_kwargs: Table = Field(default={}, description="keywords for the chat template")
    step_separator: str = Field(
        default="\n",
        min_length=1,
        description="text that is put behind each of a row's completions, its steps; a process "
        "reward model scores its last token",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferBatchConfig(Section):
    """How the preferences are cut."""

    pairs_per_step: int = Field(default=64, ge=2, description="pairs, or answers, in one update")
    max_tokens_per_device: int = Field(
        default=16384,
        description="tokens of a micro-batch on each device: bounds memory, never exceeded",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferValidationConfig(Section):
    """Validation on data.validation."""

    before: bool = Field(default=True, description="validate before the first step")
    every: int = Field(default=0, ge=0, description="validate every n steps; 0 only at the end")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferConfig(Section):
    """A whole run of `jaxrl_llm.prefer`."""

    run_dir: str = Field(min_length=1, description="directory for everything that the run writes")
    export_to: str = Field(description="Hugging Face directory to write at the end")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="seed of the data order and of random weights"
    )
    steps: int | None = Field(default=None, ge=1, description="updates in all; null takes epochs")
    epochs: int = Field(default=1, ge=1, description="passes over the rows, where steps is null")
    loss: Function = function_key(
        kinds.PREFERENCES,
        "dpo",
        "loss of pairs, of answers with a label or of labelled steps; one that asks for scores, or "
        "for logits of steps, trains a reward model",
    )
    model: ModelConfig
    reference: str | None = Field(
        default=None,
        description="Hugging Face directory of the reference, where the loss asks for one; null: "
        "the model as the run begins with it",
    )
    data: PreferDataConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    batch: PreferBatchConfig = Field(default_factory=PreferBatchConfig)
    validation: PreferValidationConfig = Field(default_factory=PreferValidationConfig)
    mesh: SftMeshConfig = Field(default_factory=SftMeshConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    compilation_cache: bool = Field(default=True, description=COMPILATION_CACHE)
    log: LogConfig = Field(default_factory=LogConfig)
    stall_timeout_s: Number | None = Field(default=3600.0, gt=0, description=STALL_TIMEOUT)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(
            self,
            longest_pair_fits,
            export_has_a_folder,
            profiled_steps_are_steps,
            adapter_is_new_or_given,
            adapter_has_a_kept_base,
            own_model_is_plain,
            text_is_all,
        )


def longest_pair_fits(config: PreferConfig) -> Iterator[str]:
    """Require room for the longest pair, unless devices share a row."""
    room, needed = config.batch.max_tokens_per_device, 2 * config.data.max_tokens
    if config.mesh.train.context == 1 and room < needed:
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest pair: twice "
            f"data.max_tokens={config.data.max_tokens}"
        )


def text_is_all(config: PreferConfig) -> Iterator[str]:
    """Refuse images, which pairs have not got yet."""
    if config.model.vision != "none":
        yield (
            f"model.vision={config.model.vision}: expected none, as preferences are of text alone "
            "(jaxrl_llm.train and jaxrl_llm.sft read images)"
        )


def export_has_a_folder(config: PreferConfig) -> Iterator[str]:
    """Refuse to export into the folder of the run."""
    if Path(config.export_to).resolve() == Path(config.run_dir).resolve():
        yield f"export_to and run_dir are both {config.run_dir!r}: name two folders"

"""A whole evaluation by `jaxrl_llm.evaluate`: its keys, and the rules between them."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, Several, Table, function_key
from jaxrl_llm.config.rules import check
from jaxrl_llm.config.sections.agent import AgentConfig
from jaxrl_llm.config.sections.data import IMAGE_KEY, MAX_PIXELS, MIN_PIXELS, VIDEO_KEY
from jaxrl_llm.config.sections.mesh import EngineMeshConfig
from jaxrl_llm.config.sections.reward import EvaluateRewardConfig
from jaxrl_llm.config.sections.rollout import CACHE_GB


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationKeys(Section):
    """What an evaluation evaluates, and how it samples and scores."""

    model: str = Field(
        description="Hugging Face directory or repository, or the run_dir of train or sft"
    )
    data: Several[str] = Field(
        min_length=1, description="parquet or jsonl files with verl's columns"
    )
    out: str | None = Field(
        default=None,
        description=(
            "folder for metrics.json and samples.parquet; null: runs/evaluate/<date and time>"
        ),
    )
    step: int | None = Field(
        default=None, description="which checkpoint of a run; null takes the newest"
    )
    function_from: str | None = Field(
        default=None,
        description=(
            "my_file.py or pkg.mod, that has the function which a notebook gave the run as "
            "model.function"
        ),
    )
    seed: int = Field(default=0, ge=0, description="seed of sampling")
    rows: int | None = Field(
        default=None, ge=1, description="the first n rows only; null takes all"
    )
    dataset: Function = function_key(
        kinds.DATASETS, FunctionSpec("verl_rows"), "function from files to rows"
    )
    vision: bool = Field(
        default=False,
        description="load the vision tower of a directory, too; that of a run always is, if it was "
        "trained with one (docs/images.md)",
    )
    image_key: str = IMAGE_KEY
    video_key: str = VIDEO_KEY
    max_pixels: int | None = MAX_PIXELS
    min_pixels: int | None = MIN_PIXELS
    chat_template_kwargs: Table = Field(default={}, description="keywords for the chat template")
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "drop longer prompts; null drops none, and refuses prompts that the model can't hold"
        ),
    )
    samples: int = Field(default=1, ge=1, description="n: responses sampled for each prompt")
    k: Several[int] = Field(
        default=(), description="k of pass@k and maj@k, up to n; none takes 2, 4, 8, … and n"
    )
    max_new_tokens: int = Field(
        default=512,
        ge=1,
        description="largest number of tokens of a response; of an episode, all after its prompt",
    )
    temperature: Number = Field(default=0.0, ge=0, description="softmax temperature; 0 is greedy")
    top_p: Number = Field(
        default=1.0, gt=0, le=1, description="nucleus: sample from the smallest set with this mass"
    )
    top_k: int = Field(
        default=0, ge=0, description="sample from the k most likely tokens; 0 means all"
    )
    min_p: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description="sample from tokens at least this share as likely as the most likely one",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of weights, cache and computation: float32 or bfloat16"
    )
    max_running_sequences: int = Field(
        default=256, ge=1, description="sequences that the engine decodes at once"
    )
    kv_cache_gb: Number | None = Field(default=None, gt=0, description=CACHE_GB)
    reward: EvaluateRewardConfig = Field(default_factory=EvaluateRewardConfig)
    mesh: EngineMeshConfig = Field(default_factory=EngineMeshConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateConfig(AgentConfig, EvaluationKeys):  # the keys of the last come first
    """A whole evaluation by `jaxrl_llm.evaluate`."""

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(self, samples_differ, k_is_at_most_samples)


def samples_differ(config: EvaluateConfig) -> Iterator[str]:
    """Refuse several samples of the likeliest answer."""
    if config.samples > 1 and config.temperature == 0:
        yield (
            f"samples={config.samples} at temperature=0 draws the same answer each time: "
            "raise the temperature, or take one sample"
        )


def k_is_at_most_samples(config: EvaluateConfig) -> Iterator[str]:
    """Require that each k is a number of samples that there are."""
    if not all(1 <= k <= config.samples for k in config.k):
        yield f"k: expected numbers from 1 to samples={config.samples}, got {list(config.k)}"

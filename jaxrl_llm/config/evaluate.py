"""A whole evaluation by `jaxrl_llm.evaluate`: its keys, and the rules between them."""

from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.checks import at_least, require
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key, required, section
from jaxrl_llm.config.sections.mesh import EngineMeshConfig, check_sizes
from jaxrl_llm.config.sections.model import check_dtype
from jaxrl_llm.config.sections.reward import EvaluateRewardConfig, check_scoring
from jaxrl_llm.config.sections.rollout import CACHE_GB


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """A whole evaluation by `jaxrl_llm.evaluate`."""

    model: str = required(
        "Hugging Face directory or repository, or the folder of a run of train or sft"
    )
    data: tuple[str, ...] = required("parquet or jsonl files with verl's columns")
    out: str | None = key(
        None, "folder for metrics.json and samples.parquet; null: runs/evaluate/<date and time>"
    )
    step: int | None = key(None, "which checkpoint of a run; null takes the newest")
    seed: int = key(0, "seed of sampling")
    rows: int | None = key(None, "the first n rows only; null takes all")
    dataset: FunctionSpec = key(FunctionSpec("verl_rows"), "function from files to rows")
    chat_template_kwargs: dict[str, Any] = key({}, "keywords for the chat template")
    max_prompt_tokens: int | None = key(
        None, "drop prompts of more tokens; null takes all, and refuses what the model can't hold"
    )
    samples: int = key(1, "n: answers drawn for each prompt")
    k: tuple[int, ...] = key((), "k of pass@k and maj@k, up to n; none takes 2, 4, 8, … and n")
    max_new_tokens: int = key(512, "the longest answer")
    temperature: float = key(0.0, "softmax temperature; 0 takes the likeliest token")
    top_p: float = key(1.0, "nucleus: sample from the smallest set with this mass")
    top_k: int = key(0, "sample from the k likeliest tokens; 0 means all")
    min_p: float = key(0.0, "sample from tokens at least this share as likely as the likeliest")
    dtype: str = key("float32", "of weights, cache and computation: float32 or bfloat16")
    max_running_sequences: int = key(256, "sequences that the engine decodes at once")
    kv_cache_gb: float | None = key(None, CACHE_GB)
    reward: EvaluateRewardConfig = section(EvaluateRewardConfig)
    mesh: EngineMeshConfig = section(EngineMeshConfig)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        at_least(self, 1, "rows max_prompt_tokens samples max_new_tokens max_running_sequences")
        at_least(self, 0, "seed temperature top_k reward.workers")
        require(len(self.data) > 0, "data names no file")
        require(
            self.samples == 1 or self.temperature > 0,
            f"samples={self.samples} at temperature=0 draws the same answer each time: "
            "raise the temperature, or take one sample",
        )
        require(
            all(1 <= k <= self.samples for k in self.k),
            f"k={list(self.k)}, wanted numbers from 1 to samples={self.samples}",
        )
        require(0 < self.top_p <= 1, f"top_p={self.top_p}, wanted a number in (0, 1]")
        require(0 <= self.min_p <= 1, f"min_p={self.min_p}, wanted a number in [0, 1]")
        require(
            self.kv_cache_gb is None or self.kv_cache_gb > 0,
            f"kv_cache_gb={self.kv_cache_gb}, wanted a number above 0, or null",
        )
        check_dtype("dtype", self.dtype)
        check_scoring(self.reward)
        check_sizes("rollout", self.mesh.rollout)

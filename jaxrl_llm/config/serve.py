"""All of `jaxrl_llm.serve`: its keys, and the rules between them."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Number, Section
from jaxrl_llm.config.sections.data import MAX_PIXELS, MIN_PIXELS
from jaxrl_llm.config.sections.limits import LimitsConfig
from jaxrl_llm.config.sections.mesh import ServeMeshConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServeConfig(Section):
    """All of `jaxrl_llm.serve`."""

    model: str = Field(description="Hugging Face directory, or the run_dir of train or sft")
    function_from: str | None = Field(
        default=None,
        description=(
            "my_file.py or pkg.mod, that has the function which a notebook gave the run as "
            "model.function"
        ),
    )
    name: str | None = Field(
        default=None, description="the model's name for clients; null takes model"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of weights, cache and computation: float32 or bfloat16"
    )
    max_running_sequences: int = Field(
        default=64, ge=1, description="sequences that the engine decodes at once"
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="largest number of tokens of prompt and completion; null takes the "
        "model's own limit",
    )
    kv_cache_gb: Number | None = Field(
        default=None,
        gt=0,
        description="GB of each device for the KV cache at most; null takes four fifths of a GPU's "
        "memory less the weights, or half of the machine's shared by its CPU devices; what all "
        "running sequences can't fill is not taken",
    )
    call_format: str | None = Field(
        default=None,
        description=(
            "how the model writes calls of tools: hermes, qwen3_coder, llama3_json, pythonic, "
            "mistral, deepseek or harmony; null: as its chat template does"
        ),
    )
    vision: bool = Field(
        default=False,
        description="load the model's vision tower, too, so that chats may show images "
        "(docs/images.md)",
    )
    max_pixels: int | None = MAX_PIXELS
    min_pixels: int | None = MIN_PIXELS
    mesh: ServeMeshConfig = Field(default_factory=ServeMeshConfig)
    host: str = Field(
        default="127.0.0.1", description="address to listen on; 0.0.0.0 listens to all machines"
    )
    port: int = Field(
        default=8000, ge=0, lt=2**16, description="port to listen on; 0 takes a free one"
    )
    api_key: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "key that clients must send; null takes JAXRL_LLM_API_KEY of the "
            "environment; without that variable no key is needed"
        ),
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig)

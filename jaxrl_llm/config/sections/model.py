"""The keys of a model."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, Several, function_key


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig(Section):
    """A low-rank adapter, trained while the model's own weights are frozen."""

    rank: int = Field(default=16, ge=1, description="r: inner width of the adapter")
    alpha: Number = Field(
        default=32.0, gt=0, description="the adapter's output is scaled by alpha / rank"
    )
    targets: Several[str] = Field(
        default=("all-linear",),
        min_length=1,
        description="adapted matrices: all-linear, or names or patterns such as q_proj, *_proj",
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank) instead")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig(Section):
    """The policy's model."""

    path: str = Field(description="Hugging Face directory: config.json, safetensors, tokenizer")
    function: Function | None = function_key(
        kinds.MODELS,
        None,
        "function that returns your own model (docs/own_models.md); model.path then holds its "
        "tokenizer, and its safetensors unless random_init",
        passed=("rngs", "vocab_size"),
    )
    vision: Literal["none", "frozen", "trained"] = Field(
        default="none",
        description=(
            "the tower that reads images and videos: none (text only; prompts with images are "
            "refused), frozen (it reads them, and stays as it is) or trained"
        ),
    )
    random_init: bool = Field(
        default=False, description="initialise the weights at random; the directory then needs none"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="compute dtype, float32 or bfloat16; master weights are float32",
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="none",
        description=(
            "activation checkpointing: none (store all), dots (store products) or "
            "full (store each layer's input)"
        ),
    )
    logprob_chunk: int = Field(
        default=1024, ge=1, description="tokens of a device whose logits are in memory at once"
    )
    attention: Literal["auto", "xla", "cudnn"] = Field(
        default="auto",
        description=(
            "attention kernel in training: xla, cudnn (Hopper GPUs and later), or "
            "auto, which takes cudnn if it is possible and agrees with xla; the native engine "
            "reads pages of its cache in place where it can, unless it is xla"
        ),
    )
    experts: Literal["auto", "xla", "triton"] = Field(
        default="auto",
        description=(
            "what multiplies rows of experts: xla, triton (Ampere GPUs and later, bfloat16), or "
            "auto, which takes triton if it is possible and agrees with xla"
        ),
    )
    router_loss_coef: Number = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the load-balance loss of a mixture of experts, 0.001 in many families; it "
            "takes one more forward pass in each update"
        ),
    )
    router_bias_rate: Number = Field(
        default=0.001,
        ge=0,
        description=(
            "step by which each update moves the bias of sigmoid routers against "
            "the load; 0 freezes it"
        ),
    )
    lora: LoraConfig | None = Field(
        default=None,
        description=(
            "train a low-rank adapter {rank: 16, alpha: 32, targets: all-linear, rslora: false} "
            "over the frozen model; null trains every weight"
        ),
    )
    adapter: str | None = Field(
        default=None,
        description="directory of an adapter in PEFT's format to continue from, instead of "
        "a new one",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyConfig(ModelConfig):
    """The policy's model in RL."""

    warm_start: str | None = Field(
        default=None,
        description="config for jaxrl_llm.sft that makes model.path when there is nothing there",
    )
    router_replay: Literal["none", "rollout", "old_policy"] = Field(
        default="none",
        description=(
            "experts that tokens go to in the update of a mixture of experts: none, those that its "
            "router chooses; rollout, those that the engine's has chosen (R3), also for the old "
            "log-probs; old_policy, those of the pass for the old log-probs (R2)"
        ),
    )

"""The keys of a model."""

from dataclasses import dataclass

from jaxrl_llm.config.checks import require
from jaxrl_llm.config.load import key, required


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, trained while the model's own weights are frozen."""

    rank: int = key(16, "r: inner width of the adapter")
    alpha: float = key(32.0, "what the adapter adds is scaled by alpha / rank")
    targets: tuple[str, ...] = key(
        ("all-linear",), "adapted matrices: all-linear, or names or patterns such as q_proj, *_proj"
    )
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy's model."""

    path: str = required("Hugging Face directory: config.json, safetensors, tokenizer")
    random_init: bool = key(False, "draw the weights at random; the directory then needs none")
    dtype: str = key("float32", "compute dtype, float32 or bfloat16; master weights are float32")
    remat: str = key(
        "none", "what of a layer is stored for the backward pass: none (all), dots or full (least)"
    )
    logprob_chunk: int = key(1024, "tokens whose logits are alive at once")
    attention: str = key(
        "auto",
        "what attends to packed rows in training: xla, cudnn (Hopper GPUs and later), or auto, "
        "which takes cudnn where it is possible and agrees with xla",
    )
    router_loss_coef: float = key(
        0.0,
        "weight of the load-balance loss of a mixture of experts, 0.001 in many families; it takes "
        "one more forward pass in each update",
    )
    router_bias_rate: float = key(
        0.001,
        "how far each update moves the bias of sigmoid routers against the load; 0 freezes it",
    )
    lora: LoraConfig | None = key(
        None,
        "train a low-rank adapter {rank: 16, alpha: 32, targets: all-linear, rslora: false} over "
        "the frozen model; null trains every weight",
    )
    adapter: str | None = key(
        None, "directory of an adapter in PEFT's format to train on, in place of a new one"
    )


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(ModelConfig):
    """The policy's model in RL."""

    warm_start: str | None = key(
        None, "config for jaxrl_llm.sft that makes model.path when there is nothing there"
    )


def check_adapter(model: ModelConfig) -> None:
    """Refuse contradictions between a model's adapter and its other keys."""
    if model.lora is not None:
        require(model.lora.rank >= 1, f"model.lora.rank={model.lora.rank}, wanted 1 or more")
        alpha = model.lora.alpha
        require(alpha > 0, f"model.lora.alpha={alpha}, wanted a number above 0")
        require(len(model.lora.targets) > 0, "model.lora.targets names no matrix")
    require(
        not (model.lora and model.adapter),
        "model.adapter brings its own rank, alpha and targets: remove model.lora",
    )
    require(
        not (model.random_init and (model.lora or model.adapter)),
        "model.random_init draws a model that is not kept, so that no adapter fits it later: "
        "remove model.lora and model.adapter, or name a model that has weights",
    )


def check_dtype(name: str, dtype: str) -> None:
    """Refuse a compute dtype that is none."""
    fits = dtype in ("float32", "bfloat16")
    require(fits, f"{name}={dtype!r}, wanted float32 or bfloat16")

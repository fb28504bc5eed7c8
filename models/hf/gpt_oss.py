"""What several keys of a gpt-oss `config.json` give together."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec
from jaxrl_llm.models.rope import YarnScaling
from jaxrl_llm.models.spec import ModelSpec

Config = Mapping[str, Any]

GPT_OSS_DEFAULTS = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
GPT_OSS_UNREAD = {"experts_per_token", "initial_context_length"}
"""What OpenAI's own code calls two of the others."""

GPT_OSS_YARN = YarnScaling(factor=32.0, original_positions=4096, truncate=False)
"""What transformers takes where a config says nothing of rotary positions."""


def read_gpt_oss(config: Config) -> dict[str, Any]:
    """Read the experts of a gpt-oss model, and its rotary positions where nothing is said of them.

    Raises:
        ValueError: A key is null.

    >>> config = GPT_OSS_DEFAULTS | {"intermediate_size": 6}
    >>> read_gpt_oss(config)["moe"].swiglu
    ClippedSwiglu(alpha=1.702, limit=7.0)
    """
    if nulls := [key for key in GPT_OSS_DEFAULTS if config[key] is None]:
        raise ValueError(f"the keys {nulls} are null; expected numbers")
    moe = MoeSpec(
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        ff_width=config["intermediate_size"],
        router=SoftmaxRouter(normalize=True),
        biases=True,
        swiglu=ClippedSwiglu(
            alpha=float(config["swiglu_alpha"]), limit=float(config["swiglu_limit"])
        ),
        hf_router="router",
        hf_joined=True,
    )
    is_told = config.get("rope_parameters") or config.get("rope_scaling")
    return {"moe": moe} | ({} if is_told else {"rope_scaling": GPT_OSS_YARN})


def write_gpt_oss(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_gpt_oss` reads; None for a model without such experts.

    >>> spec = tiny_spec()
    >>> write_gpt_oss(spec) is None
    True
    """
    if spec.moe is None or spec.moe.swiglu is None:
        return None
    return {
        "num_local_experts": spec.moe.experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
        "swiglu_alpha": spec.moe.swiglu.alpha,
        "swiglu_limit": spec.moe.swiglu.limit,
    }

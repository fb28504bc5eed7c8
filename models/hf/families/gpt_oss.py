"""gpt-oss: experts with biases, attention sinks, and a window in every other layer."""

from typing import Any

from jaxrl_llm.models.hf.families.mistral import EXPERT_KEYS
from jaxrl_llm.models.hf.family import BALANCE_KEYS, FULL, SLIDING, Config, Family
from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec
from jaxrl_llm.models.rope import YarnScaling

YARN = YarnScaling(factor=32.0, original_positions=4096, truncate=False)
"""What transformers takes where a config says nothing of rotary positions."""
SYNONYMS = {"experts_per_token", "initial_context_length"}  # of two other keys, in OpenAI's code


def _read_more(config: Config) -> dict[str, Any]:
    is_told = config.get("rope_parameters") or config.get("rope_scaling")
    rope = {} if is_told else {"rope_scaling": YARN}
    return {"moe.ff_width": config["intermediate_size"]} | rope


GPT_OSS = Family(
    name="GptOss",
    model_type="gpt_oss",
    keys=EXPERT_KEYS
    | {"attention_bias": "qkv_bias"}
    | {"swiglu_alpha": "moe.swiglu.alpha", "swiglu_limit": "moe.swiglu.limit"},
    parts={"moe.router": SoftmaxRouter, "moe.swiglu": ClippedSwiglu, "moe": MoeSpec},
    defaults={
        "hidden_act": "silu",
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    common={"qk_norm": False, "attention_sinks": True, "moe.router.normalize": True}
    | {"moe.biases": True, "moe.hf_router": "router", "moe.hf_joined": True},
    layer_types=lambda config: [
        FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])
    ],
    unread=BALANCE_KEYS | SYNONYMS,
    rope_theta=1.5e5,
    read_more=_read_more,
)

"""GLM-4.5, whose experts are DeepSeek-V3's, and GLM-4.7-Flash, whose attention is, too."""

import dataclasses
from typing import Any

from jaxrl_llm.models.hf.families.deepseek import (
    DEEPSEEK_V3,
    EXPERT_KEYS,
    read_deepseek_v3,
    read_shared_width,
    write_deepseek_v3,
    write_experts,
)
from jaxrl_llm.models.hf.family import (
    BALANCE_KEYS,
    FRACTION_KEY,
    Config,
    Family,
    all_full,
    check_only,
    width_per_head,
)
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.spec import ModelSpec

GLM4_MOE = Family(
    name="Glm4Moe",
    model_type="glm4_moe",
    keys={"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"} | EXPERT_KEYS,
    parts={"moe.router": SigmoidRouter, "moe": MoeSpec},
    only=DEEPSEEK_V3.only,
    defaults={"hidden_act": "silu", "attention_bias": False, "use_qk_norm": False}
    | {FRACTION_KEY: 0.5, "norm_topk_prob": True},
    derived={"head_dim": width_per_head},
    common={"output_bias": False},
    layer_types=all_full,
    mixed_layers=False,
    rope_theta=1e4,
    partial_rotary=True,
    unread=BALANCE_KEYS | {"num_nextn_predict_layers", "num_mtp_layers"},
    token_classifier=False,
    sequence_classifier=None,
    read_more=read_shared_width,
    write_more=write_experts,
)


def _dense_layers(config: Config) -> int:
    layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ValueError(f"mlp_layer_types={kinds}; supported are dense layers before sparse ones")
    return dense


def _read_glm4_moe_lite(config: Config) -> dict[str, Any]:
    # which transformers does not read
    check_only(config, {"first_k_dense_replace": _dense_layers(config)})
    return read_deepseek_v3(config)


def _write_glm4_moe_lite(spec: ModelSpec) -> dict[str, Any]:
    dense = spec.moe.dense_layers if spec.moe else spec.layers
    kinds = ["dense"] * dense + ["sparse"] * (spec.layers - dense)
    return write_deepseek_v3(spec) | {"mlp_layer_types": kinds}


GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    name="Glm4MoeLite",
    model_type="glm4_moe_lite",
    derived=DEEPSEEK_V3.derived | {"first_k_dense_replace": _dense_layers},
    unread=DEEPSEEK_V3.unread | {"mlp_layer_types"},
    token_classifier=False,
    sequence_classifier=None,
    read_more=_read_glm4_moe_lite,
    write_more=_write_glm4_moe_lite,
)

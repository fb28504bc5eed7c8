"""The families of models that we read from and write to Hugging Face directories, as one table.

A family says which keys of `config.json` give which fields of a spec, what transformers takes for
a key that is absent, and what all its models have in common. Reading and writing are the same for
all of them (`models.hf.family`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.hf.delta import (
    DELTA_KEYS,
    DENSE_KEYS,
    EXPERTS_KEYS,
    every_nth_attends,
    read_delta,
    read_delta_moe,
    read_qwen3_next,
    write_delta,
    write_delta_moe,
    write_qwen3_next,
)
from jaxrl_llm.models.hf.family import FULL, LINEAR, SLIDING, Family
from jaxrl_llm.models.hf.parts import (
    BALANCE_KEYS,
    DEEPSEEK_V3_KEYS,
    MIXTRAL_KEYS,
    QWEN3_MOE_KEYS,
    read_deepseek_v3,
    read_mixtral,
    read_qwen3_moe,
    write_deepseek_v3,
    write_mixtral,
    write_qwen3_moe,
)
from jaxrl_llm.models.hf.rope import FRACTION_KEY

Config = Mapping[str, Any]


def _all_full(config: Config) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


def _all_alike(config: Config) -> list[str]:
    kind = FULL if config["sliding_window"] is None else SLIDING
    return [kind] * config["num_hidden_layers"]


def _last_slide(config: Config) -> list[str]:
    slides = config["use_sliding_window"] and config["sliding_window"] is not None
    first = config["max_window_layers"] if slides else config["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


def _every_nth_is_full(config: Config) -> list[str]:
    period = config["sliding_window_pattern"]
    return [FULL if (i + 1) % period == 0 else SLIDING for i in range(config["num_hidden_layers"])]


def _width_per_head(config: Config) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GEMMA: dict[str, Any] = {
    "activation_key": "hidden_activation",
    "layer_types": _every_nth_is_full,
    "unread": frozenset({"hidden_act", "_sliding_window_pattern", "sliding_window_size"}),
}
GEMMA_KEYS = {
    "attention_bias": "qkv_bias",
    "query_pre_attn_scalar": "query_scalar",
    "final_logit_softcapping": "logit_softcap",
}
GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_COMMON = {"unit_offset_norms": True, "post_norms": True, "scaled_embeddings": True}

DELTA_DEFAULTS = {
    "hidden_act": "silu",
    "head_dim": 256,
    FRACTION_KEY: 0.25,
    "full_attention_interval": 4,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DELTA: dict[str, Any] = {
    "keys": {"attention_bias": "qkv_bias"},
    "derived": {"layer_types": every_nth_attends},
    "common": {"qk_norm": True, "unit_offset_norms": True, "gated_attention": True},
    "layer_types": every_nth_attends,
    "layer_kinds": frozenset({FULL, LINEAR}),
    "rope_theta": 1e4,
    "partial_rotary": True,
}
EXPERT_WIDTH = "moe_intermediate_size"
DELTA_EXPERTS = {
    "num_experts_per_tok": 8,
    EXPERT_WIDTH: 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
}
# they have no plain layers, whose width may be left out
DELTA_MOE = DELTA | {
    "derived": DELTA["derived"] | {"intermediate_size": lambda config: config[EXPERT_WIDTH]}
}


def _seeing(family: Family, model_type: str, **fields: Any) -> Family:
    """Return the family of models that see images, too, with the language models of another."""
    return dataclasses.replace(
        family,
        model_type=model_type,
        common=family.common | {"hf_prefix": "model.language_model."},
        language_class="ForConditionalGeneration",
        text_key="text_config",
        **fields,
    )


QWEN3_5 = Family(
    name="Qwen3_5",
    model_type="qwen3_5_text",
    defaults=DELTA_DEFAULTS,
    unread=frozenset(DELTA_KEYS),
    sequence_classifier="TextForSequenceClassification",  # without Text it sees images, too
    read_parts=read_delta,
    write_parts=write_delta,
    **DELTA,
)
QWEN3_5_MOE = Family(
    name="Qwen3_5Moe",
    model_type="qwen3_5_moe_text",
    defaults=DELTA_DEFAULTS | DELTA_EXPERTS,
    unread=frozenset(DELTA_KEYS.keys() | EXPERTS_KEYS.keys() | BALANCE_KEYS | {"norm_topk_prob"}),
    token_classifier=False,
    sequence_classifier=None,
    read_parts=read_delta_moe,
    write_parts=write_delta_moe,
    **DELTA_MOE,
)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="Qwen3",
        model_type="qwen3",
        keys={"attention_bias": "qkv_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False} | QWEN_WINDOW,
        common={"qk_norm": True},
        layer_types=_last_slide,
    ),
    Family(
        name="Qwen2",
        model_type="qwen2",
        defaults={"hidden_act": "silu"} | QWEN_WINDOW,
        derived={"head_dim": _width_per_head},
        common={"qk_norm": False, "qkv_bias": True},
        layer_types=_last_slide,
    ),
    Family(
        name="Llama",
        model_type="llama",
        keys={"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        derived={
            "head_dim": _width_per_head,
            "num_key_value_heads": lambda config: config["num_attention_heads"],
        },
        common={"qk_norm": False},
        layer_types=_all_full,
        mixed_layers=False,
        rope_theta=1e4,
    ),
    Family(
        name="Mistral",
        model_type="mistral",
        defaults={"hidden_act": "silu", "sliding_window": 4096},
        derived={"head_dim": _width_per_head},
        common={"qk_norm": False},
        layer_types=_all_alike,
        mixed_layers=False,
        rope_theta=1e4,
    ),
    Family(
        name="Gemma2",
        model_type="gemma2",
        keys=GEMMA_KEYS | {"attn_logit_softcapping": "score_softcap"},
        defaults=GEMMA_DEFAULTS
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
        | {"sliding_window_pattern": 2},
        common=GEMMA_COMMON | {"qk_norm": False},
        rope_theta=1e4,
        **GEMMA,
    ),
    Family(
        name="Gemma3",
        model_type="gemma3_text",
        keys=GEMMA_KEYS,
        # its code in transformers does not apply attn_logit_softcapping, so a value is refused
        defaults=GEMMA_DEFAULTS | {"final_logit_softcapping": None, "sliding_window_pattern": 6},
        common=GEMMA_COMMON | {"qk_norm": True},
        rope_theta=1e6,
        local_rope_theta=1e4,
        token_classifier=False,
        sequence_classifier="TextForSequenceClassification",  # without Text it sees images too
        **GEMMA,
    ),
    Family(
        name="Qwen3Moe",
        model_type="qwen3_moe",
        keys={"attention_bias": "qkv_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False},
        derived={"head_dim": _width_per_head},
        common={"qk_norm": True},
        layer_types=_all_full,
        mixed_layers=False,
        unread=frozenset(QWEN3_MOE_KEYS | BALANCE_KEYS | {"sliding_window", "max_window_layers"}),
        read_parts=read_qwen3_moe,
        write_parts=write_qwen3_moe,
    ),
    Family(
        name="Mixtral",
        model_type="mixtral",
        defaults={"hidden_act": "silu", "sliding_window": None},
        derived={
            "head_dim": _width_per_head,
            "num_key_value_heads": lambda config: config["num_attention_heads"],
        },
        common={"qk_norm": False},
        layer_types=_all_alike,
        mixed_layers=False,
        unread=frozenset(MIXTRAL_KEYS | BALANCE_KEYS),
        rope_theta=1e6,
        read_parts=read_mixtral,
        write_parts=write_mixtral,
    ),
    Family(
        name="DeepseekV3",
        model_type="deepseek_v3",
        defaults={"hidden_act": "silu"},
        derived={
            "head_dim": lambda config: config["qk_rope_head_dim"],
            "num_key_value_heads": lambda config: config["num_attention_heads"],
        },
        common={"qk_norm": False},
        layer_types=_all_full,
        mixed_layers=False,
        unread=frozenset(DEEPSEEK_V3_KEYS | BALANCE_KEYS),
        rope_theta=1e4,
        read_parts=read_deepseek_v3,
        write_parts=write_deepseek_v3,
    ),
    QWEN3_5,
    QWEN3_5_MOE,
    Family(
        name="Qwen3Next",
        model_type="qwen3_next",
        defaults=DELTA_DEFAULTS
        | DELTA_EXPERTS
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        unread=frozenset(
            DELTA_KEYS.keys() | EXPERTS_KEYS.keys() | DENSE_KEYS.keys() | BALANCE_KEYS
        ),
        read_parts=read_qwen3_next,
        write_parts=write_qwen3_next,
        **DELTA_MOE,
    ),
    _seeing(QWEN3_5, "qwen3_5", sequence_classifier="ForSequenceClassification"),
    _seeing(QWEN3_5_MOE, "qwen3_5_moe"),
)

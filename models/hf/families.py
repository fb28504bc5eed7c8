"""The families of models that we read from and write to Hugging Face directories, as one table.

A family says which keys of `config.json` give which fields of a spec, what transformers takes for
a key that is absent, and what all its models have in common. Reading and writing are the same for
all of them (`models.hf.family`).
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.hf.deepseek import (
    LATENT_KEYS,
    MINIMAX_M2_KEYS,
    MINIMAX_M2_ONLY,
    SIGMOID_EXPERTS_KEYS,
    read_deepseek_v3,
    read_glm4_moe,
    read_glm4_moe_lite,
    read_minimax_m2,
    write_deepseek_v3,
    write_glm4_moe,
    write_glm4_moe_lite,
    write_minimax_m2,
)
from jaxrl_llm.models.hf.delta import DELTA_FAMILIES
from jaxrl_llm.models.hf.family import FULL, SLIDING, Family
from jaxrl_llm.models.hf.gemma import GEMMA_FAMILIES
from jaxrl_llm.models.hf.layer_types import QWEN_LAYERS, all_full, last_slide
from jaxrl_llm.models.hf.parts import (
    BALANCE_KEYS,
    GPT_OSS_KEYS,
    MIXTRAL_KEYS,
    QWEN3_MOE_KEYS,
    read_gpt_oss,
    read_mixtral,
    read_qwen3_moe,
    write_gpt_oss,
    write_mixtral,
    write_qwen3_moe,
)
from jaxrl_llm.models.hf.rope import (
    FRACTION_KEY,
    NO_ROPE_KEYS,
    read_smollm3,
    write_phi3,
    write_smollm3,
)
from jaxrl_llm.models.hf.vision_families import VISION_FAMILIES

Config = Mapping[str, Any]


def _all_alike(config: Config) -> list[str]:
    window = config["sliding_window"]
    reaches_all = window is None or window >= config["max_position_embeddings"]
    kind = FULL if reaches_all else SLIDING
    return [kind] * config["num_hidden_layers"]


def _every_fourth_is_full(config: Config) -> list[str]:
    return [SLIDING if (i + 1) % 4 else FULL for i in range(config["num_hidden_layers"])]


def _unrotated_slide(config: Config) -> list[str]:
    slides = config["use_sliding_window"] and config["sliding_window"] is not None
    rotary = read_smollm3(config)["rotary_layers"] or (True,) * config["num_hidden_layers"]
    return [SLIDING if slides and not rotates else FULL for rotates in rotary]


def _one_key_per_query(config: Config) -> int:
    return config["num_attention_heads"]


def _fraction_by_width(config: Config) -> float | None:
    width = config.get("rotary_dim")
    return None if width is None else width / config["head_dim"]


def _every_other_slides(config: Config) -> list[str]:
    return [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]


def _width_per_head(config: Config) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


QWEN_WINDOW = QWEN_LAYERS | {"max_window_layers": 28}
OF_HEADS = {"head_dim": _width_per_head, "num_key_value_heads": _one_key_per_query}
LATENT: dict[str, Any] = {
    "defaults": {"hidden_act": "silu"},
    "derived": OF_HEADS | {"head_dim": lambda config: config["qk_rope_head_dim"]},
    "common": {"qk_norm": False},
    "layer_types": all_full,
    "mixed_layers": False,
    "rope_theta": 1e4,
}
NO_CLASSIFIERS: dict[str, Any] = {"token_classifier": False, "sequence_classifier": None}

FAMILIES: tuple[Family, ...] = (
    Family(
        name="Qwen3",
        model_type="qwen3",
        keys={"attention_bias": "qkv_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False} | QWEN_WINDOW,
        common={"qk_norm": True},
        layer_types=last_slide,
    ),
    Family(
        name="Qwen2",
        model_type="qwen2",
        defaults={"hidden_act": "silu"} | QWEN_WINDOW,
        derived={"head_dim": _width_per_head},
        common={"qk_norm": False, "qkv_bias": True},
        layer_types=last_slide,
    ),
    Family(
        name="Llama",
        model_type="llama",
        keys={"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        derived=OF_HEADS,
        common={"qk_norm": False},
        layer_types=all_full,
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
    *GEMMA_FAMILIES,
    Family(
        name="Qwen3Moe",
        model_type="qwen3_moe",
        keys={"attention_bias": "qkv_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False},
        derived={"head_dim": _width_per_head},
        common={"qk_norm": True},
        layer_types=all_full,
        mixed_layers=False,
        unread=frozenset(QWEN3_MOE_KEYS | BALANCE_KEYS | {"sliding_window", "max_window_layers"}),
        read_parts=read_qwen3_moe,
        write_parts=write_qwen3_moe,
    ),
    Family(
        name="Mixtral",
        model_type="mixtral",
        defaults={"hidden_act": "silu", "sliding_window": None},
        derived=OF_HEADS,
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
        unread=frozenset(SIGMOID_EXPERTS_KEYS | LATENT_KEYS | BALANCE_KEYS),
        read_parts=read_deepseek_v3,
        write_parts=write_deepseek_v3,
        **LATENT,
    ),
    Family(
        name="Glm4MoeLite",
        model_type="glm4_moe_lite",
        unread=frozenset(SIGMOID_EXPERTS_KEYS | LATENT_KEYS | BALANCE_KEYS | {"mlp_layer_types"}),
        read_parts=read_glm4_moe_lite,
        write_parts=write_glm4_moe_lite,
        **LATENT,
        **NO_CLASSIFIERS,
    ),
    Family(
        name="Glm4Moe",
        model_type="glm4_moe",
        keys={"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"},
        defaults={"hidden_act": "silu", "attention_bias": False, "use_qk_norm": False}
        | {FRACTION_KEY: 0.5},
        derived={"head_dim": _width_per_head},
        common={"output_bias": False},
        layer_types=all_full,
        mixed_layers=False,
        unread=frozenset(SIGMOID_EXPERTS_KEYS | BALANCE_KEYS),
        rope_theta=1e4,
        partial_rotary=True,
        read_parts=read_glm4_moe,
        write_parts=write_glm4_moe,
        **NO_CLASSIFIERS,
    ),
    Family(
        name="MiniMaxM2",
        model_type="minimax_m2",
        defaults={"hidden_act": "silu", "head_dim": 128},
        derived={FRACTION_KEY: _fraction_by_width},
        common={"qk_norm": True, "whole_qk_norm": True},
        layer_types=all_full,
        mixed_layers=False,
        unread=frozenset(MINIMAX_M2_KEYS | MINIMAX_M2_ONLY.keys() | BALANCE_KEYS),
        rope_theta=5e6,
        partial_rotary=True,
        read_parts=read_minimax_m2,
        write_parts=write_minimax_m2,
        **NO_CLASSIFIERS,
    ),
    Family(
        name="Phi3",
        model_type="phi3",
        defaults={"hidden_act": "silu", "sliding_window": None}
        | {"original_max_position_embeddings": 4096},
        derived=OF_HEADS,
        common={"qk_norm": False, "hf_joined": True},
        layer_types=_all_alike,
        mixed_layers=False,
        rope_theta=1e4,
        partial_rotary=True,
        write_parts=write_phi3,
    ),
    Family(
        name="Olmo3",
        model_type="olmo3",
        keys={"attention_bias": "qkv_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False, "sliding_window": 4096},
        derived=OF_HEADS,
        common={"qk_norm": True, "whole_qk_norm": True, "pre_norms": False, "post_norms": True},
        layer_types=_every_fourth_is_full,
        rope_theta=5e5,
        local_rope_theta=5e5,
        local_rope_key="rope_theta",
        token_classifier=False,
    ),
    Family(
        name="SmolLM3",
        model_type="smollm3",
        keys={"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
        | {"tie_word_embeddings": True, "no_rope_layer_interval": 4}
        | {"use_sliding_window": False, "sliding_window": None},
        derived=OF_HEADS,
        common={"qk_norm": False},
        layer_types=_unrotated_slide,
        unread=frozenset(NO_ROPE_KEYS | {"max_window_layers"}),
        rope_theta=2e6,
        read_parts=read_smollm3,
        write_parts=write_smollm3,
    ),
    Family(
        name="GptOss",
        model_type="gpt_oss",
        keys={"attention_bias": "qkv_bias"},
        defaults={
            "hidden_act": "silu",
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
        },
        common={"qk_norm": False, "attention_sinks": True},
        layer_types=_every_other_slides,
        unread=frozenset(GPT_OSS_KEYS | BALANCE_KEYS),
        rope_theta=1.5e5,
        read_parts=read_gpt_oss,
        write_parts=write_gpt_oss,
    ),
    *DELTA_FAMILIES,
    *VISION_FAMILIES,
)

"""The families of Qwen's models that see images and whose language models have no family else."""

import dataclasses
from typing import Any

from jaxrl_llm.models.hf.family import Family
from jaxrl_llm.models.hf.keys import Config
from jaxrl_llm.models.hf.layer_types import QWEN_LAYERS, all_full, last_slide
from jaxrl_llm.models.hf.nested import seeing
from jaxrl_llm.models.hf.parts import (
    BALANCE_KEYS,
    QWEN3_MOE_KEYS,
    read_qwen3_moe,
    write_qwen3_moe,
)
from jaxrl_llm.models.hf.vision import QWEN2_5_TOWER, VISION_KEY, qwen3_tower
from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.spec import ModelSpec


def read_qwen3_vl_moe(config: Config) -> dict[str, Any]:
    """Read the experts of a Qwen3-VL-MoE model, of which every layer must be a mixture.

    Raises:
        ValueError: A key is missing, or some layers have no experts.

    >>> config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    >>> read_qwen3_vl_moe(config)["moe"].router
    SoftmaxRouter(normalize=True)
    """
    moe = read_qwen3_moe(config)["moe"]
    router = SoftmaxRouter(normalize=True)
    return {"moe": dataclasses.replace(moe, router=router, hf_joined=True, hf_halves=True)}


def write_qwen3_vl_moe(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_qwen3_vl_moe` reads; None for a model without such experts.

    >>> write_qwen3_vl_moe(tiny_spec()) is None
    True
    """
    config = write_qwen3_moe(spec)
    if config is not None:
        del config["norm_topk_prob"]
    return config


def _width_per_head(config: Config) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


_QWEN3: dict[str, Any] = {
    "keys": {"attention_bias": "qkv_bias"},
    "common": {"qk_norm": True},
    "layer_types": all_full,
    "mixed_layers": False,
    "rope_theta": 5e5,
    "token_classifier": False,
    "sequence_classifier": None,
}
_QWEN3_DEFAULTS = {"hidden_act": "silu", "attention_bias": False}
_QWEN2_5 = seeing(
    Family(
        name="Qwen2_5_VL",
        model_type="qwen2_5_vl",
        defaults={"hidden_act": "silu", "max_window_layers": 80} | QWEN_LAYERS,
        derived={"head_dim": _width_per_head},
        common={"qk_norm": False, "qkv_bias": True, "output_bias": False},
        layer_types=last_slide,
        rope_theta=1e6,
        token_classifier=False,
        sequence_classifier=None,
    ),
    QWEN2_5_TOWER,
    "model.",
)

VISION_FAMILIES: tuple[Family, ...] = (
    seeing(
        Family(
            name="Qwen3VL",
            model_type="qwen3_vl",
            defaults=_QWEN3_DEFAULTS | {"head_dim": 128},
            **_QWEN3,
        ),
        qwen3_tower("qwen3_vl"),
    ),
    seeing(
        Family(
            name="Qwen3VLMoe",
            model_type="qwen3_vl_moe",
            defaults=_QWEN3_DEFAULTS,
            derived={"head_dim": _width_per_head},
            unread=frozenset(QWEN3_MOE_KEYS | BALANCE_KEYS | {"sliding_window"}),
            read_parts=read_qwen3_vl_moe,
            write_parts=write_qwen3_vl_moe,
            **_QWEN3,
        ),
        qwen3_tower("qwen3_vl_moe"),
    ),
    _QWEN2_5,
    # published files of Qwen2.5-VL have the language model's keys outside
    dataclasses.replace(
        _QWEN2_5,
        text_key=None,
        unread=frozenset({VISION_KEY, *QWEN2_5_TOWER.tokens}),
    ),
)

"""Llama, and what differs little from it: Phi-3, OLMo 3 and SmolLM3."""

from typing import Any

from jaxrl_llm.models.hf.family import (
    FULL,
    SLIDING,
    Config,
    Family,
    all_alike,
    all_full,
    width_per_head,
)
from jaxrl_llm.models.rope import LongRopeScaling
from jaxrl_llm.models.spec import ModelSpec

OF_HEADS = {
    "head_dim": width_per_head,
    "num_key_value_heads": lambda config: config["num_attention_heads"],
}
"""What follows from the number of heads where it is not given."""

LLAMA = Family(
    name="Llama",
    model_type="llama",
    keys={"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"},
    defaults={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    derived=OF_HEADS,
    common={"qk_norm": False},
    layer_types=all_full,
    mixed_layers=False,
    rope_theta=1e4,
)


def _write_phi3(spec: ModelSpec) -> dict[str, Any]:
    """Write what transformers would take from the published models where it is absent."""
    scaling = spec.rope_scaling
    has_original = isinstance(scaling, LongRopeScaling)
    original = scaling.original_positions if has_original else spec.max_positions
    return {"pad_token_id": None, "original_max_position_embeddings": original}


PHI3 = Family(
    name="Phi3",
    model_type="phi3",
    defaults={"hidden_act": "silu", "sliding_window": None}
    | {"original_max_position_embeddings": 4096},
    derived=OF_HEADS,
    common={"qk_norm": False, "hf_joined": True},
    layer_types=all_alike,
    mixed_layers=False,
    rope_theta=1e4,
    partial_rotary=True,
    write_more=_write_phi3,
)
OLMO3 = Family(
    name="Olmo3",
    model_type="olmo3",
    keys={"attention_bias": "qkv_bias"},
    defaults={"hidden_act": "silu", "attention_bias": False, "sliding_window": 4096},
    derived=OF_HEADS,
    common={"qk_norm": True, "whole_qk_norm": True, "pre_norms": False, "post_norms": True},
    layer_types=lambda config: [
        SLIDING if (i + 1) % 4 else FULL for i in range(config["num_hidden_layers"])
    ],
    rope_theta=5e5,
    local_rope_theta=5e5,
    local_rope_key="rope_theta",
    token_classifier=False,
)


def _read_smollm3(config: Config) -> dict[str, Any]:
    """Read which layers are rotated.

    >>> _read_smollm3({"num_hidden_layers": 4, "no_rope_layer_interval": 2})
    {'rotary_layers': (True, False, True, False)}
    """
    layers = config["num_hidden_layers"]
    given, period = config.get("no_rope_layers"), config["no_rope_layer_interval"]
    if given is None:
        given = [(layer + 1) % period for layer in range(layers)]
    if len(given) < layers:
        raise ValueError(f"no_rope_layers={given}; expected one entry for each of {layers} layers")
    rotary = tuple(bool(flag) for flag in given[:layers])
    return {"rotary_layers": () if all(rotary) else rotary}


def _write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    rotary = spec.rotary_layers or (True,) * spec.layers
    # transformers would take a token of the published models' vocabulary for padding
    return {"no_rope_layers": [int(flag) for flag in rotary], "pad_token_id": None}


def _unrotated_slide(config: Config) -> list[str]:
    slides = config["use_sliding_window"] and config["sliding_window"] is not None
    rotary = _read_smollm3(config)["rotary_layers"] or (True,) * config["num_hidden_layers"]
    return [SLIDING if slides and not rotates else FULL for rotates in rotary]


SMOLLM3 = Family(
    name="SmolLM3",
    model_type="smollm3",
    keys={"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"},
    defaults={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    | {"tie_word_embeddings": True, "no_rope_layer_interval": 4}
    | {"use_sliding_window": False, "sliding_window": None},
    derived=OF_HEADS,
    common={"qk_norm": False},
    layer_types=_unrotated_slide,
    unread=frozenset({"no_rope_layers", "max_window_layers"}),
    rope_theta=2e6,
    read_more=_read_smollm3,
    write_more=_write_smollm3,
)

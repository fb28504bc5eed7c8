"""Qwen 2 and 3, Qwen3-MoE, Qwen3-Next and Qwen 3.5, and their models that see images."""

import dataclasses
from typing import Any

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.family import (
    BALANCE_KEYS,
    CLIP,
    FRACTION_KEY,
    FULL,
    HALF,
    IMAGE,
    LINEAR,
    MARKS,
    SLIDING,
    VIDEO,
    VISION_KEY,
    Config,
    Family,
    TowerForm,
    all_full,
    check_whole,
    seeing,
    width_per_head,
)
from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import CHANNELS

# ------------------------------------------------------------------------------- Qwen 2 and Qwen 3

WINDOW = {"use_sliding_window": False, "sliding_window": 4096}


def _last_slide(config: Config) -> list[str]:
    """Return that the layers from `max_window_layers` on have the window, if any has (Qwen 2).

    >>> keys = {"num_hidden_layers": 2, "max_window_layers": 1, "sliding_window": 8}
    >>> _last_slide(keys | {"use_sliding_window": True})
    ['full_attention', 'sliding_attention']
    """
    slides = config["use_sliding_window"] and config["sliding_window"] is not None
    first = config["max_window_layers"] if slides else config["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    keys={"attention_bias": "qkv_bias"},
    defaults={"hidden_act": "silu", "attention_bias": False, "max_window_layers": 28} | WINDOW,
    common={"qk_norm": True},
    layer_types=_last_slide,
)
QWEN2 = Family(
    name="Qwen2",
    model_type="qwen2",
    defaults={"hidden_act": "silu", "max_window_layers": 28} | WINDOW,
    derived={"head_dim": width_per_head},
    common={"qk_norm": False, "qkv_bias": True},
    layer_types=_last_slide,
)

# --------------------------------------------------------------------------------------- Qwen3-MoE

EXPERT_KEYS = {
    "num_experts": "moe.experts",
    "num_experts_per_tok": "moe.experts_per_token",
    "moe_intermediate_size": "moe.ff_width",
}
EXPERT_PARTS: dict[str, type[Any]] = {"moe.router": SoftmaxRouter, "moe": MoeSpec}
ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Every layer has experts."""


def _number_of_experts(config: Config) -> int:
    names = ("num_experts", "num_local_experts")  # of transformers 4 and 5
    given = {config[name] for name in names if config.get(name) is not None}
    if len(given) != 1:
        raise ValueError(f"num_experts or num_local_experts must give one number, got {given}")
    return given.pop()


QWEN3_MOE = Family(
    name="Qwen3Moe",
    model_type="qwen3_moe",
    keys={"attention_bias": "qkv_bias", "norm_topk_prob": "moe.router.normalize"} | EXPERT_KEYS,
    parts=EXPERT_PARTS,
    only=ALL_SPARSE,
    defaults={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": False},
    derived={"head_dim": width_per_head, "num_experts": _number_of_experts},
    common={"qk_norm": True},
    layer_types=all_full,
    mixed_layers=False,
    unread=BALANCE_KEYS
    | {"num_local_experts", "use_qk_norm", "sliding_window", "max_window_layers"},
    read_more=lambda config: {"moe.experts": _number_of_experts(config)},
    write_more=lambda spec: ALL_SPARSE,
)

# ------------------------------------------------------- Qwen 3.5 and Qwen3-Next: Gated DeltaNets

DELTA_KEYS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_width",
    "linear_value_head_dim": "value_width",
    "linear_conv_kernel_dim": "conv_width",
}


def every_nth_attends(config: Config) -> list[str]:
    """Return the kinds of layers that transformers takes where none are given.

    Raises:
        ValueError: The interval is no whole number.

    >>> every_nth_attends({"num_hidden_layers": 2, "full_attention_interval": 2})
    ['linear_attention', 'full_attention']
    """
    period = config["full_attention_interval"]
    if type(period) is not int or period < 1:
        raise ValueError(f"full_attention_interval={period!r}; expected a whole number of layers")
    return [LINEAR if (i + 1) % period else FULL for i in range(config["num_hidden_layers"])]


def read_delta(config: Config) -> dict[str, Any]:
    """Read the DeltaNet; there is none where all layers have attention.

    Raises:
        ValueError: A size is none.

    >>> sizes = dict.fromkeys(DELTA_KEYS, 4)
    >>> read_delta({"layer_types": ["linear_attention", "full_attention"], **sizes})["delta"]
    DeltaSpec(key_heads=4, value_heads=4, key_width=4, value_width=4, conv_width=4, \
joined_by_head=False)
    """
    if LINEAR not in config["layer_types"]:
        return {}
    check_whole(config, DELTA_KEYS)
    return {"delta": DeltaSpec(**{ours: config[key] for key, ours in DELTA_KEYS.items()})}


def _read_joined_delta(config: Config) -> dict[str, Any]:
    parts = read_delta(config)
    return {name: dataclasses.replace(delta, joined_by_head=True) for name, delta in parts.items()}


def _write_delta(spec: ModelSpec) -> dict[str, Any]:
    delta = spec.delta
    return {key: getattr(delta, ours) for key, ours in DELTA_KEYS.items()} if delta else {}


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
QWEN3_5 = Family(
    name="Qwen3_5",
    model_type="qwen3_5_text",
    keys={"attention_bias": "qkv_bias"},
    defaults=DELTA_DEFAULTS,
    derived={"layer_types": every_nth_attends},
    common={"qk_norm": True, "unit_offset_norms": True, "gated_attention": True},
    layer_types=every_nth_attends,
    layer_kinds=frozenset({FULL, LINEAR}),
    rope_theta=1e4,
    partial_rotary=True,
    sequence_classifier="TextForSequenceClassification",  # without Text it sees images, too
    untouched=("mtp.",),  # layers for multi-token prediction
    read_more=read_delta,
    write_more=_write_delta,
)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    name="Qwen3_5Moe",
    model_type="qwen3_5_moe_text",
    keys=QWEN3_5.keys | EXPERT_KEYS | {"shared_expert_intermediate_size": "moe.shared_ff_width"},
    parts=EXPERT_PARTS,
    defaults=DELTA_DEFAULTS
    | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512},
    # they have no plain layers, whose width may be left out
    derived=QWEN3_5.derived | {"intermediate_size": lambda config: config["moe_intermediate_size"]},
    common=QWEN3_5.common
    | {"moe.router.normalize": True, "moe.hf_shared": "shared_expert", "moe.shared_gate": True},
    unread=BALANCE_KEYS | {"norm_topk_prob"},
    token_classifier=False,
    sequence_classifier=None,
)
QWEN3_NEXT = dataclasses.replace(
    QWEN3_5_MOE,
    name="Qwen3Next",
    model_type="qwen3_next",
    keys=QWEN3_5_MOE.keys | {"norm_topk_prob": "moe.router.normalize"},
    only=ALL_SPARSE,
    defaults=QWEN3_5_MOE.defaults
    | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    common=QWEN3_5.common | {"moe.hf_shared": "shared_expert", "moe.shared_gate": True},
    unread=BALANCE_KEYS,
    token_classifier=True,
    sequence_classifier="ForSequenceClassification",
    read_more=_read_joined_delta,
    write_more=lambda spec: _write_delta(spec) | ALL_SPARSE,
)

# ------------------------------------------------------------------------- models that see images


def _tokens(image: int, video: int, start: int, end: int) -> dict[str, int]:
    return dict(zip((IMAGE, VIDEO, *MARKS), (image, video, start, end), strict=True))


_QWEN = _tokens(151655, 151656, 151652, 151653)
_SHARED = {
    "in_channels": CHANNELS,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "initializer_range": 0.02,
    "num_heads": 16,
}
_QWEN3 = _SHARED | {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}


def qwen3_tower(model_type: str) -> TowerForm:
    """Return how the families with Qwen3-VL's tower write it.

    >>> qwen3_tower("qwen3_5").sections
    (11, 11, 10)
    """
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        tokens = _tokens(248056, 248057, 248053, 248054)
        return TowerForm("qwen3", model_type, _QWEN3, tokens, (11, 11, 10), True, HALF)
    keys = _QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]}
    return TowerForm("qwen3", model_type, keys, _QWEN, (24, 20, 20), True, HALF)


QWEN2_5_TOWER = TowerForm(
    "qwen2_5",
    "qwen2_5_vl",
    _SHARED
    | {
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "patch_size": 14,
        "tokens_per_second": 4,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    _QWEN,
    (16, 24, 24),
    False,
    CLIP,
    ("visual.", "model.visual."),
)

QWEN3_5_FAMILIES: tuple[Family, ...] = (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    seeing(QWEN3_5, qwen3_tower("qwen3_5"), sequence_classifier="ForSequenceClassification"),
    seeing(QWEN3_5_MOE, qwen3_tower("qwen3_5_moe")),
)
_QWEN2_5_VL = seeing(
    Family(
        name="Qwen2_5_VL",
        model_type="qwen2_5_vl",
        defaults={"hidden_act": "silu", "max_window_layers": 80} | WINDOW,
        derived={"head_dim": width_per_head},
        common={"qk_norm": False, "qkv_bias": True, "output_bias": False},
        layer_types=_last_slide,
        rope_theta=1e6,
        token_classifier=False,
        sequence_classifier=None,
    ),
    QWEN2_5_TOWER,
    "model.",
)
_QWEN3_VL = seeing(
    Family(
        name="Qwen3VL",
        model_type="qwen3_vl",
        keys={"attention_bias": "qkv_bias"},
        defaults={"hidden_act": "silu", "attention_bias": False, "head_dim": 128},
        common={"qk_norm": True},
        layer_types=all_full,
        mixed_layers=False,
        rope_theta=5e5,
        token_classifier=False,
        sequence_classifier=None,
    ),
    qwen3_tower("qwen3_vl"),
)
_QWEN3_VL_MOE = seeing(
    dataclasses.replace(
        QWEN3_MOE,
        name="Qwen3VLMoe",
        keys={"attention_bias": "qkv_bias"} | EXPERT_KEYS,
        defaults={"hidden_act": "silu", "attention_bias": False},
        common={"qk_norm": True, "moe.router.normalize": True}
        | {"moe.hf_joined": True, "moe.hf_halves": True},
        unread=BALANCE_KEYS
        | {"num_local_experts", "norm_topk_prob", "use_qk_norm", "sliding_window"},
        rope_theta=5e5,
        token_classifier=False,
        sequence_classifier=None,
    ),
    qwen3_tower("qwen3_vl_moe"),
)
QWEN_VL_FAMILIES: tuple[Family, ...] = (
    _QWEN3_VL,
    _QWEN3_VL_MOE,
    _QWEN2_5_VL,
    # published files of Qwen2.5-VL have the language model's keys outside
    dataclasses.replace(
        _QWEN2_5_VL, text_key=None, unread=frozenset({VISION_KEY, *QWEN2_5_TOWER.tokens})
    ),
)

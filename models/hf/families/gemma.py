"""Gemma 2 and Gemma 3, of text, and Gemma 3 that sees images."""

import dataclasses
from typing import Any

from jaxrl_llm.models.hf.family import FULL, SLIDING, Config, Family, SiglipForm, seeing


def _every_nth_is_full(config: Config) -> list[str]:
    period = config["sliding_window_pattern"]
    return [FULL if (i + 1) % period == 0 else SLIDING for i in range(config["num_hidden_layers"])]


_SHARED: dict[str, Any] = {
    "activation_key": "hidden_activation",
    "layer_types": _every_nth_is_full,
    "unread": frozenset({"hidden_act", "_sliding_window_pattern", "sliding_window_size"}),
}
_KEYS = {
    "attention_bias": "qkv_bias",
    "query_pre_attn_scalar": "query_scalar",
    "final_logit_softcapping": "logit_softcap",
}
_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_COMMON = {"unit_offset_norms": True, "post_norms": True, "scaled_embeddings": True}
_GEMMA3_SIZES = {  # published configs of models that see images leave most of them out
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
_HEADS = ("vision_tower.vision_model.head.", "vision_tower.head.")  # a tower's own, not read here

_GEMMA3 = Family(
    name="Gemma3",
    model_type="gemma3_text",
    keys=_KEYS,
    # its code in transformers does not apply attn_logit_softcapping, so a value is refused
    defaults=_DEFAULTS | {"final_logit_softcapping": None, "sliding_window_pattern": 6},
    common=_COMMON | {"qk_norm": True},
    rope_theta=1e6,
    local_rope_theta=1e4,
    token_classifier=False,
    sequence_classifier="TextForSequenceClassification",  # without Text it sees images too
    **_SHARED,
)

GEMMA_FAMILIES: tuple[Family, ...] = (
    Family(
        name="Gemma2",
        model_type="gemma2",
        keys=_KEYS | {"attn_logit_softcapping": "score_softcap"},
        defaults=_DEFAULTS
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
        | {"sliding_window_pattern": 2},
        common=_COMMON | {"qk_norm": False},
        rope_theta=1e4,
        **_SHARED,
    ),
    _GEMMA3,
    seeing(
        dataclasses.replace(_GEMMA3, untouched=_HEADS),
        SiglipForm(),
        "language_model.model.",
        defaults=_GEMMA3.defaults | _GEMMA3_SIZES,
        sequence_classifier=None,
    ),
)

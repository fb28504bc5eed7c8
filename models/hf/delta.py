"""The families with Gated DeltaNets, Qwen3.5 and Qwen3-Next, and their parts in `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.family import FULL, LINEAR, Family
from jaxrl_llm.models.hf.keys import Config, check_whole
from jaxrl_llm.models.hf.nested import seeing
from jaxrl_llm.models.hf.parts import BALANCE_KEYS, only_values
from jaxrl_llm.models.hf.rope import FRACTION_KEY
from jaxrl_llm.models.hf.vision import qwen3_tower
from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.spec import ModelSpec

DELTA_KEYS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_width",
    "linear_value_head_dim": "value_width",
    "linear_conv_kernel_dim": "conv_width",
}
SHARED_NAMES: dict[str, Any] = {"hf_shared": "shared_expert", "shared_gate": True}
EXPERTS_KEYS = {
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "ff_width",
    "shared_expert_intermediate_size": "shared_ff_width",
}
DENSE_KEYS = {"decoder_sparse_step": 1, "mlp_only_layers": []}


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
    """Read the DeltaNet of a Qwen3.5 model; there is none where all layers have attention.

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


def write_delta(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_delta` reads; None for a model with experts.

    >>> write_delta(tiny_spec())
    {}
    """
    if spec.moe is not None:
        return None
    return _written(spec.delta, DELTA_KEYS) if spec.delta else {}


def read_delta_moe(config: Config) -> dict[str, Any]:
    """Read the DeltaNet and the experts of a Qwen3.5-MoE model.

    >>> sizes = dict.fromkeys(EXPERTS_KEYS, 4)
    >>> read_delta_moe({"layer_types": ["full_attention"], **sizes})["moe"].shared_ff_width
    4
    """
    check_whole(config, EXPERTS_KEYS)
    return read_delta(config) | {
        "moe": MoeSpec(
            **{ours: config[key] for key, ours in EXPERTS_KEYS.items()},
            router=SoftmaxRouter(normalize=True),
            **SHARED_NAMES,
        )
    }


def write_delta_moe(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_delta_moe` reads; None for a model without such experts.

    >>> write_delta_moe(tiny_spec()) is None
    True
    """
    if spec.moe is None or not spec.moe.shared_gate:
        return None
    delta = _written(spec.delta, DELTA_KEYS) if spec.delta else {}
    return delta | _written(spec.moe, EXPERTS_KEYS)


def read_qwen3_next(config: Config) -> dict[str, Any]:
    """Read the DeltaNet and the experts of a Qwen3-Next model, of which every layer is a mixture.

    Raises:
        ValueError: Some layers have no experts.

    >>> read_qwen3_next({"decoder_sparse_step": 2})
    Traceback (most recent call last):
    ValueError: decoder_sparse_step=2; supported is 1
    """
    only_values(config, **DENSE_KEYS)
    parts = read_delta_moe(config)
    router = SoftmaxRouter(normalize=config["norm_topk_prob"])
    parts["moe"] = dataclasses.replace(parts["moe"], router=router)
    if delta := parts.get("delta"):
        parts["delta"] = dataclasses.replace(delta, joined_by_head=True)
    return parts


def write_qwen3_next(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_qwen3_next` reads; None for a model without such experts.

    >>> write_qwen3_next(tiny_spec()) is None
    True
    """
    config = write_delta_moe(spec)
    if config is None or spec.moe is None or not isinstance(spec.moe.router, SoftmaxRouter):
        return None
    return config | DENSE_KEYS | {"norm_topk_prob": spec.moe.router.normalize}


def _written(part: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    return {key: getattr(part, ours) for key, ours in keys.items()}


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
# what transformers' text models pass over, too
NEXT_TOKENS = "mtp."
DELTA: dict[str, Any] = {
    "keys": {"attention_bias": "qkv_bias"},
    "derived": {"layer_types": every_nth_attends},
    "common": {"qk_norm": True, "unit_offset_norms": True, "gated_attention": True},
    "layer_types": every_nth_attends,
    "layer_kinds": frozenset({FULL, LINEAR}),
    "rope_theta": 1e4,
    "partial_rotary": True,
    "untouched": (NEXT_TOKENS,),
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

DELTA_FAMILIES: tuple[Family, ...] = (
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
    seeing(QWEN3_5, qwen3_tower("qwen3_5"), sequence_classifier="ForSequenceClassification"),
    seeing(QWEN3_5_MOE, qwen3_tower("qwen3_5_moe")),
)

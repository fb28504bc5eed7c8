"""Mistral and Mixtral."""

from typing import Any

from jaxrl_llm.models.hf.families.llama import OF_HEADS
from jaxrl_llm.models.hf.family import BALANCE_KEYS, Family, all_alike, width_per_head
from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.moe.spec import MoeSpec

MISTRAL = Family(
    name="Mistral",
    model_type="mistral",
    defaults={"hidden_act": "silu", "sliding_window": 4096},
    derived={"head_dim": width_per_head},
    common={"qk_norm": False},
    layer_types=all_alike,
    mixed_layers=False,
    rope_theta=1e4,
)

EXPERT_KEYS = {"num_local_experts": "moe.experts", "num_experts_per_tok": "moe.experts_per_token"}
EXPERT_NAMES: dict[str, Any] = {
    "moe.hf_module": "block_sparse_moe",
    "moe.hf_projections": ("w1", "w3", "w2"),
}

MIXTRAL = Family(
    name="Mixtral",
    model_type="mixtral",
    keys=EXPERT_KEYS,
    parts={"moe.router": SoftmaxRouter, "moe": MoeSpec},
    defaults={"hidden_act": "silu", "sliding_window": None},
    derived=OF_HEADS,
    common={"qk_norm": False, "moe.router.normalize": True} | EXPERT_NAMES,
    layer_types=all_alike,
    mixed_layers=False,
    unread=BALANCE_KEYS,
    rope_theta=1e6,
    read_more=lambda config: {"moe.ff_width": config["intermediate_size"]},
)

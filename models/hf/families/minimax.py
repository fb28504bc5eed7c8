"""MiniMax-M2, whose experts are named as Mixtral's."""

from jaxrl_llm.models.hf.families.mistral import EXPERT_KEYS, EXPERT_NAMES
from jaxrl_llm.models.hf.family import BALANCE_KEYS, FRACTION_KEY, Config, Family, all_full
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec

ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""What the code on the hub reads and transformers' takes for granted."""
ROUTER = {"groups": 1, "top_groups": 1, "normalize": True, "scale": 1.0}


def _fraction_by_width(config: Config) -> float | None:
    width = config.get("rotary_dim")
    return None if width is None else width / config["head_dim"]


MINIMAX_M2 = Family(
    name="MiniMaxM2",
    model_type="minimax_m2",
    keys=EXPERT_KEYS,
    parts={"moe.router": SigmoidRouter, "moe": MoeSpec},
    only=ONLY,
    defaults={"hidden_act": "silu", "head_dim": 128},
    derived={FRACTION_KEY: _fraction_by_width},
    common={"qk_norm": True, "whole_qk_norm": True}
    | {"moe.hf_router_bias": "e_score_correction_bias"}
    | EXPERT_NAMES
    | {f"moe.router.{name}": value for name, value in ROUTER.items()},
    layer_types=all_full,
    mixed_layers=False,
    unread=BALANCE_KEYS | {"num_experts", "rotary_dim"},
    rope_theta=5e6,
    partial_rotary=True,
    token_classifier=False,
    sequence_classifier=None,
    read_more=lambda config: {"moe.ff_width": config["intermediate_size"]},
    write_more=lambda spec: ONLY | {"rotary_dim": spec.rotary_width},
)

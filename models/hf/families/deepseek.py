"""DeepSeek-V3 and Kimi K2: sigmoid-routed experts and latent attention."""

import math
from typing import Any

from jaxrl_llm.models.hf.families.llama import OF_HEADS
from jaxrl_llm.models.hf.family import (
    BALANCE_KEYS,
    Config,
    Family,
    all_full,
    check_only,
    read_ropes,
)
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.rope import Scaling, YarnScaling
from jaxrl_llm.models.spec import ModelSpec

EXPERT_KEYS = {
    "n_routed_experts": "moe.experts",
    "num_experts_per_tok": "moe.experts_per_token",
    "moe_intermediate_size": "moe.ff_width",
    "n_shared_experts": "moe.shared_ff_width",  # times the width of one
    "first_k_dense_replace": "moe.dense_layers",
    "n_group": "moe.router.groups",
    "topk_group": "moe.router.top_groups",
    "norm_topk_prob": "moe.router.normalize",
    "routed_scaling_factor": "moe.router.scale",
}
LATENT_KEYS = {
    "q_lora_rank": "latent.query_rank",
    "kv_lora_rank": "latent.kv_rank",
    "qk_nope_head_dim": "latent.nope_width",
    "qk_rope_head_dim": "latent.rope_width",
    "v_head_dim": "latent.value_width",
    "rope_interleave": "latent.interleaved",
}


def read_shared_width(config: Config) -> dict[str, Any]:
    """Read the width of all the experts that every token passes."""
    return {"moe.shared_ff_width": config["moe_intermediate_size"] * config["n_shared_experts"]}


def write_experts(spec: ModelSpec) -> dict[str, Any]:
    """Write how many these are, and that no layer predicts more tokens."""
    assert spec.moe is not None
    shared = spec.moe.shared_ff_width // spec.moe.ff_width
    return {"n_shared_experts": shared, "num_nextn_predict_layers": 0}


def read_deepseek_v3(config: Config) -> dict[str, Any]:
    r"""Read what several keys give together: the width of a head, and the scale of its scores.

    With YaRN and `mscale_all_dim` m, scores are multiplied by $(0.1\,m \ln f + 1)^2$ for the factor
    f, besides $1/\sqrt{H}$; in the spec that is a part of `query_scalar`.
    """
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    check_only(config, {"qk_head_dim": width})
    _, scaling, _ = read_ropes(config, theta=1e4, local_theta=None)
    scalar = _query_scalar(width, scaling)
    return {"head_dim": width, "query_scalar": scalar} | read_shared_width(config)


def _query_scalar(width: int, scaling: Scaling | None) -> float | None:
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    return width / (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 4


def write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    """Write what `read_deepseek_v3` reads."""
    assert spec.latent is not None
    # of the width of a head transformers takes the number of frequencies
    return {"head_dim": spec.latent.rope_width} | write_experts(spec)


DEEPSEEK_V3 = Family(
    name="DeepseekV3",
    model_type="deepseek_v3",
    keys=EXPERT_KEYS | LATENT_KEYS,
    parts={"moe.router": SigmoidRouter, "moe": MoeSpec, "latent": LatentSpec},
    only={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    | {"ep_size": 1},
    defaults={"hidden_act": "silu", "norm_topk_prob": True}
    | {"q_lora_rank": None, "rope_interleave": True},
    derived=OF_HEADS | {"head_dim": lambda config: config["qk_rope_head_dim"]},
    common={"qk_norm": False},
    layer_types=all_full,
    mixed_layers=False,
    # layers for multi-token prediction are no part of the language model
    unread=BALANCE_KEYS | {"qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"},
    rope_theta=1e4,
    read_more=read_deepseek_v3,
    write_more=write_deepseek_v3,
)

"""Sigmoid-routed experts and latent attention in `config.json`: DeepSeek-V3, GLM, Kimi, MiniMax."""

import dataclasses
import math
from typing import Any

from jaxrl_llm.models.hf.parts import Config, given_key, only_values, read_mixtral
from jaxrl_llm.models.hf.rope import read_ropes
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.rope import Scaling, YarnScaling
from jaxrl_llm.models.spec import ModelSpec

SIGMOID_EXPERTS_KEYS = {
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "num_nextn_predict_layers",  # multi-token prediction, which is no part of the language model
    "num_mtp_layers",
    "ep_size",
}
LATENT_KEYS = {
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "rope_interleave",
}
MINIMAX_M2_ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""What the code on the hub reads and transformers' takes for granted."""
MINIMAX_M2_KEYS = {"num_local_experts", "num_experts", "num_experts_per_tok", "rotary_dim"}


def read_deepseek_v3(config: Config) -> dict[str, Any]:
    r"""Read the experts and the latent attention of a DeepSeek-V3 model.

    With YaRN and `mscale_all_dim` m, scores are multiplied by $(0.1\,m \ln f + 1)^2$ for the factor
    f, besides $1/\sqrt{H}$; in the spec that is a part of `query_scalar`.

    Raises:
        ValueError: A key is missing or has a value that we do not support.

    >>> sizes = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=6)
    >>> sizes |= dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
    >>> read_deepseek_v3(sizes | {"n_shared_experts": 1, "first_k_dense_replace": 3,
    ...     "max_position_embeddings": 64, "n_group": 2, "topk_group": 1,
    ...     "routed_scaling_factor": 2.5})["head_dim"]
    6
    """
    latent = LatentSpec(
        query_rank=config.get("q_lora_rank"),
        kv_rank=given_key(config, "kv_lora_rank"),
        nope_width=given_key(config, "qk_nope_head_dim"),
        rope_width=given_key(config, "qk_rope_head_dim"),
        value_width=given_key(config, "v_head_dim"),
        interleaved=config.get("rope_interleave", True),
    )
    only_values(config, qk_head_dim=latent.key_width)
    scaling = read_ropes(config, theta=1e4, local_theta=None).rope_scaling
    return {
        "latent": latent,
        "head_dim": latent.key_width,
        "query_scalar": _query_scalar(latent.key_width, scaling),
        **read_glm4_moe(config),
    }


def write_deepseek_v3(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_deepseek_v3` reads; None for a model without these two parts.

    >>> spec = tiny_spec()
    >>> write_deepseek_v3(spec) is None
    True
    """
    latent, experts = spec.latent, write_glm4_moe(spec)
    if latent is None or experts is None:
        return None
    return {
        "head_dim": latent.rope_width,  # what transformers takes the frequencies' number from
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_width,
        "qk_rope_head_dim": latent.rope_width,
        "v_head_dim": latent.value_width,
        "rope_interleave": latent.interleaved,
        **experts,
    }


def read_glm4_moe_lite(config: Config) -> dict[str, Any]:
    """Read what `read_deepseek_v3` reads from the keys of a GLM-4.7-Flash model.

    Raises:
        ValueError: As there, or plain layers follow on layers with experts.

    >>> read_glm4_moe_lite({"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]})
    Traceback (most recent call last):
    ValueError: mlp_layer_types=['sparse', 'dense']; supported are dense layers before sparse ones
    """
    layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ValueError(f"mlp_layer_types={kinds}; supported are dense layers before sparse ones")
    only_values(config, first_k_dense_replace=dense)  # which transformers does not read
    return read_deepseek_v3({**config, "first_k_dense_replace": dense})


def write_glm4_moe_lite(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_glm4_moe_lite` reads; None for a model without these parts.

    >>> spec = tiny_spec()
    >>> write_glm4_moe_lite(spec) is None
    True
    """
    config = write_deepseek_v3(spec)
    if config is None:
        return None
    dense = config["first_k_dense_replace"]
    return config | {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (spec.layers - dense)}


def read_glm4_moe(config: Config) -> dict[str, Any]:
    """Read the experts of a GLM-4.5 model, which are those of DeepSeek-V3, too.

    Raises:
        ValueError: A key is missing or has a value that we do not support.

    >>> read_glm4_moe({"topk_method": "greedy"})
    Traceback (most recent call last):
    ValueError: topk_method='greedy'; supported is 'noaux_tc'
    """
    only_values(config, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, ep_size=1)
    width = given_key(config, "moe_intermediate_size")
    return {
        "moe": MoeSpec(
            experts=given_key(config, "n_routed_experts"),
            experts_per_token=given_key(config, "num_experts_per_tok"),
            ff_width=width,
            dense_layers=given_key(config, "first_k_dense_replace"),
            shared_ff_width=width * given_key(config, "n_shared_experts"),
            router=SigmoidRouter(
                groups=given_key(config, "n_group"),
                top_groups=given_key(config, "topk_group"),
                normalize=config.get("norm_topk_prob", True),
                scale=float(given_key(config, "routed_scaling_factor")),
            ),
        ),
    }


def write_glm4_moe(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_glm4_moe` reads; None for a model without such experts.

    >>> spec = tiny_spec()
    >>> write_glm4_moe(spec) is None
    True
    """
    moe = spec.moe
    if moe is None or not isinstance(moe.router, SigmoidRouter):
        return None
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.ff_width,
        "n_shared_experts": moe.shared_ff_width // moe.ff_width,
        "first_k_dense_replace": moe.dense_layers,
        "n_group": moe.router.groups,
        "topk_group": moe.router.top_groups,
        "norm_topk_prob": moe.router.normalize,
        "routed_scaling_factor": moe.router.scale,
        "num_nextn_predict_layers": 0,
    }


def read_minimax_m2(config: Config) -> dict[str, Any]:
    """Read the experts of a MiniMax-M2 model.

    Raises:
        ValueError: A key is missing or has a value that we do not support.

    >>> config = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 6}
    >>> read_minimax_m2(config)["moe"].hf_router_bias
    'e_score_correction_bias'
    """
    only_values(config, **MINIMAX_M2_ONLY)
    router = SigmoidRouter(groups=1, top_groups=1, normalize=True, scale=1.0)
    mixture = read_mixtral(config)["moe"]
    return {
        "moe": dataclasses.replace(mixture, router=router, hf_router_bias="e_score_correction_bias")
    }


def write_minimax_m2(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_minimax_m2` reads; None for a model without such experts.

    >>> spec = tiny_spec()
    >>> write_minimax_m2(spec) is None
    True
    """
    if spec.moe is None or not isinstance(spec.moe.router, SigmoidRouter):
        return None
    return {
        "num_local_experts": spec.moe.experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
        "rotary_dim": spec.rotary_width,
        **MINIMAX_M2_ONLY,
    }


def _query_scalar(width: int, scaling: Scaling | None) -> float | None:
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    return width / (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 4

"""Gated DeltaNets and the experts beside them in `config.json`: Qwen3.5 and Qwen3-Next.

Each pair of functions reads the fields of a spec from the keys of a family, and writes them back.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.family import FULL, LINEAR
from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.spec import ModelSpec

Config = Mapping[str, Any]

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

    >>> every_nth_attends({"num_hidden_layers": 2, "full_attention_interval": 2})
    ['linear_attention', 'full_attention']
    """
    period = config["full_attention_interval"]
    return [LINEAR if (i + 1) % period else FULL for i in range(config["num_hidden_layers"])]


def read_delta(config: Config) -> dict[str, Any]:
    """Read the DeltaNet of a Qwen3.5 model; there is none where all layers have attention.

    >>> sizes = dict.fromkeys(DELTA_KEYS, 4)
    >>> read_delta({"layer_types": ["linear_attention", "full_attention"], **sizes})["delta"]
    DeltaSpec(key_heads=4, value_heads=4, key_width=4, value_width=4, conv_width=4, \
joined_by_head=False)
    """
    if LINEAR not in config["layer_types"]:
        return {}
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
    return read_delta(config) | {
        "moe": MoeSpec(
            **{ours: config[key] for key, ours in EXPERTS_KEYS.items()},
            router=SoftmaxRouter(normalize=config.get("norm_topk_prob", True)),
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
    for key, supported in DENSE_KEYS.items():
        if config.get(key) not in (None, supported):
            raise ValueError(f"{key}={config[key]!r}; supported is {supported!r}")
    parts = read_delta_moe(config)
    if delta := parts.get("delta"):
        parts["delta"] = DeltaSpec(**vars(delta) | {"joined_by_head": True})
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

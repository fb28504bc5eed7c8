"""Mixtures of experts in `config.json`, where several keys give one part of a spec.

Each pair of functions reads the fields of a spec from the keys of a family, and writes them back.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.moe.routing import SoftmaxRouter
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec
from jaxrl_llm.models.rope import YarnScaling
from jaxrl_llm.models.spec import ModelSpec

Config = Mapping[str, Any]

MIXTRAL_NAMES: dict[str, Any] = {
    "hf_module": "block_sparse_moe",
    "hf_projections": ("w1", "w3", "w2"),
}
# Keys that only training in transformers looks at: the balance loss and what reports it.
BALANCE_KEYS = {"router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux"}
QWEN3_MOE_KEYS = {
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "use_qk_norm",
}
MIXTRAL_KEYS = {"num_local_experts", "num_experts_per_tok"}
GPT_OSS_KEYS = {
    "num_local_experts",
    "num_experts_per_tok",
    "swiglu_alpha",
    "swiglu_limit",
    # what OpenAI's own code calls two of the others
    "experts_per_token",
    "initial_context_length",
}
GPT_OSS_YARN = YarnScaling(factor=32.0, original_positions=4096, truncate=False)
"""What transformers takes where a config says nothing of rotary positions."""


def read_qwen3_moe(config: Config) -> dict[str, Any]:
    """Read the experts of a Qwen3-MoE model, of which every layer must be a mixture.

    Raises:
        ValueError: A key is missing, or some layers have no experts.

    >>> config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    >>> read_qwen3_moe(config)["moe"].router
    SoftmaxRouter(normalize=False)
    """
    only_values(config, decoder_sparse_step=1, mlp_only_layers=[])
    names = ("num_experts", "num_local_experts")  # of transformers 4 and 5
    given = {config[name] for name in names if config.get(name) is not None}
    if len(given) != 1:
        raise ValueError(f"num_experts or num_local_experts must give one number, got {given}")
    return {
        "moe": MoeSpec(
            experts=given.pop(),
            experts_per_token=given_key(config, "num_experts_per_tok"),
            ff_width=given_key(config, "moe_intermediate_size"),
            router=SoftmaxRouter(normalize=config.get("norm_topk_prob", False)),
        )
    }


def write_qwen3_moe(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_qwen3_moe` reads; None for a model without such experts.

    >>> spec = tiny_spec()
    >>> write_qwen3_moe(spec) is None
    True
    """
    if spec.moe is None or not isinstance(spec.moe.router, SoftmaxRouter):
        return None
    return {
        "num_experts": spec.moe.experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
        "moe_intermediate_size": spec.moe.ff_width,
        "norm_topk_prob": spec.moe.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def read_mixtral(config: Config) -> dict[str, Any]:
    """Read the experts of a Mixtral model.

    Raises:
        ValueError: A key is missing.

    >>> config = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 6}
    >>> read_mixtral(config)["moe"].hf_module
    'block_sparse_moe'
    """
    return {
        "moe": MoeSpec(
            experts=given_key(config, "num_local_experts"),
            experts_per_token=given_key(config, "num_experts_per_tok"),
            ff_width=given_key(config, "intermediate_size"),
            router=SoftmaxRouter(normalize=True),
            **MIXTRAL_NAMES,
        )
    }


def write_mixtral(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_mixtral` reads; None for a model without such experts.

    >>> spec = tiny_spec()
    >>> write_mixtral(spec) is None
    True
    """
    if spec.moe is None or not isinstance(spec.moe.router, SoftmaxRouter):
        return None
    return {
        "num_local_experts": spec.moe.experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
    }


def read_gpt_oss(config: Config) -> dict[str, Any]:
    """Read the experts of a gpt-oss model, and its rotary positions where nothing is said of them.

    Raises:
        ValueError: A key is missing.

    >>> config = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 6}
    >>> read_gpt_oss(config)["moe"].swiglu
    ClippedSwiglu(alpha=1.702, limit=7.0)
    """
    moe = MoeSpec(
        experts=given_key(config, "num_local_experts"),
        experts_per_token=given_key(config, "num_experts_per_tok"),
        ff_width=given_key(config, "intermediate_size"),
        router=SoftmaxRouter(normalize=True),
        biases=True,
        swiglu=ClippedSwiglu(
            alpha=float(config.get("swiglu_alpha", 1.702)),
            limit=float(config.get("swiglu_limit", 7.0)),
        ),
        hf_router="router",
        hf_joined=True,
    )
    is_told = config.get("rope_parameters") or config.get("rope_scaling")
    return {"moe": moe} | ({} if is_told else {"rope_scaling": GPT_OSS_YARN})


def write_gpt_oss(spec: ModelSpec) -> dict[str, Any] | None:
    """Write what `read_gpt_oss` reads; None for a model without such experts.

    >>> spec = tiny_spec()
    >>> write_gpt_oss(spec) is None
    True
    """
    if spec.moe is None or spec.moe.swiglu is None:
        return None
    return {
        "num_local_experts": spec.moe.experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
        "swiglu_alpha": spec.moe.swiglu.alpha,
        "swiglu_limit": spec.moe.swiglu.limit,
    }


def given_key(config: Config, key: str) -> Any:
    """Return the value of a key.

    Raises:
        ValueError: It is missing or null.

    >>> given_key({"n_group": 8}, "n_group")
    8
    """
    if config.get(key) is None:
        raise ValueError(f"the key {key!r} is missing")
    return config[key]


def only_values(config: Config, **supported: Any) -> None:
    """Check that keys that are set have the one value that is supported.

    Raises:
        ValueError: One has another.

    >>> only_values({"ep_size": 1, "topk_method": None}, ep_size=1, topk_method="noaux_tc")
    """
    for key, value in supported.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"{key}={config[key]!r}; supported is {value!r}")

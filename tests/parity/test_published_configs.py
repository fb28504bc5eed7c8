"""The `config.json` of published models: read, counted, compared with what transformers reads."""

import dataclasses
import json
import math

import numpy as np
import pytest
import transformers

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.moe.routing import SigmoidRouter, SoftmaxRouter
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_MOE = QWEN_3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
ROPE_LLAMA_3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": ROPE_LLAMA_3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "vocab_size": 32000,
}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
OLMO_3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_cache": False,
    "vocab_size": 100278,
}
SMOLLM_3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
PHI_4 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {},
    "bos_token_id": 100257,
    "embd_pdrop": 0.0,
    "eos_token_id": 100265,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "model_type": "phi3",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "pad_token_id": 100349,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}
PHI_4_MINI_LONG = [1 + i for i in range(48)]  # as many as there are; the numbers are not theirs
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def sized(width, ff_width, layers, heads, kv_heads, **others):
    return {
        "hidden_size": width,
        "intermediate_size": ff_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    } | others


LLAMA_3 = Llama3Scaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
)
QWEN_YARN = YarnScaling(factor=4.0, original_positions=32768)
OSS_YARN = YarnScaling(factor=32.0, original_positions=4096, truncate=False)
# name: config, number of parameters as published or as transformers counts them, and fields of the
# spec
QWEN_3_5_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3584,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 248320,
}
QWEN_3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": QWEN_3_5_TEXT,
    "tie_word_embeddings": True,
    "video_token_id": 248057,
    "vision_config": {"depth": 12, "hidden_size": 768, "model_type": "qwen3_5", "num_heads": 12},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
QWEN_3_5_MOE_TEXT = {k: v for k, v in QWEN_3_5_TEXT.items() if k != "intermediate_size"} | {
    "hidden_size": 2048,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
QWEN_3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "Qwen2.5-0.5B": (
        QWEN_2_5
        | sized(896, 4864, 24, 14, 2, tie_word_embeddings=True, vocab_size=151936)
        | {"max_window_layers": 24, "sliding_window": 32768},
        494_032_768,
        {"head_dim": 64, "qkv_bias": True, "output_bias": False, "window": None},
    ),
    "Qwen2.5-7B": (QWEN_2_5, 7_615_616_512, {"head_dim": 128, "rope_scaling": None}),
    "Qwen2.5-7B-Instruct, YaRN as documented": (
        QWEN_2_5
        | {
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            }
        },
        7_615_616_512,
        {"rope_scaling": QWEN_YARN, "rope_theta": 1e6},
    ),
    "Qwen2.5-72B": (
        QWEN_2_5 | sized(8192, 29568, 80, 64, 8, max_window_layers=80, rms_norm_eps=1e-5),
        72_706_203_648,
        {"norm_eps": 1e-5},
    ),
    "Qwen3-0.6B": (
        QWEN_3 | sized(1024, 3072, 28, 16, 8, max_window_layers=28, tie_word_embeddings=True),
        596_049_920,
        {"head_dim": 128, "qk_norm": True, "qkv_bias": False, "tied_embeddings": True},
    ),
    "Qwen3-8B": (QWEN_3, 8_190_735_360, {"windowed_layers": (), "window": None}),
    "Qwen3-8B, YaRN as documented": (
        QWEN_3
        | {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
        8_190_735_360,
        {"rope_scaling": QWEN_YARN},
    ),
    "Qwen3-32B": (
        QWEN_3 | sized(5120, 25600, 64, 64, 8, max_window_layers=64),
        32_762_123_264,
        {"heads": 64, "head_dim": 128},
    ),
    "Llama-3.1-8B": (
        LLAMA_3_1,
        8_030_261_248,
        {"rope_scaling": LLAMA_3, "head_dim": 128, "qk_norm": False},
    ),
    "Llama-3.2-1B": (
        LLAMA_3_1
        | sized(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True)
        | {"rope_scaling": ROPE_LLAMA_3 | {"factor": 32.0}},
        1_235_814_400,
        {"tied_embeddings": True, "rope_theta": 5e5},
    ),
    "Llama-3.3-70B-Instruct": (
        LLAMA_3_1 | sized(8192, 28672, 80, 64, 8),
        70_553_706_496,
        {"rope_scaling": LLAMA_3, "max_positions": 131072},
    ),
    "Mistral-7B-v0.1": (
        MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
        7_241_732_096,
        {"window": 4096, "windowed_layers": (), "rope_theta": 1e4},
    ),
    "Mistral-7B-v0.3": (MISTRAL, 7_248_023_552, {"window": None, "head_dim": 128}),
    "Mistral-Small-24B-2501": (
        MISTRAL
        | sized(5120, 32768, 40, 32, 8, head_dim=128)
        | {"attention_dropout": 0.0, "rope_theta": 100000000.0, "vocab_size": 131072},
        23_572_403_200,
        {"head_dim": 128, "rope_theta": 1e8},
    ),
    "Gemma-2-2B": (
        GEMMA_2 | sized(2304, 9216, 26, 8, 4),
        2_614_341_888,
        {"tied_embeddings": True, "windowed_layers": (True, False) * 13, "window": 4096},
    ),
    "Gemma-2-9B": (
        GEMMA_2,
        9_241_705_984,
        {"score_softcap": 50.0, "logit_softcap": 30.0, "query_scalar": None},
    ),
    "Gemma-2-27B": (
        GEMMA_2 | sized(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
        27_227_128_320,
        {"query_scalar": 144.0, "head_dim": 128, "activation": "gelu_tanh"},
    ),
    "Gemma-3-1B-it": (
        GEMMA_3,
        999_885_952,
        {
            "windowed_layers": ((True,) * 5 + (False,)) * 4 + (True,) * 2,
            "window": 512,
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "qk_norm": True,
        },
    ),
    "Gemma-3-4B, its text alone": (
        GEMMA_3
        | sized(2560, 10240, 34, 8, 4, max_position_embeddings=131072, sliding_window=1024)
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 262208},
        3_880_263_168,
        {"rope_scaling": LinearScaling(factor=8.0), "local_rope_theta": 1e4},
    ),
    "Qwen3-30B-A3B": (QWEN_3_MOE, 30_532_122_624, {"head_dim": 128, "qk_norm": True}),
    "Qwen3-235B-A22B": (
        QWEN_3_MOE
        | sized(4096, 12288, 94, 64, 4, max_window_layers=94, moe_intermediate_size=1536),
        235_093_634_560,
        {"heads": 64},
    ),
    "Qwen3-Coder-30B-A3B": (
        QWEN_3_MOE
        | {"max_position_embeddings": 262144, "rope_theta": 10000000, "use_qk_norm": True}
        | {"qkv_bias": False, "shared_expert_intermediate_size": 0},
        30_532_122_624,
        {"rope_theta": 1e7},
    ),
    "Mixtral-8x7B-v0.1": (MIXTRAL, 46_702_792_704, {"window": None, "rope_theta": 1e6}),
    "DeepSeek-V3 and R1, converted to bfloat16": (
        DEEPSEEK_V3,
        671_026_419_200,
        {
            "head_dim": 192,
            "qk_norm": False,
            "max_positions": 163840,
            "query_scalar": pytest.approx(192 / 1.3688879454**4),  # 0.1 ln 40 + 1
        },
    ),
    "gpt-oss-20b, converted to bfloat16": (
        GPT_OSS,
        20_914_757_184,
        {
            "rope_scaling": OSS_YARN,
            "rope_theta": 1.5e5,
            "windowed_layers": (True, False) * 12,
            "window": 128,
            "attention_sinks": True,
            "output_bias": True,
        },
    ),
    "gpt-oss-120b, rotary positions left to transformers": (
        {key: value for key, value in GPT_OSS.items() if key[:4] != "rope"}
        | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None},
        116_829_156_672,
        {"rope_scaling": OSS_YARN, "windowed_layers": (True, False) * 18},
    ),
}
PUBLISHED |= {
    "Kimi-K2-Instruct, converted to bfloat16": (
        KIMI_K2,
        1_026_408_232_448,
        {"query_scalar": pytest.approx(192 / 1.3465735903**4), "heads": 64},  # 0.1 ln 32 + 1
    ),
    "GLM-4.5-Air": (
        GLM_4_5_AIR,
        106_852_251_264,
        {"qkv_bias": True, "output_bias": False, "qk_norm": False, "rotary_width": 64},
    ),
    "GLM-4.5": (
        GLM_4_5_AIR
        | sized(5120, 12288, 92, 96, 8, first_k_dense_replace=3, moe_intermediate_size=1536)
        | {"n_routed_experts": 160, "routed_scaling_factor": 2.5, "use_qk_norm": True},
        352_797_829_024,
        {"qk_norm": True, "whole_qk_norm": False},
    ),
    "GLM-4.7-Flash": (
        GLM_4_7_FLASH,
        29_943_393_920,
        {"head_dim": 256, "rotary_width": 64, "heads": 20},
    ),
    "MiniMax-M2, converted to bfloat16": (
        MINIMAX_M2,
        228_689_764_864,
        {"rotary_width": 64, "whole_qk_norm": True, "rope_theta": 5e6},
    ),
    "Olmo-3-7B": (
        OLMO_3,
        7_298_011_136,
        {
            "windowed_layers": (True, True, True, False) * 8,
            "rope_theta": 5e5,
            "local_rope_theta": 5e5,
            "rope_scaling": YarnScaling(
                factor=8.0, original_positions=8192, attention_factor=1.2079441541679836
            ),
            "pre_norms": False,
            "whole_qk_norm": True,
        },
    ),
    "Olmo-3-32B": (
        OLMO_3
        | sized(5120, 27648, 64, 40, 8)
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16},
        32_233_522_176,
        {"kv_heads": 8, "head_dim": 128},
    ),
    "SmolLM3-3B": (
        SMOLLM_3,
        3_075_098_624,
        {"rotary_layers": (True, True, True, False) * 9, "window": None, "tied_embeddings": True},
    ),
    "Phi-4": (
        PHI_4,
        14_659_507_200,
        {"hf_joined": True, "rotary_fraction": 1.0, "rope_scaling": None},
    ),
    "Phi-4-mini-instruct": (
        PHI_4
        | sized(3072, 8192, 32, 24, 8, tie_word_embeddings=True, vocab_size=200064)
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
        | {"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "sliding_window": 262144}
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
        | {
            "rope_scaling": {
                "long_factor": PHI_4_MINI_LONG,
                "short_factor": [1.0] * 48,
                "type": "longrope",
            }
        },
        3_836_021_760,
        {
            "window": None,
            "rotary_width": 96,
            "rope_scaling": LongRopeScaling(
                short_factors=(1.0,) * 48,
                long_factors=tuple(map(float, PHI_4_MINI_LONG)),
                original_positions=4096,
                attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
            ),
        },
    ),
}
PUBLISHED |= {
    "Qwen3.5-0.8B, its language model": (
        QWEN_3_5,
        752_393_024,
        {
            "delta_layers": (True, True, True, False) * 6,
            "delta": DeltaSpec(key_heads=16, value_heads=16, key_width=128, value_width=128),
            "rotary_width": 64,
            "rope_theta": 1e7,
            "hf_prefix": "model.language_model.",
            "tied_embeddings": True,
            "unit_offset_norms": True,
        },
    ),
    "Qwen3.5-27B, its language model": (
        QWEN_3_5
        | {"tie_word_embeddings": False}
        | {
            "text_config": QWEN_3_5_TEXT
            | sized(5120, 17408, 64, 24, 4, linear_num_value_heads=48, tie_word_embeddings=False)
            | {"layer_types": None}
        },
        26_895_998_464,
        {"delta_layers": (True, True, True, False) * 16, "gated_attention": True},
    ),
    "Qwen3.5-35B-A3B, its language model": (
        QWEN_3_5
        | {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
        | {"text_config": QWEN_3_5_MOE_TEXT, "tie_word_embeddings": False},
        34_660_610_688,
        {"delta_layers": (True, True, True, False) * 10, "hf_prefix": "model.language_model."},
    ),
    "Qwen3-Next-80B-A3B": (
        QWEN_3_NEXT,
        79_674_391_296,
        {
            "delta_layers": (True, True, True, False) * 12,
            "delta": DeltaSpec(
                key_heads=16, value_heads=32, key_width=128, value_width=128, joined_by_head=True
            ),
            "rotary_width": 64,
        },
    ),
}
ROUTERS = {
    "Qwen3-30B-A3B": (128, 8, 768, SoftmaxRouter(normalize=True)),
    "Mixtral-8x7B-v0.1": (8, 2, 14336, SoftmaxRouter(normalize=True)),
    "DeepSeek-V3 and R1, converted to bfloat16": (
        256,
        8,
        2048,
        SigmoidRouter(groups=8, top_groups=4, normalize=True, scale=2.5),
    ),
    "Qwen3.5-35B-A3B, its language model": (256, 8, 512, SoftmaxRouter(normalize=True)),
    "Qwen3-Next-80B-A3B": (512, 10, 512, SoftmaxRouter(normalize=True)),
    "gpt-oss-20b, converted to bfloat16": (32, 4, 2880, SoftmaxRouter(normalize=True)),
}


def write(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name, tmp_path):
    config, parameters, fields = PUBLISHED[name]
    spec = read_spec(write(tmp_path, config))
    assert parameter_count(spec) == parameters
    assert {field: getattr(spec, field) for field in fields} == fields
    if name in ROUTERS:
        moe = spec.moe
        router = (moe.experts, moe.experts_per_token, moe.ff_width, moe.router)
        assert router == ROUTERS[name]
    alone = dataclasses.replace(spec, hf_prefix="model.")  # one that no larger model holds
    assert read_spec(write(tmp_path / "ours", make_config(spec))) == alone

    if config["model_type"] == "kimi_k2":  # which transformers has as DeepSeek-V3, as we save it
        write(tmp_path, config_to_save(spec, tmp_path, np.dtype("float32")))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)  # which fills and renames keys
    theirs.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "config.json").read_text())
    saved["architectures"] = config["architectures"]
    assert read_spec(write(tmp_path / "theirs", saved)) == spec


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Llama-3.2-1B", {"sliding_window": 4096}, "'sliding_window': 4096.*supported in a Llama"),
        ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, "rotates the whole head"),
        ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "axial"}}, "rope_type='axial'; supported"),
        (
            "Llama-3.2-1B",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3.0}},
            r"'linear' with \{'alpha': 3.0\}; supported are \['factor'\]",
        ),
        (
            "Llama-3.2-1B",
            {"rope_scaling": {"rope_type": "linear"}},
            r"'linear' without \['factor'\]",
        ),
        (
            "Llama-3.2-1B",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling=.* and rope_parameters=.* disagree",
        ),
        ("Llama-3.2-1B", {"layer_types": ["sliding_attention"] * 16}, "the code of Llama takes"),
        ("Qwen2.5-7B", {"mrope_section": [1, 2]}, "'mrope_section'"),
        ("Qwen2.5-7B", {"layer_types": ["sliding_attention"] * 28}, "there is no sliding_window"),
        ("Qwen2.5-7B", {"layer_types": ["full_attention"]}, "expected 28 of 'full_attention' and"),
        (
            "Qwen2.5-7B",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"given for \['full_attention'\]; expected one for all",
        ),
        (
            "Gemma-2-9B",
            {"use_bidirectional_attention": True},
            "'use_bidirectional_attention': True",
        ),
        ("Gemma-3-1B-it", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping': 50.0"),
        (
            "Gemma-3-1B-it",
            {"rope_parameters": {"rope_type": "default"}},
            "expected one entry for each of",
        ),
        (
            "Gemma-3-1B-it",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                }
            },
            "of sliding_attention have LinearScaling",
        ),
        (
            "Gemma-3-1B-it",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            r"\['Gemma3ForConditionalGeneration'\]; supported are",
        ),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step=2; supported is 1"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]; supported is \[\]"),
        ("Qwen3-30B-A3B", {"use_sliding_window": True}, "use_sliding_window"),
        ("Qwen3-30B-A3B", {"num_local_experts": 7}, "must give one number"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "experts_per_token=129 of 128"),
        ("Qwen3-30B-A3B", {"moe_intermediate_size": None}, "'moe_intermediate_size'. are missing"),
        ("Mixtral-8x7B-v0.1", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("Mixtral-8x7B-v0.1", {"num_local_experts": None}, "'num_local_experts'. are missing"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, "first_k_dense_replace=2; supported is 1"),
        ("MiniMax-M2", {"qk_norm_type": "per_head"}, "supported is 'per_layer'"),
        ("MiniMax-M2", {"scoring_func": "softmax"}, "supported is 'sigmoid'"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "expected one entry for each of 36 layers"),
        (
            "Phi-4-mini",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}},
            r"rope_type='longrope' without \['long_factors'\]",
        ),
        ("Phi-4-mini", {"resid_pdrop": 0.1}, "'resid_pdrop': 0.1.*not supported in a Phi3"),
        ("DeepSeek", {"topk_method": "greedy"}, "topk_method='greedy'; supported is 'noaux_tc'"),
        ("DeepSeek", {"scoring_func": "softmax"}, "supported is 'sigmoid'"),
        ("DeepSeek", {"moe_layer_freq": 2}, "moe_layer_freq=2; supported is 1"),
        ("DeepSeek", {"attention_bias": True}, "attention_bias"),
        ("DeepSeek", {"n_group": 3}, "groups must divide the experts"),
        ("DeepSeek", {"first_k_dense_replace": 61}, "must leave layers with experts"),
        (
            "DeepSeek",
            {"quantization_config": FP8 | {"weight_block_size": None}},
            "quantized by 'fp8' with weight_block_size=None and fmt='e4m3'; expected 'fp8'",
        ),
        ("gpt-oss-20b", {"num_local_experts": None}, "'num_local_experts'. are missing"),
        ("Qwen3-Next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2; supported is 1"),
        (
            "Qwen3-Next",
            {"layer_types": ["sliding_attention"] * 48},
            "expected 48 of 'full_attention' and 'linear_attention'",
        ),
        ("Qwen3-Next", {"layer_types": ["linear_attention"] * 48}, "both kinds of layers"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=str,
)
def test_what_would_change_the_model_unread_is_refused(name, changes, message, tmp_path):
    config = next(entry[0] for full, entry in PUBLISHED.items() if full.startswith(name))
    with pytest.raises(ValueError, match=message):
        read_spec(write(tmp_path, config | changes))


def test_float8_in_blocks_is_the_same_model(tmp_path):
    config = next(entry[0] for full, entry in PUBLISHED.items() if full.startswith("DeepSeek"))
    plain = read_spec(write(tmp_path, config))
    assert read_spec(write(tmp_path, config | {"quantization_config": FP8})) == plain

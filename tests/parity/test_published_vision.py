"""Published configs of models that see images, written by hand: the numbers of parameters."""

import json

import pytest

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import parameter_count

pytestmark = pytest.mark.guards("models/hf/", "models/vision/parameters.py")

TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def qwen3_vl(hidden, ff, layers, heads, vision, *, tied, **text):
    """A config of Qwen3-VL as it is published."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": ff,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": 151936,
        }
        | text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "initializer_range": 0.02,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }
        | vision,
    } | TOKENS


LARGE = dict(
    depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24]
)
SMALL = dict(
    depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17]
)
A3B = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_vl_moe_text",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}


def qwen2_5_vl(hidden, ff, layers, heads, keys, *, tied):
    """A config of Qwen2.5-VL as it is published: the language model's keys are not nested."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ff,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": keys,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 151936 if tied else 152064,
    }


PUBLISHED = {
    "Qwen3-VL-2B": (qwen3_vl(2048, 6144, 28, 16, SMALL, tied=True), 2_127_532_032),
    "Qwen3-VL-4B": (qwen3_vl(2560, 9728, 36, 32, SMALL, tied=True), 4_437_815_808),
    "Qwen3-VL-8B": (qwen3_vl(4096, 12288, 36, 32, LARGE, tied=False), 8_767_123_696),
    "Qwen3-VL-32B": (qwen3_vl(5120, 25600, 64, 64, LARGE, tied=False), 33_357_390_064),
    "Qwen3-VL-30B-A3B": (
        qwen3_vl(2048, 6144, 48, 32, LARGE, tied=False, **A3B)
        | {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"},
        31_070_754_032,
    ),
    "Qwen2.5-VL-3B": (qwen2_5_vl(2048, 11008, 36, 16, 2, tied=True), 3_754_622_976),
    "Qwen2.5-VL-7B": (qwen2_5_vl(3584, 18944, 28, 28, 4, tied=False), 8_292_166_656),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters(name, tmp_path):
    config, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path, vision=True)
    assert parameter_count(spec) == parameters
    assert spec.vision.never_sampled == (151652, 151653, 151655, 151656)
    assert sum(spec.mrope_sections) == 64
    assert spec.mrope_interleaved == (spec.vision.window is None)
    if spec.vision.window is not None:
        assert (spec.vision.window, spec.vision.full_layers) == (4, (7, 15, 23, 31))
        assert spec.vision.tokens_per_second == 2
        assert spec.vision.hf_prefix == "visual."

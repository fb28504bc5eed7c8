"""The `config.json` of published models (published.json): read, counted, and as transformers reads.

Keys that every config has and nobody reads, as `eos_token_id`, stand in Qwen3-8B's alone.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import transformers

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.moe.routing import SigmoidRouter, SoftmaxRouter
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

LLAMA_3 = Llama3Scaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
)
QWEN_YARN = YarnScaling(factor=4.0, original_positions=32768)
OSS_YARN = YarnScaling(factor=32.0, original_positions=4096, truncate=False)
OLMO_YARN = YarnScaling(factor=8.0, original_positions=8192, attention_factor=1.2079441541679836)
PHI_LONG = LongRopeScaling(
    short_factors=(1.0,) * 48,
    long_factors=(2.0,) * 48,
    original_positions=4096,
    attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
)
DELTA = DeltaSpec(key_heads=16, value_heads=16, key_width=128, value_width=128)
NEXT = dataclasses.replace(DELTA, value_heads=32, joined_by_head=True)
THREE_OF_FOUR = (True, True, True, False)
FIELDS = {  # of the spec
    "Qwen2.5-0.5B": {"head_dim": 64, "qkv_bias": True, "output_bias": False, "window": None},
    "Qwen2.5-7B-Instruct, YaRN as documented": {"rope_scaling": QWEN_YARN, "rope_theta": 1e6},
    "Qwen3-0.6B": {"head_dim": 128, "qk_norm": True, "qkv_bias": False, "tied_embeddings": True},
    "Qwen3-8B": {"windowed_layers": (), "window": None},
    "Qwen3-8B, YaRN as documented": {"rope_scaling": QWEN_YARN},
    "Llama-3.1-8B": {"rope_scaling": LLAMA_3, "head_dim": 128, "qk_norm": False},
    "Mistral-7B-v0.1": {"window": 4096, "windowed_layers": (), "rope_theta": 1e4},
    "Gemma-2-2B": {"windowed_layers": (True, False) * 13, "window": 4096},
    "Gemma-2-9B": {"score_softcap": 50.0, "logit_softcap": 30.0, "query_scalar": None},
    "Gemma-2-27B": {"query_scalar": 144.0, "head_dim": 128, "activation": "gelu_tanh"},
    "Gemma-3-1B-it": {"windowed_layers": ((True,) * 5 + (False,)) * 4 + (True,) * 2}
    | {"window": 512, "rope_theta": 1e6, "local_rope_theta": 1e4, "qk_norm": True},
    "Gemma-3-4B, its text alone": {"rope_scaling": LinearScaling(factor=8.0)},
    "DeepSeek-V3 and R1, converted to bfloat16": {"head_dim": 192, "qk_norm": False}
    | {"query_scalar": pytest.approx(192 / 1.3688879454**4)},  # 0.1 ln 40 + 1
    "Kimi-K2-Instruct, converted to bfloat16": {
        "query_scalar": pytest.approx(192 / 1.3465735903**4)
    },
    "gpt-oss-20b, converted to bfloat16": {"rope_scaling": OSS_YARN, "window": 128}
    | {"windowed_layers": (True, False) * 12, "attention_sinks": True, "output_bias": True},
    "gpt-oss-120b, rotary positions left to transformers": {"rope_scaling": OSS_YARN},
    "GLM-4.5-Air": {"qkv_bias": True, "output_bias": False, "qk_norm": False, "rotary_width": 64},
    "GLM-4.5": {"qk_norm": True, "whole_qk_norm": False},
    "GLM-4.7-Flash": {"head_dim": 256, "rotary_width": 64, "heads": 20},
    "MiniMax-M2, converted to bfloat16": {"rotary_width": 64, "whole_qk_norm": True},
    "Olmo-3-7B": {"windowed_layers": THREE_OF_FOUR * 8, "local_rope_theta": 5e5}
    | {"rope_scaling": OLMO_YARN, "pre_norms": False, "whole_qk_norm": True},
    "SmolLM3-3B": {"rotary_layers": THREE_OF_FOUR * 9, "window": None},
    "Phi-4": {"hf_joined": True, "rotary_fraction": 1.0, "rope_scaling": None},
    "Phi-4-mini-instruct": {"window": None, "rotary_width": 96, "rope_scaling": PHI_LONG},
    "Qwen3.5-0.8B, its language model": {"delta": DELTA, "delta_layers": THREE_OF_FOUR * 6}
    | {"rotary_width": 64, "hf_prefix": "model.language_model.", "unit_offset_norms": True},
    "Qwen3.5-27B, its language model": {"delta_layers": THREE_OF_FOUR * 16},
    "Qwen3-Next-80B-A3B": {"delta_layers": THREE_OF_FOUR * 12, "delta": NEXT},
}
ROUTERS = {
    "Qwen3-30B-A3B": (128, 8, 768, SoftmaxRouter(normalize=True)),
    "Mixtral-8x7B-v0.1": (8, 2, 14336, SoftmaxRouter(normalize=True)),
    "DeepSeek-V3 and R1, converted to bfloat16": (
        *(256, 8, 2048),
        SigmoidRouter(groups=8, top_groups=4, normalize=True, scale=2.5),
    ),
    "Qwen3-Next-80B-A3B": (512, 10, 512, SoftmaxRouter(normalize=True)),
    "gpt-oss-20b, converted to bfloat16": (32, 4, 2880, SoftmaxRouter(normalize=True)),
}


def _expand(value):
    """Undo `{"repeat": [...], "times": n}`, which stands for a long list."""
    if not isinstance(value, dict):
        return value
    if "repeat" in value:
        return value["repeat"] * value["times"]
    return {key: _expand(one) for key, one in value.items()}


def _merge(base, changes):
    both = {
        key: _merge(base[key], value) if key.endswith("_config") and key in base else value
        for key, value in changes.items()
    }
    return base | both


def _read_published():
    stored = json.loads(Path(__file__).with_name("published.json").read_text())
    configs = {}
    for name, entry in stored.items():
        given = _expand(entry)
        count, like = given.pop("parameters"), given.pop("like", None)
        base = configs[like][0] if like else {}
        configs[name] = _merge(base, given), count, FIELDS.get(name, {})
    return configs


PUBLISHED = _read_published()
"""Of each model its config, its number of parameters, and fields of the spec."""
SEEING = [name for name in PUBLISHED if "-VL-" in name or name == "Gemma-3-4B"]


def write(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def check_text_model(name, folder):
    config, parameters, fields = PUBLISHED[name]
    spec = read_spec(write(folder, config))
    assert parameter_count(spec) == parameters
    assert {field: getattr(spec, field) for field in fields} == fields
    if name in ROUTERS:
        moe = spec.moe
        assert (moe.experts, moe.experts_per_token, moe.ff_width, moe.router) == ROUTERS[name]
    alone = dataclasses.replace(spec, hf_prefix="model.")  # one that no larger model holds
    assert read_spec(write(folder / "ours", make_config(spec))) == alone

    if config["model_type"] == "kimi_k2":  # which transformers has as DeepSeek-V3, as we save it
        write(folder, config_to_save(spec, folder, np.dtype("float32")))
    theirs = transformers.AutoConfig.from_pretrained(folder)  # which fills and renames keys
    theirs.save_pretrained(folder / "theirs")
    saved = json.loads((folder / "theirs" / "config.json").read_text())
    saved["architectures"] = config["architectures"]
    assert read_spec(write(folder / "theirs", saved)) == spec


def test_published_configs_are_read_as_transformers_reads_them(tmp_path, subtests):
    for number, name in enumerate(name for name in PUBLISHED if name not in SEEING):
        with subtests.test(name):
            check_text_model(name, tmp_path / str(number))


def test_models_that_see_images_have_as_many_parameters_as_published(tmp_path, subtests):
    for name in SEEING:
        with subtests.test(name):
            config, parameters, _ = PUBLISHED[name]
            spec = read_spec(write(tmp_path, config), vision=True)
            assert parameter_count(spec) == parameters
            if name == "Gemma-3-4B":
                assert (spec.vision.merge, spec.vision.position_side) == (4, 64)
                assert spec.vision.never_sampled == (255999, 256000, 262144)
                continue
            assert spec.vision.never_sampled == (151652, 151653, 151655, 151656)
            assert sum(spec.mrope_sections) == 64
            assert spec.mrope_interleaved == (spec.vision.window is None)
            if spec.vision.window is not None:
                assert (spec.vision.window, spec.vision.full_layers) == (4, (7, 15, 23, 31))
                assert spec.vision.tokens_per_second == 2
                assert spec.vision.hf_prefix == "visual."


FP8 = {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
LINEAR = {"rope_type": "linear", "factor": 2.0}
BY_KIND = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": LINEAR}
LONG = {"type": "longrope", "short_factor": [1.0] * 48}
REFUSED = [  # a model, changes of its config, and what the error names if not their key
    ("Llama-3.2-1B", {"sliding_window": 4096}, "Llama"),
    ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, ""),
    ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "axial"}}, "axial"),
    ("Llama-3.2-1B", {"rope_scaling": LINEAR | {"alpha": 3.0}}, "alpha"),
    ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ("Llama-3.2-1B", {"rope_parameters": LINEAR}, "rope_scaling"),
    ("Llama-3.2-1B", {"layer_types": ["sliding_attention"] * 16}, "Llama"),
    ("Qwen2.5-7B", {"mrope_section": [1, 2]}, ""),
    ("Qwen2.5-7B", {"layer_types": ["sliding_attention"] * 28}, "sliding_window"),
    ("Qwen2.5-7B", {"layer_types": ["full_attention"]}, "28"),
    ("Qwen2.5-7B", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ("Gemma-2-9B", {"use_bidirectional_attention": True}, ""),
    ("Gemma-3-1B-it", {"attn_logit_softcapping": 50.0}, ""),
    ("Gemma-3-1B-it", {"rope_parameters": {"rope_type": "default"}}, "full_attention"),
    ("Gemma-3-1B-it", {"rope_parameters": BY_KIND}, "sliding_attention"),
    ("Gemma-3-1B-it", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3For"),
    ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, ""),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, ""),
    ("Qwen3-30B-A3B", {"use_sliding_window": True}, ""),
    ("Qwen3-30B-A3B", {"num_local_experts": 7}, ""),
    ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "experts_per_token"),
    ("Qwen3-30B-A3B", {"moe_intermediate_size": None}, ""),
    ("Mixtral-8x7B-v0.1", {"router_jitter_noise": 0.1}, ""),
    ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, ""),
    ("MiniMax-M2", {"qk_norm_type": "per_head"}, "per_layer"),
    ("MiniMax-M2", {"scoring_func": "softmax"}, "sigmoid"),
    ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "36"),
    ("Phi-4-mini", {"rope_scaling": LONG}, "long_factors"),
    ("Phi-4-mini", {"resid_pdrop": 0.1}, "Phi3"),
    ("DeepSeek", {"topk_method": "greedy"}, "noaux_tc"),
    ("DeepSeek", {"moe_layer_freq": 2}, ""),
    ("DeepSeek", {"attention_bias": True}, ""),
    ("DeepSeek", {"n_group": 3}, "groups"),
    ("DeepSeek", {"first_k_dense_replace": 61}, "experts"),
    ("DeepSeek", {"quantization_config": FP8 | {"weight_block_size": None}}, "weight_block_size"),
    ("Qwen3-Next", {"layer_types": ["sliding_attention"] * 48}, "linear_attention"),
    ("Qwen3-Next", {"layer_types": ["linear_attention"] * 48}, "both"),
    ("gpt-oss-20b", {"hidden_act": "gelu"}, ""),
]


def find_published(start):
    return next(entry[0] for name, entry in PUBLISHED.items() if name.startswith(start))


def test_what_would_change_the_model_unread_is_refused(tmp_path, subtests):
    for name, changes, named in REFUSED:
        with subtests.test(name, changes=changes):
            write(tmp_path, find_published(name) | changes)
            with pytest.raises(ValueError) as caught:
                read_spec(tmp_path)
            assert (named or next(iter(changes))) in str(caught.value)


def test_float8_in_blocks_is_the_same_model(tmp_path):
    config = find_published("DeepSeek")
    plain = read_spec(write(tmp_path, config))
    assert read_spec(write(tmp_path, config | {"quantization_config": FP8})) == plain

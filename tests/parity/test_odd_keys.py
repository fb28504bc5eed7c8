"""Keys that published configs hold beside those of their family; transformers says which matter."""

import json
import logging

import pytest
import torch
import transformers

from jaxrl_llm.models.hf import family as family_module
from jaxrl_llm.models.hf.config import read_spec

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.001}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4} | MOE,
}
JS = {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}
CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
GENERATION = {"min_length": 0, "num_beams": 1, "length_penalty": 1.0, "repetition_penalty": 1.1}
# model: family, keys of its config.json that are not the family's
ODD: dict[str, tuple[str, dict]] = {
    "SmolLM2-135M-Instruct": ("llama", {"is_llama_config": True, "rope_interleaved": False} | JS),
    "SmolLM-360M": ("llama", {"_name_or_path": "/fsx/checkpoints/smollm", "pretraining_tp": 1}),
    "Llama-3.2-1B, onnx-community": ("llama", JS | {"_attn_implementation_autoset": True}),
    "InternLM2, converted": ("llama", {"auto_map": {"AutoModelForCausalLM": "a.B"}, "bias": False}),
    "Qwen2, whose biases are not optional": ("qwen2", {"attention_bias": True, "use_mrope": False}),
    "Qwen2.5-7B-Instruct-1M": ("qwen2", {"dual_chunk_attention_config": CHUNKS}),
    "Qwen2-0.5B, with generation": ("qwen2", GENERATION),
    "Qwen3-Coder-30B-A3B": ("qwen3_moe", {"use_qk_norm": True, "shared_expert_gate": True}),
    "Mistral-7B-v0.1, fine-tuned": ("mistral", {"model_max_length": 4096, "torchscript": True}),
    "gemma-2-9b, unsloth": ("gemma2", {"unsloth_version": "2024.9", "hidden_act": "gelu"}),
}
REFUSED = [
    ("llama", {"attention_dropout": 0.1}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("qwen3_moe", {"num_experts": "4"}),
]


def written(tmp_path, family, **keys):
    config = {"model_type": family} | SIZES | FAMILIES[family] | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_keys_that_transformers_does_not_read_are_ignored_with_a_line(tmp_path, caplog, subtests):
    for model, (family, keys) in ODD.items():
        with subtests.test(model), caplog.at_level(logging.INFO, "jaxrl_llm"):
            family_module._log_ignored.cache_clear()
            expected = read_spec(written(tmp_path, family))
            caplog.clear()
            specs = [read_spec(written(tmp_path, family, **keys)) for _ in range(2)]
            assert specs == [expected] * 2
            assert len(caplog.messages) <= 1, "a run reads its config several times"


@pytest.mark.parametrize("family", sorted({family for family, _ in ODD.values()}))
def test_they_change_nothing_in_transformers(tmp_path, family):
    def logits(**keys):
        config = transformers.AutoConfig.from_pretrained(written(tmp_path, family, **keys))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            return model(torch.arange(12)[None]).logits

    odd = {
        key: value for name, keys in ODD.values() if name == family for key, value in keys.items()
    }
    for key in ("auto_map", "torchscript", "use_bfloat16"):  # how a model is loaded or returned
        odd.pop(key, None)
    assert torch.equal(logits(), logits(**odd))


def test_keys_that_transformers_reads_are_refused(tmp_path, subtests):
    for family, keys in REFUSED:
        with subtests.test(family, **keys), pytest.raises(ValueError, match=next(iter(keys))):
            read_spec(written(tmp_path, family, **keys))


def test_unknown_keys_are_looked_up_in_the_transformers_that_is_there(tmp_path, monkeypatch):
    """Here a newer one, that reads a key."""
    folder = tmp_path / "models/llama"
    folder.mkdir(parents=True)
    (folder / "modeling_llama.py").write_text("scale = config.secret_scale * 2")
    package = type("Package", (), {"submodule_search_locations": [tmp_path]})
    monkeypatch.setattr(family_module.importlib.util, "find_spec", lambda name: package)
    family_module._words.cache_clear()
    try:
        read_spec(written(tmp_path, "llama", secret=2.0))
        with pytest.raises(ValueError, match="secret_scale"):
            read_spec(written(tmp_path, "llama", secret_scale=2.0))
    finally:
        family_module._words.cache_clear()

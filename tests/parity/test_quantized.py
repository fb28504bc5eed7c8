"""Quantized checkpoints as `transformers` restores them."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.files import find_arrays
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.quantized import restore_arrays
from jaxrl_llm.models.hf.save import save_params
from tests.parity.reference import build
from tests.quantize import quantize_fp8, quantize_mxfp4

pytestmark = pytest.mark.guards("models/hf/")

SIZES = dict(vocab_size=24, hidden_size=16, head_dim=8, intermediate_size=24)
SIZES |= dict(tie_word_embeddings=False)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {
    "Qwen3": {},
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "DeepseekV3": EXPERTS
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    | {"v_head_dim": 8, "num_key_value_heads": 4},
}


def assert_restored_alike(directory, saved, quantization):
    """Load a checkpoint here, save it plainly, and compare every bit with transformers' own."""
    spec = read_spec(directory)
    params = load_params(directory, spec)
    save_params(saved, params, spec, source=directory, dtype=np.float32)
    ours, report = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=quantization
    )
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value.float(), expected[name].float()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_float8_is_what_transformers_restores(family, tmp_path):
    build(family, **SIZES | FAMILIES[family]).save_pretrained(tmp_path / "x")
    quantize_fp8(tmp_path / "x", (8, 8))
    quantization = FineGrainedFP8Config(weight_block_size=(8, 8), dequantize=True)
    assert_restored_alike(tmp_path / "x", tmp_path / "y", quantization)


def test_mxfp4_is_what_transformers_restores(tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    build("GptOss", **SIZES | sizes).save_pretrained(tmp_path / "x")
    quantize_mxfp4(tmp_path / "x")
    assert_restored_alike(tmp_path / "x", tmp_path / "y", Mxfp4Config(dequantize=True))


def test_every_byte_of_mxfp4_with_every_scale(tmp_path):
    """But 255, which is no number, and 253 and 254, with which the largest ones are infinite."""
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    blocks = np.broadcast_to(every, (1, 253, 16, 16)).copy()
    scales = np.broadcast_to(np.arange(253, dtype=np.uint8)[:, None], (1, 253, 16)).copy()
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    arrays, problems = restore_arrays(find_arrays(tmp_path), {"quant_method": "mxfp4"})
    assert problems == []
    theirs = convert_moe_packed_tensors(*map(torch.tensor, (blocks, scales)), dtype=torch.float32)
    ours = arrays["w"].read((np.arange(1), np.arange(512), np.arange(253)))
    np.testing.assert_array_equal(ours, theirs.numpy())

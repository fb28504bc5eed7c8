"""A model of transformers that sees images: trained as text here, exported whole."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.rollout.vllm.environment import language_model
from jaxrl_llm.rollout.vllm.weights import WeightBuffer
from tests.parity.reference import randomize

pytestmark = pytest.mark.guards("models/hf/")

TEXT = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    max_position_embeddings=64,
    pad_token_id=None,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
)
VISION = dict(
    depth=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=16,
    out_hidden_size=16,
    patch_size=4,
    num_position_embeddings=16,
)
IMAGE = {"image_token_id": 30, "video_token_id": 31, "vision_start_token_id": 32}
IMAGE |= {"vision_end_token_id": 33}


def arrays_of(directory):
    stored = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= load_file(path)
    return stored


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Its files as published: bfloat16, the decays and a norm in float32, and `mtp.*`."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION, **IMAGE)
    model = randomize(transformers.Qwen3_5ForConditionalGeneration(config))
    directory = tmp_path_factory.mktemp("seeing")
    model.to(torch.bfloat16).save_pretrained(directory)
    stored = arrays_of(directory)
    for name, value in stored.items():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            stored[name] = value.float() + 1e-4
    stored["mtp.fc.weight"] = torch.randn(16, 32, dtype=torch.bfloat16)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_run_on_text_exports_the_whole_model(source, tmp_path):
    spec = read_spec(source)
    params = load_params(source, spec)
    trained = jax.tree.map(lambda x: x + 0.125, params)
    save_params(
        tmp_path / "x", trained, spec, source=source, dtype="bfloat16", max_shard_bytes=9000
    )
    before, after = arrays_of(source), arrays_of(tmp_path / "x")
    assert before.keys() == after.keys()
    assert {name: x.dtype for name, x in before.items()} == {n: x.dtype for n, x in after.items()}
    ours = {name for name in before if name.startswith(("model.language_model.", "lm_head."))}
    assert len(ours) > 20 and any(name.startswith("model.visual.") for name in before.keys() - ours)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name not in ours), name
    loaded, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "x", output_loading_info=True
    )
    assert type(loaded).__name__ == "Qwen3_5ForConditionalGeneration"
    assert not any(report.values()), report
    image = {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, dtype=loaded.dtype),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]]),
    }
    tokens = torch.tensor([[5, 32, 30, 30, 30, 30, 33, 7]])
    with torch.no_grad():
        assert torch.isfinite(loaded(input_ids=tokens, **image).logits).all()


def test_vllm_gets_the_language_model_alone(source, tmp_path):
    spec = read_spec(source)
    alone, config = language_model(spec, str(source), "bfloat16")
    buffer = WeightBuffer(alone, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        auto = transformers.AutoConfig.from_pretrained(tmp_path)
        model = transformers.AutoModelForCausalLM.from_config(auto)
        names = {entry.name: entry.shape for entry in buffer.entries}
        assert names == {name: tuple(value.shape) for name, value in model.named_parameters()}
    finally:
        buffer.close()
    assert np.dtype("bfloat16") == np.dtype(config["dtype"])
